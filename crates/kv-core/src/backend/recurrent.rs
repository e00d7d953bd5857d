//! The recurrent operations in plain code: the specification of every faster one, and the bodies that
//! a backend gets for nothing.
//!
//! Formulas are those of Mamba (Gu and Dao, arXiv 2312.00752) and Mamba-2 (Dao and Gu,
//! arXiv 2405.21060); shapes are those of
//! [`RecurrentMemory`](crate::layers::RecurrentMemory). Knows nothing of sequences.

use super::args::{Conv, RowKind, RowSpan, Scan, ScanHeads, expect_len, state_rows};
use super::{Backend, BackendError};
use crate::graph::{StateGroup, check_states};
use crate::ids::{CellIdx, LayerIdx};

/// Takes one token into a convolution: `x` and `out` are `[channels]`, the state is
/// `[width - 1, channels]`, oldest first, and the weights are `([channels, width], bias)`.
pub fn conv_token(
    state: &mut [f32],
    x: &[f32],
    (weight, bias): (&[f32], Option<&[f32]>),
    out: &mut [f32],
) {
    let channels = x.len();
    let width = weight.len() / channels.max(1);
    for (i, (out, kernel)) in out
        .iter_mut()
        .zip(weight.chunks_exact(width.max(1)))
        .enumerate()
    {
        let inputs = state
            .iter()
            .skip(i)
            .step_by(channels.max(1))
            .chain(x.get(i));
        let sum: f32 = inputs.zip(kernel).map(|(x, w)| x * w).sum();
        *out = sum + bias.and_then(|b| b.get(i)).copied().unwrap_or(0.0);
    }
    if state.len() >= channels {
        state.copy_within(channels.., 0);
        let last = state.len() - channels;
        state[last..].copy_from_slice(x);
    }
}

/// Takes one token into a selective scan: `x`, `dt` and `out` are `[channels]`, `b` and `c` are
/// `[d_state]`, the state is `[channels, d_state]`, and the weights are
/// `(A [channels, d_state], D [channels])`.
pub fn scan_token(
    state: &mut [f32],
    ([x, dt], [b, c]): ([&[f32]; 2], [&[f32]; 2]),
    (a, d): (&[f32], &[f32]),
    out: &mut [f32],
) {
    let d_state = b.len().max(1);
    let channels = state.chunks_exact_mut(d_state).zip(a.chunks_exact(d_state));
    let inputs = x.iter().zip(dt).zip(d);
    for (((state, a), ((x, dt), d)), out) in channels.zip(inputs).zip(out) {
        let step = softplus(*dt);
        let mut y = 0.0;
        for (((h, a), b), c) in state.iter_mut().zip(a).zip(b).zip(c) {
            *h = *h * (step * a).exp() + b * (x * step);
            y += *h * c;
        }
        *out = y + d * x;
    }
}

/// Weights of a scan by heads, `[heads]` each.
#[derive(Clone, Copy, Debug)]
pub struct HeadWeights<'a> {
    /// Decay, negative.
    pub a: &'a [f32],
    /// What of the input is added to the output.
    pub d: &'a [f32],
    /// Added to step sizes before the softplus.
    pub dt_bias: &'a [f32],
}

/// Takes one token into a scan by heads: `x` and `out` are `[heads, head_dim]`, `dt` is `[heads]`,
/// `b` and `c` are `[n_groups, d_state]`, and the state is `[heads, head_dim, d_state]`.
pub fn scan_heads_token(
    state: &mut [f32],
    (x, dt, [b, c]): (&[f32], &[f32], [&[f32]; 2]),
    weights: HeadWeights<'_>,
    n_groups: usize,
    out: &mut [f32],
) {
    let (n_heads, n_groups) = (dt.len().max(1), n_groups.max(1));
    let d_state = (b.len() / n_groups).max(1);
    let head_dim = (x.len() / n_heads).max(1);
    let per_group = n_heads.div_ceil(n_groups);
    let HeadWeights { a, d, dt_bias } = weights;
    let channels = state.chunks_exact_mut(d_state).zip(x).zip(out);
    for (channel, ((state, x), out)) in channels.enumerate() {
        let head = channel / head_dim;
        let group = head / per_group * d_state;
        let step = softplus(dt[head] + dt_bias[head]);
        let decay = (step * a[head]).exp();
        let mut y = 0.0;
        for ((h, b), c) in state.iter_mut().zip(&b[group..]).zip(&c[group..]) {
            *h = *h * decay + b * (x * step);
            y += *h * c;
        }
        *out = y + d[head] * x;
    }
}

/// `ln(1 + e^x)`; from 20 on that is `x` in `f32`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

