//! Saving: one pass over the rows, a piece at a time.

use std::io::{self, Write};

use kv_core::{
    ids::{CellIdx, SeqId},
    memory::Snapshot,
    seq_set::SeqSet,
};
use kv_rows::{HeadRotation, KvType, RowLayout, RowShape, ValueRows};
use serde::{Deserialize, Serialize};

use super::error::StateError;
use super::fingerprint::Fingerprint;
use super::frame::{FrameWriter, Tag, total};
use super::read::check_tokens;
use super::rows::{Converter, RowEncoding, RowFormat, formats};
use super::snapshot::{encode_part, encode_states, encode_tokens};
use super::{ReadRows, SeqTokens};
use crate::{RowKind, RowSpan};

pub(super) const META: Tag = *b"META";
pub(super) const TOKENS: Tag = *b"TOKN";
pub(super) const PART: Tag = *b"PART";
pub(super) const STATES: Tag = *b"STAT";
pub(super) const ROWS: Tag = *b"ROWS";

/// Bytes of rows that are held at once.
const PIECE: usize = 1 << 20;

/// The description of a state: the JSON of its first section.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Meta {
    /// Program and version that wrote it, for people.
    pub(super) written_by: String,
    pub(super) fingerprint: Fingerprint,
    /// The contents of the sections of rows, in order.
    pub(super) rows: Vec<RowFormat>,
    /// Sequences that were saved without tokens: the first and the last of each range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) empty: Vec<[u32; 2]>,
    /// Text that the caller adds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) note: String,
}

/// A state that is to be saved.
#[derive(Clone, Copy, Debug)]
pub struct StateToSave<'a> {
    /// The model.
    pub fingerprint: &'a Fingerprint,
    /// The contents of the memory, as [`Memory::snapshot`](kv_core::memory::Memory::snapshot) gives
    /// it.
    pub snapshot: &'a Snapshot,
    /// The ids of the tokens, as far as they are known.
    pub tokens: &'a [SeqTokens],
    /// The rows of the memory.
    pub layout: &'a RowLayout,
    /// The way keys and values are saved; `None` as they are stored.
    pub kv_type: Option<KvType>,
    /// The way recurrent states are saved but for the inputs of convolutions; `None` as they are
    /// stored.
    pub state_type: Option<KvType>,
    /// The caller's text: [`SavedState::note`](super::SavedState::note) gives it back.
    /// [`SavedState::note`](super::SavedState::note) gives it back.
    pub note: &'a str,
}

/// Checks that rows of this layout can be saved as `kv_type`.
///
/// # Errors
/// [`StateError::RowType`] for the first layer whose rows are no whole blocks.
pub fn check_kv_type(layout: &RowLayout, kv_type: KvType) -> Result<(), StateError> {
    let here = formats(layout, |_| 0);
    here.iter()
        .try_for_each(|format| saved_as(format, [Some(kv_type), None], layout).map(drop))
}

/// Checks that recurrent states of this layout can be saved as `kv_type`.
///
/// # Errors
/// [`StateError::RowType`] for the first layer whose states are no whole blocks.
pub fn check_state_type(layout: &RowLayout, kv_type: KvType) -> Result<(), StateError> {
    let here = formats(layout, |_| 0);
    here.iter()
        .try_for_each(|format| saved_as(format, [None, Some(kv_type)], layout).map(drop))
}

/// Writes a state and returns its bytes. `read` gives the stored bytes of a span of rows.
///
/// # Errors
/// [`StateError::Token`] before anything is written; [`StateError`], where what was written by then
/// is not a state.
pub fn save(
    state: &StateToSave<'_>,
    read: &mut ReadRows<'_>,
    out: &mut dyn Write,
) -> Result<u64, StateError> {
    check_tokens(state.tokens, state.fingerprint.n_vocab)?;
    let snapshot = state.snapshot;
    let state_rows = snapshot.state_rows();
    let n_rows = |part| match part {
        Some(part) => snapshot.part(part).map_or(0, |p| p.cells.len() as u32),
        None => state_rows.len() as u32,
    };
    let here = formats(state.layout, n_rows);
    let types = [state.kv_type, state.state_type];
    let saved = here
        .iter()
        .map(|format| saved_as(format, types, state.layout));
    let saved = saved.collect::<Result<Vec<_>, _>>()?;
    let meta = serde_json::to_vec(&Meta {
        written_by: concat!("cellar ", env!("CARGO_PKG_VERSION")).to_owned(),
        fingerprint: state.fingerprint.clone(),
        rows: saved.clone(),
        empty: ranges(snapshot.empty_seqs()),
        note: state.note.to_owned(),
    })
    .map_err(io::Error::from)?;
    let mut sections = vec![(META, meta), (TOKENS, encode_tokens(state.tokens))];
    for part in snapshot.parts() {
        sections.push((PART, encode_part(part)));
    }
    if let Some(chains) = snapshot.states() {
        sections.push((STATES, encode_states(chains, &state_rows)));
    }
    let small = sections.iter().map(|(_, bytes)| bytes.len() as u64);
    let large = saved.iter().map(|rows| rows.n_bytes().unwrap_or(u64::MAX));
    let n_bytes = total(small.chain(large)).unwrap_or(u64::MAX);
    let n_sections = (sections.len() + saved.len()) as u32;
    let mut frame = FrameWriter::new(out, n_sections, n_bytes)?;
    for (tag, bytes) in &sections {
        frame.section(*tag, bytes)?;
    }
    for (here, saved) in here.iter().zip(&saved) {
        let rows = match here.stored {
            RowEncoding::Heads { part, .. } => {
                let tokens = snapshot.part(part).map_or(&[][..], |p| &p.cells);
                runs(tokens.iter().map(|t| t.row))
            }
            RowEncoding::Floats(_) | RowEncoding::Values { .. } => runs(state_rows.iter().copied()),
        };
        write_rows(here, saved, &rows, read, &mut frame)?;
    }
    Ok(n_bytes)
}

