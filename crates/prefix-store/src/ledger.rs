//! [`Ledger`]: which groups a store has, how many bytes they take, and which one goes first.
//!
//! Invariant: the bytes are the sum of all groups; the least recently used group goes first. Groups
//! are nearly the same size and each costs its size to compute, so there is nothing better to
//! weigh than recency. Knows no clock: it counts uses.

use std::collections::{BTreeMap, HashMap};

use crate::key::GroupName;

/// The groups of a store, by recency.
#[derive(Debug, Default)]
pub struct Ledger {
    groups: HashMap<GroupName, Entry>,
    /// By last use, the oldest first.
    order: BTreeMap<u64, GroupName>,
    n_bytes: u64,
    n_uses: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    n_bytes: u64,
    used: u64,
}

impl Ledger {
    /// Bytes of all groups.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Bytes of a group that is there.
    pub fn bytes_of(&self, name: GroupName) -> Option<u64> {
        self.groups.get(&name).map(|entry| entry.n_bytes)
    }

    /// A group is there, and was used now.
    pub fn insert(&mut self, name: GroupName, n_bytes: u64) {
        self.remove(name);
        self.n_uses += 1;
        let used = self.n_uses;
        self.groups.insert(name, Entry { n_bytes, used });
        self.order.insert(used, name);
        self.n_bytes += n_bytes;
    }

    /// A group was used, where it is there.
    pub fn touch(&mut self, name: GroupName) {
        if let Some(n_bytes) = self.bytes_of(name) {
            self.insert(name, n_bytes);
        }
    }

    /// A group is gone.
    pub fn remove(&mut self, name: GroupName) {
        if let Some(entry) = self.groups.remove(&name) {
            self.order.remove(&entry.used);
            self.n_bytes -= entry.n_bytes;
        }
    }

    /// The group that goes first.
    pub fn oldest(&self) -> Option<GroupName> {
        self.order.first_key_value().map(|(_, name)| *name)
    }
}
