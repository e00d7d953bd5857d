//! [`Delta`]: the gated delta rule of one layer, up to 32 neighbouring channels of a head at a
//! time.
//!
//! A channel is one value of one head; its state is a row of key values. Knows nothing of
//! sequences.

use std::ops::Range;

use kv_core::memory::StateGroup;
use kv_graph::DeltaSpec;

use super::channel_tile::{ChannelTile, MAX_TILE_TOKENS};
use super::{ChannelOp, StateValue, States};
use crate::kernels::{
    DELTA_WIDTH, DeltaDecay, DeltaScratch, DeltaTile, F32x16, Kernels, MAX_DELTA_KEYS, SCAN_WIDTH,
};
use crate::values::SharedValues;

/// Values of the keys of most models, for which a smaller scratch is cleared.
const SMALL_KEYS: usize = 128;

/// The scratch of kernels, for keys of at most `K` values. Lanes begin with a cache line, so that
/// no register is read from two.
#[repr(C, align(64))]
struct KernelScratch<const K: usize> {
    lanes: [F32x16; K],
    products: [f32; K],
}

impl<const K: usize> KernelScratch<K> {
    fn new() -> Self {
        Self {
            lanes: [[0.0; SCAN_WIDTH]; K],
            products: [0.0; K],
        }
    }

    fn parts(&mut self) -> DeltaScratch<'_> {
        DeltaScratch {
            lanes: &mut self.lanes,
            products: &mut self.products,
        }
    }
}

/// The delta rule of one layer.
pub(crate) struct Delta<'a, T> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) spec: &'a DeltaSpec,
    pub(crate) channels: usize,
    /// Decays of a token: one for each head, or one for each key value of each.
    pub(crate) decays: usize,
    /// q, k `[tokens, key_heads, k_dim]`, v `[tokens, channels]`, decay, beta `[tokens, heads]`.
    pub(crate) inputs: [&'a [f32]; 5],
    /// Rows are `[channels, k_dim]`.
    pub(crate) states: States<'a, T>,
    /// `[tokens, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl<T: StateValue> ChannelOp for Delta<'_, T> {
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        T::with_scratch(self.spec.k_dim, |states| match self.spec.k_dim {
            // SAFETY: as the caller promises.
            0..=SMALL_KEYS => unsafe { self.run_with::<SMALL_KEYS>(groups, channels, states) },
            // SAFETY: likewise.
            _ => unsafe { self.run_with::<MAX_DELTA_KEYS>(groups, channels, states) },
        });
    }
}

impl<T: StateValue> Delta<'_, T> {
    /// [`ChannelOp::run`], with room for a tile's states, and for keys of at most `K` values.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    unsafe fn run_with<const K: usize>(
        &self,
        groups: &[StateGroup],
        channels: Range<usize>,
        states: &mut [f32],
    ) {
        let n = self.spec.k_dim;
        let mut scratch = KernelScratch::<K>::new();
        let v_dim = (self.channels / self.spec.n_heads.max(1)).max(1);
        let mut next = channels.start;
        while next < channels.end {
            // Tiles end with their head.
            let head_end = (next / v_dim + 1) * v_dim;
            let own = next..head_end.min(channels.end).min(next + DELTA_WIDTH);
            next = own.end;
            let advance = |state: &mut [f32], rows: &[u32]| match rows.len() {
                // SAFETY: as the caller of `run` promises.
                1 => unsafe { self.advance::<1>(state, rows, &own, scratch.parts()) },
                _ => rows.chunks(MAX_TILE_TOKENS).for_each(|rows| {
                    // SAFETY: as the caller of `run` promises.
                    unsafe { self.advance::<MAX_TILE_TOKENS>(state, rows, &own, scratch.parts()) };
                }),
            };
            // SAFETY: as the caller of `run` promises.
            unsafe {
                self.states
                    .advance_groups(groups, &(own.start * n..own.end * n), states, advance)
            }
        }
    }

    /// Updates the states of some channels of one head with at most `N` tokens and writes their
    /// outputs.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    unsafe fn advance<const N: usize>(
        &self,
        state: &mut [f32],
        rows: &[u32],
        channels: &Range<usize>,
        scratch: DeltaScratch<'_>,
    ) {
        let (n_heads, k_dim) = (self.spec.n_heads, self.spec.k_dim);
        let head = channels.start / (self.channels / n_heads).max(1);
        let first_key = self.spec.key_head(head) * k_dim;
        let [q, k, v, decay, beta] = self.inputs;
        let of_head = |values: &[f32]| -> [f32; N] {
            let mut of_tokens = [0.0; N];
            for (to, &row) in of_tokens.iter_mut().zip(rows) {
                *to = values[row as usize * n_heads + head];
            }
            of_tokens
        };
        let factors = if self.decays == n_heads {
            of_head(decay)
        } else {
            [0.0; N]
        };
        let mut values = ChannelTile::<N, DELTA_WIDTH>::gather(v, self.channels, rows, channels);
        (self.kernels.delta_tile)(DeltaTile {
            state,
            k_dim,
            rounding: T::TYPE,
            scale: self.spec.scale,
            decay: if self.decays == n_heads {
                DeltaDecay::PerHead(&factors[..rows.len()])
            } else {
                DeltaDecay::PerKey {
                    factors: &decay[head * k_dim..],
                    stride: self.decays,
                }
            },
            rows,
            q: &q[first_key..],
            k: &k[first_key..],
            stride: self.spec.key_heads * k_dim,
            beta: &of_head(beta)[..rows.len()],
            values: values.tokens_mut(),
            scratch,
        });
        for (&row, out) in rows.iter().zip(values.tokens()) {
            let first = row as usize * self.channels;
            let range = first + channels.start..first + channels.end;
            // SAFETY: as the caller promises, no other task has these channels of any row.
            let to = unsafe { self.out.range(range) };
            to.copy_from_slice(&out[..channels.len()]);
        }
    }
}
