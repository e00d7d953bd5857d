//! All checks on a caller's batch, in one function.
//!
//! Invariant: in a [`ValidBatch`] every entry has a position and at least one sequence, all ids are
//! in range, positions of a sequence neither go back nor leave holes, and what was appended
//! follows what the memory holds. Knows nothing of how batches are cut or placed.

use std::collections::HashMap;
use std::ops::Range;

use super::{Batch, Content, Entry, Output, TokensOf};
use crate::grid::GridPos;
use crate::ids::{Pos, SeqId, TokenId};
use crate::seq_set::SeqSet;
use crate::window::PosRange;

/// The largest position of a token: what fits a signed 32-bit number.
pub const MAX_POS: Pos = Pos(i32::MAX as u32);

/// The limits of a model and a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRules {
    /// Largest number of entries.
    pub n_batch: u32,
    /// Number of sequences that the memory can hold.
    pub n_seqs: u32,
    /// Number of tokens in the vocabulary.
    pub n_vocab: u32,
    /// Values in one embedding row.
    pub n_embd: u32,
}

/// The rule by which the positions of a sequence follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PositionRule {
    /// One after the other; a position may repeat. Tokens of images are refused.
    #[default]
    Linear,
    /// For models of images: positions may also jump ahead, since an image counts as many as it is
    /// high or wide. A token of text comes behind what the memory holds, one of an image may share
    /// its last position.
    Grid,
}

/// One checked entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidEntry {
    /// Its position.
    pub pos: Pos,
    /// Its place in an image; `None` for text.
    pub grid: Option<GridPos>,
    /// The last position that it sees, where that is not its own.
    pub sees_to: Option<Pos>,
    /// Its type: which text of a pair it belongs to.
    pub token_type: u32,
    /// Its sequences, at least one.
    pub seqs: SeqSet,
    /// The sequence with the smallest id, whose tokens it sees.
    pub first_seq: SeqId,
    /// The choice to hand out its output.
    pub output: Output,
}

/// A batch that may go into the memory whose positions it was checked against.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidBatch {
    pub(super) tokens_of: TokensOf,
    pub(super) entries: Vec<ValidEntry>,
    /// A token for each entry, or empty.
    pub(super) tokens: Vec<u32>,
    /// A row of `n_embd` values for each entry, in the order of the entries, or empty.
    pub(super) embeddings: Vec<f32>,
    pub(super) n_embd: usize,
}

impl ValidBatch {
    /// The entries, in the caller's order.
    pub fn entries(&self) -> &[ValidEntry] {
        &self.entries
    }

    /// The owner of the tokens.
    pub fn tokens_of(&self) -> TokensOf {
        self.tokens_of
    }

    /// Number of entries, at least 1.
    pub fn n_tokens(&self) -> usize {
        self.entries.len()
    }

    /// Number of ubatches of at most `n_ubatch` rows that it is cut into in the caller's order.
    pub fn n_pieces(&self, n_ubatch: u32) -> usize {
        self.pieces(n_ubatch).map_or(1, |pieces| pieces.len())
    }

    /// The entries of each ubatch of at most `n_ubatch` rows, in the caller's order. Tokens and
    /// names of rows are not in one, and what sees each other is not cut.
    pub(super) fn pieces(&self, n_ubatch: u32) -> Result<Vec<Range<usize>>, BatchError> {
        let n_entries = self.entries.len();
        let names_row = |at: usize| {
            let token = self.tokens.get(at);
            token.is_some_and(|&token| TokenId(token).names_row())
        };
        // A cut before this entry would part what sees each other.
        let holds = |at: usize| match (self.entries.get(at.wrapping_sub(1)), self.entries.get(at)) {
            (Some(before), Some(entry)) => {
                let is_same = before.first_seq == entry.first_seq;
                entry.sees_to.is_some() && before.sees_to == entry.sees_to && is_same
            }
            _ => false,
        };
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < n_entries {
            let most = (start + (n_ubatch as usize).max(1)).min(n_entries);
            let is_named = names_row(start);
            let other = (start..most).find(|&at| names_row(at) != is_named);
            let end = other.unwrap_or(most);
            let whole = (start + 1..=end).rev().find(|&at| !holds(at));
            let Some(end) = whole else {
                let same = (start..n_entries).skip(1).take_while(|&at| holds(at));
                return Err(BatchError::SequenceTooLong {
                    set: self.entries[start].seqs.clone(),
                    n_tokens: 1 + same.count(),
                    n_ubatch,
                });
            };
            pieces.push(start..end);
            start = end;
        }
        Ok(pieces)
    }

