//! [`Conversion`]: rows that a memory stores in another way than they were saved, converted on all
//! threads of the machine and written on one.
//!
//! Invariant: bytes that are held are bounded, and each row is converted as it would be alone.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::thread;

use kv_rows::RowShape;

use super::WriteRows;
use super::rows::Converter;
use crate::{BackendError, RowSpan};

/// Bytes of rows that a thread converts at once.
const PIECE: usize = 1 << 20;

/// Fewer bytes than this are converted without other threads: starting them takes longer.
const MIN_SHARED: usize = 1 << 18;

/// Rows that follow one another, in both places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conversion<'a> {
    pub(super) from: RowShape,
    pub(super) to: RowShape,
    /// Where they go.
    pub(super) span: RowSpan,
    /// What was saved.
    pub(super) bytes: &'a [u8],
}

impl<'a> Conversion<'a> {
    /// Adds these rows in pieces.
    pub(super) fn split_into(self, pieces: &mut Vec<Self>) {
        let row_bytes = self.from.bytes().max(1);
        let n_rows = (PIECE / row_bytes.max(self.to.bytes())).max(1);
        let chunks = self.bytes.chunks(n_rows * row_bytes);
        let firsts = (0u32..).step_by(n_rows);
        pieces.extend(firsts.zip(chunks).map(|(at, bytes)| Self {
            span: RowSpan {
                first: self.span.first.offset(at),
                len: (bytes.len() / row_bytes) as u32,
                ..self.span
            },
            bytes,
            ..self
        }));
    }

    fn convert(&self) -> Vec<u8> {
        let mut converted = Vec::with_capacity(self.span.len as usize * self.to.bytes());
        Converter::new(self.from, self.to).convert(self.bytes, &mut converted);
        converted
    }
}

/// Converts and writes all pieces, in order.
///
/// # Errors
/// The failure of `write`, at once.
pub(super) fn write_all(
    pieces: &[Conversion<'_>],
    write: &mut WriteRows<'_>,
) -> Result<(), BackendError> {
    let n_threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut rest = pieces;
    while !rest.is_empty() {
        // As many pieces as all threads convert at once.
        let mut n_bytes = 0;
        let n = rest.iter().take_while(|piece| {
            let fits = n_bytes < n_threads * PIECE;
            n_bytes += piece.bytes.len();
            fits
        });
        let (batch, others) = rest.split_at(n.count());
        rest = others;
        let converted = if n_threads == 1 || n_bytes < MIN_SHARED {
            batch.iter().map(Conversion::convert).collect()
        } else {
            convert_on_threads(batch, n_threads)
        };
        for (piece, bytes) in batch.iter().zip(converted) {
            write(piece.span, &bytes)?;
        }
    }
    Ok(())
}

/// The rows of these pieces, in order.
fn convert_on_threads(pieces: &[Conversion<'_>], n_threads: usize) -> Vec<Vec<u8>> {
    let convert = |share: &[Conversion<'_>]| -> Vec<Vec<u8>> {
        share.iter().map(Conversion::convert).collect()
    };
    thread::scope(|scope| {
        let shares = pieces.chunks(pieces.len().div_ceil(n_threads).max(1));
        let started: Vec<_> = shares
            .map(|share| {
                let thread = thread::Builder::new().name("cellar-restore".to_owned());
                (share, thread.spawn_scoped(scope, move || convert(share)))
            })
            .collect();
        let converted = started.into_iter().map(|(share, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // Where no more threads can be had, this one does the work.
            Err(_) => convert(share),
        });
        converted.collect::<Vec<_>>().concat()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowKind;
    use kv_core::ids::{CellIdx, LayerIdx};
    use kv_rows::{HeadRotation, KvType};

    fn shape(kv_type: KvType) -> RowShape {
        RowShape {
            heads: 2,
            dim: 32,
            kv_type,
            rotation: HeadRotation::None,
        }
    }

    /// The same bytes as each row alone, wherever pieces and shares end, and each row once.
    #[test]
    fn rows_are_converted_as_if_alone() {
        let (from, to) = (shape(KvType::F32), shape(KvType::Q8_0));
        for n_rows in [1, 100, 1024, 30_000] {
            let values = (0..n_rows * from.len()).map(|i| ((i * 37) % 1013) as f32 - 500.0);
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            let mut pieces = Vec::new();
            // Two runs of rows, as of two layers.
            for (layer, part) in bytes.chunks(bytes.len().div_ceil(2)).enumerate() {
                let len = (part.len() / from.bytes()) as u32;
                let part = &part[..len as usize * from.bytes()];
                let span = RowSpan {
                    layer: LayerIdx(layer as u32),
                    kind: RowKind::K,
                    first: CellIdx(7),
                    len,
                };
                let whole = Conversion {
                    from,
                    to,
                    span,
                    bytes: part,
                };
                whole.split_into(&mut pieces);
            }
            let mut written: Vec<(LayerIdx, u32, Vec<u8>)> = Vec::new();
            let mut write = |span: RowSpan, bytes: &[u8]| {
                for (at, row) in (0..span.len).zip(bytes.chunks(to.bytes())) {
                    written.push((span.layer, span.first.0 + at, row.to_vec()));
                }
                Ok(())
            };
            write_all(&pieces, &mut write).unwrap();
            let mut alone = Vec::new();
            for piece in &pieces {
                for (at, row) in (0..).zip(piece.bytes.chunks(from.bytes())) {
                    let mut converted = Vec::new();
                    Converter::new(from, to).convert(row, &mut converted);
                    alone.push((piece.span.layer, piece.span.first.0 + at, converted));
                }
            }
            assert!(alone.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(written == alone, "{n_rows} rows");
        }
    }

    #[test]
    fn a_failure_ends_it() {
        let (from, to) = (shape(KvType::F32), shape(KvType::F16));
        let bytes = vec![0; 4096 * from.bytes()];
        let span = RowSpan {
            layer: LayerIdx(0),
            kind: RowKind::V,
            first: CellIdx(0),
            len: 4096,
        };
        let whole = Conversion {
            from,
            to,
            span,
            bytes: &bytes,
        };
        let mut pieces = Vec::new();
        whole.split_into(&mut pieces);
        let mut n = 0;
        let mut write = |_: RowSpan, _: &[u8]| {
            n += 1;
            let layer = LayerIdx(0);
            Err(BackendError::NoRows { layer })
        };
        assert!(write_all(&pieces, &mut write).is_err());
        assert_eq!(n, 1);
    }
}
