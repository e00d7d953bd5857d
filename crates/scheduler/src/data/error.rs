//! [`RequestError`]: why a request is refused, or a scheduler cannot be made.
//!
//! Plain data, with the numbers.

use kv_core::TokenId;

use super::ids::RequestId;

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
        /// The name of the limit.
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
