//! KV write: stores K and V of a batch in their cells, converted to the layer's KV type.
//!
//! K and V are one task each: two tokens may name the same cell, where the last one wins, so
//! tokens are not divided among tasks. Knows nothing of visibility.

use std::sync::{Mutex, PoisonError};

use kv_backend::BackendError;
use kv_core::CellIdx;

use crate::kernels::Kernels;
use crate::kv_rows::KvRowsMut;
use crate::storage::CpuRows;
use crate::team::TeamGuard;

/// Values of K and V together below which one thread stores both.
const MIN_PARALLEL_VALUES: usize = 4096;

/// New K and V rows and the cells that receive them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRows<'a> {
    /// Index of the layer in the layout.
    pub(crate) layer: usize,
    /// `[tokens, kv_heads, k_dim]`.
    pub(crate) k: &'a [f32],
    /// `[tokens, kv_heads, v_dim]`; empty if V is a part of K.
    pub(crate) v: &'a [f32],
    /// `[tokens]`, below the layer's number of rows.
    pub(crate) cells: &'a [CellIdx],
}

/// Stores `new` in `rows`.
pub(crate) fn store(
    kernels: &Kernels,
    lead: &mut TeamGuard<'_>,
    rows: &mut CpuRows,
    new: NewRows<'_>,
) -> Result<(), BackendError> {
    let Some(stored) = rows.stored_mut(new.layer) else {
        return Ok(());
    };
    let values = [new.k, new.v];
    let stored = stored.map(Mutex::new);
    let store_one = |kind: usize| {
        let mut stored = stored[kind].lock().unwrap_or_else(PoisonError::into_inner);
        write_rows(kernels, &mut stored, values[kind], new.cells);
    };
    if new.k.len() + new.v.len() < MIN_PARALLEL_VALUES {
        (0..2).for_each(store_one);
        return Ok(());
    }
    lead.each(2, &|_, kind| {
        store_one(kind);
        Ok(())
    })
}

fn write_rows(kernels: &Kernels, stored: &mut KvRowsMut<'_>, values: &[f32], cells: &[CellIdx]) {
    let n = values.len() / cells.len().max(1);
    for (row, cell) in values.chunks_exact(n.max(1)).zip(cells) {
        let range = cell.as_usize() * n..(cell.as_usize() + 1) * n;
        match stored {
            KvRowsMut::F32(to) => to[range].copy_from_slice(row),
            KvRowsMut::F16(to) => (kernels.f32_to_f16)(row, &mut to[range]),
            KvRowsMut::Encoded(shape, to) => {
                let n = shape.bytes();
                shape.encode(row, &mut to[cell.as_usize() * n..][..n]);
            }
        }
    }
}