pub(super) fn conv_by_rows<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    args: Conv<'_>,
    out: &mut [f32],
) -> Result<(), BackendError> {
    let n_rows = n_rows_of(args.groups);
    let mut store = Store::open(backend, rows, (args.layer, RowKind::Conv), args.groups)?;
    let channels = args.x.len() / n_rows.max(1);
    let width = args.weight.len() / channels.max(1);
    let state = width.saturating_sub(1) * channels;
    let n_biases = args.bias.map_or(channels, <[f32]>::len);
    expect_lens([
        (
            "values of a convolution's input",
            n_rows * channels,
            args.x.len(),
        ),
        ("values of a convolution's output", args.x.len(), out.len()),
        ("values of a kernel", channels * width, args.weight.len()),
        ("values of a bias", channels, n_biases),
        ("values of a convolution's state", store.state.len(), state),
    ])?;
    store.walk(args.groups, |state, row| {
        let range = row * channels..(row + 1) * channels;
        let (x, out) = (&args.x[range.clone()], &mut out[range]);
        conv_token(state, x, (args.weight, args.bias), out);
    })
}

pub(super) fn scan_by_rows<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    args: Scan<'_>,
    out: &mut [f32],
) -> Result<(), BackendError> {
    let n_rows = n_rows_of(args.groups);
    let mut store = Store::open(backend, rows, (args.layer, RowKind::State), args.groups)?;
    let channels = args.d.len();
    let d_state = args.a.len() / channels.max(1);
    let state = channels * d_state;
    expect_lens([
        ("values of a scan's input", n_rows * channels, args.x.len()),
        ("step sizes of a scan", n_rows * channels, args.dt.len()),
        ("values of B", n_rows * d_state, args.b.len()),
        ("values of C", n_rows * d_state, args.c.len()),
        ("values of A", state, args.a.len()),
        ("values of a scan's output", n_rows * channels, out.len()),
        ("values of a scan's state", store.state.len(), state),
    ])?;
    store.walk(args.groups, |state, row| {
        let wide = row * channels..(row + 1) * channels;
        let narrow = row * d_state..(row + 1) * d_state;
        let inputs = (
            [&args.x[wide.clone()], &args.dt[wide.clone()]],
            [&args.b[narrow.clone()], &args.c[narrow]],
        );
        scan_token(state, inputs, (args.a, args.d), &mut out[wide]);
    })
}

pub(super) fn scan_heads_by_rows<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    args: ScanHeads<'_>,
    out: &mut [f32],
) -> Result<(), BackendError> {
    let n_rows = n_rows_of(args.groups);
    let mut store = Store::open(backend, rows, (args.layer, RowKind::State), args.groups)?;
    let (n_heads, channels) = (args.a.len(), args.x.len() / n_rows.max(1));
    let narrow = args.b.len() / n_rows.max(1);
    let d_state = narrow / args.n_groups.max(1);
    // Whole heads of whole groups.
    let whole = |n: usize, of: usize| n.checked_rem(of).map_or(0, |rest| n - rest);
    let heads = whole(channels, n_heads);
    let groups = whole(n_heads, args.n_groups);
    let state = channels * d_state;
    expect_lens([
        ("values of a scan's input", n_rows * channels, args.x.len()),
        ("channels of whole heads", heads, channels),
        ("heads of whole groups", groups, n_heads),
        ("step sizes of a scan", n_rows * n_heads, args.dt.len()),
        (
            "values of B",
            n_rows * args.n_groups * d_state,
            args.b.len(),
        ),
        ("values of C", args.b.len(), args.c.len()),
        ("values of D", n_heads, args.d.len()),
        ("biases of step sizes", n_heads, args.dt_bias.len()),
        ("values of a scan's output", n_rows * channels, out.len()),
        ("values of a scan's state", store.state.len(), state),
    ])?;
    let ScanHeads { a, d, dt_bias, .. } = args;
    let weights = HeadWeights { a, d, dt_bias };
    store.walk(args.groups, |state, row| {
        let wide = row * channels..(row + 1) * channels;
        let narrow = row * narrow..(row + 1) * narrow;
        let inputs = (
            &args.x[wide.clone()],
            &args.dt[row * n_heads..(row + 1) * n_heads],
            [&args.b[narrow.clone()], &args.c[narrow]],
        );
        scan_heads_token(state, inputs, weights, args.n_groups, &mut out[wide]);
    })
}

