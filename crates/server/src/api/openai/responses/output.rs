//! [`Writer`]: the output of `/v1/responses`, as items and as the events of a stream.
//!
//! Invariant: each event has its name and the next number; an item is added, grows and is done
//! before the next one is added; the last event has the response that a request without `stream`
//! gives. Knows nothing of how texts are generated.

use std::sync::Arc;

use cellar_engine::serve::Usage;
use cellar_engine::{FinishReason, TokenLogprobs};
use model_core::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::kept_response::KeptResponse;
use crate::api::logprobs;
use crate::conversations::AssistantMessage;
use crate::error::ApiError;
use crate::generate::{Finish, Piece};
use crate::ids::{now, random_id};
use crate::model::ServedModel;
use crate::skips::Skips;
use crate::stream::{Encoder, named_event};

/// What an item of the output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

/// An item that is not complete.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    /// The id of a call and the name of its function; empty for others.
    call_id: String,
    name: String,
    /// The text, or the arguments.
    text: String,
    logprobs: Vec<Value>,
}

/// Writes one response.
#[derive(Debug)]
pub(super) struct Writer {
    /// All members, with the complete items.
    response: Value,
    open: Option<Open>,
    n_events: u64,
    tokenizer: Arc<Tokenizer>,
    /// Those of the piece that comes next.
    logprobs: Vec<TokenLogprobs>,
    finish: Option<Finish>,
    kept: Option<KeptResponse>,
    /// Named in the response once it is complete.
    skips: Skips,
}

impl Open {
    fn new(kind: Kind) -> Self {
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call => "fc_",
        };
        Self {
            kind,
            id: random_id(prefix),
            call_id: String::new(),
            name: String::new(),
            text: String::new(),
            logprobs: Vec::new(),
        }
    }

    fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({
                "type": "output_text", "text": self.text, "annotations": [],
                "logprobs": self.logprobs,
            }),
        }
    }

    fn item(&self, status: &str, parts: &[Value]) -> Value {
        let mut item = match self.kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "summary": [], "content": parts, "encrypted_content": null,
            }),
            Kind::Message => json!({"type": "message", "role": "assistant", "content": parts}),
            Kind::Call => json!({
                "type": "function_call", "call_id": self.call_id, "name": self.name,
                "arguments": self.text,
            }),
        };
        item["id"] = json!(self.id);
        item["status"] = json!(status);
        item
    }
}

impl Writer {
    /// A writer of the response with these members, of which it fills in the rest.
    pub(super) fn new(
        response: Value,
        model: &ServedModel,
        kept: Option<KeptResponse>,
        skips: &Skips,
    ) -> Self {
        Self {
            response,
            open: None,
            n_events: 0,
            tokenizer: Arc::clone(model.tokenizer()),
            logprobs: Vec::new(),
            finish: None,
            kept,
            skips: skips.clone(),
        }
    }

    /// The response as it is.
    pub(super) fn into_response(self) -> Value {
        self.response
    }

    fn event(&mut self, name: &str, mut data: Value) -> String {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.n_events);
        self.n_events += 1;
        named_event(name, &data)
    }

    fn response_event(&mut self, name: &str) -> String {
        let response = self.response.clone();
        self.event(name, json!({ "response": response }))
    }

    /// The number of the item that is open, or comes next.
    fn output_index(&self) -> usize {
        self.response["output"].as_array().map_or(0, Vec::len)
    }

    /// An event about the item that is open.
    fn item_event(&mut self, name: &str, mut data: Value) -> String {
        data["output_index"] = json!(self.output_index());
        if let Some(open) = &self.open {
            data["item_id"] = json!(open.id);
            if open.kind != Kind::Call {
                data["content_index"] = json!(0);
            }
        }
        self.event(name, data)
    }

    /// Adds an item, after the one before is done.
    fn add(&mut self, open: Open) -> String {
        let mut out = self.close("completed");
        let index = self.output_index();
        let item = open.item("in_progress", &[]);
        let part = open.part();
        let kind = open.kind;
        self.open = Some(open);
        let added = json!({"output_index": index, "item": item});
        out += &self.event("response.output_item.added", added);
        if kind != Kind::Call {
            out += &self.item_event("response.content_part.added", json!({ "part": part }));
        }
        out
    }

    /// The item that is open is done.
    fn close(&mut self, status: &str) -> String {
        let Some(open) = &self.open else {
            return String::new();
        };
        let (kind, text, part) = (open.kind, json!(open.text), open.part());
        let (logprobs, name) = (open.logprobs.clone(), open.name.clone());
        let mut out = match kind {
            Kind::Reasoning => {
                self.item_event("response.reasoning_text.done", json!({ "text": text }))
            }
            Kind::Message => {
                let data = json!({"text": text, "logprobs": logprobs});
                self.item_event("response.output_text.done", data)
            }
            Kind::Call => {
                let data = json!({"name": name, "arguments": text});
                self.item_event("response.function_call_arguments.done", data)
            }
        };
        if kind != Kind::Call {
            out += &self.item_event("response.content_part.done", json!({ "part": part }));
        }
        let Some(open) = self.open.take() else {
            return out;
        };
        let item = open.item(status, &[part]);
        let data = json!({"output_index": self.output_index(), "item": item});
        out += &self.event("response.output_item.done", data);
        if let Some((kept, call)) = self.kept.as_ref().zip(call(&item)) {
            kept.answer().calls.push(call);
        }
        if let Some(output) = self.response["output"].as_array_mut() {
            output.push(item);
        }
        out
    }

    /// More of an item, which is added where another is open.
    fn delta(&mut self, kind: Kind, text: &str) -> String {
        let places = match kind {
            Kind::Message => std::mem::take(&mut self.logprobs),
            Kind::Reasoning | Kind::Call => {
                self.logprobs.clear();
                Vec::new()
            }
        };
        let logprobs = logprobs::places(&self.tokenizer, &places);
        let is_open = self.open.as_ref().is_some_and(|open| open.kind == kind);
        let mut out = if is_open {
            String::new()
        } else {
            self.add(Open::new(kind))
        };
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            open.logprobs.extend(logprobs.iter().cloned());
        }
        if let Some(kept) = &self.kept {
            let mut answer = kept.answer();
            match kind {
                Kind::Reasoning => answer.reasoning.push_str(text),
                Kind::Message => answer.content.get_or_insert_default().push_str(text),
                Kind::Call => {} // it is one when it is complete
            }
        }
        out += &match kind {
            Kind::Reasoning => {
                self.item_event("response.reasoning_text.delta", json!({ "delta": text }))
            }
            Kind::Message => {
                let data = json!({"delta": text, "logprobs": logprobs});
                self.item_event("response.output_text.delta", data)
            }
            Kind::Call => {
                let data = json!({ "delta": text });
                self.item_event("response.function_call_arguments.delta", data)
            }
        };
        out
    }

    /// The text has ended.
    fn finished(&mut self, finish: Finish) -> String {
        let mut out = String::new();
        let is_cut = matches!(
            finish.reason,
            FinishReason::Length | FinishReason::ContextFull
        );
        if self.output_index() == 0 && self.open.is_none() {
            out += &self.add(Open::new(Kind::Message));
        }
        let status = if is_cut { "incomplete" } else { "completed" };
        out += &self.close(status);
        self.response["status"] = json!(status);
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        } else {
            self.response["completed_at"] = json!(now());
        }
        self.finish = Some(finish);
        out
    }

    fn used(&mut self, usage: &Usage) {
        let n_reasoning = self.finish.as_ref().map_or(0, |finish| finish.n_reasoning);
        self.response["usage"] = usage_json(usage, n_reasoning);
        self.skips.add_to(&mut self.response);
        if let Some(kept) = self.kept.take() {
            kept.complete(&self.response, message(&self.response["output"]));
        }
    }
}

