//! [`DraftSource`]: what drafts the tokens of a text, and how many at once may be asked for.
//!
//! Invariant: the tokens of a text, and what its sampler draws for them, are those without
//! speculation where rows do not depend on the number of tokens in a batch (the CPU backend).

use cellar_scheduler::{Drafter, MAX_DRAFT, Speculated, Speculation, SpeculationOff};
use kv_core::TokenId;

use crate::config::ConfigError;
use crate::draft_model::{DraftModel, ModelDrafter};

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
