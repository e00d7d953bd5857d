//! [`LongRope`]: two sets of divisors of rotary frequencies, each with a factor on what it rotates,
//! of which the length of the context chooses one.
//!
//! LongRoPE: Ding et al., arXiv 2402.13753. Tensor names are those of GGUF files.

use kv_graph::rope::{RopeScaling, RopeSpec};

/// A model with two sets of divisors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRope {
    /// Tokens of the longest sequence that the short set is for.
    pub original_context: usize,
    /// Factor on rotated values with the short set.
    pub short_attention: f64,
    /// The same with the long set.
    pub long_attention: f64,
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
        if n_tokens > self.original_context {
            Self::LONG
        } else {
            Self::SHORT
        }
    }

    /// The scaling of a rotation with that set.
    pub fn scaling(self, n_tokens: usize) -> RopeScaling {
        let attention_factor = if n_tokens > self.original_context {
            self.long_attention
        } else {
            self.short_attention
        };
        RopeScaling::LongRope { attention_factor }
    }

    /// Makes a rotation that uses either set use that for sequences of at most so many tokens.
    pub(super) fn choose(self, rope: &mut RopeSpec, n_tokens: usize) {
        let is_either = |name: &str| [Self::LONG, Self::SHORT].contains(&name);
        if rope.factors.as_deref().is_some_and(is_either) {
            rope.factors = Some(self.factors(n_tokens).to_owned());
            rope.scaling = self.scaling(n_tokens);
        }
    }
}
