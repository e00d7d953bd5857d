//! Copying rows through the host: what [`Backend::copy_rows`] does where a backend has nothing
//! better.

use super::rows::{layers_of, stored_kinds};
use super::{Backend, BackendError, RowCopy, RowSpan, RowStorage};

/// Reads and writes the rows of each copy, one after the other.
pub(super) fn through_the_host<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    copies: &[RowCopy],
) -> Result<(), BackendError> {
    for copy in copies {
        for layer in layers_of(rows.layout(), copy.part) {
            for (kind, shape) in stored_kinds(&layer) {
                let span = |first| RowSpan {
                    layer: layer.layer,
                    kind,
                    first,
                    len: copy.len,
                };
                // Both must be there before anything is as large as they say.
                for first in [copy.from, copy.to] {
                    span(first).byte_range(rows.layout())?;
                }
                let mut bytes = vec![0; shape.bytes() * copy.len as usize];
                backend.read_rows(rows, span(copy.from), &mut bytes)?;
                backend.write_rows(rows, span(copy.to), &bytes)?;
            }
        }
    }
    Ok(())
}
