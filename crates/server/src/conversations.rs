//! [`Conversation`]: what was said up to an answer of `/v1/responses`, and in it as far as it is
//! written, for requests that go on from there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

/// An answer, and the messages up to it.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// The answer as the client got it; without output while it is written.
    pub(crate) response: Value,
    /// The messages before, for a chat template and without instructions.
    before: Arc<[Value]>,
    /// The answer, as far as it is written.
    answer: Mutex<AssistantMessage>,
}

/// An answer in the words of a chat template.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AssistantMessage {
    pub(crate) reasoning: String,
    pub(crate) content: Option<String>,
    /// With arguments as the model wrote them: JSON, as a rule.
    pub(crate) calls: Vec<Value>,
}

impl AssistantMessage {
    pub(crate) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_none() && self.calls.is_empty()
    }

    /// A call of a function in the words of a template.
    pub(crate) fn call(id: &str, name: &str, arguments: &str) -> Value {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    }

    pub(crate) fn into_json(self) -> Value {
        let content = self.content.unwrap_or_default();
        let mut message = json!({"role": "assistant", "content": content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = json!(self.calls);
        }
        message
    }
}

impl Conversation {
    /// An answer to these messages, of which nothing is written.
    pub(crate) fn begin(response: Value, before: Vec<Value>) -> Self {
        Self {
            response,
            before: before.into(),
            answer: Mutex::default(),
        }
    }

    /// The same with its whole answer.
    pub(crate) fn completed(&self, response: Value, answer: AssistantMessage) -> Self {
        Self {
            response,
            before: Arc::clone(&self.before),
            answer: Mutex::new(answer),
        }
    }

    /// The part of the answer that is written, to add to it.
    pub(crate) fn answer(&self) -> MutexGuard<'_, AssistantMessage> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The messages that another request goes on from.
    pub(crate) fn messages(&self) -> Vec<Value> {
        let mut messages = self.before.to_vec();
        let answer = self.answer().clone();
        if !answer.is_empty() {
            messages.push(answer.into_json());
        }
        messages
    }

    /// Bytes of memory that it takes, about.
    pub(crate) fn n_bytes(&self) -> usize {
        let answer = self.answer().clone().into_json();
        let values = self.before.iter().chain([&self.response, &answer]);
        values.map(json_len).sum()
    }
}

/// About how many bytes of memory a value takes: its texts, itself, and what a map has besides.
fn json_len(value: &Value) -> usize {
    /// The name's `String`, its hash and its index.
    const OF_A_MEMBER: usize = 48;
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(json_len).sum(),
            Value::Object(members) => {
                let sizes = members
                    .iter()
                    .map(|(name, value)| OF_A_MEMBER + name.len() + json_len(value));
                sizes.sum()
            }
            _ => 0,
        }
}
