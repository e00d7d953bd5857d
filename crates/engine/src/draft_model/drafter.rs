//! [`ModelDrafter`]: drafts the tokens of one text with a [`DraftModel`], alone or together with
//! other texts ([`draft_together`]).
//!
//! Invariant: while it lives, the model keeps what it computed of the text where it has room; what
//! is drafted depends on the text alone. Knows no memory.

use cellar_scheduler::{DraftLength, Speculated};
use kv_backend::CancelFlag;
use kv_core::TokenId;

use super::DraftModel;
use super::lines::{DraftRequest, Drafted, LineOwner};

/// Drafts the tokens of one text.
#[derive(Debug)]
pub(crate) struct ModelDrafter {
    model: DraftModel,
    owner: LineOwner,
    n_max: usize,
    /// The text, with its prompt.
    text: Vec<TokenId>,
    length: DraftLength,
    speculated: Speculated,
}

/// A text whose turn it is, and how many of its tokens may be drafted.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    pub(crate) drafter: &'a mut ModelDrafter,
    pub(crate) n_max: usize,
}

impl ModelDrafter {
    pub(crate) fn new(model: DraftModel, n_max: usize) -> Self {
        let n_max = n_max.min(model.n_max);
        let owner = model.lock().new_owner();
        Self {
            owner,
            n_max,
            length: DraftLength::new(n_max),
            model,
            text: Vec::new(),
            speculated: Speculated::default(),
        }
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        self.text.extend_from_slice(tokens);
    }

    /// Of `n_drafted` tokens that were computed, the first `n_accepted` were right.
    pub(crate) fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        self.speculated.n_drafted += n_drafted;
        self.speculated.n_accepted += n_accepted;
        self.length.learn(self.text.len(), n_drafted, n_accepted);
    }

    /// Nothing is drafted for a while: there was no room for it.
    pub(crate) fn pause(&mut self) {
        self.length.learn(self.text.len(), 1, 0);
    }

    /// The text does not go on for now: its sequence is for others, until it does.
    pub(crate) fn release(&self) {
        self.model.lock().release(self.owner);
    }

    /// What became of its drafts so far.
    pub(crate) fn speculated(&self) -> Speculated {
        self.speculated
    }

    /// How many tokens are worth drafting.
    fn n_wanted(&self, n_max: usize) -> usize {
        match self.speculated.off {
            Some(_) => 0,
            None => self.length.next(self.text.len(), usize::MAX).min(n_max),
        }
    }
}

impl Drop for ModelDrafter {
    fn drop(&mut self) {
        self.release();
    }
}

/// Drafts for several texts of one model, in common batches; for each what came of it.
pub(crate) fn draft_together(turns: Vec<Turn<'_>>, cancel: &CancelFlag) -> Vec<Drafted> {
    let Some(first) = turns.first() else {
        return Vec::new();
    };
    let model = first.drafter.model.clone();
    let wanted = turns.iter().map(|turn| DraftRequest {
        owner: turn.drafter.owner,
        tokens: &turn.drafter.text,
        n: turn.drafter.n_wanted(turn.n_max.min(turn.drafter.n_max)),
    });
    let wanted: Vec<DraftRequest<'_>> = wanted.collect();
    let mut drafted = model.lock().draft(&wanted, cancel);
    for (turn, drafted) in turns.into_iter().zip(&mut drafted) {
        match drafted {
            Drafted::Tokens(_) | Drafted::Behind => {}
            Drafted::NoRoom => turn.drafter.pause(),
            Drafted::Off(off) => turn.drafter.speculated.off = Some(*off),
        }
    }
    drafted
}
