//! The scan of Mamba-2: one decay for all channels of a head. dt is `[rows, heads]`, B and C are
//! `[rows, groups, d_state]`.
//!
//! Knows nothing of sequences.

use super::scan::{Narrow, Rule, Scan, Tile};
use super::tile::TileRows;
use crate::kernels::{Decay, LANES};
use crate::plan::HeadScanWeights;

impl HeadScanWeights {
    fn head_dim(&self, channels: usize) -> usize {
        (channels / self.a.len().max(1)).max(1)
    }
}

impl Rule for HeadScanWeights {
    fn d_state(&self) -> usize {
        self.d_state
    }

    fn tile_end(&self, first: usize, channels: usize) -> usize {
        // Tiles end with their head.
        let head_dim = self.head_dim(channels);
        (first / head_dim + 1) * head_dim
    }

    unsafe fn rows<const N: usize>(scan: &Scan<'_, Self>, state: &mut [f32], tile: Tile<'_>) {
        let weights = scan.rule;
        let (n, n_heads, n_groups) = (weights.d_state, weights.a.len(), weights.n_groups);
        let head = tile.channels.start / weights.head_dim(scan.channels);
        let [x, dt, _, _] = scan.inputs;
        let n_rows = tile.rows.len();
        let mut steps = [0.0; N];
        let steps = &mut steps[..n_rows.min(N)];
        for (step, &row) in steps.iter_mut().zip(tile.rows) {
            *step = dt[row as usize * n_heads + head] + weights.dt_bias[head];
        }
        (scan.kernels.softplus)(steps);
        let x = TileRows::<N>::gather(x, scan.channels, (tile.rows, tile.channels));
        let mut decays = TileRows::<N>::zeros(n_rows);
        let (mut added, mut out) = (TileRows::<N>::zeros(n_rows), TileRows::<N>::zeros(n_rows));
        let all = added.rows_mut().iter_mut().zip(out.rows_mut());
        let all = all.zip(decays.rows_mut());
        for (((added, out), decay), (x, step)) in all.zip(x.rows().iter().zip(steps)) {
            *added = x.map(|x| x * *step);
            *out = x.map(|x| x * weights.d[head]);
            *decay = [(*step * weights.a[head]).exp(); LANES];
        }
        let decay = Decay::PerChannel(decays.rows());
        let narrow = Narrow {
            first: head / (n_heads / n_groups) * n,
            stride: n_groups * n,
        };
        // SAFETY: as the caller promises.
        unsafe { scan.advance((state, tile), (decay, &added), narrow, out) };
    }
}
