//! [`ChannelTile`]: the operands of a recurrent kernel, gathered for some neighbouring channels.
//!
//! Values beyond the last channel are 0 and reach no state. Knows nothing of states.

use std::ops::Range;

use crate::kernels::SCAN_WIDTH;

/// The largest number of tokens of a tile: its operands stay in the L1 cache.
pub(super) const MAX_TILE_TOKENS: usize = 64;

/// One value of each of `C` channels, for at most `N` tokens.
pub(super) struct ChannelTile<const N: usize, const C: usize = SCAN_WIDTH> {
    values: [[f32; C]; N],
    n_tokens: usize,
}

impl<const N: usize, const C: usize> ChannelTile<N, C> {
    /// Zeros for `n_tokens` tokens.
    pub(super) fn zeros(n_tokens: usize) -> Self {
        Self {
            values: [[0.0; C]; N],
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
            // Full tiles are copied as registers.
            match <&[f32; C]>::try_from(values) {
                Ok(values) => *lanes = *values,
                Err(_) => lanes[..values.len()].copy_from_slice(values),
            }
        }
        tile
    }

    /// `[tokens, C]`.
    pub(super) fn tokens(&self) -> &[[f32; C]] {
        &self.values[..self.n_tokens]
    }

    /// `[tokens, C]`, to be overwritten.
    pub(super) fn tokens_mut(&mut self) -> &mut [[f32; C]] {
        &mut self.values[..self.n_tokens]
    }
}
