//! Moving keys to other positions through the host: the definition of [`Backend::shift_rows`],
//! right for every element type.
//!
//! Rows are decoded, rotated and encoded again, so stored types round once more.

use kv_core::memory::RowShift;
use kv_graph::rope::{LayerRope, Rotation};
use kv_rows::{LayerRows, RowLayout};

use crate::rows::{RowKind, RowSpan, RowStorage, layers_of};
use crate::{Backend, BackendError};

/// Rows that are on the host at the same time.
const CHUNK_ROWS: u32 = 64;

/// A rotation of some rows of one layer.
pub(super) struct KeyShift<'a> {
    layer: LayerRows,
    rotation: &'a Rotation,
    shift: RowShift,
}

/// The rotations of all layers in which keys change, once all are known to be possible.
///
/// # Errors
/// [`BackendError`] for the first that is not.
pub(super) fn check_shifts<'r>(
    layout: &RowLayout,
    shifts: &[RowShift],
    ropes: &'r [LayerRope],
) -> Result<Vec<KeyShift<'r>>, BackendError> {
    let mut checked = Vec::new();
    for &shift in shifts {
        for layer in layers_of(layout, shift.part) {
            span(&layer, shift).byte_range(layout)?;
            checked.extend(KeyShift::new(layer, shift, ropes)?);
        }
    }
    Ok(checked)
}

/// Checks all shifts, then carries them out one after the other.
pub(super) fn through_the_host<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    shifts: &[RowShift],
    ropes: &[LayerRope],
) -> Result<(), BackendError> {
    let checked = check_shifts(rows.layout(), shifts, ropes)?;
    checked.iter().try_for_each(|s| s.apply(backend, rows))
}

fn span(layer: &LayerRows, shift: RowShift) -> RowSpan {
    RowSpan {
        layer: layer.layer,
        kind: RowKind::K,
        first: shift.first,
        len: shift.len,
    }
}

impl<'a> KeyShift<'a> {
    /// One shift in one layer, checked; `None` where no key changes.
    fn new(
        layer: LayerRows,
        shift: RowShift,
        ropes: &'a [LayerRope],
    ) -> Result<Option<Self>, BackendError> {
        let number = layer.layer;
        let rope = ropes
            .iter()
            .find(|rope| rope.layer == number)
            .ok_or(BackendError::MissingRope { layer: number })?;
        let Some(rotation) = rope.rotation.as_ref().filter(|_| shift.delta.0 != 0) else {
            return Ok(None);
        };
        let (n_rot, dim) = (rotation.rope().n_rot, layer.k.dim);
        if n_rot > dim {
            return Err(BackendError::RopeWidth {
                layer: number,
                n_rot,
                dim,
            });
        }
        Ok(Some(Self {
            layer,
            rotation,
            shift,
        }))
    }

    fn apply<B: Backend + ?Sized>(
        &self,
        backend: &B,
        rows: &mut B::Rows,
    ) -> Result<(), BackendError> {
        let shape = self.layer.k;
        let (cos, sin) = self.rotation.angles(self.shift.delta);
        let mut values = vec![0.0; shape.len()];
        let mut done = 0;
        while done < self.shift.len {
            let len = CHUNK_ROWS.min(self.shift.len - done);
            let chunk = RowSpan {
                first: self.shift.first.offset(done),
                len,
                ..span(&self.layer, self.shift)
            };
            let mut bytes = vec![0; shape.bytes() * len as usize];
            backend.read_rows(rows, chunk, &mut bytes)?;
            for row in bytes.chunks_exact_mut(shape.bytes().max(1)) {
                shape.decode(row, &mut values);
                for head in values.chunks_exact_mut(shape.dim.max(1)) {
                    self.rotation.rope().rotate_head(head, &cos, &sin);
                }
                shape.encode(&values, row);
            }
            backend.write_rows(rows, chunk, &bytes)?;
            done += len;
        }
        Ok(())
    }
}
