//! The gated delta rule over groups of rows, token by token, and its decay factors.
//!
//! Invariant: only the rows that groups store in change. Knows nothing of sequences.

use candle_core::{D, Result, Tensor};
use kv_core::memory::StateGroup;
use kv_graph::{DecaySpec, DeltaSpec};

use super::recurrent::{by_groups, put, rounded, softplus, source};

/// `exp(a softplus(x + dt_bias))` of `x [n, columns]`, with a rate `a` for each head.
pub(crate) fn decay(x: &Tensor, [a, dt_bias]: [&Tensor; 2], spec: &DecaySpec) -> Result<Tensor> {
    let (n, columns) = x.dims2()?;
    let heads = spec.n_heads;
    let steps = softplus(&x.broadcast_add(dt_bias)?)?;
    let steps = steps.reshape((n, heads, columns / heads))?;
    let rates = a.reshape((1, heads, 1))?;
    steps.broadcast_mul(&rates)?.exp()?.reshape((n, columns))
}

/// The gated delta rule of `q` and `k [n, key_heads * k_dim]`, `v [n, heads * v_dim]`, `decay
/// [n, heads]` or `[n, heads * k_dim]`, `beta [n, heads]` and states
/// `[n_states, heads * v_dim * k_dim]`.
pub(crate) fn delta(
    states: &Tensor,
    [q, k, v, decay, beta]: [&Tensor; 5],
    spec: &DeltaSpec,
    groups: &[StateGroup],
) -> Result<Tensor> {
    let (_, channels) = v.dims2()?;
    let (heads, k_dim) = (spec.n_heads, spec.k_dim);
    let v_dim = channels / heads;
    let key_heads: Vec<u32> = (0..heads).map(|head| spec.key_head(head) as u32).collect();
    let key_heads = Tensor::from_vec(key_heads, heads, v.device())?;
    by_groups(v, groups, |group, rows| {
        let n = group.rows.len();
        let of_group = |values: &Tensor| values.index_select(rows, 0);
        // A row of queries or keys for every head.
        let per_head = |values: &Tensor| {
            let values = of_group(values)?.reshape((n, spec.key_heads, k_dim))?;
            let values = values.contiguous()?.index_select(&key_heads, 1)?;
            values.reshape((n, heads, 1, k_dim))
        };
        let (q, k) = (per_head(q)?, per_head(k)?);
        let v = of_group(v)?.reshape((n, heads, v_dim, 1))?;
        let decay = of_group(decay)?.reshape((n, heads, 1, ()))?;
        let beta = of_group(beta)?.reshape((n, heads, 1, 1))?;
        let mut state = source(states, group)?.reshape((heads, v_dim, k_dim))?;
        let mut ys = Vec::with_capacity(n);
        let mut stores = group.stores.iter().peekable();
        for (t, n_rows) in (0..n).zip(1u32..) {
            let (k, beta) = (k.get(t)?, beta.get(t)?);
            state = state.broadcast_mul(&decay.get(t)?)?;
            let known = state.broadcast_mul(&k)?.sum_keepdim(D::Minus1)?;
            let change = (v.get(t)? - known)?.broadcast_mul(&beta)?;
            state = (state + change.broadcast_mul(&k)?)?;
            let y = state.broadcast_mul(&q.get(t)?)?.sum(D::Minus1)?;
            ys.push(y.reshape((1, channels))?);
            state = rounded(&state, states)?;
            if let Some(store) = stores.next_if(|store| store.n_rows == n_rows) {
                put(states, &state, store.to)?;
            }
        }
        Tensor::cat(&ys, 0)? * f64::from(spec.scale)
    })
}
