//! [`DraftModel`]: a smaller model with the same vocabulary, which drafts the tokens that may
//! follow texts of a larger one.
//!
//! It has an engine of its own, with a memory of its own, and a sequence for each text that it
//! drafts for at the same time. What it cannot compute ends drafts, never a text. Knows no sampler:
//! it drafts the likeliest token each time.

mod drafter;
mod lines;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_backend::BoxedBackend;
use kv_core::TokenId;
use model_core::tokenizer::{TokenKind, Tokenizer};

pub(crate) use self::drafter::{ModelDrafter, Turn, draft_together};
pub(crate) use self::lines::Drafted;
use self::lines::Lines;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::speculate::check_n_max;

/// A model that drafts for another one:
/// [`ServiceExtras::draft_model`](crate::serve::ServiceExtras).
///
/// Clones are the same model. It drafts for as many texts as its engine has sequences, those of a
/// service in one batch; further texts take turns, where it computes again what they do not have in
/// common.
#[derive(Clone, Debug)]
pub struct DraftModel {
    lines: Arc<Mutex<Lines>>,
    n_max: usize,
}

impl DraftModel {
    /// A model that drafts at most `n_max` tokens of a text at once. `engine` is its own, with a
    /// sequence for each text that is drafted for at the same time, and what it remembered goes; a
    /// model with recurrent layers needs `n_max` snapshots
    /// ([`EngineConfig::n_snapshots`](crate::EngineConfig::n_snapshots)), or drafts one token more
    /// than it has; one with sliding windows wants
    /// [`SwaSize::Full`](kv_core::memory::SwaSize::Full), or drafts single tokens of long texts.
    ///
    /// # Errors
    /// [`EngineError::VocabulariesDiffer`] with the first token that its tokenizer and that of the
    /// `target` do not have in common; [`EngineError::Config`] where `n_max` is 0 or above
    /// [`MAX_DRAFT`](cellar_scheduler::MAX_DRAFT); [`EngineError::SourcesUnsupported`] where it
    /// encodes a source before each text.
    pub fn new(
        engine: Engine<BoxedBackend>,
        tokenizer: &Tokenizer,
        target: &Tokenizer,
        n_max: usize,
    ) -> Result<Self, EngineError> {
        Self::check_vocabulary(tokenizer, target)?;
        check_n_max(n_max)?;
        if engine.model().source_encoder().is_some() {
            let architecture = engine.model().architecture().to_owned();
            return Err(EngineError::SourcesUnsupported { architecture });
        }
        Ok(Self {
            lines: Arc::new(Mutex::new(Lines::new(engine, n_max))),
            n_max,
        })
    }

    /// Checks that tokens mean the same to both, before the model is loaded. One may have more of
    /// them, which are not used.
    ///
    /// # Errors
    /// [`EngineError::VocabulariesDiffer`] with the first token that the two do not have in common.
    pub fn check_vocabulary(draft: &Tokenizer, target: &Tokenizer) -> Result<(), EngineError> {
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

    /// Texts that it drafts for: each has a sequence of its engine.
    pub fn n_texts(&self) -> usize {
        self.lock().n_owned()
    }

    /// The most tokens of a text that it drafts at once.
    pub fn n_max(&self) -> usize {
        self.n_max
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        // What a thread that panicked left is found out by comparing.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
