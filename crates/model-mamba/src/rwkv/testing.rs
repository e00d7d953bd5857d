//! Operands, weights and runs for tests of the recurrences of heads.

use std::sync::Arc;

use kv_backend::{CustomOp, CustomRows};
use kv_graph::CustomSpec;

/// Tokens.
pub(super) const N: usize = 5;
pub(super) const HEADS: usize = 2;
/// Values of a head.
pub(super) const DIM: usize = 3;

fn values(seed: usize, n: usize) -> Vec<f32> {
    let value = |at: usize| ((at * 7 + seed * 13) % 19) as f32 / 8.0 - 1.1;
    (0..n).map(value).collect()
}

/// `[tokens, heads * dim]` each.
pub(super) fn operands<const OPERANDS: usize>() -> [Vec<f32>; OPERANDS] {
    std::array::from_fn(|at| values(at, N * HEADS * DIM))
}

/// `[heads * dim]` each.
pub(super) fn weights<const WEIGHTS: usize>() -> [Arc<[f32]>; WEIGHTS] {
    std::array::from_fn(|at| values(at + 5, HEADS * DIM).into())
}

/// With an eps of 0.001.
pub(super) fn spec(name: &str) -> CustomSpec {
    CustomSpec {
        params: [("eps".to_owned(), 1e-3)].into(),
        ..CustomSpec::new(name)
    }
}

/// All tokens, so many at once: what comes out, and the states after.
pub(super) fn run_op<const OPERANDS: usize, const WEIGHTS: usize>(
    op: &dyn CustomOp,
    at_once: usize,
) -> (Vec<f32>, Vec<f32>) {
    const WIDTH: usize = HEADS * DIM;
    let spec = spec(op.name());
    let (all, weights) = (operands::<OPERANDS>(), weights::<WEIGHTS>());
    let mut state = vec![0.0; WIDTH * DIM];
    let mut out = Vec::new();
    for first in (0..N).step_by(at_once) {
        let n = at_once.min(N - first);
        let cut = all
            .each_ref()
            .map(|x| &x[first * WIDTH..(first + n) * WIDTH]);
        let rows = CustomRows {
            spec: &spec,
            n_rows: n,
            operands: &cut,
            weights: &weights,
        };
        let mut here = vec![0.0; n * WIDTH];
        op.rows(&rows, &mut state, &mut here).unwrap();
        out.extend(here);
    }
    (out, state)
}