    /// Number of entries whose output is wanted.
    pub fn n_outputs(&self) -> usize {
        self.entries
            .iter()
            .filter(|e| e.output == Output::Wanted)
            .count()
    }
}

/// The reason why a batch is wrong, or cannot be cut into ubatches. `entry` is the number of the
/// entry, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// There is nothing to evaluate.
    #[error("the batch has no entries")]
    Empty,
    /// More entries than one call takes.
    #[error("the batch has {n_entries} entries; one call takes {n_batch}")]
    TooLarge {
        /// Entries given.
        n_entries: usize,
        /// Entries allowed.
        n_batch: u32,
    },
    /// Tokens and embeddings in one batch.
    #[error("entry {entry} is {got}, but the batch began with {began}: it must be all the same")]
    Mixed {
        /// The entry.
        entry: usize,
        /// The kind of the entry.
        got: &'static str,
        /// The kind of the first entry.
        began: &'static str,
    },
    /// A token outside the vocabulary.
    #[error("entry {entry}: token {token} is not below the vocabulary's {n_vocab}")]
    TokenOutOfRange {
        /// The entry.
        entry: usize,
        /// Its token.
        token: TokenId,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// An embedding row of another width than the model's.
    #[error("entry {entry}: an embedding of {got} values; the model takes {n_embd}")]
    EmbeddingWidth {
        /// The entry.
        entry: usize,
        /// Values given.
        got: usize,
        /// Values wanted.
        n_embd: u32,
    },
    /// An entry that belongs to no sequence.
    #[error("entry {entry} belongs to no sequence")]
    NoSequence {
        /// The entry.
        entry: usize,
    },
    /// A sequence that the memory cannot hold.
    #[error("entry {entry}: sequence {seq} is not below the memory's {n_seqs}")]
    SeqOutOfRange {
        /// The entry.
        entry: usize,
        /// Its sequence.
        seq: SeqId,
        /// Sequences that the memory can hold.
        n_seqs: u32,
    },
    /// A position beyond [`MAX_POS`].
    #[error("entry {entry}: position {pos} is beyond {MAX_POS}")]
    PosOutOfRange {
        /// The entry.
        entry: usize,
        /// Its position.
        pos: Pos,
    },
    /// A token of an image, for a model that knows positions of one number only.
    #[error("entry {entry} lies at {grid} in an image, but the model takes text only")]
    Image {
        /// The entry.
        entry: usize,
        /// Its place.
        grid: GridPos,
    },
    /// The first token of a sequence in the batch does not follow what the memory holds.
    #[error("entry {entry}: sequence {seq} is remembered up to {last}, so {pos} cannot follow")]
    NotConsecutive {
        /// The entry.
        entry: usize,
        /// The sequence.
        seq: SeqId,
        /// The entry's position.
        pos: Pos,
        /// The last position in the memory.
        last: Pos,
    },
    /// A source for a sequence that has one.
    #[error(
        "entry {entry}: sequence {seq} has a source of {n_tokens} tokens already: remove the \
         sequence before it is given another"
    )]
    HasSource {
        /// The entry.
        entry: usize,
        /// The sequence.
        seq: SeqId,
        /// Tokens of its source.
        n_tokens: u64,
    },
    /// A sequence's positions leave some out.
    #[error("entry {entry}: sequence {seq} jumps from position {last} to {pos}")]
    Hole {
        /// The entry.
        entry: usize,
        /// The sequence.
        seq: SeqId,
        /// The entry's position.
        pos: Pos,
        /// The sequence's position before, in the same batch.
        last: Pos,
    },
    /// A sequence's positions go back.
    #[error("entry {entry}: sequence {seq} goes back from position {last} to {pos}")]
    WentBack {
        /// The entry.
        entry: usize,
        /// The sequence.
        seq: SeqId,
        /// The entry's position.
        pos: Pos,
        /// The sequence's position before, in the same batch.
        last: Pos,
    },
    /// An entry couples sequences of which the memory holds different positions.
    #[error("entry {entry} couples sequence {a} (positions {a_has}) with {b} ({b_has})")]
    Diverged {
        /// The entry.
        entry: usize,
        /// The sequence with the smallest id.
        a: SeqId,
        /// The contents of the memory of it.
        a_has: PosRange,
        /// Another sequence of the entry.
        b: SeqId,
        /// The contents of the memory of it.
        b_has: PosRange,
    },
    /// An entry's sequences were not together before, in the same batch.
    #[error("entry {entry}: sequences {set} cannot join, {seq} was in {earlier} before")]
    SetsOverlap {
        /// The entry.
        entry: usize,
        /// Its sequences.
        set: SeqSet,
        /// The one that was in another set.
        seq: SeqId,
        /// That set.
        earlier: SeqSet,
    },
    /// Ubatches without rows.
    #[error("ubatches of 0 tokens hold no batch")]
    NoRows,
    /// A sequence that must not be cut and is longer than a ubatch.
    #[error(
        "the batch has {n_tokens} tokens of sequences {set}, which see each other and must be in \
         one ubatch: it takes {n_ubatch}"
    )]
    SequenceTooLong {
        /// The sequence, or all that share tokens with it.
        set: SeqSet,
        /// Its tokens in the batch.
        n_tokens: usize,
        /// Rows of a ubatch.
        n_ubatch: u32,
    },
}

