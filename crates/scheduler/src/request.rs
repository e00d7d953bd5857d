//! [`Request`]: what a scheduler is asked for, and [`RequestError`]: why it refuses.
//!
//! Invariant: what can never be computed is refused before anything is, with the numbers. Knows no
//! text: how tokens are chosen and when a text ends is the caller's.

use std::fmt;

use kv_core::TokenId;

use crate::prefix::PrefixUse;
use crate::tenant::Tenant;

/// A request, by a number of the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A time of the caller's clock, in microseconds since any beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

/// Which requests go first. A request that waits rises, see
/// [`SchedulerConfig::aging`](crate::SchedulerConfig::aging).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Background work.
    Batch,
    /// Everything else.
    #[default]
    Normal,
    /// A user reads the text as it is generated.
    Interactive,
}

/// A prompt that is to be continued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Its number, which no other request has at the same time.
    pub id: RequestId,
    /// Which requests go before it.
    pub priority: Priority,
    /// The tokens to continue.
    pub prompt: Vec<TokenId>,
    /// With whom it shares cached prefixes.
    pub prefix: PrefixUse,
    /// Which rows of its prompt are wanted.
    pub prompt_rows: PromptRows,
    /// After so many tokens of the prompt others are likely to part from it: where messages end.
    /// Where windows or states can only be copied as they are, a copy is kept there.
    pub checkpoints: Vec<usize>,
    /// Further texts of the same prompt: requests of their own from its end on.
    pub siblings: Vec<RequestId>,
    /// Whose it is, and what that tenant gets from now on.
    pub tenant: Tenant,
    /// The way in which the text goes on when it is as long as a request can be.
    pub overflow: Overflow,
    /// Whether a source is encoded into its sequence first. Such a request takes
    /// [`PrefixUse::Off`].
    pub source: SourceUse,
}

/// The fate of a text that is as long as a request can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// It ends.
    #[default]
    End,
    /// The first `n_keep` tokens are kept, half of the others are dropped, and it goes on. If it is
    /// preempted then, it is computed again from the tokens that are left.
    Shift {
        /// Tokens at the beginning that are never dropped.
        n_keep: usize,
    },
}

/// The source that a request attends over in addition to its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceUse {
    /// It has none.
    #[default]
    None,
    /// It is encoded whenever the request is given a sequence
    /// ([`Work::Encode`](crate::Work::Encode)).
    Encoded,
}

/// The most tokens of a prompt that are computed at once where the rows of all are wanted: each is
/// as long as the vocabulary.
pub const MAX_PROMPT_ROWS: usize = 64;

/// Which rows of a prompt come out of the steps that compute it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptRows {
    /// That of its last token, from which the text begins.
    #[default]
    Last,
    /// Those of all its tokens. What is reused has none: such a request takes [`PrefixUse::Off`].
    All,
}

/// What every prompt must comply with, whatever else is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// The most tokens that one request can have in the memory, prompt and text together.
    pub n_tokens: usize,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
}

impl PromptLimits {
    /// Whether a prompt can be computed at all.
    ///
    /// # Errors
    /// [`RequestError`], the reason, with the numbers.
    pub fn check(&self, prompt: &[TokenId]) -> Result<(), RequestError> {
        let (n_prompt, limit, n_vocab) = (prompt.len(), self.n_tokens, self.n_vocab);
        if n_prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        if n_prompt > limit {
            return Err(RequestError::TooLong { n_prompt, limit });
        }
        match (0..).zip(prompt).find(|(_, token)| token.0 >= n_vocab) {
            Some((at, &token)) => Err(RequestError::TokenOutOfRange { at, token, n_vocab }),
            None => Ok(()),
        }
    }
}

/// Why a request is refused, or a scheduler cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A prompt that fits no memory of this size, whatever else is removed.
    #[error("the prompt of {n_prompt} tokens does not fit the {limit} that one request may have")]
    TooLong {
        /// Tokens of the prompt.
        n_prompt: usize,
        /// The most that a request can have in the memory.
        limit: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} at {at} of the prompt is not below the vocabulary's {n_vocab}")]
    TokenOutOfRange {
        /// Its place in the prompt, counted from 0.
        at: usize,
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// The queue is full: try again later.
    #[error("{queued} requests wait, of at most {limit}")]
    Busy {
        /// Requests that wait.
        queued: usize,
        /// The most that may.
        limit: usize,
    },
    /// The prompts that wait are too long together: try again later.
    #[error(
        "the prompts that wait have {queued} tokens; with {n_prompt} more they would have more than \
         {limit}"
    )]
    BusyTokens {
        /// Tokens of the prompts that wait.
        queued: usize,
        /// Tokens of this one.
        n_prompt: usize,
        /// The most that may wait.
        limit: usize,
    },
    /// The tenant's requests that wait are as many as may: try again later.
    #[error("{queued} requests of this tenant wait, of at most {limit}")]
    TenantBusy {
        /// Its requests that wait.
        queued: usize,
        /// The most that may.
        limit: usize,
    },
    /// Another request has this number.
    #[error("there is a request {id} already")]
    Duplicate {
        /// The number.
        id: RequestId,
    },
    /// A limit of the scheduler that is 0.
    #[error("{name} is 0: it must be at least 1")]
    Zero {
        /// Which limit.
        name: &'static str,
    },
    /// A memory that takes whole sequences only: prompts cannot be computed in chunks.
    #[error("this memory takes whole sequences only, and a scheduler computes prompts in chunks")]
    WholeSequences,
    /// A memory that is not empty.
    #[error("the memory holds {n_tokens} tokens of other texts: clear it first")]
    NotEmpty {
        /// Tokens of the first sequence that has some.
        n_tokens: u32,
    },
}
