//! Storing K and V of some tokens in their cells, in the type of the rows.
//!
//! Knows nothing of who sees the cells. K and V are two tasks: cells may repeat, so tokens are not
//! divided (the last one wins, as in order).

use std::sync::{Mutex, PoisonError};

use kv_core::CellIdx;
use kv_core::backend::BackendError;

use crate::kernels::Kernels;
use crate::storage::{CpuRows, StoredMut};
use crate::team::Lead;

/// Values below which one thread does it all.
const SMALL: usize = 4096;

/// Stores `k` and `v`, `[tokens, heads, dim]` each, in the `layer`-th layer of the layout. Cells
/// must be below the layer's number of rows.
pub(crate) fn store(
    kernels: &Kernels,
    lead: &mut Lead<'_>,
    (rows, layer): (&mut CpuRows, usize),
    (values, cells): ([&[f32]; 2], &[CellIdx]),
) -> Result<(), BackendError> {
    let Some(stored) = rows.stored_mut(layer) else {
        return Ok(());
    };
    let n_values = values[0].len() + values[1].len();
    let jobs = stored.map(Mutex::new);
    let one = |at: usize| {
        let mut stored = jobs[at].lock().unwrap_or_else(PoisonError::into_inner);
        write(kernels, &mut stored, values[at], cells);
    };
    if n_values < SMALL {
        (0..2).for_each(one);
        return Ok(());
    }
    lead.each(2, &|_, at| {
        one(at);
        Ok(())
    })
}

fn write(kernels: &Kernels, stored: &mut StoredMut<'_>, values: &[f32], cells: &[CellIdx]) {
    let n = values.len() / cells.len().max(1);
    for (row, cell) in values.chunks_exact(n.max(1)).zip(cells) {
        let range = cell.as_usize() * n..(cell.as_usize() + 1) * n;
        match stored {
            StoredMut::F32(to) => to[range].copy_from_slice(row),
            StoredMut::F16(to) => (kernels.f32_to_f16)(row, &mut to[range]),
            StoredMut::Encoded(shape, to) => {
                let n = shape.bytes();
                shape.encode(row, &mut to[cell.as_usize() * n..][..n]);
            }
        }
    }
}
