//! Reading: everything is checked before anybody acts on it; rows stay where they are.

use std::collections::BTreeSet;

use kv_core::{
    ids::{CellIdx, LayerIdx, MAX_SEQS, SeqId},
    memory::{Restoration, Snapshot},
    seq_set::SeqSet,
};
use kv_rows::RowLayout;

use super::convert::{self, Conversion};
use super::error::StateError;
use super::fingerprint::Fingerprint;
use super::frame::{self, Section, Tag, tag_name};
use super::rows::{RowEncoding, RowFormat, formats};
use super::snapshot::{decode_part, decode_states, decode_tokens};
use super::write::{META, Meta, PART, ROWS, STATES, TOKENS};
use super::{SeqTokens, WriteRows};
use crate::{BackendError, RowKind, RowSpan};

/// A state whose bytes were checked.
#[derive(Clone, Debug)]
pub struct SavedState<'a> {
    version: u32,
    n_bytes: u64,
    written_by: String,
    fingerprint: Fingerprint,
    snapshot: Snapshot,
    tokens: Vec<SeqTokens>,
    note: String,
    rows: Vec<SavedRows<'a>>,
}

/// The rows of one kind of one layer, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct SavedRows<'a> {
    /// The kind of the rows.
    pub format: RowFormat,
    /// Their bytes.
    pub bytes: &'a [u8],
}

/// Rows of a state, and what they become in a memory.
struct Pairing<'s, 'a> {
    saved: &'s SavedRows<'a>,
    here: RowFormat,
}

impl<'a> SavedState<'a> {
    /// Checks every byte of a state. Rows stay in `bytes`.
    ///
    /// # Errors
    /// [`StateError`], the first thing that is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, StateError> {
        let (version, sections) = frame::read(bytes)?;
        let known = [META, TOKENS, PART, STATES, ROWS];
        for section in &sections {
            if !known.contains(&section.tag) && !section.may_be_skipped() {
                let tag = tag_name(section.tag);
                return Err(StateError::UnknownSection { tag });
            }
        }
        let meta = parse_meta(only(&sections, META)?)?;
        let tokens = decode_tokens(only(&sections, TOKENS)?)?;
        let parts = all(&sections, PART).map(decode_part);
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let (n_states, chains) = match all(&sections, STATES).next() {
            None => (0, None),
            Some(_) => {
                let (n, chains) = decode_states(only(&sections, STATES)?)?;
                (n, Some(chains))
            }
        };
        let snapshot = Snapshot::new(parts, chains)?.of_seqs(&empty_seqs(&meta)?);
        let rows = rows(&meta, &sections, &snapshot, n_states)?;
        let state = Self {
            version,
            n_bytes: bytes.len() as u64,
            written_by: meta.written_by,
            fingerprint: meta.fingerprint,
            snapshot,
            tokens,
            note: meta.note,
            rows,
        };
        check_tokens(&state.tokens, state.fingerprint.n_vocab)?;
        Ok(state)
    }

    /// The version of its format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Its bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// The program that wrote it, in its own words.
    pub fn written_by(&self) -> &str {
        &self.written_by
    }

    /// The model that computed it.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// The saved sequences. Rows are numbered as in [`SavedState::rows`].
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The ids of tokens, as far as they were known.
    pub fn tokens(&self) -> &[SeqTokens] {
        &self.tokens
    }

    /// The note of the program that wrote it; empty where there is none.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// The rows.
    pub fn rows(&self) -> &[SavedRows<'a>] {
        &self.rows
    }

    /// Checks that the rows can become those of a memory with this layout: the same layers with
    /// rows of the same heads and widths; how values are stored may differ.
    ///
    /// # Errors
    /// [`StateError::Rows`], the first rows that cannot.
    pub fn check_rows(&self, layout: &RowLayout) -> Result<(), StateError> {
        let here = formats(layout, |_| 0);
        for saved in &self.rows {
            let RowFormat { layer, kind, .. } = saved.format;
            if !here.iter().any(|h| (h.layer, h.kind) == (layer, kind)) {
                return Err(differ(layer, kind, Some(&saved.format), None));
            }
        }
        self.pairings(layout).map(drop)
    }

    /// True if the rows are stored as a memory with this layout stores them, so that they are
    /// restored to the bit.
    pub fn is_stored_as(&self, layout: &RowLayout) -> bool {
        let pairings = self.pairings(layout);
        pairings.is_ok_and(|pairings| {
            let mut pairs = pairings.iter();
            pairs.all(|pair| pair.saved.format.stored == pair.here.stored)
        })
    }

    /// Hands out the rows that a restoration of this snapshot is to write, as a memory with this
    /// layout stores them.
    ///
    /// # Errors
    /// The failure of `write`, at once. [`BackendError::NoRows`] where [`SavedState::check_rows`]
    /// refuses.
    pub fn write_rows(
        &self,
        restored: &Restoration,
        layout: &RowLayout,
        write: &mut WriteRows<'_>,
    ) -> Result<(), BackendError> {
        let pairings = self.pairings(layout).map_err(|error| match error {
            StateError::Rows { layer, .. } => BackendError::NoRows { layer },
            _ => BackendError::NoRows { layer: LayerIdx(0) },
        })?;
        let mut conversions = Vec::new();
        for pairing in &pairings {
            let mut add = |from, to, len| pairing.write(from, to, len, write, &mut conversions);
            match pairing.here.stored {
                RowEncoding::Heads { part, .. } => {
                    for w in restored.row_writes.iter().filter(|w| w.part == part) {
                        add(w.from, w.to, w.len)?;
                    }
                }
                RowEncoding::Floats(_) | RowEncoding::Values { .. } => {
                    for w in &restored.state_writes {
                        add(w.from, w.to, 1)?;
                    }
                }
            }
        }
        convert::write_all(&conversions, write)
    }

    /// For all rows of a layout those that were saved.
    fn pairings(&self, layout: &RowLayout) -> Result<Vec<Pairing<'_, 'a>>, StateError> {
        let pair = |here: RowFormat| {
            let RowFormat { layer, kind, .. } = here;
            let mut all = self.rows.iter();
            let saved = all.find(|s| (s.format.layer, s.format.kind) == (layer, kind));
            match saved {
                Some(saved) if fits(&saved.format, &here) => Ok(Pairing { saved, here }),
                other => Err(differ(layer, kind, other.map(|s| &s.format), Some(&here))),
            }
        };
        formats(layout, |_| 0).into_iter().map(pair).collect()
    }
}

