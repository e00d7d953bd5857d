//! [`AnsweredLine`]: the line that answers one of OpenAI's Batch API.
//!
//! Invariant: a line that begins in this form is answered in it. Knows nothing of how requests are
//! computed.

use std::time::{SystemTime, UNIX_EPOCH};

use cellar_engine::FinishReason;
use cellar_engine::batch_file::BatchLine;
use cellar_engine::serve::FinishedText;
use serde_json::{Value, json};

/// The endpoints whose requests are answered; the first is that of lines which name none.
pub(super) const ENDPOINTS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// The parts of a line that its answer repeats.
#[derive(Clone, Debug)]
pub(super) struct AnsweredLine {
    custom_id: String,
    is_chat: bool,
    model: Value,
}

/// What the answer to a line needs of it, and its fields in the names of this program.
///
/// # Errors
/// What it asks for that there is not.
pub(super) fn fields_of(line: BatchLine) -> Result<(AnsweredLine, Value), String> {
    let mut fields = line.body;
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
    let answered = AnsweredLine {
        custom_id: line.custom_id,
        is_chat: line.url.is_none_or(|url| url == ENDPOINTS[0]),
        model,
    };
    Ok((answered, Value::Object(fields)))
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

impl AnsweredLine {
    /// The caller's name of the request.
    pub(super) fn custom_id(&self) -> &str {
        &self.custom_id
    }

    /// The answer with these texts of one prompt.
    pub(super) fn answer(&self, index: usize, texts: &[FinishedText]) -> Value {
        let choices = (0..).zip(texts).map(|(at, text)| {
            let finish = finish_reason(&text.finish);
            if self.is_chat {
                json!({
                    "index": at,
                    "message": {"role": "assistant", "content": text.text},
                    "logprobs": null,
                    "finish_reason": finish,
                })
            } else {
                json!({
                    "index": at, "text": text.text, "logprobs": null, "finish_reason": finish,
                })
            }
        });
        let n_prompt = texts.first().map_or(0, |text| text.usage.n_prompt);
        let n_cached = texts.first().map_or(0, |text| text.usage.n_reused());
        let n_text: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let (object, prefix) = if self.is_chat {
            ("chat.completion", "chatcmpl")
        } else {
            ("text_completion", "cmpl")
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