fn expect_lens<const N: usize>(
    lens: [(&'static str, usize, usize); N],
) -> Result<(), BackendError> {
    let mut lens = lens.into_iter();
    lens.try_for_each(|(what, wanted, got)| expect_len(what, wanted, got))
}

fn n_rows_of(groups: &[StateGroup]) -> usize {
    groups.iter().map(|group| group.rows.len()).sum()
}

fn check_groups(groups: &[StateGroup], n_rows: usize, n_states: usize) -> Result<(), BackendError> {
    let number = |n| u32::try_from(n).unwrap_or(u32::MAX);
    check_states(groups, number(n_rows), number(n_states)).map_err(|error| BackendError::Input {
        input: "states",
        reason: error.to_string(),
    })
}

/// One kind of rows of one layer, and the state under way.
struct Store<'a, B: Backend + ?Sized> {
    backend: &'a B,
    rows: &'a mut B::Rows,
    of: (LayerIdx, RowKind),
    state: Vec<f32>,
}

impl<'a, B: Backend + ?Sized> Store<'a, B> {
    /// The rows of a layer, whose groups name only states that are there.
    fn open(
        backend: &'a B,
        rows: &'a mut B::Rows,
        of: (LayerIdx, RowKind),
        groups: &[StateGroup],
    ) -> Result<Self, BackendError> {
        let (layer, kind) = of;
        let states = state_rows(backend.layout(rows), layer)?;
        check_groups(groups, n_rows_of(groups), states.n_rows)?;
        let len = match kind {
            RowKind::Conv => states.row.conv_row,
            _ => states.row.state_row,
        };
        let state = vec![0.0; len];
        Ok(Self {
            backend,
            rows,
            of,
            state,
        })
    }

    /// Calls `token(state, row)` for every row of every group, and stores what groups keep.
    fn walk(
        &mut self,
        groups: &[StateGroup],
        mut token: impl FnMut(&mut [f32], usize),
    ) -> Result<(), BackendError> {
        for group in groups {
            match group.source {
                None => self.state.fill(0.0),
                Some(row) => self.read(row)?,
            }
            let mut stores = group.stores.iter().peekable();
            for (n_rows, &row) in (1u32..).zip(&group.rows) {
                token(&mut self.state, row as usize);
                if let Some(store) = stores.next_if(|store| store.n_rows == n_rows) {
                    self.write(store.to)?;
                }
            }
        }
        Ok(())
    }

    fn span(&self, first: CellIdx) -> RowSpan {
        let ((layer, kind), len) = (self.of, 1);
        RowSpan {
            layer,
            kind,
            first,
            len,
        }
    }

    fn read(&mut self, row: CellIdx) -> Result<(), BackendError> {
        let mut bytes = vec![0; self.state.len() * size_of::<f32>()];
        self.backend
            .read_rows(self.rows, self.span(row), &mut bytes)?;
        for (value, bytes) in self.state.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn write(&mut self, row: CellIdx) -> Result<(), BackendError> {
        let bytes: Vec<u8> = self.state.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.backend.write_rows(self.rows, self.span(row), &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g19_the_worked_convolution() {
        let (kernel, mut state, mut out) = ([0.5, 1.0], [0.0], [0.0]);
        let mut take = |x: f32| {
            conv_token(&mut state, &[x], (&kernel, None), &mut out);
            (out[0], state[0])
        };
        assert_eq!(take(2.0), (2.0, 2.0));
        assert_eq!(take(4.0), (5.0, 4.0));
    }

    #[test]
    fn g19_the_worked_scan() {
        let (mut state, mut out) = ([0.0], [0.0]);
        let mut take = |x: f32| {
            let inputs = ([&[x][..], &[0.0]], [&[1.0][..], &[1.0]]);
            scan_token(&mut state, inputs, (&[-1.0], &[0.0]), &mut out);
            (out[0], state[0])
        };
        let near = |(y, s): (f32, f32), want: f32| (y - want).abs() < 1e-6 && s == y;
        let ln2 = std::f32::consts::LN_2;
        assert!(near(take(2.0), 2.0 * ln2));
        // e^-ln 2 = 1/2 of what was there stays.
        assert!(near(take(2.0), 3.0 * ln2));
    }

    #[test]
    fn g19a_channels_are_kept_apart_and_the_bias_is_added() {
        // Two channels, width 3: state oldest first.
        let mut state = [1.0, 10.0, 2.0, 20.0];
        let weight = [1.0, 1.0, 1.0, 0.0, 0.0, 2.0];
        let mut out = [0.0; 2];
        conv_token(
            &mut state,
            &[3.0, 30.0],
            (&weight, Some(&[0.5, -1.0])),
            &mut out,
        );
        assert_eq!(out, [6.5, 59.0]);
        assert_eq!(state, [2.0, 20.0, 3.0, 30.0]);
    }

    #[test]
    fn heads_share_decay_and_groups_share_b_and_c() {
        // Two heads of one channel, a group each, one value of state: halves, and keeps nothing.
        let (mut state, mut out) = ([4.0, 5.0], [0.0; 2]);
        let ln2 = std::f32::consts::LN_2;
        let weights = HeadWeights {
            a: &[-1.0, -1000.0],
            d: &[0.0, 10.0],
            dt_bias: &[0.0, -1.0],
        };
        let inputs = (
            &[1.0, 2.0][..],
            &[0.0, 1.0][..],
            [&[1.0, 3.0][..], &[2.0, 1.0]],
        );
        scan_heads_token(&mut state, inputs, weights, 2, &mut out);
        let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
        assert!(near(state[0], 2.0 + ln2) && near(out[0], 2.0 * (2.0 + ln2)));
        assert!(near(state[1], 6.0 * ln2) && near(out[1], 6.0 * ln2 + 20.0));
    }

    #[test]
    fn a_convolution_of_width_1_has_no_state() {
        let (mut state, mut out) = ([], [0.0]);
        conv_token(&mut state, &[3.0], (&[2.0], None), &mut out);
        assert_eq!(out, [6.0]);
    }

    #[test]
    fn softplus_is_smooth_at_20() {
        assert_eq!(softplus(0.0), std::f32::consts::LN_2);
        assert!((softplus(20.0) - softplus(20.001)).abs() < 2e-3);
        assert_eq!(softplus(100.0), 100.0);
        assert!(softplus(-30.0) > 0.0);
    }
}
