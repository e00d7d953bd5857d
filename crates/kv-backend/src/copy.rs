//! Copying rows through the host: what [`Backend::copy_rows`] does where a backend has nothing
//! better.

use kv_core::{ids::CellIdx, memory::RowCopy};
use kv_rows::{LayerRows, RowLayout};

use crate::rows::{layers_of, stored_kinds};
use crate::{Backend, BackendError, RowKind, RowSpan, RowStorage};

/// Checks that the rows of all copies are there.
///
/// # Errors
/// [`BackendError::RowOutOfRange`], for the first that are not.
pub(super) fn check_copies(layout: &RowLayout, copies: &[RowCopy]) -> Result<(), BackendError> {
    for copy in copies {
        for layer in layers_of(layout, copy.part) {
            for (kind, _) in stored_kinds(&layer) {
                for first in [copy.from, copy.to] {
                    span_of(&layer, kind, first, copy.len).byte_range(layout)?;
                }
            }
        }
    }
    Ok(())
}

/// Reads and writes the rows of each copy, one after the other.
pub(super) fn through_the_host<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    copies: &[RowCopy],
) -> Result<(), BackendError> {
    // They must be there before anything is as large as they say.
    check_copies(rows.layout(), copies)?;
    for copy in copies {
        for layer in layers_of(rows.layout(), copy.part) {
            for (kind, shape) in stored_kinds(&layer) {
                let span = |first| span_of(&layer, kind, first, copy.len);
                let mut bytes = vec![0; shape.bytes() * copy.len as usize];
                backend.read_rows(rows, span(copy.from), &mut bytes)?;
                backend.write_rows(rows, span(copy.to), &bytes)?;
            }
        }
    }
    Ok(())
}

fn span_of(layer: &LayerRows, kind: RowKind, first: CellIdx, len: u32) -> RowSpan {
    RowSpan {
        layer: layer.layer,
        kind,
        first,
        len,
    }
}
