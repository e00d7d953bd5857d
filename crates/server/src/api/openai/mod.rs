//! OpenAI's API.
//!
//! Knows the wire and nothing of how texts are generated.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod messages;
pub mod models;
pub mod render;
pub mod responses;
pub mod tools;

use cellar_engine::serve::Usage;
use cellar_engine::{FinishReason, Logprobs};
use serde_json::{Value, json};

use crate::api::params::SamplingParams;
use crate::error::ApiError;
use crate::generate::{Constraint, Finish, GenerateRequest, Output, Prompt};
use crate::json::{Body, Neutral, Refused};
use crate::model::ModelSettings;

/// Parameters of all endpoints of texts that are not done.
pub(in crate::api) const LIMITED: [Refused; 16] = [
    Refused::new("dynatemp_range", Neutral::Number(0.0), "use temperature"),
    Refused::new(
        "grammar",
        Neutral::Empty,
        "use response_format with a JSON schema",
    ),
    Refused::new("guided_regex", Neutral::Empty, SCHEMA_INSTEAD),
    Refused::new("guided_choice", Neutral::Empty, SCHEMA_INSTEAD),
    Refused::new("guided_grammar", Neutral::Empty, SCHEMA_INSTEAD),
    Refused::new("bad_words", Neutral::Empty, BIAS_INSTEAD),
    Refused::new("allowed_token_ids", Neutral::Empty, BIAS_INSTEAD),
    Refused::new(
        "truncate_prompt_tokens",
        Neutral::Empty,
        "a prompt that is too long is refused with the numbers: send a shorter one",
    ),
    Refused::new(
        "prompt_logprobs",
        Neutral::Empty,
        "use 'echo' with 'logprobs' of /v1/completions",
    ),
    Refused::new(
        "skip_special_tokens",
        Neutral::True,
        "control tokens are never part of a text",
    ),
    Refused::new("use_beam_search", Neutral::False, "use 'n' or 'best_of'"),
    Refused::new("length_penalty", Neutral::Number(1.0), "there are no beams").skipped(),
    SAMPLERS,
    Refused::new("lora", Neutral::Empty, "this server has no adapters"),
    Refused::new(
        "t_max_predict_ms",
        Neutral::NotPositive,
        "a client that waits no longer may leave",
    )
    .skipped(),
    Refused::new(
        "logits_processors",
        Neutral::Empty,
        "there are none but those of the parameters",
    ),
];

/// llama-server's order of samplers, which its editors send.
pub(in crate::api) const SAMPLERS: Refused = Refused::new(
    "samplers",
    Neutral::Empty,
    "the order is fixed, and the value of each parameter says whether it is used",
)
.skipped();

const SCHEMA_INSTEAD: &str = "use response_format with a JSON schema";
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
        stop: sampling.stop()?,
        // A format binds the final text, which an answer that has to call a tool has not.
        constraint: specific.forced.or(constraint(body)?),
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        speculate: sampling.speculate(),
        output: specific.output,
        logprobs: specific.logprobs,
        echo: specific.echo,
        choices: sampling.choices()?,
    })
}

/// `response_format`, or the schema under one of vLLM's names.
fn constraint(body: &Body) -> Result<Option<Constraint>, ApiError> {
    match (response_format(body)?, guided_json(body)?) {
        (Some(_), Some(Constraint::JsonSchema { param, .. })) => {
            let message = format!("there is both 'response_format' and '{param}'");
            Err(ApiError::invalid_param(param, message))
        }
        (format, guided) => Ok(format.or(guided)),
    }
}

/// `guided_json`, and `json` of `structured_outputs`, which has nothing else.
fn guided_json(body: &Body) -> Result<Option<Constraint>, ApiError> {
    if let Some(schema) = body.field("guided_json") {
        return json_schema(Some(schema), "guided_json").map(Some);
    }
    let Some(outputs) = body.field("structured_outputs") else {
        return Ok(None);
    };
    let members = outputs.as_object().into_iter().flatten();
    let mut given = members.filter(|(_, value)| !matches!(value, Value::Null | Value::Bool(false)));
    if let Some((name, _)) = given.find(|(name, _)| *name != "json") {
        let param = format!("structured_outputs.{name}");
        let message = format!("'{param}' is not supported: {SCHEMA_INSTEAD}");
        return Err(ApiError::unsupported(param, message));
    }
    match outputs.get("json") {
        Some(schema) => json_schema(Some(schema), "structured_outputs.json").map(Some),
        None if outputs.is_object() => Ok(None),
        None => {
            let message = "'structured_outputs' is not an object";
            Err(ApiError::invalid_param("structured_outputs", message))
        }
    }
}

fn response_format(body: &Body) -> Result<Option<Constraint>, ApiError> {
    let Some(format) = body.field("response_format") else {
        return Ok(None);
    };
    let wrong = |param: &str, message: &str| Err(ApiError::invalid_param(param, message));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match format.get("schema") {
            // llama-server's extension.
            Some(schema) if !schema.is_null() => Ok(Some(Constraint::JsonSchema {
                schema: schema.clone(),
                param: "response_format.schema",
            })),
            _ => Ok(Some(Constraint::JsonObject)),
        },
        Some("json_schema") => {
            let schema = format.pointer("/json_schema/schema");
            let schema = schema.or_else(|| format.get("schema"));
            json_schema(schema, "response_format.json_schema.schema").map(Some)
        }
        Some(other) => wrong(
            "response_format.type",
            &format!("'{other}' is not one of text, json_object, json_schema"),
        ),
        None => wrong("response_format.type", "'response_format' needs a 'type'"),
    }
}

/// The schema of a format `json_schema`, which stands at this path of the request.
pub(in crate::api) fn json_schema(
    schema: Option<&Value>,
    param: &'static str,
) -> Result<Constraint, ApiError> {
    match schema {
        Some(schema) if schema.is_object() || schema.is_boolean() => Ok(Constraint::JsonSchema {
            schema: schema.clone(),
            param,
        }),
        _ => {
            let message = format!(
                "'{param}' is missing, or no schema: it needs a 'schema', which is an object"
            );
            Err(ApiError::invalid_param(param, message))
        }
    }
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
