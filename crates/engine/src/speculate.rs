//! Speculative decoding in an engine: what is checked before, and how one generation takes what it
//! drafted.
//!
//! Invariant: the tokens of a text, and what its sampler draws for them, are those without
//! speculation where rows do not depend on the number of tokens in a batch (the CPU backend); after
//! each call the memory holds no token that the text does not have. Drafts nothing itself:
//! [`cellar_scheduler::Drafter`] and [`DraftModel`](crate::DraftModel) do.

use cellar_scheduler::{Drafter, MAX_DRAFT, Speculated, Speculation, SpeculationOff};
use kv_core::backend::{Backend, CancelFlag};
use kv_core::memory::{Edit, Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use crate::completion::{Completion, OutputRow};
use crate::config::ConfigError;
use crate::context::LongContext;
use crate::decode::Engine;
use crate::draft_model::{DraftModel, ModelDrafter};
use crate::error::EngineError;
use crate::generation::TokenPiece;

/// Checks how many tokens are to be drafted at once.
///
/// # Errors
/// [`ConfigError::OutOfRange`] where it is 0 or above [`MAX_DRAFT`].
pub(crate) fn check(speculation: Speculation) -> Result<(), ConfigError> {
    match speculation {
        Speculation::Off => Ok(()),
        Speculation::Lookup { n_max } | Speculation::Draft { n_max } => check_n_max(n_max),
    }
}

/// The same of the number alone.
pub(crate) fn check_n_max(n_max: usize) -> Result<(), ConfigError> {
    match n_max {
        1..=MAX_DRAFT => Ok(()),
        _ => Err(ConfigError::OutOfRange {
            name: "draft_max",
            got: n_max,
            max: MAX_DRAFT,
        }),
    }
}

/// What drafts the tokens of a text.
#[derive(Debug)]
pub(crate) enum DraftSource {
    Lookup(Box<Drafter>),
    Model(ModelDrafter),
}

impl DraftSource {
    /// That of an empty text; `None` where nothing is to be drafted.
    ///
    /// # Errors
    /// [`SpeculationOff::NoDraftModel`].
    pub(crate) fn new(
        speculation: Speculation,
        draft_model: Option<&DraftModel>,
    ) -> Result<Option<Self>, SpeculationOff> {
        match (speculation, draft_model) {
            (Speculation::Draft { n_max }, Some(model)) => {
                Ok(Some(Self::Model(ModelDrafter::new(model.clone(), n_max))))
            }
            (Speculation::Draft { .. }, None) => Err(SpeculationOff::NoDraftModel),
            (Speculation::Off | Speculation::Lookup { .. }, _) => {
                let drafter = Drafter::new(speculation);
                Ok(drafter.map(|drafter| Self::Lookup(Box::new(drafter))))
            }
        }
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        match self {
            Self::Lookup(drafter) => drafter.push(tokens),
            Self::Model(drafter) => drafter.push(tokens),
        }
    }

    fn draft(&mut self, n_max: usize, cancel: &CancelFlag) -> Vec<TokenId> {
        match self {
            Self::Lookup(drafter) => drafter.draft(n_max),
            Self::Model(drafter) => drafter.draft(n_max, cancel),
        }
    }

    /// Of `n_drafted` tokens that were computed, the first `n_accepted` were right.
    pub(crate) fn learn(&mut self, n_drafted: usize, n_accepted: usize) {
        match self {
            Self::Lookup(drafter) => drafter.learn(n_drafted, n_accepted),
            Self::Model(drafter) => drafter.learn(n_drafted, n_accepted),
        }
    }

    /// What became of its drafts so far.
    pub(crate) fn speculated(&self) -> Speculated {
        match self {
            Self::Lookup(drafter) => drafter.speculated(),
            Self::Model(drafter) => drafter.speculated(),
        }
    }
}

/// Drafts tokens of one generation and counts what became of them.
#[derive(Debug, Default)]
pub(crate) struct Speculating {
    drafter: Option<DraftSource>,
    off: Option<SpeculationOff>,
    /// The most tokens at once.
    limit: usize,
}

/// What drafts.
#[derive(Debug)]
pub(crate) struct SpeculationOptions<'a> {
    pub(crate) speculation: Speculation,
    pub(crate) draft_model: Option<&'a DraftModel>,
}

