//! [`LongRope`]: two sets of divisors of rotary frequencies, of which the length of the context
//! chooses one.
//!
//! LongRoPE: Ding et al., arXiv 2402.13753. Tensor names are those of GGUF files.

use super::AttentionBlock;

/// A model with two sets of divisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongRope {
    /// Tokens of the longest sequence that the short set is for.
    pub original_context: usize,
}

impl LongRope {
    /// The divisors for longer sequences.
    pub const LONG: &str = "rope_factors_long.weight";
    /// The divisors for sequences within the original context.
    pub const SHORT: &str = "rope_factors_short.weight";

    /// Name of the set for sequences of at most so many tokens. One set is for all of a sequence
    /// from its beginning, whatever its length is at the time, so that keys once stored stay right
    /// (as in llama.cpp).
    pub fn factors(self, n_tokens: usize) -> &'static str {
        match n_tokens > self.original_context {
            true => Self::LONG,
            false => Self::SHORT,
        }
    }

    /// Makes an attention that uses either set use that for sequences of at most so many tokens.
    pub(super) fn choose(self, attention: &mut AttentionBlock, n_tokens: usize) {
        let own = attention.rope.as_mut().and_then(|r| r.factors.as_mut());
        if let Some(name) = own.filter(|name| [Self::LONG, Self::SHORT].contains(&name.as_str())) {
            *name = self.factors(n_tokens).to_owned();
        }
    }
}
