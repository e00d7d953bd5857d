//! Storing K and V of some tokens in their cells.
//!
//! Invariant: only the named cells change; values are rounded as
//! [`RowShape::encode`](kv_rows::RowShape::encode) rounds them. Knows nothing of which
//! cells are free.

use candle_core::{Result, Tensor};
use kv_core::CellIdx;

use crate::rows::KvTensors;

/// Stores `k [n, ..]` and `v [n, ..]` in rows `cells`: one copy for each stretch of neighbours.
pub(crate) fn store_rows(rows: &KvTensors, [k, v]: [&Tensor; 2], cells: &[CellIdx]) -> Result<()> {
    for (rows, values) in [(&rows.k, k), (&rows.v, v)] {
        let row_len = rows.shape.len();
        if row_len == 0 {
            continue;
        }
        let values = rows.encoded(&values.reshape((cells.len(), row_len))?)?;
        let mut at = 0;
        for stretch in cells.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0)) {
            if let Some(first) = stretch.first() {
                let values = values.narrow(0, at, stretch.len())?;
                rows.tensor.slice_set(&values, 0, first.as_usize())?;
            }
            at += stretch.len();
        }
    }
    Ok(())
}