/// Checks a batch and fills in automatic positions. `positions` gives the positions that the memory
/// holds of a sequence; where nothing is remembered, pass `|_| None`.
///
/// An automatic position follows the last one of the entry's first sequence, in the batch or else
/// in the memory; those of a batch of sources are positions in the source. Repeated positions are
/// allowed. Sequences that share an entry must have been
/// together in the entries before; they may part for good (`{0,1}`, then `{0}` and `{1}`).
///
/// # Errors
/// [`BatchError`], for the first entry that is wrong; nothing is changed.
pub fn validate(
    batch: &Batch,
    rules: &BatchRules,
    positions: impl Fn(SeqId) -> Option<PosRange>,
) -> Result<ValidBatch, BatchError> {
    validate_with(batch, rules, PositionRule::Linear, positions)
}

/// The same, with a rule of how positions follow each other.
///
/// # Errors
/// As [`validate`].
pub fn validate_with(
    batch: &Batch,
    rules: &BatchRules,
    rule: PositionRule,
    positions: impl Fn(SeqId) -> Option<PosRange>,
) -> Result<ValidBatch, BatchError> {
    let n_entries = batch.entries.len();
    if n_entries == 0 {
        return Err(BatchError::Empty);
    }
    if n_entries > rules.n_batch as usize {
        return Err(BatchError::TooLarge {
            n_entries,
            n_batch: rules.n_batch,
        });
    }
    let mut valid = ValidBatch {
        tokens_of: batch.tokens_of,
        entries: Vec::with_capacity(n_entries),
        n_embd: rules.n_embd as usize,
        ..ValidBatch::default()
    };
    let mut seen: HashMap<SeqId, LastEntry> = HashMap::new();
    for (number, entry) in batch.entries.iter().enumerate() {
        add_content(&mut valid, batch, number, rules)?;
        let first_seq = check_sequences(number, entry, rules)?;
        if batch.tokens_of == TokensOf::Source {
            check_sources(number, &entry.seqs, &positions)?;
        }
        if let (Some(grid), PositionRule::Linear) = (entry.grid, rule) {
            let entry = number;
            return Err(BatchError::Image { entry, grid });
        }
        let checked = EntryCheck {
            number,
            grid: entry.grid,
            rule,
            seqs: &entry.seqs,
            first_seq,
        };
        let pos = checked.position(entry.pos, &mut seen, &positions)?;
        valid.entries.push(ValidEntry {
            pos,
            grid: entry.grid,
            sees_to: entry.sees_to,
            token_type: entry.token_type,
            seqs: entry.seqs.clone(),
            first_seq,
            output: entry.output,
        });
    }
    Ok(valid)
}

/// The last entry of a sequence in the batch so far.
struct LastEntry {
    last: Pos,
    set: SeqSet,
}

struct EntryCheck<'a> {
    number: usize,
    grid: Option<GridPos>,
    rule: PositionRule,
    seqs: &'a SeqSet,
    first_seq: SeqId,
}

