//! Speculative decoding: tokens are drafted cheaply, and one step verifies several of them.
//!
//! A step computes the last token of a text and the tokens that were drafted after it, and gives
//! the rows of all. The caller chooses a token from each row in order, while what it chose is what
//! was drafted: so a text, and what its sampler draws, are those without speculation, and a draft
//! that is wrong costs time only. Tokens that were not chosen are taken from the memory before the
//! next step.
//!
//! [`NgramLookup`] drafts from the text itself, [`DraftLength`] learns how many tokens are worth
//! drafting, and [`Drafter`] combines both. Where steps are measured, [`HeadLength`] finds by
//! [`DraftCosts`] what pays. Nothing in here knows a model.

use std::fmt;

mod draft_costs;
mod draft_length;
mod drafter;
mod head_length;
mod lookup;

pub use draft_costs::{DraftCosts, DraftedBy};
pub use draft_length::DraftLength;
pub use drafter::{Drafter, Speculated};
pub use head_length::{HeadLength, MAX_HEAD_DRAFT, USUAL_RATE};
pub use lookup::{NgramLookup, Repetition};

/// The most tokens that are drafted at once: the row of each is as long as the vocabulary.
pub const MAX_DRAFT: usize = 32;

/// The way in which the tokens that may follow a text are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// They are not: each step gives a token.
    #[default]
    Off,
    /// Prompt lookup: where the last tokens of a text occurred in it before, what followed then.
    Lookup {
        /// The most tokens that are drafted at once, 1 to [`MAX_DRAFT`].
        n_max: usize,
    },
    /// A smaller model drafts them, where the caller has one. A [`Drafter`] does not.
    Draft {
        /// The most tokens that are drafted at once, 1 to [`MAX_DRAFT`].
        n_max: usize,
    },
    /// A head of the model drafts them, where it has one. A [`Drafter`] does not.
    Head {
        /// The most tokens that are drafted at once, 1 to [`MAX_DRAFT`]; a head drafts at most
        /// [`MAX_HEAD_DRAFT`].
        n_max: usize,
    },
    /// Prompt lookup where the text repeats itself, else a head; nothing where the model has none.
    Auto {
        /// The most tokens that are drafted at once, 1 to [`MAX_DRAFT`].
        n_max: usize,
    },
}

/// A number of tokens to draft at once that suits most models.
pub const DEFAULT_DRAFT: usize = 16;

impl Speculation {
    /// Prompt lookup of [`DEFAULT_DRAFT`] tokens.
    pub const LOOKUP: Self = Self::Lookup {
        n_max: DEFAULT_DRAFT,
    };
}

/// Why a text is computed token by token though speculation was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpeculationOff {
    /// The memory cannot take drafted tokens back: recurrent states without snapshots.
    NothingTakenBack,
    /// A sliding window may forget what a text goes back to, where a step is computed in pieces.
    StepsInPieces {
        /// Tokens of a step.
        step_tokens: u32,
        /// Tokens that are computed at once.
        n_ubatch: u32,
    },
    /// Tokens share positions.
    SharedPositions,
    /// The prompt has pictures, which drafters do not see.
    Pictures,
    /// There is no draft model.
    NoDraftModel,
    /// The text is longer than what the draft model remembers.
    DraftModelFull {
        /// Tokens that its memory holds.
        n_ctx: u32,
    },
    /// The draft model could not compute.
    DraftModelFailed,
    /// The model has no head that drafts, or it was not loaded with it.
    NoHead,
    /// The head could not compute.
    HeadFailed,
    /// Drafts of the head take more time than they save.
    DoesNotPay {
        /// The share of its tokens that were right of late, in percent.
        percent: u8,
        /// The share from which on drafts would pay by the times of steps; `None` where none would.
        needed: Option<u8>,
    },
}

impl fmt::Display for SpeculationOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingTakenBack => f.write_str(
                "the memory cannot take rejected tokens back: recurrent states need snapshots, as many \
                 as tokens are drafted",
            ),
            Self::StepsInPieces {
                step_tokens,
                n_ubatch,
            } => write!(
                f,
                "a step of {step_tokens} tokens is computed in pieces of {n_ubatch}, and a sliding \
                 window may forget in between what a text goes back to"
            ),
            Self::Pictures => f.write_str("the prompt has pictures, which drafters do not see"),
            Self::SharedPositions => {
                f.write_str("positions that several tokens share cannot be taken back")
            }
            Self::NoDraftModel => f.write_str("there is no draft model"),
            Self::DraftModelFull { n_ctx } => write!(
                f,
                "the text is longer than the {n_ctx} tokens that the draft model remembers"
            ),
            Self::DraftModelFailed => f.write_str("the draft model failed"),
            Self::NoHead => f.write_str("the model has no head that drafts"),
            Self::HeadFailed => f.write_str("the head that drafts failed"),
            Self::DoesNotPay { percent, needed } => {
                write!(f, "the head's tokens were right {percent} % of the time, ")?;
                match needed {
                    Some(needed) => write!(f, "and with these steps drafts pay from {needed} % on"),
                    None => f.write_str("and with these steps no drafts pay"),
                }
            }
        }
    }
}
