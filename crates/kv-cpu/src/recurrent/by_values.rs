//! The selective scan of Mamba: one decay for each value of a channel's state. dt is `[rows,
//! channels]`, B and C are `[rows, d_state]`.
//!
//! Knows nothing of sequences.

use super::fetch_ahead;
use super::scan::{Narrow, Rule, Scan, Tile};
use super::tile::TileRows;
use crate::kernels::{Decay, LANES};
use crate::plan::ScanWeights;

impl Rule for ScanWeights {
    fn d_state(&self) -> usize {
        self.d_state
    }

    fn tile_end(&self, first: usize, _channels: usize) -> usize {
        // Rates are stored by tiles.
        first + LANES
    }

    unsafe fn rows<const N: usize>(scan: &Scan<'_, Self>, state: &mut [f32], tile: Tile<'_>) {
        let (n, own) = (scan.rule.d_state, tile.channels);
        let [x, dt, _, _] = scan.inputs;
        let n_rows = tile.rows.len();
        let x = TileRows::<N>::gather(x, scan.channels, (tile.rows, own));
        let mut steps = TileRows::<N>::gather(dt, scan.channels, (tile.rows, own));
        (scan.kernels.softplus)(steps.rows_mut().as_flattened_mut());
        let (mut added, mut out) = (TileRows::<N>::zeros(n_rows), TileRows::<N>::zeros(n_rows));
        let d = &scan.rule.d[own.clone()];
        let all = added.rows_mut().iter_mut().zip(out.rows_mut());
        for ((added, out), (x, step)) in all.zip(x.rows().iter().zip(steps.rows())) {
            for ((added, x), step) in added.iter_mut().zip(x).zip(step) {
                *added = x * step;
            }
            for ((out, x), d) in out.iter_mut().zip(x).zip(d) {
                *out = x * d;
            }
        }
        let first = own.start / LANES * n;
        let rates = &scan.rule.rates[first..first + n];
        fetch_ahead(rates.as_ptr().cast(), n * LANES);
        let decay = Decay::PerValue {
            steps: steps.rows(),
            rates,
        };
        let narrow = Narrow {
            first: 0,
            stride: n,
        };
        // SAFETY: as the caller promises.
        unsafe { scan.advance((state, tile), (decay, &added), narrow, out) };
    }
}
