//! The scan of Mamba-2: all channels of a head share one decay, `exp(dt · A[head])`.
//!
//! dt is `[tokens, heads]`, B and C are `[tokens, groups, d_state]`. Knows nothing of sequences.

use super::StateValue;
use super::channel_tile::ChannelTile;
use super::scan::{Scan, ScanVariant, TileIndices, TileInputs};
use crate::kernels::{Decay, SCAN_WIDTH};
use crate::plan::HeadScanWeights;

impl HeadScanWeights {
    fn head_dim(&self, channels: usize) -> usize {
        (channels / self.a.len().max(1)).max(1)
    }
}

impl ScanVariant for HeadScanWeights {
    fn d_state(&self) -> usize {
        self.d_state
    }

    fn tile_end(&self, first: usize, channels: usize) -> usize {
        // Tiles end with their head.
        let head_dim = self.head_dim(channels);
        (first / head_dim + 1) * head_dim
    }

    unsafe fn scan_tile<const N: usize, T: StateValue>(
        scan: &Scan<'_, Self, T>,
        state: &mut [f32],
        tile: TileIndices<'_>,
    ) {
        let weights = scan.variant;
        let (n, n_heads, n_groups) = (weights.d_state, weights.a.len(), weights.n_groups);
        let head = tile.channels.start / weights.head_dim(scan.channels);
        let [x, dt, _, _] = scan.inputs;
        let n_tokens = tile.rows.len();
        let mut steps = [0.0; N];
        let steps = &mut steps[..n_tokens.min(N)];
        for (step, &row) in steps.iter_mut().zip(tile.rows) {
            *step = dt[row as usize * n_heads + head] + weights.dt_bias[head];
        }
        (scan.kernels.softplus)(steps);
        let x = ChannelTile::<N>::gather(x, scan.channels, tile.rows, tile.channels);
        let mut decays = ChannelTile::<N>::zeros(n_tokens);
        let mut added = ChannelTile::<N>::zeros(n_tokens);
        let mut skip = ChannelTile::<N>::zeros(n_tokens);
        let outputs = added.tokens_mut().iter_mut().zip(skip.tokens_mut());
        let outputs = outputs.zip(decays.tokens_mut());
        for (((added, skip), decay), (x, step)) in outputs.zip(x.tokens().iter().zip(steps)) {
            *added = x.map(|x| x * *step);
            *skip = x.map(|x| x * weights.d[head]);
            *decay = [(*step * weights.a[head]).exp(); SCAN_WIDTH];
        }
        let inputs = TileInputs {
            decay: Decay::PerChannel(decays.tokens()),
            added: &added,
            bc_first: head / (n_heads / n_groups) * n,
            bc_stride: n_groups * n,
            skip,
        };
        // SAFETY: as the caller promises.
        unsafe { scan.advance(state, tile, inputs) };
    }
}
