//! Convolution and selective scan over groups of rows, group by group.
//!
//! Invariant: only the rows that groups store in change. Knows nothing of sequences.

use candle_core::{D, DType, Result, Tensor};
use kv_core::CellIdx;
use kv_core::memory::StateGroup;
use kv_graph::HeadScanSpec;

use super::AffineTensors;

/// `x [n, channels]` through the kernel `[channels, width]`, with states
/// `[n_states, (width - 1) * channels]`, oldest input first.
pub(crate) fn conv(
    states: &Tensor,
    x: &Tensor,
    affine: AffineTensors<'_>,
    groups: &[StateGroup],
) -> Result<Tensor> {
    let AffineTensors { weight, bias } = affine;
    let (channels, width) = weight.dims2()?;
    by_groups(x, groups, |group, rows| {
        let new = x.index_select(rows, 0)?;
        let n = group.rows.len();
        // The inputs before the group, and then its own.
        let all = match width {
            1 => new,
            _ => {
                let old = source(states, group)?.reshape((width - 1, channels))?;
                Tensor::cat(&[&old, &new], 0)?
            }
        };
        let mut y = Tensor::zeros((n, channels), DType::F32, x.device())?;
        for k in 0..width {
            let taps = weight.narrow(1, k, 1)?.reshape((1, channels))?;
            y = (y + all.narrow(0, k, n)?.broadcast_mul(&taps)?)?;
        }
        if width > 1 {
            for store in &group.stores {
                let last = all.narrow(0, store.n_rows as usize, width - 1)?;
                put(states, &last, store.to)?;
            }
        }
        match bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    })
}

/// The selective scan of `x [n, channels]` with `dt [n, channels]`, `b` and `c [n, d_state]`, decay
/// `a [channels, d_state]`, skip `d [channels]` and states `[n_states, channels * d_state]`.
pub(crate) fn scan(
    states: &Tensor,
    [x, dt, b, c]: [&Tensor; 4],
    [a, d]: [&Tensor; 2],
    groups: &[StateGroup],
) -> Result<Tensor> {
    let (channels, d_state) = a.dims2()?;
    by_groups(x, groups, |group, rows| {
        let step = softplus(&dt.index_select(rows, 0)?)?;
        let [x, b, c] = [x, b, c].map(|t| t.index_select(rows, 0));
        let (x, b, c) = (x?, b?, c?);
        let input = (&x * &step)?;
        let mut state = source(states, group)?.reshape((channels, d_state))?;
        let mut ys = Vec::with_capacity(group.rows.len());
        let mut stores = group.stores.iter().peekable();
        for (t, n_rows) in (0..group.rows.len()).zip(1u32..) {
            let column = |values: &Tensor| values.narrow(0, t, 1)?.reshape((channels, 1));
            let decay = a.broadcast_mul(&column(&step)?)?.exp()?;
            let added = column(&input)?.broadcast_mul(&b.narrow(0, t, 1)?)?;
            state = ((state * decay)? + added)?;
            let y = state.broadcast_mul(&c.narrow(0, t, 1)?)?.sum(D::Minus1)?;
            ys.push(y.reshape((1, channels))?);
            state = rounded(&state, states)?;
            if let Some(store) = stores.next_if(|store| store.n_rows == n_rows) {
                put(states, &state, store.to)?;
            }
        }
        Tensor::cat(&ys, 0)? + x.broadcast_mul(d)?
    })
}

