//! What a caller submits: entries of tokens or embeddings, with sequences and wanted outputs.
//!
//! A [`Batch`] only records; [`validate()`] checks everything that a caller can get wrong, once,
//! and gives a [`ValidBatch`] that the rest of the crate trusts. [`SplitPolicy::split`] cuts that
//! into [`UBatch`]es. Knows nothing of cells.
//!
//! ```
//! use kv_core::batch::{Batch, BatchRules, validate};
//! use kv_core::{Pos, SeqId, TokenId};
//!
//! let mut batch = Batch::new();
//! batch.push_token(TokenId(17));
//! batch.push_token(TokenId(4)).with_output();
//! batch.push_token(TokenId(9)).in_sequence(SeqId(1)).at(Pos(0)).with_output();
//!
//! let rules = BatchRules { n_batch: 512, n_seqs: 2, n_vocab: 100, n_embd: 8 };
//! let nothing_remembered = |_| None;
//! let batch = validate(&batch, &rules, nothing_remembered)?;
//! assert_eq!(batch.entries()[1].pos, Pos(1)); // automatic
//! # Ok::<(), kv_core::batch::BatchError>(())
//! ```

use std::ops::Range;

use crate::grid::GridPos;
use crate::ids::{Pos, SeqId, TokenId};
use crate::seq_set::SeqSet;

mod split;
mod ubatch;
mod validate;

pub use split::SplitPolicy;
pub use ubatch::{UBatch, UBatchRow};
pub use validate::{
    BatchError, BatchRules, MAX_POS, PositionRule, ValidBatch, ValidEntry, validate, validate_with,
};

/// Tokens (or embeddings) to be evaluated together, in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    entries: Vec<Entry>,
    tokens_of: TokensOf,
    /// Rows of all embedding entries; each entry has its range.
    embeddings: Vec<f32>,
}

/// The owner of the entries of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokensOf {
    /// Those of its sequences.
    #[default]
    Sequence,
    /// Those of their sources: what a model with an encoder attends over in addition. A sequence is
    /// given its source whole, in one batch, before its own tokens.
    Source,
}

/// The choice to hand out an entry's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Output {
    /// It only goes into the memory.
    #[default]
    Skip,
    /// Its logits (or hidden state) are wanted.
    Wanted,
}

#[derive(Clone, Debug)]
struct Entry {
    content: Content,
    /// `None`: follows its sequence.
    pos: Option<Pos>,
    /// `None`: text.
    grid: Option<GridPos>,
    /// The last position that it sees, where that is not its own.
    sees_to: Option<Pos>,
    token_type: u32,
    seqs: SeqSet,
    /// A sequence id that no set can hold, kept for the error message.
    out_of_range: Option<SeqId>,
    output: Output,
}

#[derive(Clone, Debug)]
enum Content {
    Token(TokenId),
    /// The row's place in `Batch::embeddings`.
    Embedding(Range<usize>),
}

/// The entry just added, to be described further.
#[derive(Debug)]
pub struct EntryMut<'a>(&'a mut Entry);

impl Batch {
    /// A batch without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next tokens of one sequence; the output of the last is wanted.
    pub fn prompt(seq: SeqId, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut batch = Self::new();
        for token in tokens {
            batch.push_token(token).in_sequence(seq);
        }
        if let Some(last) = batch.entries.last_mut() {
            last.output = Output::Wanted;
        }
        batch
    }

    /// The tokens of a sequence's source, none of whose outputs is wanted.
    pub fn source(seq: SeqId, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut batch = Self {
            tokens_of: TokensOf::Source,
            ..Self::default()
        };
        for token in tokens {
            batch.push_token(token).in_sequence(seq);
        }
        batch
    }

    /// The owner of the tokens.
    pub fn tokens_of(&self) -> TokensOf {
        self.tokens_of
    }

    /// Makes all entries tokens of these.
    pub fn set_tokens_of(&mut self, tokens_of: TokensOf) {
        self.tokens_of = tokens_of;
    }

    /// Adds a token: of sequence 0, at the next position there, without output, unless changed.
    pub fn push_token(&mut self, token: TokenId) -> EntryMut<'_> {
        self.push(Content::Token(token))
    }

    /// Adds one embedding row, with the same defaults as a token.
    pub fn push_embedding(&mut self, row: &[f32]) -> EntryMut<'_> {
        let start = self.embeddings.len();
        self.embeddings.extend_from_slice(row);
        self.push(Content::Embedding(start..self.embeddings.len()))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of entries that belong to a sequence.
    pub fn n_entries_of(&self, seq: SeqId) -> usize {
        let of_seq = |entry: &&Entry| entry.seqs.contains(seq);
        self.entries.iter().filter(of_seq).count()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes all entries out and keeps the room for new ones.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.embeddings.clear();
    }

    fn push(&mut self, content: Content) -> EntryMut<'_> {
        let at = self.entries.len();
        self.entries.push(Entry {
            content,
            pos: None,
            grid: None,
            sees_to: None,
            token_type: 0,
            seqs: SeqSet::one(SeqId(0)),
            out_of_range: None,
            output: Output::Skip,
        });
        EntryMut(&mut self.entries[at])
    }
}

