//! OpenAI's API.
//!
//! Knows the wire and nothing of how texts are generated.

pub mod batches;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod files;
mod lists;
pub mod messages;
pub mod models;
pub mod render;
pub mod responses;
pub mod tools;
mod transfer;

use cellar_engine::serve::Usage;
use cellar_engine::{FinishReason, Logprobs};
use serde_json::{Value, json};

use crate::api::constraints::constraint;
use crate::api::params::SamplingParams;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::generate::{Constraint, Finish, GenerateRequest, Output, Prompt};
use crate::json::Body;
use crate::model::ModelSettings;

/// Parameters of all endpoints of texts that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 11] = [
    FieldRule::new("dynatemp_range", Neutral::Number(0.0), "use temperature"),
    FieldRule::new("bad_words", Neutral::Empty, BIAS_INSTEAD),
    FieldRule::new("allowed_token_ids", Neutral::Empty, BIAS_INSTEAD),
    FieldRule::new(
        "truncate_prompt_tokens",
        Neutral::Empty,
        "a prompt that is too long is refused with the numbers: send a shorter one",
    ),
    FieldRule::new(
        "prompt_logprobs",
        Neutral::Empty,
        "use 'echo' with 'logprobs' of /v1/completions",
    ),
    FieldRule::new(
        "skip_special_tokens",
        Neutral::True,
        "control tokens are never part of a text",
    ),
    FieldRule::new("use_beam_search", Neutral::False, "use 'n' or 'best_of'"),
    FieldRule::new("length_penalty", Neutral::Number(1.0), "there are no beams").skipped(),
    SAMPLERS,
    FieldRule::new(
        "t_max_predict_ms",
        Neutral::NotPositive,
        "a client that waits no longer may leave",
    )
    .skipped(),
    FieldRule::new(
        "logits_processors",
        Neutral::Empty,
        "there are none but those of the parameters",
    ),
];

/// llama-server's order of samplers, which its editors send.
pub(in crate::api) const SAMPLERS: FieldRule = FieldRule::new(
    "samplers",
    Neutral::Empty,
    "the order is fixed, and the value of each parameter says whether it is used",
)
.skipped();

const BIAS_INSTEAD: &str = "use 'logit_bias'";

/// What the caller of an endpoint adds to the common parameters.
#[derive(Debug)]
struct Specific {
    prompt: Prompt,
    echo: bool,
    max_tokens: Option<usize>,
    output: Output,
    /// A schema by which the text is a call of a tool.
    forced: Option<Constraint>,
    logprobs: Logprobs,
}

/// A request in the words of no API.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported.
fn generate_request(
    body: &Body,
    settings: &ModelSettings,
    specific: Specific,
) -> Result<GenerateRequest, ApiError> {
    let sampling: SamplingParams = body.get()?;
    Ok(GenerateRequest {
        prompt: specific.prompt,
        sampler: sampling.sampler(settings)?,
        max_tokens: specific.max_tokens,
        stop: sampling.stop(settings)?,
        // A format binds the final text, which an answer that has to call a tool has not.
        constraint: specific.forced.or(constraint(body)?),
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        adapters: sampling.adapters(),
        speculate: sampling.speculate(),
        output: specific.output,
        logprobs: specific.logprobs,
        echo: specific.echo,
        choices: sampling.choices()?,
        skips: body.skips().clone(),
    })
}

/// OpenAI's word for why a text ended.
fn finish_reason(finish: &Finish) -> &'static str {
    match finish.reason {
        // A text that ends in the middle of a call says so.
        FinishReason::EndOfGeneration { .. }
        | FinishReason::StopToken { .. }
        | FinishReason::StopString { .. }
            if finish.has_calls =>
        {
            "tool_calls"
        }
        FinishReason::Length | FinishReason::ContextFull => "length",
        _ => "stop",
    }
}

/// OpenAI's usage of several texts of one request, of which so many have the same prompt: it counts
/// once. So many of all their tokens are reasoning.
fn usage_json(usages: &[Usage], n_of_prompt: usize, n_reasoning: usize) -> Value {
    let prompts = || usages.iter().step_by(n_of_prompt.max(1));
    let prompt: usize = prompts().map(|usage| usage.n_prompt).sum();
    let completion: usize = usages.iter().map(|usage| usage.n_tokens).sum();
    let cached: usize = prompts().map(Usage::n_reused).sum();
    let drafted: usize = usages.iter().map(|usage| usage.speculated.n_drafted).sum();
    let accepted: usize = usages.iter().map(|usage| usage.speculated.n_accepted).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": n_reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    })
}
