//! The indexer of sparse attention: scores by plain products, choice on the host.
//!
//! Invariant: a token is scored against what it sees only. Does not know what is attended.

use candle_core::{Result, Tensor};
use kv_core::{CellIdx, Pos, Visibility};
use kv_graph::IndexSpec;

use crate::rows::RowTensor;

/// Rows that are scored together: bounds the table of scores.
const MAX_ROWS: usize = 16;

/// The queries and weights of an indexer.
#[derive(Clone, Copy)]
pub(crate) struct IndexQueries<'a> {
    /// `[n, heads, dim]`.
    pub(crate) q: &'a Tensor,
    /// `[n, heads]`.
    pub(crate) weights: &'a Tensor,
    pub(crate) visibility: &'a Visibility,
}

/// The ranks of the rows with the largest scores, `[n, top_k]`.
pub(crate) fn index(keys: &RowTensor, of: &IndexSpec, queries: IndexQueries<'_>) -> Result<Tensor> {
    let (n, device) = (queries.q.dim(0)?, queries.q.device());
    let mut chosen = vec![-1.0; n * of.top_k];
    let mut order = Vec::new();
    for group in &queries.visibility.groups {
        let seen: Vec<(CellIdx, Pos)> = group.runs.iter().flat_map(|run| run.iter()).collect();
        if seen.is_empty() {
            continue;
        }
        let cells: Vec<u32> = seen.iter().map(|(cell, _)| cell.0).collect();
        let cells = Tensor::from_vec(cells, seen.len(), device)?;
        let keys = keys.values(&keys.tensor.index_select(&cells, 0)?)?;
        let keys = keys.reshape((seen.len(), of.dim))?.t()?.contiguous()?;
        for first in (0..group.rows.len()).step_by(MAX_ROWS) {
            let rows = first..group.rows.len().min(first + MAX_ROWS);
            let scores = scores(&keys, of, &queries, &group.rows[rows.clone()])?;
            for (at, scores) in rows.zip(scores) {
                let (row, limits) = (group.rows[at] as usize, group.limits[at]);
                let visible = seen.iter().zip(scores);
                let visible = visible.filter(|((_, pos), _)| limits.contains(*pos));
                let scores: Vec<f32> = visible.map(|(_, score)| score).collect();
                let out = &mut chosen[row * of.top_k..(row + 1) * of.top_k];
                IndexSpec::choose(&scores, &mut order, out);
            }
        }
    }
    Tensor::from_vec(chosen, (n, of.top_k), device)
}

/// Scores of all keys `[dim, cells]` for these rows.
fn scores(
    keys: &Tensor,
    of: &IndexSpec,
    queries: &IndexQueries<'_>,
    rows: &[u32],
) -> Result<Vec<Vec<f32>>> {
    let n = rows.len();
    let rows = Tensor::from_slice(rows, n, keys.device())?;
    let q = queries.q.index_select(&rows, 0)?;
    let q = q.reshape((n * of.n_heads, of.dim))?.contiguous()?;
    let by_head = q.matmul(keys)?.relu()?;
    let by_head = by_head.reshape((n, of.n_heads, keys.dim(1)?))?;
    let weights = queries.weights.index_select(&rows, 0)?;
    let weights = weights.reshape((n, 1, of.n_heads))?.contiguous()?;
    weights.matmul(&by_head)?.squeeze(1)?.to_vec2()
}
