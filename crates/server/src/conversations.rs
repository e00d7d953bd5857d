//! [`Conversations`]: what was said up to an answer of `/v1/responses`, for requests that go on
//! from there.
//!
//! Invariant: never more entries and bytes than configured; a tenant finds its own alone, and loses
//! none to others while it has at most an equal share. The oldest of a tenant go first. Kept in
//! memory only: a server that starts again has none.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::auth::Tenant;

/// How much is kept, of all keys together. A key may use what others leave; where there is no room,
/// the one that has most gives way.
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
    n_bytes: usize,
    conversation: Arc<Conversation>,
}

/// The answers of a tenant.
#[derive(Debug, Default)]
struct Shelf {
    /// The oldest first.
    entries: VecDeque<Entry>,
    n_bytes: usize,
}

/// The answers that are kept.
#[derive(Debug)]
pub(crate) struct Conversations {
    limits: ConversationLimits,
    /// Of each tenant that has any.
    shelves: Mutex<BTreeMap<Tenant, Shelf>>,
}

impl Conversations {
    /// None so far.
    pub(crate) fn new(limits: ConversationLimits) -> Self {
        Self {
            limits,
            shelves: Mutex::default(),
        }
    }

    /// Keeps an answer; where there is no room, the oldest of the tenant that has most go. One that
    /// is larger than all room is not kept, and one that alone is more than all that others have
    /// may not be.
    pub(crate) fn keep(&self, id: &str, tenant: Tenant, conversation: Conversation) {
        let sizes = conversation.messages.iter().chain([&conversation.response]);
        let n_bytes = id.len() + sizes.map(json_len).sum::<usize>();
        if n_bytes > self.limits.n_bytes || self.limits.n_entries == 0 {
            return;
        }
        let mut shelves = self.lock();
        let own = shelves.entry(tenant).or_default();
        own.n_bytes += n_bytes;
        own.entries.push_back(Entry {
            id: id.to_owned(),
            n_bytes,
            conversation: Arc::new(conversation),
        });
        while let Some(over) = self.limits.exceeded(&shelves) {
            // Of two that have as much, the one that wants more gives way.
            let most = shelves.iter_mut().max_by_key(|(of, shelf)| {
                let n = match over {
                    Over::Entries => shelf.entries.len(),
                    Over::Bytes => shelf.n_bytes,
                };
                (n, **of == tenant)
            });
            if most.and_then(|(_, shelf)| shelf.remove(0)).is_none() {
                break;
            }
        }
        shelves.retain(|_, shelf| !shelf.entries.is_empty());
    }

    /// The answer of this id, where this tenant has it.
    pub(crate) fn get(&self, id: &str, tenant: Tenant) -> Option<Arc<Conversation>> {
        let shelves = self.lock();
        let shelf = shelves.get(&tenant)?;
        let found = shelf.entries.get(shelf.position(id)?)?;
        Some(Arc::clone(&found.conversation))
    }

    /// Forgets an answer; whether this tenant had it.
    pub(crate) fn forget(&self, id: &str, tenant: Tenant) -> bool {
        let mut shelves = self.lock();
        let Some(shelf) = shelves.get_mut(&tenant) else {
            return false;
        };
        let removed = shelf.position(id).and_then(|at| shelf.remove(at));
        if shelf.entries.is_empty() {
            shelves.remove(&tenant);
        }
        removed.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tenant, Shelf>> {
        // A panic between the lines above leaves a count of bytes that is too large at worst.
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What there is too much of.
#[derive(Clone, Copy)]
enum Over {
    Entries,
    Bytes,
}

impl ConversationLimits {
    fn exceeded(&self, shelves: &BTreeMap<Tenant, Shelf>) -> Option<Over> {
        let n_entries: usize = shelves.values().map(|shelf| shelf.entries.len()).sum();
        let n_bytes: usize = shelves.values().map(|shelf| shelf.n_bytes).sum();
        if n_bytes > self.n_bytes {
            Some(Over::Bytes)
        } else {
            (n_entries > self.n_entries).then_some(Over::Entries)
        }
    }
}

impl Shelf {
    fn position(&self, id: &str) -> Option<usize> {
        self.entries.iter().rposition(|entry| entry.id == id)
    }

    fn remove(&mut self, at: usize) -> Option<Entry> {
        let removed = self.entries.remove(at)?;
        self.n_bytes -= removed.n_bytes;
        Some(removed)
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
        assert!(kept.lock().is_empty());
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
        assert_eq!(limits.exceeded(&kept.lock()).map(|_| ()), None);
    }

    #[test]
    fn a_tenant_with_less_than_its_share_loses_nothing_to_others() {
        let [first, second] = tenants();
        let kept = Conversations::new(ConversationLimits {
            n_entries: 4,
            n_bytes: 10_000,
        });
        let has = |tenant, ids: [&str; 2]| ids.map(|id| kept.get(id, tenant).is_some());
        for id in ["a", "b", "c", "d"] {
            kept.keep(id, first, of("text"));
        }
        // A tenant may use what others leave; once both have answers, each keeps half.
        kept.keep("e", second, of("text"));
        kept.keep("f", second, of("text"));
        assert_eq!(has(first, ["a", "b"]), [false, false]);
        for id in ["g", "h", "i"] {
            kept.keep(id, second, of("text"));
        }
        assert_eq!(has(first, ["c", "d"]), [true, true]);
        assert_eq!(has(second, ["h", "i"]), [true, true]);
        // So it is with bytes: a large answer takes the room of its own tenant.
        kept.keep("small", first, of(&"x".repeat(3000)));
        kept.keep("large", second, of(&"x".repeat(6000)));
        kept.keep("larger", second, of(&"x".repeat(6500)));
        assert_eq!(has(first, ["d", "small"]), [true, true]);
        assert_eq!(has(second, ["large", "larger"]), [false, true]);
    }
}
