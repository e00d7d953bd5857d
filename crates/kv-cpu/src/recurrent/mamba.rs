//! The selective scan of Mamba: each state value of a channel has its own decay,
//! `exp(dt · A[channel, k])`.
//!
//! dt is `[tokens, channels]`, B and C are `[tokens, d_state]`. Knows nothing of sequences.

use super::StateValue;
use super::channel_tile::ChannelTile;
use super::prefetch_after;
use super::scan::{Scan, ScanVariant, TileIndices, TileInputs};
use crate::kernels::{Decay, SCAN_WIDTH};
use crate::plan::ScanWeights;

impl ScanVariant for ScanWeights {
    fn d_state(&self) -> usize {
        self.d_state
    }

    fn tile_end(&self, first: usize, _channels: usize) -> usize {
        // Decay rates are stored by tiles.
        first + SCAN_WIDTH
    }

    unsafe fn scan_tile<const N: usize, T: StateValue>(
        scan: &Scan<'_, Self, T>,
        state: &mut [f32],
        tile: TileIndices<'_>,
    ) {
        let (weights, own) = (scan.variant, tile.channels);
        let n = weights.d_state;
        let [x, dt, _, _] = scan.inputs;
        let n_tokens = tile.rows.len();
        let x = ChannelTile::<N>::gather(x, scan.channels, tile.rows, own);
        let mut steps = ChannelTile::<N>::gather(dt, scan.channels, tile.rows, own);
        (scan.kernels.softplus)(steps.tokens_mut().as_flattened_mut());
        let mut added = ChannelTile::<N>::zeros(n_tokens);
        let mut skip = ChannelTile::<N>::zeros(n_tokens);
        let d = &weights.d[own.clone()];
        let outputs = added.tokens_mut().iter_mut().zip(skip.tokens_mut());
        for ((added, skip), (x, step)) in outputs.zip(x.tokens().iter().zip(steps.tokens())) {
            for ((added, x), step) in added.iter_mut().zip(x).zip(step) {
                *added = x * step;
            }
            for ((skip, x), d) in skip.iter_mut().zip(x).zip(d) {
                *skip = x * d;
            }
        }
        let first = own.start / SCAN_WIDTH * n;
        let rates = &weights.rates[first..first + n];
        prefetch_after(rates.as_ptr().cast::<f32>(), n * SCAN_WIDTH);
        let inputs = TileInputs {
            decay: Decay::PerValue {
                steps: steps.tokens(),
                rates,
            },
            added: &added,
            bc_first: 0,
            bc_stride: n,
            skip,
        };
        // SAFETY: as the caller promises.
        unsafe { scan.advance(state, tile, inputs) };
    }
}
