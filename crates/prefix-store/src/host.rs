//! [`HostStore`]: groups in the memory of this process.
//!
//! Invariant: the frames take at most the budget.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::StoreError;
use crate::key::GroupName;
use crate::ledger::Ledger;
use crate::store::{GroupStore, Kept};

/// Groups in memory, the least recently used of which go for others.
#[derive(Debug)]
pub struct HostStore {
    frames: HashMap<GroupName, Arc<[u8]>>,
    ledger: Ledger,
    max_bytes: u64,
}

impl HostStore {
    /// An empty store of so many bytes.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            frames: HashMap::new(),
            ledger: Ledger::default(),
            max_bytes,
        }
    }

    /// The bytes that groups take.
    pub fn n_bytes(&self) -> u64 {
        self.ledger.n_bytes()
    }

    fn forget(&mut self, name: GroupName) {
        self.frames.remove(&name);
        self.ledger.remove(name);
    }
}

impl GroupStore for HostStore {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        let there = names.iter().map(|name| self.frames.contains_key(name));
        Ok(there.collect())
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        let frames = names.iter().map(|name| {
            self.ledger.touch(*name);
            self.frames.get(name).cloned()
        });
        Ok(frames.collect())
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        if self.frames.contains_key(&name) {
            self.ledger.touch(name);
            return Ok(Kept::Known);
        }
        let n_bytes = frame.len() as u64;
        if n_bytes > self.max_bytes {
            let max = self.max_bytes;
            return Err(StoreError::TooLarge { n_bytes, max });
        }
        while self.ledger.n_bytes() + n_bytes > self.max_bytes
            && let Some(oldest) = self.ledger.oldest()
        {
            self.forget(oldest);
        }
        self.frames.insert(name, Arc::clone(frame));
        self.ledger.insert(name, n_bytes);
        Ok(Kept::New)
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.forget(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u8) -> GroupName {
        GroupName([n; 32])
    }

    #[test]
    fn the_least_recently_used_go_for_others() {
        let mut store = HostStore::new(30);
        let frame: Arc<[u8]> = [0; 10].into();
        for n in 0..3 {
            assert_eq!(store.put(name(n), &frame).unwrap(), Kept::New);
        }
        store.get(&[name(0)]).unwrap();
        assert_eq!(store.put(name(1), &frame).unwrap(), Kept::Known);
        store.put(name(3), &frame).unwrap();
        let all = [0, 1, 2, 3].map(name);
        assert_eq!(store.has(&all).unwrap(), [true, true, false, true]);
        assert_eq!(store.n_bytes(), 30);
        // One that is as large as all: the others go. One that is larger: none go.
        let large: Arc<[u8]> = [0; 30].into();
        store.put(name(4), &large).unwrap();
        assert_eq!(store.n_bytes(), 30);
        let larger: Arc<[u8]> = [0; 31].into();
        let refused = store.put(name(5), &larger).unwrap_err();
        assert!(matches!(
            refused,
            StoreError::TooLarge {
                n_bytes: 31,
                max: 30
            }
        ));
        assert_eq!(store.has(&[name(4), name(5)]).unwrap(), [true, false]);
        store.evict(name(4)).unwrap();
        store.evict(name(4)).unwrap();
        assert_eq!(store.n_bytes(), 0);
    }
}
