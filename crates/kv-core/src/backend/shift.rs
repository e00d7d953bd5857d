//! Moving keys to other positions, written with reads and writes of rows: the definition of
//! [`Backend::shift_rows`], right for every element type.
//!
//! Rows are decoded, rotated and encoded again, so stored types round once more.

use super::args::{LayerRope, RowKind, RowShift, RowSpan, layers_of};
use super::{Backend, BackendError};
use crate::layers::LayerRows;
use crate::rope::Rotation;

/// Rows that are in memory at the same time.
const CHUNK: u32 = 64;

/// The rotation of one layer's rows.
struct Turn<'a> {
    layer: LayerRows,
    rotation: &'a Rotation,
    shift: RowShift,
}

pub(super) fn by_rewriting_rows<B: Backend + ?Sized>(
    backend: &B,
    rows: &mut B::Rows,
    shifts: &[RowShift],
    ropes: &[LayerRope],
) -> Result<(), BackendError> {
    let mut turns = Vec::new();
    for &shift in shifts {
        for layer in layers_of(backend.layout(rows), shift.part) {
            turns.extend(turn(backend, rows, (layer, shift), ropes)?);
        }
    }
    turns.iter().try_for_each(|turn| turn.apply(backend, rows))
}

/// What is to be done for one shift in one layer, checked; `None` where nothing is.
fn turn<'a, B: Backend + ?Sized>(
    backend: &B,
    rows: &B::Rows,
    (layer, shift): (LayerRows, RowShift),
    ropes: &'a [LayerRope],
) -> Result<Option<Turn<'a>>, BackendError> {
    let number = layer.layer;
    let rope = ropes
        .iter()
        .find(|rope| rope.layer == number)
        .ok_or(BackendError::MissingRope { layer: number })?;
    span(&layer, shift).byte_range(backend.layout(rows))?;
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
    Ok(Some(Turn {
        layer,
        rotation,
        shift,
    }))
}

fn span(layer: &LayerRows, shift: RowShift) -> RowSpan {
    RowSpan {
        layer: layer.layer,
        kind: RowKind::K,
        first: shift.first,
        len: shift.len,
    }
}

impl Turn<'_> {
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
            let len = CHUNK.min(self.shift.len - done);
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
