//! Speculative decoding in an engine: what is checked before, and how one generation takes what it
//! drafted.
//!
//! Invariant: the tokens of a text, and what its sampler draws for them, are those without
//! speculation where rows do not depend on the number of tokens in a batch (the CPU backend); after
//! each call the memory holds no token that the text does not have. Drafts nothing itself:
//! [`cellar_scheduler::Drafter`] and [`DraftModel`](crate::DraftModel) do.

use cellar_scheduler::{Drafter, MAX_DRAFT, Speculated, Speculation, SpeculationOff};
use kv_core::backend::{Backend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::{Edit, Memory, Refusal, Seqs, Streams};
use kv_core::{Pos, PosRange, SeqId, SeqSet, TokenId, Window};

use crate::completion::{Completion, OutputRow};
use crate::config::ConfigError;
use crate::context::LongContext;
use crate::decode::Engine;
use crate::draft_model::{Draft, DraftModel, ModelDrafter};
use crate::error::EngineError;
use crate::generation::{TokenPiece, next_pos};

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

    fn draft(&mut self, n_max: usize, cancel: &CancelFlag) -> Draft {
        match self {
            Self::Lookup(drafter) => drafter.draft(n_max).into(),
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
    /// Sequences that hold nothing between steps: one for each second choice.
    branches: Vec<SeqId>,
    branches_off: Option<SpeculationOff>,
}

/// What drafts, and where second choices of it are verified.
#[derive(Debug)]
pub(crate) struct SpeculationOptions<'a> {
    pub(crate) speculation: Speculation,
    pub(crate) draft_model: Option<&'a DraftModel>,
    pub(crate) branches: Vec<SeqId>,
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
            branches,
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
        let branches_off = match branches.is_empty() || takes_branches(engine) {
            true => None,
            false => Some(SpeculationOff::NoBranches),
        };
        let n_branches = match branches_off {
            None => branches.len(),
            Some(_) => 0,
        };
        let off = drafter.as_ref().err().copied();
        let drafter = drafter.ok().flatten().map(|drafter| match drafter {
            DraftSource::Model(model) => DraftSource::Model(model.with_seconds(n_branches)),
            DraftSource::Lookup(_) => drafter,
        });
        Ok(Self {
            off,
            drafter,
            limit: limit as usize,
            branches,
            branches_off,
        })
    }

    /// Why second choices of a draft are not verified, where that was wanted.
    pub(crate) fn branches_off(&self) -> Option<SpeculationOff> {
        self.branches_off
    }

    /// Adds tokens of the text.
    pub(crate) fn push(&mut self, tokens: &[TokenId]) {
        if let Some(drafter) = &mut self.drafter {
            drafter.push(tokens);
        }
    }

    /// Tokens that may follow, at most `n_max`.
    pub(crate) fn draft(&mut self, n_max: usize, cancel: &CancelFlag) -> Draft {
        let n_max = n_max.min(self.limit);
        let drafter = self.drafter.as_mut();
        drafter.map_or_else(Draft::default, |drafter| drafter.draft(n_max, cancel))
    }

    /// Evaluates a token of a text and a draft behind it, whose second choices are in sequences of their
    /// own, which share what is before them. Returns whether there was room; where there was none, or an
    /// error, the memory is as before.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub(crate) fn evaluate_tree<B: Backend, M: Memory + Clone>(
        &self,
        engine: &mut Engine<B, M>,
        seq: SeqId,
        token: TokenId,
        draft: &Draft,
        cancel: &CancelFlag,
    ) -> Result<bool, EngineError> {
        let branches = || draft.seconds.iter().zip(&self.branches);
        let computed = branches()
            .try_for_each(|(_, &to)| {
                let range = PosRange::ALL;
                let edit = Edit::Copy {
                    from: seq,
                    to,
                    range,
                };
                engine.edit(edit).map(drop)
            })
            .and_then(|()| {
                let mut batch = Batch::new();
                for (at, &token) in (0..).zip(std::iter::once(&token).chain(&draft.tokens)) {
                    // The second choice for token 3 parts after token 2, which is entry 3 here.
                    let own = branches().filter(|(second, _)| second.at >= at);
                    let seqs = own.map(|(_, &branch)| branch).chain([seq]);
                    let seqs: SeqSet = seqs.collect();
                    batch.push_token(token).in_sequences(&seqs).with_output();
                }
                for (second, &branch) in branches() {
                    let entry = batch.push_token(second.token);
                    entry.in_sequence(branch).with_output();
                }
                engine.decode_until(&batch, cancel).map(drop)
            });
        if computed.is_err() {
            self.remove_branches(engine, draft)?;
        }
        match computed {
            Ok(()) => Ok(true),
            Err(EngineError::Refused(Refusal::NoRoom(_) | Refusal::NoStateRoom(_))) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remove_branches<B: Backend, M: Memory + Clone>(
        &self,
        engine: &mut Engine<B, M>,
        draft: &Draft,
    ) -> Result<(), EngineError> {
        for &branch in self.branches.iter().take(draft.seconds.len()) {
            engine.edit(Edit::Remove {
                seqs: Seqs::One(branch),
                range: PosRange::ALL,
            })?;
        }
        Ok(())
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
        draft: &Draft,
    ) -> Result<ChosenDraft, EngineError> {
        let mut right = RightTokens::default();
        let chosen = self.take_rows(engine, completion, draft, &mut right);
        let n_drafted = draft.tokens.len();
        if right.n_accepted < n_drafted {
            let end = next_pos(engine, seq);
            let n_rejected = u32::try_from(n_drafted - right.n_accepted).unwrap_or(u32::MAX);
            let range = PosRange::from(Pos(end.0.saturating_sub(n_rejected))..);
            let seqs = Seqs::One(seq);
            engine.edit(Edit::Remove { seqs, range })?;
            if let Some(&from) = right.second.and_then(|number| self.branches.get(number)) {
                let to = seq;
                engine.edit(Edit::Copy { from, to, range })?;
            }
        }
        self.remove_branches(engine, draft)?;
        match &mut self.drafter {
            Some(DraftSource::Model(drafter)) => {
                drafter.learn(n_drafted, right.n_accepted);
                drafter.learn_seconds(&draft.seconds, right.second);
            }
            Some(DraftSource::Lookup(drafter)) => drafter.learn(n_drafted, right.n_accepted),
            None => {}
        }
        chosen
    }

    fn take_rows<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &Engine<B, M>,
        completion: &mut Completion,
        draft: &Draft,
        right: &mut RightTokens,
    ) -> Result<ChosenDraft, EngineError> {
        let logits = engine.last_logits();
        let mut pieces = Vec::new();
        let mut row = 0;
        loop {
            let logits = logits.row(row).ok_or(EngineError::NoLogits)?;
            let token = completion.choose(OutputRow::Logits(logits))?;
            let n_evaluated = pieces.len() + 1;
            self.push(token.as_slice());
            let next = match right.second {
                None => right.next(draft, token),
                Some(_) => None,
            };
            let (Some(drafted), Some(next)) = (token, next) else {
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
            *right = next;
            row = match right.second {
                None => right.n_accepted,
                Some(number) => 1 + draft.tokens.len() + number,
            };
        }
    }
}

/// Which tokens of a draft were right.
#[derive(Clone, Copy, Debug, Default)]
struct RightTokens {
    /// How many of the line, from its beginning.
    n_accepted: usize,
    /// Which second choice, behind these.
    second: Option<usize>,
}

impl RightTokens {
    /// The same where this token was chosen next; `None` where it was not drafted.
    fn next(self, draft: &Draft, token: Option<TokenId>) -> Option<Self> {
        let token = token?;
        let n_accepted = self.n_accepted;
        if draft.tokens.get(n_accepted) == Some(&token) {
            let n_accepted = n_accepted + 1;
            return Some(Self { n_accepted, ..self });
        }
        let mut seconds = draft.seconds.iter();
        let second = seconds.position(|s| s.at == n_accepted && s.token == token);
        second.map(|number| Self {
            second: Some(number),
            ..self
        })
    }
}

/// Whether sequences of this memory can part anywhere at no cost.
fn takes_branches<B: Backend, M: Memory + Clone>(engine: &Engine<B, M>) -> bool {
    let (layers, memory) = engine.settings().memory_config();
    let parts = layers.parts();
    let sees_all = parts.iter().all(|part| part.window == Window::Full);
    let goes_back = engine.memory().max_take_back() == u32::MAX;
    sees_all && goes_back && memory.streams == Streams::Shared
}
