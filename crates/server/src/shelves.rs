//! [`Shelves`]: what a server keeps by id for requests that go on from it.
//!
//! Invariant: never more entries and bytes than configured; a tenant finds its own alone, and loses
//! none to others while it has at most an equal share. The oldest of a tenant go first. Kept in
//! memory only: a server that starts again has none. Knows nothing of what is kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::auth::Tenant;

/// How much is kept, of all keys together. A key may use what others leave; where there is no room,
/// the one that has most gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShelfLimits {
    /// Entries.
    pub n_entries: usize,
    /// Bytes of memory that they take, about.
    pub n_bytes: usize,
}

impl Default for ShelfLimits {
    fn default() -> Self {
        Self {
            n_entries: 4096,
            n_bytes: 64 << 20,
        }
    }
}

#[derive(Debug)]
struct Entry<T> {
    id: String,
    n_bytes: usize,
    value: Arc<T>,
}

/// The entries of a tenant.
#[derive(Debug)]
struct Shelf<T> {
    /// The oldest first.
    entries: VecDeque<Entry<T>>,
    n_bytes: usize,
}

/// What is kept by id.
#[derive(Debug)]
pub(crate) struct Shelves<T> {
    limits: ShelfLimits,
    /// Of each tenant that has any.
    shelves: Mutex<BTreeMap<Tenant, Shelf<T>>>,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            n_bytes: 0,
        }
    }
}

impl<T> Shelves<T> {
    /// None so far.
    pub(crate) fn new(limits: ShelfLimits) -> Self {
        Self {
            limits,
            shelves: Mutex::default(),
        }
    }

    /// Keeps a value of so many bytes, in place of one of this id; where there is no room, the
    /// oldest of the tenant that has most go. One that is larger than all room is not kept, and one
    /// that alone is more than all that others have may not be.
    pub(crate) fn keep(&self, id: &str, tenant: Tenant, value: Arc<T>, n_bytes: usize) {
        let n_bytes = n_bytes.saturating_add(id.len());
        self.forget(id, tenant);
        if n_bytes > self.limits.n_bytes || self.limits.n_entries == 0 {
            return;
        }
        let mut shelves = self.lock();
        let own = shelves.entry(tenant).or_default();
        own.n_bytes += n_bytes;
        own.entries.push_back(Entry {
            id: id.to_owned(),
            n_bytes,
            value,
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

    /// The value of this id, where this tenant has it.
    pub(crate) fn get(&self, id: &str, tenant: Tenant) -> Option<Arc<T>> {
        let shelves = self.lock();
        let shelf = shelves.get(&tenant)?;
        let found = shelf.entries.get(shelf.position(id)?)?;
        Some(Arc::clone(&found.value))
    }

    /// Forgets a value; whether this tenant had it.
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tenant, Shelf<T>>> {
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

impl ShelfLimits {
    fn exceeded<T>(&self, shelves: &BTreeMap<Tenant, Shelf<T>>) -> Option<Over> {
        let n_entries: usize = shelves.values().map(|shelf| shelf.entries.len()).sum();
        let n_bytes: usize = shelves.values().map(|shelf| shelf.n_bytes).sum();
        if n_bytes > self.n_bytes {
            Some(Over::Bytes)
        } else {
            (n_entries > self.n_entries).then_some(Over::Entries)
        }
    }
}

impl<T> Shelf<T> {
    fn position(&self, id: &str) -> Option<usize> {
        self.entries.iter().rposition(|entry| entry.id == id)
    }

    fn remove(&mut self, at: usize) -> Option<Entry<T>> {
        let removed = self.entries.remove(at)?;
        self.n_bytes -= removed.n_bytes;
        Some(removed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::auth::Keys;
    use axum::http::HeaderMap;

    fn tenants() -> [Tenant; 2] {
        let keys = Keys::parse("first\nsecond").unwrap();
        ["first", "second"].map(|key| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.tenant(&headers).unwrap()
        })
    }

    /// Keeps so many bytes under an id.
    fn keep(kept: &Shelves<usize>, id: &str, tenant: Tenant, n_bytes: usize) {
        kept.keep(id, tenant, Arc::new(n_bytes), n_bytes);
    }

    #[test]
    fn a_tenant_finds_its_own_alone() {
        let [first, second] = tenants();
        let kept = Shelves::new(ShelfLimits::default());
        keep(&kept, "resp_1", first, 100);
        assert_eq!(kept.get("resp_1", first), Some(Arc::new(100)));
        assert_eq!(kept.get("resp_1", second), None);
        assert!(!kept.forget("resp_1", second));
        assert!(kept.forget("resp_1", first));
        assert_eq!(kept.get("resp_1", first), None);
        assert!(kept.lock().is_empty());
    }

    #[test]
    fn the_oldest_go_where_there_is_no_room() {
        let [first, _] = tenants();
        let limits = ShelfLimits {
            n_entries: 3,
            n_bytes: 10_000,
        };
        let kept = Shelves::new(limits);
        for number in 0..5 {
            keep(&kept, &format!("{number}"), first, 100);
        }
        let has = |id: &str| kept.get(id, first).is_some();
        assert_eq!(["1", "2", "3", "4"].map(has), [false, true, true, true]);
        keep(&kept, "large", first, 9000);
        assert_eq!(["2", "3", "4", "large"].map(has), [false, true, true, true]);
        // Bytes run short before entries do.
        keep(&kept, "larger", first, 9500);
        assert_eq!(["4", "large", "larger"].map(has), [false, false, true]);
        keep(&kept, "too large", first, 10_000);
        assert_eq!(["larger", "too large"].map(has), [true, false]);
        assert_eq!(limits.exceeded(&kept.lock()).map(|_| ()), None);
    }

    #[test]
    fn a_tenant_with_less_than_its_share_loses_nothing_to_others() {
        let [first, second] = tenants();
        let kept = Shelves::new(ShelfLimits {
            n_entries: 4,
            n_bytes: 10_000,
        });
        let has = |tenant, ids: [&str; 2]| ids.map(|id| kept.get(id, tenant).is_some());
        for id in ["a", "b", "c", "d"] {
            keep(&kept, id, first, 100);
        }
        // A tenant may use what others leave; once both have answers, each keeps half.
        keep(&kept, "e", second, 100);
        keep(&kept, "f", second, 100);
        assert_eq!(has(first, ["a", "b"]), [false, false]);
        for id in ["g", "h", "i"] {
            keep(&kept, id, second, 100);
        }
        assert_eq!(has(first, ["c", "d"]), [true, true]);
        assert_eq!(has(second, ["h", "i"]), [true, true]);
        // So it is with bytes: a large answer takes the room of its own tenant.
        keep(&kept, "small", first, 3000);
        keep(&kept, "large", second, 6000);
        keep(&kept, "larger", second, 6500);
        assert_eq!(has(first, ["d", "small"]), [true, true]);
        assert_eq!(has(second, ["large", "larger"]), [false, true]);
    }
}
