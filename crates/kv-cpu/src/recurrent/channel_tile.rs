//! [`ChannelTile`]: the operands of a scan kernel, gathered for 16 neighbouring channels.
//!
//! F32x16 beyond the last channel are 0 and reach no state. Knows nothing of states.

use std::ops::Range;

use crate::kernels::{F32x16, SCAN_WIDTH};

/// The largest number of tokens of a tile: its operands stay in the L1 cache.
pub(super) const MAX_TILE_TOKENS: usize = 64;

/// One value of each of 16 channels, for at most `N` tokens.
pub(super) struct ChannelTile<const N: usize> {
    values: [F32x16; N],
    n_tokens: usize,
}

impl<const N: usize> ChannelTile<N> {
    /// Zeros for `n_tokens` tokens.
    pub(super) fn zeros(n_tokens: usize) -> Self {
        Self {
            values: [[0.0; SCAN_WIDTH]; N],
            n_tokens: n_tokens.min(N),
        }
    }

    /// Gathers the columns `channels` of some `rows` of `from`, which is `[.., width]`.
    pub(super) fn gather(
        from: &[f32],
        width: usize,
        rows: &[u32],
        channels: &Range<usize>,
    ) -> Self {
        let mut tile = Self::zeros(rows.len());
        for (lanes, &row) in tile.values.iter_mut().zip(rows) {
            let first = row as usize * width;
            let values = &from[first + channels.start..first + channels.end];
            // Full tiles are copied as one register.
            match <&F32x16>::try_from(values) {
                Ok(values) => *lanes = *values,
                Err(_) => lanes[..values.len()].copy_from_slice(values),
            }
        }
        tile
    }

    /// `[tokens, 16]`.
    pub(super) fn tokens(&self) -> &[F32x16] {
        &self.values[..self.n_tokens]
    }

    /// `[tokens, 16]`, to be overwritten.
    pub(super) fn tokens_mut(&mut self) -> &mut [F32x16] {
        &mut self.values[..self.n_tokens]
    }
}