/// Checks that all tokens are of the vocabulary.
pub(super) fn check_tokens(tokens: &[SeqTokens], n_vocab: u32) -> Result<(), StateError> {
    for tokens in tokens {
        let mut all = tokens.evaluated.iter().chain(&tokens.pending);
        // Those of pictures are names of rows, which no vocabulary has.
        let is_other = |token: &&kv_core::TokenId| token.0 >= n_vocab && !token.names_row();
        if let Some(&token) = all.find(is_other) {
            let seq = tokens.seq;
            return Err(StateError::Token {
                seq,
                token,
                n_vocab,
            });
        }
    }
    Ok(())
}

impl<'a> Pairing<'_, 'a> {
    /// Writes rows that follow one another; those that are stored in another way here are left for
    /// later.
    fn write(
        &self,
        from: CellIdx,
        to: CellIdx,
        len: u32,
        write: &mut WriteRows<'_>,
        later: &mut Vec<Conversion<'a>>,
    ) -> Result<(), BackendError> {
        let RowFormat { layer, kind, .. } = self.here;
        let row_bytes = self.saved.format.row_bytes().unwrap_or(0);
        let start = from.as_usize() * row_bytes;
        let missing = BackendError::RowOutOfRange {
            layer,
            end: from.as_usize() + len as usize,
            n_rows: self.saved.format.n_rows as usize,
        };
        let bytes = self
            .saved
            .bytes
            .get(start..start + len as usize * row_bytes);
        let rows = Conversion {
            from: self.saved.format.stored.shape(),
            to: self.here.stored.shape(),
            span: RowSpan {
                layer,
                kind,
                first: to,
                len,
            },
            bytes: bytes.ok_or(missing)?,
        };
        if rows.from == rows.to {
            return write(rows.span, rows.bytes);
        }
        rows.split_into(later);
        Ok(())
    }
}

