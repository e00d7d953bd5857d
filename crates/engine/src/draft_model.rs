//! [`DraftModel`]: a smaller model with the same vocabulary, which drafts the tokens that may follow a
//! text of a larger one.
//!
//! It has an engine of its own, with a memory of its own. Invariant: before it drafts, its memory holds
//! the text and nothing else: tokens that the larger model did not take are removed, whatever became of
//! the text meanwhile. What it cannot compute ends the drafts, never the text. Knows no sampler: it
//! drafts the likeliest token each time.

use std::sync::{Arc, Mutex, PoisonError};

use kv_core::backend::{BoxedBackend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Refusal, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use model_core::tokenizer::{TokenKind, Tokenizer};
use scheduler::{DraftLength, Speculated, SpeculationOff};

use crate::decode::Engine;
use crate::error::EngineError;
use crate::sampler::likeliest;
use crate::speculate::check_n_max;

/// The only sequence of the engine.
const SEQ: SeqId = SeqId(0);

/// A model that drafts for another one: [`GenerateOptions::draft_model`](crate::GenerateOptions).
///
/// Clones are the same model. It can draft for one text after the other, also for several in turns,
/// where it computes again what they do not have in common.
#[derive(Clone, Debug)]
pub struct DraftModel {
    state: Arc<Mutex<State>>,
    n_max: usize,
}

#[derive(Debug)]
struct State {
    engine: Engine<BoxedBackend>,
    /// What its memory holds.
    held: Vec<TokenId>,
    /// The most tokens that are drafted at once.
    limit: usize,
    batch: Batch,
}

impl DraftModel {
    /// A model that drafts at most `n_max` tokens at once. `engine` is its own, with at least one
    /// sequence, and what it remembered goes; a model with recurrent layers needs `n_max` snapshots
    /// ([`EngineConfig::n_snapshots`](crate::EngineConfig::n_snapshots)), or drafts one token
    /// more than it has; one with sliding windows wants
    /// [`SwaSize::Full`](kv_core::memory::SwaSize::Full), or drafts single tokens of long texts.
    ///
    /// # Errors
    /// [`EngineError::VocabulariesDiffer`] with the first token that its tokenizer and that of the
    /// `target` do not have in common; [`EngineError::Config`] where `n_max` is 0 or above
    /// [`MAX_DRAFT`](scheduler::MAX_DRAFT); [`EngineError::SourcesUnsupported`] where it encodes a source before each text.
    pub fn new(
        mut engine: Engine<BoxedBackend>,
        tokenizer: &Tokenizer,
        target: &Tokenizer,
        n_max: usize,
    ) -> Result<Self, EngineError> {
        check_vocabularies(target, tokenizer)?;
        check_n_max(n_max)?;
        if engine.model().source_encoder().is_some() {
            let architecture = engine.model().architecture().to_owned();
            return Err(EngineError::SourcesUnsupported { architecture });
        }
        let _removed = engine.clear();
        // The last one is not evaluated, and all others may have to be taken back.
        let most = (engine.memory().max_take_back() as usize).saturating_add(1);
        let state = State {
            engine,
            held: Vec::new(),
            limit: n_max.min(most),
            batch: Batch::new(),
        };
        Ok(Self {
            state: Arc::new(Mutex::new(state)),
            n_max,
        })
    }
}

/// Checks that tokens mean the same to both. One may have more of them, which are not used.
fn check_vocabularies(target: &Tokenizer, draft: &Tokenizer) -> Result<(), EngineError> {
    let n_tokens = target.n_tokens().max(draft.n_tokens());
    let text = |tokenizer: &Tokenizer, id| {
        let is_used = !matches!(
            tokenizer.token_kind(id),
            None | Some(TokenKind::Unused | TokenKind::Undefined)
        );
        let text = tokenizer.token_text(id).filter(|_| is_used);
        text.map(str::to_owned)
    };
    let ids = (0..u32::try_from(n_tokens).unwrap_or(u32::MAX)).map(TokenId);
    for token in ids {
        let (target, draft) = (text(target, token), text(draft, token));
        if target != draft {
            return Err(EngineError::VocabulariesDiffer {
                token,
                target,
                draft,
            });
        }
    }
    Ok(())
}

/// Drafts the tokens of one text.
#[derive(Debug)]
pub(crate) struct ModelDrafter {
    model: DraftModel,
    /// The text, with its prompt.
    text: Vec<TokenId>,
    length: DraftLength,
    speculated: Speculated,
    cancel: CancelFlag,
}

impl ModelDrafter {
    pub(crate) fn new(model: DraftModel, cancel: CancelFlag) -> Self {
        Self {
            length: DraftLength::new(model.n_max),
            model,
            text: Vec::new(),
            speculated: Speculated::default(),
            cancel,
        }
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        self.text.extend_from_slice(tokens);
    }

    /// Tokens that may follow, at most `n_max`; none where that is not worth computing them.
    pub(crate) fn draft(&mut self, n_max: usize) -> Vec<TokenId> {
        let n = self.length.next(self.text.len(), usize::MAX);
        let n = n.min(n_max).min(self.model.n_max);
        if n == 0 || self.text.is_empty() || self.speculated.off.is_some() {
            return Vec::new();
        }
        let state = self.model.state.lock();
        // What a thread that panicked left is found out by comparing.
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let drafted = state.draft(&self.text, n, &self.cancel);
        drafted.unwrap_or_else(|off| {
            self.speculated.off = Some(off);
            Vec::new()
        })
    }

    /// Of `n_drafted` tokens that were computed, the first `n_accepted` were right.
    pub(crate) fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        self.speculated.n_drafted += n_drafted;
        self.speculated.n_accepted += n_accepted;
        self.length.learn(self.text.len(), n_drafted, n_accepted);
    }

    /// What became of its drafts so far.
    pub(crate) fn speculated(&self) -> Speculated {
        self.speculated
    }
}

