//! [`Retention`]: attention whose scores decay with distance, computed as a recurrence.
//!
//! For each head `h` with decay `gamma_h = 1 - 2^(-5 - h)` and the state `S`, `[k_dim, v_dim]`,
//! every token does `S = gamma_h S + k^T v`, `y = q S` (arXiv 2307.08621, equation 6). Knows
//! nothing of sequences: it is handed rows of one at a time, and the state before them.

use kv_backend::{CustomOp, CustomRows, CustomShape};
use kv_core::LayerIdx;
use kv_graph::{CustomScope, CustomSpec};

/// The name in graphs.
const NAME: &str = "retnet.retention";

/// The operation, with operands q and k `[tokens, heads * k_dim]`, v `[tokens, heads * v_dim]` and
/// the states, to `[tokens, heads * v_dim]`. Setting: `heads`.
#[derive(Clone, Copy, Debug)]
pub struct Retention;

impl Retention {
    /// The node's description for a graph.
    pub fn spec(layer: LayerIdx, n_heads: usize) -> CustomSpec {
        CustomSpec {
            params: [("heads".to_owned(), n_heads as f32)].into(),
            scope: CustomScope::State(layer),
            ..CustomSpec::new(NAME)
        }
    }
}

fn n_heads(spec: &CustomSpec) -> Result<usize, String> {
    match spec.param("heads") {
        Some(n) if n >= 1.0 && n.fract() == 0.0 => Ok(n as usize),
        other => Err(format!("heads = {other:?} is no number of heads")),
    }
}

/// The share of the state that a head keeps from token to token.
fn gamma(head: usize) -> f32 {
    1.0 - (-5.0 - head as f32).exp2()
}

impl CustomOp for Retention {
    fn name(&self) -> &str {
        NAME
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        let n = n_heads(node.spec)?;
        match *node.widths {
            [q, k, v]
                if q == k
                    && v == node.width
                    && q % n == 0
                    && v % n == 0
                    && node.n_state == q * v / n =>
            {
                Ok(())
            }
            _ => Err(node.refusal(&format!("q and k, and v to as many, all of {n} heads"))),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let n_heads = n_heads(rows.spec)?;
        let [q, k, v] = rows.all_operands()?;
        let per_head = rows.n_rows * n_heads;
        let (k_dim, v_dim) = (q.len() / per_head, v.len() / per_head);
        let heads = q.chunks_exact(k_dim).zip(k.chunks_exact(k_dim));
        let values = v.chunks_exact(v_dim).zip(out.chunks_exact_mut(v_dim));
        // Row by row, head by head: that is how the operands lie.
        for (at, ((q, k), (v, y))) in heads.zip(values).enumerate() {
            let head = at % n_heads;
            let state = &mut state[head * k_dim * v_dim..][..k_dim * v_dim];
            one_token(gamma(head), (q, k, v), state, y);
        }
        Ok(())
    }
}

fn one_token(gamma: f32, (q, k, v): (&[f32], &[f32], &[f32]), state: &mut [f32], y: &mut [f32]) {
    y.fill(0.0);
    for ((q, k), state) in q.iter().zip(k).zip(state.chunks_exact_mut(v.len())) {
        for ((s, v), y) in state.iter_mut().zip(v).zip(&mut *y) {
            *s = gamma * *s + k * v;
            *y += q * *s;
        }
    }
}