impl EntryCheck<'_> {
    /// The entry's position, checked for each of its sequences, which are brought up to it.
    fn position(
        &self,
        given: Option<Pos>,
        seen: &mut HashMap<SeqId, LastEntry>,
        positions: &impl Fn(SeqId) -> Option<PosRange>,
    ) -> Result<Pos, BatchError> {
        let entry = self.number;
        let pos = given.unwrap_or_else(|| match seen.get(&self.first_seq) {
            Some(seen) => seen.last.next(),
            None => positions(self.first_seq).map_or(Pos(0), |has| has.last.next()),
        });
        if pos > MAX_POS {
            return Err(BatchError::PosOutOfRange { entry, pos });
        }
        for seq in self.seqs {
            match seen.get(&seq) {
                Some(&LastEntry { last, .. }) if pos < last => {
                    return Err(BatchError::WentBack {
                        entry,
                        seq,
                        pos,
                        last,
                    });
                }
                Some(&LastEntry { last, .. })
                    if self.rule == PositionRule::Linear && pos > last.next() =>
                {
                    return Err(BatchError::Hole {
                        entry,
                        seq,
                        pos,
                        last,
                    });
                }
                Some(LastEntry { set: earlier, .. }) if !self.seqs.is_subset(earlier) => {
                    return Err(BatchError::SetsOverlap {
                        entry,
                        set: self.seqs.clone(),
                        seq,
                        earlier: earlier.clone(),
                    });
                }
                Some(_) => {}
                None => self.check_against_memory(seq, pos, positions)?,
            }
        }
        for seq in self.seqs {
            let set = self.seqs.clone();
            seen.insert(seq, LastEntry { last: pos, set });
        }
        Ok(pos)
    }

    /// True if `pos` may follow `last`, which the memory holds.
    fn follows(&self, last: Pos, pos: Pos) -> bool {
        match (self.rule, self.grid) {
            (PositionRule::Linear, _) => pos == last.next(),
            (PositionRule::Grid, None) => pos > last,
            (PositionRule::Grid, Some(_)) => pos >= last,
        }
    }

    fn check_against_memory(
        &self,
        seq: SeqId,
        pos: Pos,
        positions: &impl Fn(SeqId) -> Option<PosRange>,
    ) -> Result<(), BatchError> {
        let entry = self.number;
        let has = positions(seq);
        if seq != self.first_seq {
            let first_has = positions(self.first_seq);
            if has != first_has {
                return Err(BatchError::Diverged {
                    entry,
                    a: self.first_seq,
                    a_has: first_has.unwrap_or(PosRange::EMPTY),
                    b: seq,
                    b_has: has.unwrap_or(PosRange::EMPTY),
                });
            }
        }
        match has {
            Some(PosRange { last, .. }) if !self.follows(last, pos) => {
                Err(BatchError::NotConsecutive {
                    entry,
                    seq,
                    pos,
                    last,
                })
            }
            _ => Ok(()),
        }
    }
}

/// A sequence gets its source once, whole.
fn check_sources(
    entry: usize,
    seqs: &SeqSet,
    positions: impl Fn(SeqId) -> Option<PosRange>,
) -> Result<(), BatchError> {
    let of_seq = |seq: SeqId| Some((seq, positions(seq)?.len()));
    match seqs.iter().find_map(of_seq) {
        Some((seq, n_tokens)) => Err(BatchError::HasSource {
            entry,
            seq,
            n_tokens,
        }),
        None => Ok(()),
    }
}

/// The entry's smallest sequence id, after all were checked.
fn check_sequences(entry: usize, e: &Entry, rules: &BatchRules) -> Result<SeqId, BatchError> {
    let n_seqs = rules.n_seqs;
    let beyond = e
        .out_of_range
        .or_else(|| e.seqs.iter().find(|seq| seq.0 >= n_seqs));
    if let Some(seq) = beyond {
        return Err(BatchError::SeqOutOfRange { entry, seq, n_seqs });
    }
    e.seqs.first().ok_or(BatchError::NoSequence { entry })
}

/// Appends the entry's token or embedding row, so that rows lie in the order of the entries.
fn add_content(
    valid: &mut ValidBatch,
    batch: &Batch,
    entry: usize,
    rules: &BatchRules,
) -> Result<(), BatchError> {
    let kind = |content: &Content| match content {
        Content::Token(_) => "a token",
        Content::Embedding(_) => "an embedding",
    };
    let content = &batch.entries[entry].content;
    let (got, began) = (kind(content), kind(&batch.entries[0].content));
    if got != began {
        return Err(BatchError::Mixed { entry, got, began });
    }
    match content {
        &Content::Token(token) if token.0 >= rules.n_vocab && !token.names_row() => {
            Err(BatchError::TokenOutOfRange {
                entry,
                token,
                n_vocab: rules.n_vocab,
            })
        }
        &Content::Token(token) => {
            valid.tokens.push(token.0);
            Ok(())
        }
        Content::Embedding(range) if range.len() != rules.n_embd as usize => {
            let (got, n_embd) = (range.len(), rules.n_embd);
            Err(BatchError::EmbeddingWidth { entry, got, n_embd })
        }
        Content::Embedding(range) => {
            let row = batch.embeddings.get(range.clone()).unwrap_or_default();
            valid.embeddings.extend_from_slice(row);
            Ok(())
        }
    }
}
