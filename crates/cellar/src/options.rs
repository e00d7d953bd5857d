//! [`GenerateOptions`]: how a text is continued. Plain data.

use std::sync::Arc;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::TextRequest;
use cellar_engine::{CancelFlag, CompletionOptions, Logprobs, LongContext, Speculation};
use kv_core::TokenId;

/// How a text is chosen, and where it ends: what most callers need of a [`TextRequest`].
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// How tokens are sampled.
    pub sampler: SamplerConfig,
    /// Largest number of tokens; `None` goes on until the model or the context ends.
    pub n_predict: Option<usize>,
    /// Stop strings; they are not part of the result.
    pub stop: Vec<String>,
    /// Tokens that end the text where they are chosen; they are not part of the result.
    pub stop_tokens: Vec<TokenId>,
    /// Which log probabilities of its tokens are wanted.
    pub logprobs: Logprobs,
    /// Cancels it, from any thread. The text goes on when it is asked for the next piece after the
    /// flag was reset.
    pub cancel: CancelFlag,
    /// What happens when it gets longer than the context.
    pub long_context: LongContext,
    /// The scales of its adapters, one for each that the model was loaded with; `None` takes those
    /// that it was loaded with.
    pub adapters: Option<Arc<[f32]>>,
    /// Whether tokens are drafted and verified several at once. The text is the same, byte for byte
    /// on the CPU backend.
    pub speculation: Speculation,
}

impl GenerateOptions {
    /// The request for a prompt, to which a caller may add steps of the sampler: a grammar, a bias.
    #[must_use]
    pub fn request(self, prompt: Vec<TokenId>) -> TextRequest {
        TextRequest {
            prompt,
            options: CompletionOptions {
                sampler: self.sampler,
                n_predict: self.n_predict,
                stop: self.stop,
                stop_tokens: self.stop_tokens,
                logprobs: self.logprobs,
                ..CompletionOptions::default()
            },
            adapters: self.adapters,
            speculation: self.speculation,
            long_context: Some(self.long_context),
            cancel: Some(self.cancel),
            ..TextRequest::default()
        }
    }
}
