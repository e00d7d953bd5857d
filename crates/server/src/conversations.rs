//! [`Conversations`]: what was said up to an answer of `/v1/responses`, for requests that go on from
//! there.
//!
//! Invariant: never more entries and bytes than configured, the oldest go first, and a tenant finds
//! its own alone. Kept in memory only: a server that starts again has none.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::auth::Tenant;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConversationLimits {
    /// Answers.
    pub n_entries: usize,
    /// Bytes of memory that they and the messages before them take, about.
    pub n_bytes: usize,
}

impl Default for ConversationLimits {
    fn default() -> Self {
        Self {
            n_entries: 4096,
            n_bytes: 64 << 20,
        }
    }
}

/// An answer, and the messages up to it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Conversation {
    /// The answer as the client got it.
    pub(crate) response: Value,
    /// The messages for a chat template, with the answer and without instructions.
    pub(crate) messages: Vec<Value>,
}

#[derive(Debug)]
struct Entry {
    id: String,
    tenant: Tenant,
    n_bytes: usize,
    conversation: Arc<Conversation>,
}

#[derive(Debug, Default)]
struct Entries {
    /// The oldest first.
    list: VecDeque<Entry>,
    n_bytes: usize,
}

/// The answers that are kept.
#[derive(Debug)]
pub(crate) struct Conversations {
    limits: ConversationLimits,
    entries: Mutex<Entries>,
}

impl Conversations {
    /// None so far.
    pub(crate) fn new(limits: ConversationLimits) -> Self {
        Self {
            limits,
            entries: Mutex::default(),
        }
    }

    /// Keeps an answer; where there is no room, the oldest go. One that is larger than all room is
    /// not kept.
    pub(crate) fn keep(&self, id: &str, tenant: Tenant, conversation: Conversation) {
        let sizes = conversation.messages.iter().chain([&conversation.response]);
        let n_bytes = id.len() + sizes.map(json_len).sum::<usize>();
        if n_bytes > self.limits.n_bytes || self.limits.n_entries == 0 {
            return;
        }
        let mut entries = self.lock();
        let has_room = |entries: &Entries| {
            entries.list.len() < self.limits.n_entries
                && entries.n_bytes + n_bytes <= self.limits.n_bytes
        };
        while !has_room(&entries) {
            let Some(oldest) = entries.list.pop_front() else {
                break;
            };
            entries.n_bytes -= oldest.n_bytes;
        }
        entries.n_bytes += n_bytes;
        entries.list.push_back(Entry {
            id: id.to_owned(),
            tenant,
            n_bytes,
            conversation: Arc::new(conversation),
        });
    }

    /// The answer of this id, where this tenant has it.
    pub(crate) fn get(&self, id: &str, tenant: Tenant) -> Option<Arc<Conversation>> {
        let entries = self.lock();
        let at = entries.position(id, tenant)?;
        let found = entries.list.get(at)?;
        Some(Arc::clone(&found.conversation))
    }

    /// Forgets an answer; whether this tenant had it.
    pub(crate) fn forget(&self, id: &str, tenant: Tenant) -> bool {
        let mut entries = self.lock();
        let at = entries.position(id, tenant);
        let removed = at.and_then(|at| entries.list.remove(at));
        entries.n_bytes -= removed.as_ref().map_or(0, |entry| entry.n_bytes);
        removed.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // A panic between the lines above leaves a count of bytes that is too large at worst.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn position(&self, id: &str, tenant: Tenant) -> Option<usize> {
        let mut newest_first = self.list.iter().enumerate().rev();
        let found = newest_first.find(|(_, entry)| entry.id == id && entry.tenant == tenant);
        found.map(|(at, _)| at)
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use axum::http::HeaderMap;
    use serde_json::json;

    use super::*;
    use crate::auth::Keys;

    fn tenants() -> [Tenant; 2] {
        let keys = Keys::parse("first\nsecond").unwrap();
        ["first", "second"].map(|key| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.tenant(&headers).unwrap()
        })
    }

    fn of(text: &str) -> Conversation {
        Conversation {
            response: json!({}),
            messages: vec![json!(text)],
        }
    }

    #[test]
    fn a_tenant_finds_its_own_alone() {
        let [first, second] = tenants();
        let kept = Conversations::new(ConversationLimits::default());
        kept.keep("resp_1", first, of("a"));
        assert_eq!(kept.get("resp_1", first), Some(Arc::new(of("a"))));
        assert_eq!(kept.get("resp_1", second), None);
        assert!(!kept.forget("resp_1", second));
        assert!(kept.forget("resp_1", first));
        assert_eq!(kept.get("resp_1", first), None);
        assert_eq!(kept.lock().n_bytes, 0);
    }

    #[test]
    fn the_oldest_go_where_there_is_no_room() {
        let [first, _] = tenants();
        let limits = ConversationLimits {
            n_entries: 3,
            n_bytes: 10_000,
        };
        let kept = Conversations::new(limits);
        for number in 0..5 {
            kept.keep(&format!("{number}"), first, of("a"));
        }
        let has = |id: &str| kept.get(id, first).is_some();
        assert_eq!(["1", "2", "3", "4"].map(has), [false, true, true, true]);
        kept.keep("large", first, of(&"x".repeat(9000)));
        assert_eq!(["2", "3", "4", "large"].map(has), [false, true, true, true]);
        // Bytes run short before entries do.
        kept.keep("larger", first, of(&"x".repeat(9500)));
        assert_eq!(["4", "large", "larger"].map(has), [false, false, true]);
        kept.keep("too large", first, of(&"x".repeat(10_000)));
        assert_eq!(["larger", "too large"].map(has), [true, false]);
        assert!(kept.lock().n_bytes <= limits.n_bytes);
    }
}
