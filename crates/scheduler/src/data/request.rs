//! [`Request`]: what a scheduler is asked for.
//!
//! Invariant: what can never be computed is refused before anything is, with the numbers. Knows no
//! text: how tokens are chosen and when a text ends is the caller's.

use std::ops::Range;

use kv_core::TokenId;

use super::error::RequestError;
use super::ids::RequestId;
use super::reuse::PrefixUse;
use super::tenant::Tenant;

/// The urgency of a request: higher ones go first. A request that waits rises, see
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
    /// Its urgency.
    pub priority: Priority,
    /// The tokens to continue.
    pub prompt: Vec<TokenId>,
    /// With whom it shares cached prefixes.
    pub prefix: PrefixUse,
    /// The rows of its prompt that are wanted.
    pub prompt_rows: PromptRows,
    /// After so many tokens of the prompt others are likely to part from it: where messages end.
    /// Where windows or states can only be copied as they are, a copy is kept there.
    pub checkpoints: Vec<usize>,
    /// After so many tokens of the prompt others part from it whose first tokens take long to
    /// compute: behind its last picture. A copy is kept there, too, however near another one is.
    pub parting: Option<usize>,
    /// Tokens of the prompt that see each other, the later ones too, by their numbers, in order:
    /// they are computed in one step, and take a ubatch that holds them.
    pub together: Vec<Range<usize>>,
    /// Further texts of the same prompt: requests of their own from its end on.
    pub siblings: Vec<RequestId>,
    /// The tenant whose request it is, and what that tenant gets from now on.
    pub tenant: Tenant,
    /// The way in which the text goes on when it is as long as a request can be.
    pub overflow: Overflow,
    /// The source that is encoded into its sequence first. A request with one takes
    /// [`PrefixUse::Off`].
    pub source: SourceUse,
    /// The fate of its sequence when it ends.
    pub retention: Retention,
}

/// The fate of the sequence of a request that is cancelled, or whose text ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retention {
    /// Its tokens are a cached prefix, or go.
    #[default]
    Release,
    /// It stays until [`Event::Release`](crate::Event::Release), unless its room is needed: the
    /// request may go on ([`Event::Resume`](crate::Event::Resume)).
    Park,
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

/// The rows of a prompt that come out of the steps which compute it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptRows {
    /// That of its last token, from which the text begins.
    #[default]
    Last,
    /// Those of all its tokens. What is reused has none: such a request takes [`PrefixUse::Off`].
    All,
}

/// The limits of every prompt, whatever else is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// The most tokens that one request can have in the memory, prompt and text together.
    pub n_tokens: usize,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
}

impl PromptLimits {
    /// Checks that a prompt can be computed at all.
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
        let is_none = |token: &TokenId| token.0 >= n_vocab && !token.names_row();
        match (0..).zip(prompt).find(|(_, token)| is_none(token)) {
            Some((at, &token)) => Err(RequestError::TokenOutOfRange { at, token, n_vocab }),
            None => Ok(()),
        }
    }
}
