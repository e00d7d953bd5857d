//! [`BatchLine`]: a line of OpenAI's Batch API, and the line that answers it.
//!
//! Invariant: a line that begins in this form is answered in it. Knows nothing of how requests are
//! computed.

use std::time::{SystemTime, UNIX_EPOCH};

use cellar_engine::FinishReason;
use cellar_engine::serve::FinishedText;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The line of a request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenAiLine {
    custom_id: String,
    #[serde(rename = "method")]
    _method: Option<String>,
    #[serde(default)]
    url: Endpoint,
    body: Map<String, Value>,
}

/// The endpoint of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum Endpoint {
    #[default]
    #[serde(rename = "/v1/chat/completions")]
    Chat,
    #[serde(rename = "/v1/completions")]
    Text,
}

/// The parts of a line that its answer repeats.
#[derive(Clone, Debug)]
pub(super) struct BatchLine {
    custom_id: String,
    endpoint: Endpoint,
    model: Value,
}

/// The line of OpenAI's form, and its fields in the names of this program; `None` for other lines.
///
/// # Errors
/// Why it is none, or what it asks for that there is not.
pub(super) fn read(line: &Value) -> Result<Option<(BatchLine, Value)>, String> {
    if line.get("custom_id").is_none() && line.get("body").is_none() {
        return Ok(None);
    }
    let read: OpenAiLine = serde_json::from_value(line.clone()).map_err(|e| e.to_string())?;
    let mut fields = read.body;
    let model = fields.remove("model").unwrap_or_default();
    if let Some(limit) = fields.remove("max_completion_tokens") {
        fields.insert("max_tokens".to_owned(), limit);
    }
    for name in ["logprobs", "top_logprobs", "stream"] {
        let value = fields.remove(name).unwrap_or_default();
        if !matches!(value, Value::Null | Value::Bool(false)) {
            return Err(format!(
                "'{name}' is not for lines of OpenAI's form: leave it out, or write \
                 {{\"id\": …, \"messages\": …}}"
            ));
        }
    }
    if let Some(format) = fields.remove("response_format")
        && let Some(schema) = schema_of(&format)?
    {
        fields.insert("schema".to_owned(), schema);
    }
    let line = BatchLine {
        custom_id: read.custom_id,
        endpoint: read.url,
        model,
    };
    Ok(Some((line, Value::Object(fields))))
}

/// The schema that a form of answers asks for; `None` where they are free.
fn schema_of(format: &Value) -> Result<Option<Value>, String> {
    let schema = format.pointer("/json_schema/schema");
    match (format.get("type").and_then(Value::as_str), schema) {
        (Some("text"), _) => Ok(None),
        (Some("json_object"), _) => Ok(Some(json!({"type": "object"}))),
        (Some("json_schema"), Some(schema)) => Ok(Some(schema.clone())),
        _ if format.is_null() => Ok(None),
        _ => Err(format!(
            "'response_format' is {format}: it must be of type \"text\", \"json_object\", or \
             \"json_schema\" with a 'json_schema' that has a 'schema'"
        )),
    }
}

impl BatchLine {
    /// The caller's name of the request.
    pub(super) fn custom_id(&self) -> &str {
        &self.custom_id
    }

    /// The answer with these texts of one prompt.
    pub(super) fn answer(&self, index: usize, texts: &[FinishedText]) -> Value {
        let choices = (0..).zip(texts).map(|(at, text)| {
            let finish = finish_reason(&text.finish);
            match self.endpoint {
                Endpoint::Chat => json!({
                    "index": at,
                    "message": {"role": "assistant", "content": text.text},
                    "logprobs": null,
                    "finish_reason": finish,
                }),
                Endpoint::Text => json!({
                    "index": at, "text": text.text, "logprobs": null, "finish_reason": finish,
                }),
            }
        });
        let n_prompt = texts.first().map_or(0, |text| text.usage.n_prompt);
        let n_cached = texts.first().map_or(0, |text| text.usage.n_reused());
        let n_text: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let (object, prefix) = match self.endpoint {
            Endpoint::Chat => ("chat.completion", "chatcmpl"),
            Endpoint::Text => ("text_completion", "cmpl"),
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        json!({
            "response": {
                "status_code": 200,
                "request_id": format!("req_{index}"),
                "body": {
                    "id": format!("{prefix}-{index}"),
                    "object": object,
                    "created": since.map_or(0, |since| since.as_secs()),
                    "model": self.model,
                    "choices": choices.collect::<Vec<_>>(),
                    "usage": {
                        "prompt_tokens": n_prompt,
                        "completion_tokens": n_text,
                        "total_tokens": n_prompt + n_text,
                        "prompt_tokens_details": {"cached_tokens": n_cached},
                    },
                },
            },
            "error": null,
        })
    }

    /// The answer where it failed.
    pub(super) fn failure(&self, message: &str) -> Value {
        json!({"response": null, "error": {"code": "request_failed", "message": message}})
    }
}

fn finish_reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfGeneration { .. }
        | FinishReason::StopToken { .. }
        | FinishReason::StopString { .. } => "stop",
        _ => "length",
    }
}