/// What came of choosing from the rows of a batch with drafted tokens.
pub(crate) struct ChosenDraft {
    /// The text of the tokens before the last.
    pub(crate) pieces: Vec<TokenPiece>,
    /// The last token; `None` where it ended the text, or the text ended before.
    pub(crate) token: Option<TokenId>,
    /// The last token where the text ended with it: it is not in the memory.
    pub(crate) pending: Option<TokenId>,
    /// Tokens that were evaluated and stay.
    pub(crate) n_evaluated: usize,
}

impl Speculating {
    pub(crate) fn new<B: Backend, M: Memory + Clone>(
        engine: &Engine<B, M>,
        options: SpeculationOptions<'_>,
        long_context: LongContext,
    ) -> Result<Self, ConfigError> {
        let SpeculationOptions {
            speculation,
            draft_model,
        } = options;
        check(speculation)?;
        if speculation == Speculation::Off {
            return Ok(Self::default());
        }
        // A window keeps what a text goes back to while one ubatch is computed.
        let n_before = engine.settings().n_ubatch.saturating_sub(1);
        let limit = engine.memory().max_take_back().min(n_before);
        let drafter = match long_context {
            LongContext::Group(_) => Err(SpeculationOff::SharedPositions),
            _ if limit == 0 => Err(SpeculationOff::NothingTakenBack),
            _ => DraftSource::new(speculation, draft_model),
        };
        let off = drafter.as_ref().err().copied();
        let drafter = drafter.ok().flatten();
        Ok(Self {
            off,
            drafter,
            limit: limit as usize,
        })
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        if let Some(drafter) = &mut self.drafter {
            drafter.push(tokens);
        }
    }

    /// Tokens that may follow, at most `n_max`.
    pub(crate) fn draft(&mut self, n_max: usize, cancel: &CancelFlag) -> Vec<TokenId> {
        let n_max = n_max.min(self.limit);
        let drafter = self.drafter.as_mut();
        drafter.map_or_else(Vec::new, |drafter| drafter.draft(n_max, cancel))
    }

    /// What it did so far.
    pub(crate) fn speculated(&self) -> Speculated {
        let drafter = self.drafter.as_ref();
        let own = drafter.map(DraftSource::speculated).unwrap_or_default();
        Speculated {
            off: self.off.or(own.off),
            ..own
        }
    }

    /// Chooses tokens from the rows of a batch that ended with drafted ones, and takes from the
    /// memory what was not chosen.
    ///
    /// # Errors
    /// As [`Completion::take`]; the memory then holds the tokens whose rows were used.
    pub(crate) fn choose<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        seq: SeqId,
        completion: &mut Completion,
        draft: &[TokenId],
    ) -> Result<ChosenDraft, EngineError> {
        let mut n_accepted = 0;
        let chosen = self.take_rows(engine, completion, draft, &mut n_accepted);
        let n_drafted = draft.len();
        if n_accepted < n_drafted {
            let end = engine.memory().next_pos(seq);
            let n_rejected = u32::try_from(n_drafted - n_accepted).unwrap_or(u32::MAX);
            let range = PosRange::from(Pos(end.0.saturating_sub(n_rejected))..);
            let seqs = Seqs::One(seq);
            engine.edit(Edit::Remove { seqs, range })?;
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(n_drafted, n_accepted);
        }
        chosen
    }

    fn take_rows<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &Engine<B, M>,
        completion: &mut Completion,
        draft: &[TokenId],
        n_accepted: &mut usize,
    ) -> Result<ChosenDraft, EngineError> {
        let logits = engine.last_logits();
        let mut pieces = Vec::new();
        loop {
            let logits = logits.row(*n_accepted).ok_or(EngineError::NoLogits)?;
            let token = completion.choose(OutputRow::Logits(logits))?;
            let n_evaluated = pieces.len() + 1;
            self.push(token.as_slice());
            let is_right = draft.get(*n_accepted).copied() == token;
            let Some(drafted) = token.filter(|_| is_right) else {
                return Ok(ChosenDraft {
                    pieces,
                    token,
                    pending: None,
                    n_evaluated,
                });
            };
            pieces.push(TokenPiece {
                token,
                text: completion.decode(drafted)?,
            });
            if completion.is_at_length() {
                return Ok(ChosenDraft {
                    pieces,
                    token: None,
                    pending: Some(drafted),
                    n_evaluated,
                });
            }
            *n_accepted += 1;
        }
    }
}
