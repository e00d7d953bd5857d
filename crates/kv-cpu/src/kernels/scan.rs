//! What scans compute: some rows through the states of 16 neighbouring channels, in plain Rust.
//!
//! This is the specification; every other instruction set is tested against it. Invariant: within
//! one table a channel gets the same bits whichever channels are next to it, and wherever a run of
//! rows is cut. Knows nothing of sequences.

use kv_rows::StateType;

/// Channels that are taken at once.
pub const SCAN_WIDTH: usize = 16;

/// One value for each of these channels.
pub type F32x16 = [f32; SCAN_WIDTH];

/// Some rows through the states of at most [`SCAN_WIDTH`] channels: with the decay `e` of a row, a
/// channel and a value, `h[k] = e h[k] + added b[k]` and `out += sum_k c[k] h[k]`.
#[derive(Debug)]
pub struct ScanTile<'a> {
    /// `[channels, d_state]`; lanes beyond the channels are computed and dropped.
    pub state: &'a mut [f32],
    /// Values of the state of one channel.
    pub d_state: usize,
    /// The type that the state is rounded to after every row, whose outputs read it before.
    pub rounding: StateType,
    /// By how much states decay.
    pub decay: Decay<'a>,
    /// The input of each row, but for B.
    pub added: &'a [F32x16],
    /// The rows of B and C.
    pub rows: &'a [u32],
    /// B; row `r` begins at `r * stride`.
    pub b: &'a [f32],
    /// C, likewise.
    pub c: &'a [f32],
    /// From one row of B or C to the next.
    pub stride: usize,
    /// One for each row.
    pub out: &'a mut [F32x16],
}

/// By how much states decay with a row.
#[derive(Clone, Copy, Debug)]
pub enum Decay<'a> {
    /// Each value by itself, `2^(steps[row] * rates[k])`.
    PerValue {
        /// One for each row.
        steps: &'a [F32x16],
        /// One for each value of the state; not positive.
        rates: &'a [F32x16],
    },
    /// All values of a channel alike: one factor for each row.
    PerChannel(&'a [F32x16]),
}

impl ScanTile<'_> {
    /// True if every slice is as long as the others ask for: what kernels rely on.
    pub(super) fn is_sound(&self) -> bool {
        let (n, n_rows) = (self.d_state, self.rows.len());
        let fits = |narrow: &[f32]| {
            let last = self.rows.iter().max().map_or(0, |&row| row as usize);
            n_rows == 0 || last * self.stride + n <= narrow.len()
        };
        let decays = match self.decay {
            Decay::PerValue { steps, rates } => steps.len() == n_rows && rates.len() == n,
            Decay::PerChannel(factors) => factors.len() == n_rows,
        };
        n > 0
            && self.state.len().is_multiple_of(n)
            && self.state.len() / n <= SCAN_WIDTH
            && decays
            && [self.added.len(), self.out.len()] == [n_rows; 2]
            && fits(self.b)
            && fits(self.c)
    }
}

/// Row by row, channel by channel, value by value.
pub(super) fn scan_tile(tile: ScanTile<'_>) {
    assert!(tile.is_sound(), "{tile:?}");
    let n = tile.d_state;
    for (at, &row) in tile.rows.iter().enumerate() {
        let narrow = row as usize * tile.stride..row as usize * tile.stride + n;
        let (b, c) = (&tile.b[narrow.clone()], &tile.c[narrow]);
        for (lane, state) in tile.state.chunks_exact_mut(n).enumerate() {
            let added = tile.added[at][lane];
            for (k, h) in state.iter_mut().enumerate() {
                let decay = match tile.decay {
                    Decay::PerValue { steps, rates } => (steps[at][lane] * rates[k][lane]).exp2(),
                    Decay::PerChannel(factors) => factors[at][lane],
                };
                *h = *h * decay + added * b[k];
                tile.out[at][lane] += c[k] * *h;
                *h = tile.rounding.round(*h);
            }
        }
    }
}

/// `x[i] = ln(1 + e^x[i])`.
pub(super) fn softplus(x: &mut [f32]) {
    for x in x {
        *x = x.max(0.0) + (-x.abs()).exp().ln_1p();
    }
}

/// `acc[i] += a[i] b[i]`.
pub(super) fn multiply_add(acc: &mut [f32], a: &[f32], b: &[f32]) {
    debug_assert!(acc.len() == a.len() && a.len() == b.len());
    for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
        *acc += a * b;
    }
}
