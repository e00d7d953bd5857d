//! [`Conversation`]: what was said up to an answer of `/v1/responses`, for requests that go on from
//! there.

use serde_json::Value;

/// An answer, and the messages up to it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Conversation {
    /// The answer as the client got it.
    pub(crate) response: Value,
    /// The messages for a chat template, with the answer and without instructions.
    pub(crate) messages: Vec<Value>,
}

impl Conversation {
    /// Bytes of memory that it takes, about.
    pub(crate) fn n_bytes(&self) -> usize {
        let values = self.messages.iter().chain([&self.response]);
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
