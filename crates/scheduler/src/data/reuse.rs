//! [`Reuse`]: how much of a request was there already, and [`Missed`]: why not more.
//!
//! Invariant: a reason is about the cached or running text that has most tokens in common with the
//! prompt. Plain data.

use kv_core::{Pos, TokenId};

use super::ids::{Micros, Salt};

/// The part of a request in the cache of prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixUse {
    /// With all requests of this salt.
    Within(Salt),
    /// It neither takes nor leaves anything.
    Off,
}

impl Default for PrefixUse {
    fn default() -> Self {
        Self::Within(Salt::default())
    }
}

/// The tokens of a request that were there already, of cached prefixes or of running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// Tokens that need not be computed.
    pub n_tokens: usize,
    /// Why they are not all but the last; `None` where they are, or where everything cached that
    /// shares its prefix was taken.
    pub missed: Option<Missed>,
}

/// Why fewer tokens were reused than the prompt has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// The cached prefix with the longest common prefix has another token here.
    Differs {
        /// The first position whose tokens differ.
        at: usize,
    },
    /// A sliding window has forgotten what the next token would see.
    WindowForgotten {
        /// The first position that would be needed.
        from: Pos,
        /// Tokens of the common prefix.
        common: usize,
    },
    /// The recurrent state after the common tokens is not kept.
    StateGone {
        /// After how many tokens the nearest state is kept: as many as were reused, or where there
        /// is none within the common prefix, those of the first one behind it.
        nearest: usize,
        /// Tokens of the common prefix.
        common: usize,
    },
    /// It was cached, and dropped for others.
    Evicted {
        /// The time since then, in microseconds.
        age: Micros,
        /// Tokens of the common prefix.
        common: usize,
    },
    /// Prompts of so few tokens are computed again.
    TooShort {
        /// Tokens of the prompt.
        n_prompt: usize,
        /// The fewest that are reused.
        least: usize,
    },
    /// The request, or the scheduler, does not take part.
    Disabled,
    /// Nothing that was cached begins so.
    NeverSeen,
    /// Nothing that was cached begins so, and the store of prefixes has nothing, either.
    TierMiss,
    /// The store has more, but computing it is faster.
    TierSlow {
        /// The time in which it would have to be there.
        needed: Micros,
        /// The time that it would take.
        would_take: Micros,
    },
    /// The store cannot be reached, or did not answer in time.
    TierDown,
    /// The memory refused for another reason.
    Refused {
        /// Tokens of the common prefix.
        common: usize,
    },
}

impl Missed {
    /// The reason of a request that asked a store, which gave less for the reason `of_store`.
    pub(crate) fn with_store(self, of_store: Option<Self>) -> Self {
        match (self, of_store) {
            (Self::NeverSeen | Self::Evicted { .. }, Some(Self::TierMiss)) => Self::TierMiss,
            (_, Some(why @ (Self::TierSlow { .. } | Self::TierDown))) => why,
            (why, _) => why,
        }
    }

    /// The reason in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Differs { .. } => "differs",
            Self::WindowForgotten { .. } => "window_forgotten",
            Self::StateGone { .. } => "state_gone",
            Self::Evicted { .. } => "evicted",
            Self::TooShort { .. } => "too_short",
            Self::Disabled => "disabled",
            Self::NeverSeen => "never_seen",
            Self::TierMiss => "tier_miss",
            Self::TierSlow { .. } => "tier_slow",
            Self::TierDown => "tier_down",
            Self::Refused { .. } => "refused",
        }
    }
}

/// Number of tokens that both begin with.
pub fn n_common(a: &[TokenId], b: &[TokenId]) -> usize {
    // Whole blocks are compared much faster than single tokens.
    const BLOCK: usize = 64;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    let n = BLOCK * blocks.take_while(|(a, b)| a == b).count();
    let rest = a[n..].iter().zip(&b[n..]);
    n + rest.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn common_tokens_are_counted_in_blocks_and_after_them() {
        let tokens: Vec<TokenId> = (0..200).map(TokenId).collect();
        for n in [0, 1, 63, 64, 65, 128, 199] {
            let mut other = tokens.clone();
            other[n].0 = 999;
            assert_eq!(n_common(&tokens, &other), n);
            assert_eq!(n_common(&tokens[..n], &tokens), n);
        }
        assert_eq!(n_common(&tokens, &tokens), 200);
    }
}
