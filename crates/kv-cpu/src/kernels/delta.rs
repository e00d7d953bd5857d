//! What the gated delta rule computes: some tokens through the states of at most 32 channels of one
//! head, in plain Rust.
//!
//! This is the specification; every other instruction set is tested against it. Invariant: within
//! one table a channel gets the same bits whichever channels are next to it, and wherever a run of
//! tokens is cut. Knows nothing of sequences.

use kv_rows::StateType;

use super::scan::F32x16;

/// Channels of a tile: two cache lines of values of a token, which are fetched together.
pub const DELTA_WIDTH: usize = 32;

/// One value of each channel of a tile.
pub type F32x32 = [f32; DELTA_WIDTH];

/// The widest key: what a kernel holds of 16 channels fits on a task's stack.
pub const MAX_DELTA_KEYS: usize = 1024;

/// Some tokens through the states of at most [`DELTA_WIDTH`] channels of one head: with the state
/// `s [k_dim]` of a channel, every token does `s[k] *= decay[k]`,
/// `s += beta (v - Σ s[k] key[k]) key`, `out = scale Σ s[k] q[k]`.
#[derive(Debug)]
pub struct DeltaTile<'a> {
    /// `[channels, k_dim]`.
    pub state: &'a mut [f32],
    /// Values of a key.
    pub k_dim: usize,
    /// The type that the state is rounded to after every token, whose outputs read it before.
    pub rounding: StateType,
    /// Factor on outputs.
    pub scale: f32,
    /// By how much states decay.
    pub decay: DeltaDecay<'a>,
    /// The rows of queries, keys and decays by key.
    pub rows: &'a [u32],
    /// Queries; row `r` begins at `r * stride`.
    pub q: &'a [f32],
    /// Keys, likewise.
    pub k: &'a [f32],
    /// From one row of queries or keys to the next.
    pub stride: usize,
    /// Learning rates: one for each token.
    pub beta: &'a [f32],
    /// `v` of each token, which `out` overwrites; what is beyond the channels means nothing.
    pub values: &'a mut [F32x32],
    /// Room for the states of some channels at a time.
    pub scratch: DeltaScratch<'a>,
}

/// The scratch of kernels, for keys of as many values as each has.
#[derive(Debug, Default)]
pub struct DeltaScratch<'a> {
    /// Key values of many channels; fastest where it begins with a cache line.
    pub lanes: &'a mut [F32x16],
    /// Values of a key times their decays.
    pub products: &'a mut [f32],
}

/// By how much the states of a head decay with a token.
#[derive(Clone, Copy, Debug)]
pub enum DeltaDecay<'a> {
    /// One factor for each token.
    PerHead(&'a [f32]),
    /// One for each key value; row `r` begins at `r * stride`.
    PerKey {
        /// The factors.
        factors: &'a [f32],
        /// From one row to the next.
        stride: usize,
    },
}

impl<'a> DeltaTile<'a> {
    /// True if every slice is as long as the others ask for: what kernels rely on.
    pub(super) fn is_sound(&self) -> bool {
        let (n, n_rows) = (self.k_dim, self.rows.len());
        let last = self.rows.iter().max().map_or(0, |&row| row as usize);
        let fits = |values: &[f32], stride: usize| n_rows == 0 || last * stride + n <= values.len();
        let decays = match self.decay {
            DeltaDecay::PerHead(factors) => factors.len() == n_rows,
            DeltaDecay::PerKey { factors, stride } => fits(factors, stride),
        };
        (1..=MAX_DELTA_KEYS).contains(&n)
            && self.state.len().is_multiple_of(n)
            && self.state.len() / n <= DELTA_WIDTH
            && decays
            && [self.beta.len(), self.values.len()] == [n_rows; 2]
            && self.scratch.lanes.len().min(self.scratch.products.len()) >= n
            && fits(self.q, self.stride)
            && fits(self.k, self.stride)
    }

    /// The query and the key of a token.
    pub(super) fn query_key(&self, at: usize) -> [&'a [f32]; 2] {
        let first = self.rows[at] as usize * self.stride;
        [self.q, self.k].map(|values| &values[first..first + self.k_dim])
    }
}

/// Token by token, channel by channel.
pub(super) fn delta_tile(mut tile: DeltaTile<'_>) {
    assert!(tile.is_sound(), "{tile:?}");
    let n = tile.k_dim;
    let state = std::mem::take(&mut tile.state);
    for (at, &row) in tile.rows.iter().enumerate() {
        let [query, key] = tile.query_key(at);
        for (lane, s) in state.chunks_exact_mut(n).enumerate() {
            match tile.decay {
                DeltaDecay::PerHead(factors) => s.iter_mut().for_each(|s| *s *= factors[at]),
                DeltaDecay::PerKey { factors, stride } => {
                    let factors = &factors[row as usize * stride..];
                    s.iter_mut().zip(factors).for_each(|(s, f)| *s *= f);
                }
            }
            let known: f32 = s.iter().zip(key).map(|(s, k)| s * k).sum();
            let change = tile.beta[at] * (tile.values[at][lane] - known);
            s.iter_mut().zip(key).for_each(|(s, k)| *s += change * k);
            let sum: f32 = s.iter().zip(query).map(|(s, q)| s * q).sum();
            tile.values[at][lane] = tile.scale * sum;
            s.iter_mut().for_each(|s| *s = tile.rounding.round(*s));
        }
    }
}