/// True if saved rows can become such.
fn fits(saved: &RowFormat, here: &RowFormat) -> bool {
    match (saved.stored, here.stored) {
        (RowEncoding::Heads { part: a, shape: s }, RowEncoding::Heads { part: b, shape: h }) => {
            a == b && (s.heads, s.dim) == (h.heads, h.dim)
        }
        (RowEncoding::Heads { .. }, _) | (_, RowEncoding::Heads { .. }) => false,
        // Values of a state, whatever their types.
        (saved, here) => saved.shape().dim == here.shape().dim,
    }
}

fn differ(
    layer: LayerIdx,
    kind: RowKind,
    saved: Option<&RowFormat>,
    here: Option<&RowFormat>,
) -> StateError {
    let describe =
        |format: Option<&RowFormat>| format.map_or("nothing".to_owned(), RowFormat::describe);
    StateError::Rows {
        layer,
        kind,
        saved: describe(saved),
        here: describe(here),
    }
}

fn parse_meta(section: &Section<'_>) -> Result<Meta, StateError> {
    serde_json::from_slice(section.payload).map_err(|error| senseless(META, error.to_string()))
}

/// The sequences that were saved without tokens.
fn empty_seqs(meta: &Meta) -> Result<SeqSet, StateError> {
    let mut seqs = SeqSet::EMPTY;
    for &[first, last] in &meta.empty {
        if last as usize >= MAX_SEQS {
            let reason = format!("sequence {last} is beyond {}", MAX_SEQS - 1);
            return Err(senseless(META, reason));
        }
        seqs = seqs.union(&(first..=last).map(SeqId).collect());
    }
    Ok(seqs)
}

/// Each section of rows with what describes it; as many rows as the snapshot has.
fn rows<'a>(
    meta: &Meta,
    sections: &[Section<'a>],
    snapshot: &Snapshot,
    n_states: u32,
) -> Result<Vec<SavedRows<'a>>, StateError> {
    let payloads: Vec<&[u8]> = all(sections, ROWS).map(|section| section.payload).collect();
    if payloads.len() != meta.rows.len() {
        return Err(StateError::SectionCount {
            tag: tag_name(ROWS),
            n: payloads.len(),
            wanted: meta.rows.len(),
        });
    }
    let mut rows: Vec<SavedRows<'a>> = Vec::with_capacity(payloads.len());
    let mut seen = BTreeSet::new();
    for (&format, bytes) in meta.rows.iter().zip(payloads) {
        let RowFormat { layer, kind, .. } = format;
        let wanted = match (kind, format.stored) {
            (RowKind::K | RowKind::V, RowEncoding::Heads { part, .. }) => {
                snapshot.part(part).map(|p| p.cells.len() as u64)
            }
            (RowKind::Conv, RowEncoding::Floats(_))
            | (RowKind::State, RowEncoding::Floats(_) | RowEncoding::Values { .. }) => {
                Some(u64::from(n_states))
            }
            _ => None,
        };
        if wanted != Some(u64::from(format.n_rows)) {
            let reason = format!("{} rows of layer {layer} that no token has", format.n_rows);
            return Err(senseless(ROWS, reason));
        }
        if format.n_bytes() != Some(bytes.len() as u64) {
            let (n, len) = (format.n_rows, bytes.len());
            let reason = format!("{n} rows of layer {layer} do not take {len} bytes");
            return Err(senseless(ROWS, reason));
        }
        if !seen.insert((layer, kind)) {
            let reason = format!("rows of layer {layer} are there twice");
            return Err(senseless(ROWS, reason));
        }
        rows.push(SavedRows { format, bytes });
    }
    Ok(rows)
}

fn all<'s, 'a>(sections: &'s [Section<'a>], tag: Tag) -> impl Iterator<Item = &'s Section<'a>> {
    sections.iter().filter(move |section| section.tag == tag)
}

fn only<'s, 'a>(sections: &'s [Section<'a>], tag: Tag) -> Result<&'s Section<'a>, StateError> {
    let mut own = all(sections, tag);
    match (own.next(), own.count()) {
        (Some(section), 0) => Ok(section),
        (first, more) => Err(StateError::SectionCount {
            tag: tag_name(tag),
            n: usize::from(first.is_some()) + more,
            wanted: 1,
        }),
    }
}

fn senseless(tag: Tag, reason: String) -> StateError {
    StateError::Section {
        tag: tag_name(tag),
        reason,
    }
}