impl State {
    /// The `n` likeliest tokens after a text, or fewer; an error is why there are none from now on.
    fn draft(
        &mut self,
        text: &[TokenId],
        n: usize,
        cancel: &CancelFlag,
    ) -> Result<Vec<TokenId>, SpeculationOff> {
        let n_ctx = self.engine.settings().n_ctx;
        let room = (n_ctx as usize).saturating_sub(text.len());
        let n = n.min(room + 1).min(self.limit);
        let full = SpeculationOff::DraftModelFull { n_ctx };
        if text.len() > n_ctx as usize {
            self.forget();
            return Err(full);
        }
        match self.try_draft(text, n, cancel) {
            Ok(drafted) => Ok(drafted),
            Err(error) => {
                self.forget();
                match error {
                    // The text ends in the same way.
                    EngineError::Cancelled => Ok(Vec::new()),
                    EngineError::Refused(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => Err(full),
                    error => {
                        tracing::warn!(%error, "the draft model failed");
                        Err(SpeculationOff::DraftModelFailed)
                    }
                }
            }
        }
    }

    fn try_draft(
        &mut self,
        text: &[TokenId],
        n: usize,
        cancel: &CancelFlag,
    ) -> Result<Vec<TokenId>, EngineError> {
        self.keep_common(text)?;
        let new = text.get(self.held.len()..).unwrap_or_default();
        let n_piece = self.engine.settings().n_ubatch.max(1) as usize;
        for piece in new.chunks(n_piece) {
            self.evaluate(piece, cancel)?;
        }
        let mut drafted = Vec::with_capacity(n);
        while let Some(token) = self.likeliest() {
            drafted.push(token);
            if drafted.len() >= n {
                break;
            }
            self.evaluate(&[token], cancel)?;
        }
        Ok(drafted)
    }

    /// Takes from the memory what the text does not begin with, and always its last token, whose row is
    /// wanted.
    fn keep_common(&mut self, text: &[TokenId]) -> Result<(), EngineError> {
        let common = self.held.iter().zip(text).take_while(|(a, b)| a == b);
        let n_common = common.count().min(text.len().saturating_sub(1));
        if n_common == self.held.len() {
            return Ok(());
        }
        let first = Pos(u32::try_from(n_common).unwrap_or(u32::MAX));
        match self.engine.remove(Seqs::One(SEQ), PosRange::from(first..)) {
            Ok(_) => self.held.truncate(n_common),
            // A window that has forgotten what it would see, or a text that is another one: all of it
            // is computed again. Of single tokens none has to be taken back.
            Err(EngineError::Refused(_)) => {
                if self.held.len() - n_common < self.limit {
                    self.limit = 1;
                }
                self.forget();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Evaluates tokens, with the row of the last.
    fn evaluate(&mut self, tokens: &[TokenId], cancel: &CancelFlag) -> Result<(), EngineError> {
        self.batch.clear();
        for (at, &token) in tokens.iter().enumerate() {
            let entry = self.batch.push_token(token).in_sequence(SEQ);
            if at + 1 == tokens.len() {
                entry.with_output();
            }
        }
        self.engine.decode_until(&self.batch, cancel)?;
        self.held.extend_from_slice(tokens);
        Ok(())
    }

    /// The token that a greedy sampler takes; `None` where there is none.
    fn likeliest(&self) -> Option<TokenId> {
        let logits = self.engine.last_logits().last()?;
        likeliest(logits).ok().map(|candidate| candidate.token)
    }

    fn forget(&mut self) {
        let _removed = self.engine.clear();
        self.held.clear();
    }
}
