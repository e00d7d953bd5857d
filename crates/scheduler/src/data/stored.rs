//! [`StoredTokens`]: what a store outside of the memory has of a prompt, and how far its request is
//! with it.
//!
//! Plain data. Knows no store: what is asked, fetched and restored is the caller's work.

use cellar_prefix_store::{GROUP_TOKENS, TAIL_TOKENS};

/// Tokens of a prompt that a store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTokens {
    /// The first of them: those before it have to be in the memory.
    pub first: usize,
    /// Tokens of the prompt that the memory can hold with them.
    pub n_tokens: usize,
    /// The places where they can be cut.
    pub cuts: StoredCuts,
}

/// The places where stored tokens can be cut, to be put behind what the memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredCuts {
    /// Between groups.
    Groups,
    /// Nowhere: what windows and states keep is that of the last token.
    Nowhere,
}

impl StoredTokens {
    /// How many tokens of the memory are kept, of the so many that it holds of the prompt; `None`
    /// where the store has nothing that follows them.
    pub(crate) fn base(&self, n_held: usize) -> Option<usize> {
        if n_held >= self.n_tokens {
            return None;
        }
        let base = match self.cuts {
            StoredCuts::Nowhere => 0,
            // Behind the last whole group they are smaller.
            StoredCuts::Groups if n_held >= self.n_tokens - self.n_tokens % GROUP_TOKENS => {
                n_held - n_held % TAIL_TOKENS
            }
            StoredCuts::Groups => n_held - n_held % GROUP_TOKENS,
        };
        (base >= self.first).then_some(base)
    }

    /// Restorations after which it is given up: each of them has a group more, unless what was
    /// restored before is evicted again and again.
    pub(crate) fn max_tries(&self) -> usize {
        2 * (self.n_tokens / GROUP_TOKENS + GROUP_TOKENS / TAIL_TOKENS)
    }
}

/// The progress of a request with a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StoreWait {
    /// It waits for none.
    #[default]
    No,
    /// The store is asked what it has.
    Asked,
    /// It has these tokens. Where the memory has them, too, they are not needed.
    Found(StoredTokens),
    /// They are needed, and to be fetched.
    Needed(StoredTokens),
    /// They are on their way.
    Fetching,
    /// They are here, and were restored so many times.
    Here {
        stored: StoredTokens,
        n_tries: usize,
    },
}

impl StoreWait {
    /// True if it cannot be admitted yet.
    pub(crate) fn is_waiting(self) -> bool {
        matches!(self, Self::Asked | Self::Needed(_) | Self::Fetching)
    }

    /// True if tokens are on their way, or here.
    pub(crate) fn is_fetching(self) -> bool {
        matches!(self, Self::Fetching | Self::Here { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_cut_where_a_group_begins() {
        let stored = |first, cuts| StoredTokens {
            first,
            n_tokens: 2 * 256 + 3 * 16,
            cuts,
        };
        let groups = stored(0, StoredCuts::Groups);
        let bases = [0, 255, 256, 300, 511, 512, 527, 530, 559, 560, 900].map(|n| groups.base(n));
        let right = [0, 0, 256, 256, 256, 512, 512, 528, 544].map(Some);
        assert_eq!(bases, [&right[..], &[None, None]].concat()[..]);
        // What was fetched begins behind what was held then.
        assert_eq!(stored(256, StoredCuts::Groups).base(255), None);
        assert_eq!(stored(256, StoredCuts::Groups).base(400), Some(256));
        assert_eq!(stored(0, StoredCuts::Nowhere).base(559), Some(0));
    }
}