/// The scan by heads of `x [n, channels]` with `dt [n, heads]`, `b` and `c [n, groups * d_state]`,
/// decay `a [heads, 1]`, skip `d [heads, 1]`, bias `[heads]` and states
/// `[n_states, channels * d_state]`.
pub(crate) fn scan_heads(
    states: &Tensor,
    [x, dt, b, c]: [&Tensor; 4],
    [a, d, dt_bias]: [&Tensor; 3],
    spec: &HeadScanSpec,
    groups: &[StateGroup],
) -> Result<Tensor> {
    let (_, channels) = x.dims2()?;
    let (heads, n) = (spec.n_heads, spec.d_state);
    let head_dim = channels / heads;
    // A row of B or C for every head.
    let per_head = |values: &Tensor| {
        let rows = values.dim(0)?;
        let shape = (rows, spec.n_groups, heads / spec.n_groups, n);
        let values = values.reshape((rows, spec.n_groups, 1, n))?;
        values.broadcast_as(shape)?.reshape((rows, heads, 1, n))
    };
    by_groups(x, groups, |group, rows| {
        let step = softplus(&dt.index_select(rows, 0)?.broadcast_add(dt_bias)?)?;
        let x = x.index_select(rows, 0)?;
        let x = x.reshape((x.dim(0)?, heads, head_dim, 1))?;
        let b = per_head(&b.index_select(rows, 0)?)?;
        let c = per_head(&c.index_select(rows, 0)?)?;
        let input = x.broadcast_mul(&step.reshape((step.dim(0)?, heads, 1, 1))?)?;
        let decay = step.broadcast_mul(&a.reshape((1, heads))?)?.exp()?;
        let mut state = source(states, group)?.reshape((heads, head_dim, n))?;
        let mut ys = Vec::with_capacity(group.rows.len());
        let mut stores = group.stores.iter().peekable();
        for (t, n_rows) in (0..group.rows.len()).zip(1u32..) {
            let decay = decay.narrow(0, t, 1)?.reshape((heads, 1, 1))?;
            let added = input.get(t)?.broadcast_mul(&b.get(t)?)?;
            state = (state.broadcast_mul(&decay)? + added)?;
            let y = state.broadcast_mul(&c.get(t)?)?.sum(D::Minus1)?;
            ys.push(y.reshape((1, channels))?);
            state = rounded(&state, states)?;
            if let Some(store) = stores.next_if(|store| store.n_rows == n_rows) {
                put(states, &state, store.to)?;
            }
        }
        let skipped = x.broadcast_mul(&d.reshape((1, heads, 1, 1))?)?;
        Tensor::cat(&ys, 0)? + skipped.reshape((group.rows.len(), channels))?
    })
}

/// Results of all groups, put back in the order of the rows.
pub(super) fn by_groups(
    x: &Tensor,
    groups: &[StateGroup],
    result: impl Fn(&StateGroup, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut results = Vec::with_capacity(groups.len());
    let mut back = vec![0u32; x.dim(0)?];
    let rows = groups.iter().flat_map(|group| &group.rows);
    for (at, &row) in (0u32..).zip(rows) {
        if let Some(back) = back.get_mut(row as usize) {
            *back = at;
        }
    }
    for group in groups {
        let rows = Tensor::from_slice(&group.rows, group.rows.len(), x.device())?;
        results.push(result(group, &rows)?);
    }
    let back = Tensor::from_slice(&back, back.len(), x.device())?;
    Tensor::cat(&results, 0)?.index_select(&back, 0)
}

/// The state that a group begins with, as `f32`.
pub(super) fn source(states: &Tensor, group: &StateGroup) -> Result<Tensor> {
    match group.source {
        None => Tensor::zeros((1, states.dim(1)?), DType::F32, states.device()),
        // A copy: candle would refuse to write to the storage that it reads.
        Some(row) => {
            let state = states.narrow(0, row.as_usize(), 1)?.force_contiguous()?;
            state.to_dtype(DType::F32)
        }
    }
}

/// Stores a state, which its type can hold.
pub(super) fn put(states: &Tensor, state: &Tensor, to: CellIdx) -> Result<()> {
    let row = state.contiguous()?.reshape((1, states.dim(1)?))?;
    states.slice_set(&row.to_dtype(states.dtype())?, 0, to.as_usize())
}

/// A state as the next token reads it: rounded to its type.
pub(super) fn rounded(state: &Tensor, states: &Tensor) -> Result<Tensor> {
    state.to_dtype(states.dtype())?.to_dtype(DType::F32)
}

/// `ln(1 + e^x)` without overflow, and without losing `e^x` in the 1:
/// `ln(1 + u) = ln(w) u / (w - 1)` where `w` is `1 + u` as rounded (Kahan).
pub(super) fn softplus(x: &Tensor) -> Result<Tensor> {
    let u = x.abs()?.neg()?.exp()?;
    let w = (&u + 1.0)?;
    let rounded = (&w - 1.0)?;
    let none = rounded.eq(0.0)?;
    let safe = none.where_cond(&rounded.ones_like()?, &rounded)?;
    let log = none.where_cond(&u, &(w.log()? * (&u / safe)?)?)?;
    x.relu()? + log
}
