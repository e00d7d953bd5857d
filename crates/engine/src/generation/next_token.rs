//! The next token of a [`Generation`], or several where drafted ones are right.
//!
//! Invariant: a token whose evaluation fails, or has no room, stays pending. Knows nothing of
//! prompts.

use std::time::Instant;

use kv_core::Pos;
use kv_core::TokenId;
use kv_core::backend::Backend;
use kv_core::memory::{Memory, Refusal};

use super::{Generation, Next, PieceRows, last_row};
use crate::completion::{FinishReason, OutputRow};
use crate::context::{GroupAttention, LongContext};
use crate::decode::Engine;
use crate::error::EngineError;
use crate::session::MAX_CANDIDATES;

/// What came of choosing a token.
enum Chosen {
    /// The next token of the text, and how many were evaluated for it.
    Tokens {
        /// `None` where the text has ended.
        token: Option<TokenId>,
        n_evaluated: usize,
    },
    /// There was no room to evaluate the pending token.
    NoRoom,
}

impl Generation {
    /// Chooses the next token, or sets the reason why there is none. The text of tokens before it,
    /// which were drafted, goes to the last pieces.
    pub(super) fn next_token<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
    ) -> Result<Option<TokenId>, EngineError> {
        if self.is_cancelled() || self.completion.is_at_length() {
            return Ok(None);
        }
        self.check_unchanged(engine)?;
        let started = Instant::now();
        let chosen = self.choose(engine);
        if !matches!(self.next, Next::Prompt) {
            self.accept_changes(engine);
        }
        let finish = match chosen {
            Ok(Chosen::Tokens { token, n_evaluated }) => {
                self.timings.generation.add(n_evaluated, started.elapsed());
                if let Some(token) = token {
                    self.next = Next::Pending(token);
                }
                return Ok(token);
            }
            Ok(Chosen::NoRoom) => FinishReason::ContextFull,
            Err(EngineError::Cancelled) => FinishReason::Cancelled,
            Err(error) => return Err(error),
        };
        self.completion.set_finish(Some(finish));
        Ok(None)
    }

    /// Chooses a token, after evaluating the pending one, or several where drafted ones are right.
    fn choose<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
    ) -> Result<Chosen, EngineError> {
        let (token, n_evaluated) = match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Prompt => {
                self.next = Next::Prompt;
                return Err(EngineError::EmptyPrompt);
            }
            Next::Nothing => return Err(EngineError::NoLogits),
            Next::Row(row) => (self.completion.choose(row.as_output()?)?, 0),
            Next::Pending(token) => {
                self.next = Next::Pending(token);
                let Some(draft) = self.evaluate_pending(engine, token)? else {
                    return Ok(Chosen::NoRoom);
                };
                self.next = Next::Nothing;
                if !draft.is_empty() {
                    let (seq, completion) = (self.seq, &mut self.completion);
                    let chosen = self.speculating.choose(engine, seq, completion, &draft)?;
                    self.last_pieces = chosen.pieces;
                    if let Some(pending) = chosen.pending {
                        self.next = Next::Pending(pending);
                    }
                    return Ok(Chosen::Tokens {
                        token: chosen.token,
                        n_evaluated: chosen.n_evaluated,
                    });
                }
                let row = match engine.last_candidates() {
                    Some(top) => OutputRow::Candidates(top),
                    None => OutputRow::Logits(last_row(engine)?),
                };
                (self.completion.choose(row)?, 1)
            }
        };
        self.speculating.push(token.as_slice());
        Ok(Chosen::Tokens { token, n_evaluated })
    }

    /// Evaluates the pending token, and a draft behind it, of which it returns what was evaluated;
    /// `None` where there is no room for the token.
    fn evaluate_pending<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        token: TokenId,
    ) -> Result<Option<Vec<TokenId>>, EngineError> {
        let n_left = (engine.settings().n_ctx as usize).saturating_sub(self.n_used(engine) + 1);
        let draft = self.speculating.draft(n_left, &self.cancel);
        let tokens = [&[token], draft.as_slice()].concat();
        if !draft.is_empty() && self.try_evaluate(engine, &tokens)? {
            return Ok(Some(draft));
        }
        if self.try_evaluate(engine, &[token])? {
            return Ok(Some(Vec::new()));
        }
        let LongContext::Shift { n_keep } = self.long_context else {
            return Ok(None);
        };
        match engine.shift_context(self.seq, n_keep) {
            Err(EngineError::NothingToDiscard { .. }) => return Ok(None),
            shifted => shifted?,
        };
        let has_room = self.try_evaluate(engine, &[token])?;
        Ok(has_room.then(Vec::new))
    }

    /// Evaluates tokens of the text; returns whether there was room.
    fn try_evaluate<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        tokens: &[TokenId],
    ) -> Result<bool, EngineError> {
        if self.n_used(engine) >= engine.settings().n_ctx as usize {
            return Ok(false);
        }
        let rows = match tokens.len() {
            1 => PieceRows::Last,
            _ => PieceRows::All,
        };
        match self.evaluate(engine, tokens, rows) {
            Ok(()) => Ok(true),
            Err(EngineError::Refused(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)))
                if tokens.len() > 1 =>
            {
                Ok(false)
            }
            Err(EngineError::Refused(Refusal::NoRoom(_))) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Groups tokens while there are enough of them.
    fn group<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        group: GroupAttention,
    ) -> Result<(), EngineError> {
        let seq = self.seq;
        while engine.memory().next_pos(seq).0 >= self.grouped_to.0.saturating_add(group.width()) {
            engine.group(seq, self.grouped_to, group)?;
            self.grouped_to = Pos(self.grouped_to.0 + group.n_positions());
        }
        Ok(())
    }

    /// Evaluates tokens.
    pub(super) fn evaluate<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        tokens: &[TokenId],
        rows: PieceRows,
    ) -> Result<(), EngineError> {
        if let LongContext::Group(group) = self.long_context {
            self.group(engine, group)?;
        }
        self.batch.clear();
        for (at, &token) in tokens.iter().enumerate() {
            let entry = self.batch.push_token(token).in_sequence(self.seq);
            let is_wanted = match rows {
                PieceRows::None => false,
                PieceRows::Last => at + 1 == tokens.len(),
                PieceRows::All => true,
            };
            if is_wanted {
                entry.with_output();
            }
        }
        let n_vocab = engine.settings().rules.n_vocab as usize;
        let enough = self.completion.n_candidates();
        match enough.filter(|&k| k <= MAX_CANDIDATES.min(n_vocab) && rows != PieceRows::All) {
            Some(k) if engine.backend().prefers_candidates() => {
                engine.decode_candidates(&self.batch, k, &self.cancel)?;
            }
            _ => {
                engine.decode_until(&self.batch, &self.cancel)?;
            }
        }
        Ok(())
    }
}