impl EntryMut<'_> {
    /// Puts the entry into one sequence.
    pub fn in_sequence(self, seq: SeqId) -> Self {
        self.0.seqs = SeqSet::EMPTY;
        self.0.out_of_range = (!self.0.seqs.insert(seq)).then_some(seq);
        self
    }

    /// Puts the entry into several sequences at once: they share its cell.
    pub fn in_sequences(self, seqs: &SeqSet) -> Self {
        self.0.seqs = seqs.clone();
        self.0.out_of_range = None;
        self
    }

    /// Gives the entry's position; without it, it follows its sequence.
    pub fn at(self, pos: Pos) -> Self {
        self.0.pos = Some(pos);
        self
    }

    /// Makes the entry one of an image: at `pos` in its sequence, at `grid` in the image.
    pub fn at_grid(self, pos: Pos, grid: GridPos) -> Self {
        self.0.pos = Some(pos);
        self.0.grid = Some(grid);
        self
    }

    /// Lets the entry see its sequence up to this position, which is a later one: with all entries
    /// up to there it is in one ubatch.
    pub fn seeing_to(self, last: Pos) -> Self {
        self.0.sees_to = Some(last);
        self
    }

    /// Gives the entry's type, which is 0 without it: which text of a pair it belongs to, where the
    /// graph takes `Input::TokenTypes`.
    pub fn of_type(self, token_type: u32) -> Self {
        self.0.token_type = token_type;
        self
    }

    /// Asks for the entry's output.
    pub fn with_output(self) -> Self {
        self.0.output = Output::Wanted;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_counted_and_taken_out() {
        let (a, b) = (SeqId(1), SeqId(2));
        let mut batch = Batch::prompt(a, [TokenId(4), TokenId(5)]);
        let outputs: Vec<Output> = batch.entries.iter().map(|entry| entry.output).collect();
        assert_eq!(outputs, [Output::Skip, Output::Wanted]);
        batch.push_embedding(&[0.5, 1.5]).in_sequence(b);
        assert_eq!((batch.len(), batch.is_empty()), (3, false));
        assert_eq!((batch.n_entries_of(a), batch.n_entries_of(b)), (2, 1));
        batch.clear();
        assert_eq!((batch.len(), batch.is_empty()), (0, true));
        assert!(batch.embeddings.is_empty());
        batch.set_tokens_of(TokensOf::Source);
        assert_eq!(batch.tokens_of(), TokensOf::Source);
    }

    #[test]
    fn an_entry_of_known_sequences_is_in_range() {
        let mut batch = Batch::new();
        batch.push_token(TokenId(0)).in_sequence(SeqId(u32::MAX));
        assert_eq!(batch.entries[0].out_of_range, Some(SeqId(u32::MAX)));
        let known = SeqSet::one(SeqId(1));
        batch
            .push_token(TokenId(0))
            .in_sequence(SeqId(u32::MAX))
            .in_sequences(&known);
        assert_eq!(batch.entries[1].out_of_range, None);
        assert_eq!(batch.entries[1].seqs, known);
    }

    #[test]
    fn a_batch_may_be_as_large_and_reach_as_far_as_allowed() {
        let rules = BatchRules {
            n_batch: 2,
            n_seqs: 1,
            n_vocab: 1,
            n_embd: 1,
        };
        let mut batch = Batch::new();
        batch
            .push_token(TokenId(0))
            .at(Pos(MAX_POS.0 - 1))
            .of_type(3)
            .with_output();
        batch.push_token(TokenId(0)).with_output();
        let valid = validate(&batch, &rules, |_| None).unwrap();
        assert_eq!(valid.n_outputs(), 2);
        let ubatches = SplitPolicy::InOrder.split(&valid, 8).unwrap();
        assert_eq!(ubatches[0].positions, [MAX_POS.0 - 1, MAX_POS.0]);
        assert_eq!(ubatches[0].token_types, [3, 0]);
        batch.push_token(TokenId(0));
        assert!(matches!(
            validate(&batch, &rules, |_| None),
            Err(BatchError::TooLarge { n_entries: 3, .. })
        ));
    }
}