/// Usage in the words of this endpoint.
fn usage_json(usage: &Usage, n_reasoning: usize) -> Value {
    let cached = usage.n_reused();
    json!({
        "input_tokens": usage.n_prompt,
        // Prefixes are cached by themselves, and nothing is charged for it.
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_tokens,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_tokens,
    })
}

/// The output as a message for a chat template.
fn message(output: &Value) -> AssistantMessage {
    let mut message = AssistantMessage::default();
    for item in output.as_array().into_iter().flatten() {
        let part = text_at(item, "/content/0/text");
        match text_at(item, "/type") {
            "reasoning" => message.reasoning.push_str(part),
            "message" => message.content.get_or_insert_default().push_str(part),
            _ => message.calls.extend(call(item)),
        }
    }
    message
}

/// The call of an item; `None` where it is none, or was cut off: its function was not called.
fn call(item: &Value) -> Option<Value> {
    let arguments = text_at(item, "/arguments");
    let is_json = || serde_json::from_str::<Map<String, Value>>(arguments).is_ok();
    let is_call = text_at(item, "/type") == "function_call";
    let is_whole = is_call && (text_at(item, "/status") == "completed" || is_json());
    let (id, name) = (text_at(item, "/call_id"), text_at(item, "/name"));
    is_whole.then(|| AssistantMessage::call(id, name, arguments))
}

fn text_at<'v>(item: &'v Value, path: &str) -> &'v str {
    let text = item.pointer(path).and_then(Value::as_str);
    text.unwrap_or_default()
}

impl Encoder for Writer {
    fn begin(&mut self) -> String {
        self.response_event("response.created") + &self.response_event("response.in_progress")
    }

    /// Codex counts events alone, no comments.
    fn alive(&mut self) -> String {
        self.event("keepalive", json!({}))
    }

    fn piece(&mut self, _choice: usize, piece: Piece) -> String {
        match piece {
            Piece::Prompt(_) => String::new(),
            Piece::Logprobs(new) => {
                self.logprobs.extend(new);
                String::new()
            }
            Piece::Text(text) => self.delta(Kind::Message, &text),
            Piece::Reasoning(text) => self.delta(Kind::Reasoning, &text),
            Piece::ToolStart { id, name, .. } => self.add(Open {
                call_id: id,
                name,
                ..Open::new(Kind::Call)
            }),
            Piece::ToolArguments { text, .. } => self.delta(Kind::Call, &text),
            Piece::Finish(finish) => self.finished(finish),
            Piece::Usage(usage) => {
                self.used(&usage);
                String::new()
            }
        }
    }

    fn end(&mut self) -> String {
        match self.response["status"].as_str() {
            Some("incomplete") => self.response_event("response.incomplete"),
            _ => self.response_event("response.completed"),
        }
    }

    fn error(&mut self, error: &ApiError) -> String {
        let code = error.code.unwrap_or(error.kind);
        let data = json!({"code": code, "message": error.message, "param": error.param});
        let event = self.event("error", data);
        self.response["status"] = json!("failed");
        self.response["error"] = json!({"code": "server_error", "message": error.message});
        event + &self.response_event("response.failed")
    }
}