/// The rows in the state, where K and V, and states, have these types: as a memory of this type
/// would hold them, so that it takes them to the bit.
fn saved_as(
    here: &RowFormat,
    [kv_type, state_type]: [Option<KvType>; 2],
    layout: &RowLayout,
) -> Result<RowFormat, StateError> {
    let (kv_type, shape) = match (here.kind, kv_type, state_type) {
        (RowKind::K | RowKind::V, Some(kv_type), _) | (RowKind::State, _, Some(kv_type)) => {
            (kv_type, here.stored.shape())
        }
        _ => return Ok(*here),
    };
    if shape.kv_type == kv_type {
        return Ok(*here);
    }
    let RowEncoding::Heads { part, .. } = here.stored else {
        let stored = RowEncoding::of_state(shape.dim, kv_type);
        return whole_rows(RowFormat { stored, ..*here });
    };
    let values = layout.layer(here.layer).map(|rows| rows.values);
    let rotation = match values {
        // Latents are never rotated.
        Some(ValueRows::Own) if kv_type.is_quantised() => HeadRotation::for_dim(shape.dim),
        _ => HeadRotation::None,
    };
    let shape = RowShape {
        kv_type,
        rotation,
        ..shape
    };
    whole_rows(RowFormat {
        stored: RowEncoding::Heads { part, shape },
        ..*here
    })
}

/// The same, if a row is whole blocks of its type.
fn whole_rows(saved: RowFormat) -> Result<RowFormat, StateError> {
    let shape = saved.stored.shape();
    match saved.row_bytes() {
        Some(_) => Ok(saved),
        None => Err(StateError::RowType {
            layer: saved.layer,
            len: shape.len(),
            kv_type: shape.kv_type,
        }),
    }
}

/// The ids of sequences as ranges.
fn ranges(seqs: &SeqSet) -> Vec<[u32; 2]> {
    let mut ranges: Vec<[u32; 2]> = Vec::new();
    for SeqId(seq) in seqs {
        match ranges.last_mut() {
            Some([_, last]) if *last + 1 == seq => *last = seq,
            _ => ranges.push([seq, seq]),
        }
    }
    ranges
}

/// Rows that follow one another: the first, and how many.
fn runs(rows: impl Iterator<Item = CellIdx>) -> Vec<(CellIdx, u32)> {
    let mut runs: Vec<(CellIdx, u32)> = Vec::new();
    for row in rows {
        match runs.last_mut() {
            Some((first, len)) if first.offset(*len) == row => *len += 1,
            _ => runs.push((row, 1)),
        }
    }
    runs
}

fn write_rows(
    here: &RowFormat,
    saved: &RowFormat,
    rows: &[(CellIdx, u32)],
    read: &mut ReadRows<'_>,
    frame: &mut FrameWriter<'_>,
) -> Result<(), StateError> {
    let row_bytes = here.row_bytes().unwrap_or(0).max(1);
    let (from, to) = (here.stored.shape(), saved.stored.shape());
    let mut converter = (from != to).then(|| Converter::new(from, to));
    let mut section = frame.begin(ROWS, saved.n_bytes().unwrap_or(u64::MAX))?;
    let per_piece = (PIECE / row_bytes).max(1) as u32;
    let (mut bytes, mut converted) = (Vec::new(), Vec::new());
    for &(first, len) in rows {
        for at in (0..len).step_by(per_piece as usize) {
            let n = per_piece.min(len - at);
            bytes.resize(n as usize * row_bytes, 0);
            let span = RowSpan {
                layer: here.layer,
                kind: here.kind,
                first: first.offset(at),
                len: n,
            };
            read(span, &mut bytes)?;
            match &mut converter {
                None => section.write(&bytes)?,
                Some(converter) => {
                    converted.clear();
                    converter.convert(&bytes, &mut converted);
                    section.write(&converted)?;
                }
            }
        }
    }
    Ok(section.end()?)
}
