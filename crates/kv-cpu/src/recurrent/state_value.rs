//! [`StateValue`]: a stored value of a state, and how tiles of states become `f32` and back.
//!
//! Invariant: what a tile is computed with is what is stored, widened: kernels round a state to its
//! type after every token. Knows nothing of tokens and channels.

use half::{bf16, f16};
use kv_rows::StateType;

use crate::kernels::{DELTA_WIDTH, Kernels};

/// Values of one channel's state that are computed in the scratch of a tile.
pub(crate) const MAX_HALF_ROW: usize = 1024;

/// The same of the states of most models, for which a smaller scratch is cleared.
const SMALL_ROW: usize = 128;

/// A value of a state as it is stored.
pub(crate) trait StateValue: Copy + Send + Sync {
    /// Its type.
    const TYPE: StateType;

    /// Widens values.
    fn load(kernels: &Kernels, from: &[Self], to: &mut [f32]);

    /// Narrows values, which are rounded already.
    fn store(kernels: &Kernels, from: &[f32], to: &mut [Self]);

    /// The place of a tile's states: a scratch, or its state row.
    fn running<'s>(stored: &'s mut [Self], scratch: &'s mut [f32]) -> &'s mut [f32] {
        &mut scratch[..stored.len()]
    }

    /// Stores a tile that was computed in a scratch.
    fn finish(kernels: &Kernels, scratch: &[f32], stored: &mut [Self]) {
        Self::store(kernels, &scratch[..stored.len()], stored);
    }

    /// Runs `compute` with a scratch for tiles of states of `n` values a channel, at most
    /// [`MAX_HALF_ROW`].
    fn with_scratch(n: usize, compute: impl FnOnce(&mut [f32])) {
        assert!(n <= MAX_HALF_ROW, "states of {n} values a channel");
        match n {
            0..=SMALL_ROW => compute(&mut [0.0; DELTA_WIDTH * SMALL_ROW]),
            _ => compute(&mut [0.0; DELTA_WIDTH * MAX_HALF_ROW]),
        }
    }
}

impl StateValue for f32 {
    const TYPE: StateType = StateType::F32;

    fn load(_: &Kernels, from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn store(_: &Kernels, from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn running<'s>(stored: &'s mut [Self], _: &'s mut [f32]) -> &'s mut [f32] {
        stored
    }

    fn finish(_: &Kernels, _: &[f32], _: &mut [Self]) {}

    fn with_scratch(_: usize, compute: impl FnOnce(&mut [f32])) {
        compute(&mut []);
    }
}

impl StateValue for f16 {
    const TYPE: StateType = StateType::F16;

    fn load(kernels: &Kernels, from: &[Self], to: &mut [f32]) {
        (kernels.f16_to_f32)(from, to);
    }

    fn store(kernels: &Kernels, from: &[f32], to: &mut [Self]) {
        (kernels.f32_to_f16)(from, to);
    }
}

impl StateValue for bf16 {
    const TYPE: StateType = StateType::BF16;

    fn load(_: &Kernels, from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }

    fn store(_: &Kernels, from: &[f32], to: &mut [Self]) {
        // Rounded already: the lower halves are zeros.
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::from_bits((from.to_bits() >> 16) as u16);
        }
    }
}
