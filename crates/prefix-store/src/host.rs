//! [`HostStore`]: groups in the memory of this process.
//!
//! Invariant: the frames and what is reserved take at most the budget.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::StoreError;
use crate::key::GroupName;
use crate::ledger::Ledger;
use crate::store::{GroupStore, Kept};

/// Groups in memory, the least recently used of which go for others. Clones share the groups.
#[derive(Clone, Debug)]
pub struct HostStore(Arc<Mutex<Frames>>);

#[derive(Debug)]
struct Frames {
    frames: HashMap<GroupName, Arc<[u8]>>,
    ledger: Ledger,
    /// Bytes of [`ReservedBytes`].
    reserved: u64,
    max_bytes: u64,
}

/// Bytes of a [`HostStore`] that something else has, until this is dropped.
#[derive(Debug)]
pub struct ReservedBytes {
    store: HostStore,
    n_bytes: u64,
}

impl HostStore {
    /// An empty store of so many bytes.
    pub fn new(max_bytes: u64) -> Self {
        Self(Arc::new(Mutex::new(Frames {
            frames: HashMap::new(),
            ledger: Ledger::default(),
            reserved: 0,
            max_bytes,
        })))
    }

    /// The bytes that groups take, with those that are reserved.
    pub fn n_bytes(&self) -> u64 {
        self.lock().n_bytes()
    }

    /// The bytes that there are.
    pub fn max_bytes(&self) -> u64 {
        self.lock().max_bytes
    }

    /// Takes bytes for something else, for which groups go; `None` where others have too many.
    pub fn reserve(&self, n_bytes: u64) -> Option<ReservedBytes> {
        let mut reserved = ReservedBytes {
            store: self.clone(),
            n_bytes: 0,
        };
        reserved.grow(n_bytes).then_some(reserved)
    }

    fn lock(&self) -> MutexGuard<'_, Frames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservedBytes {
    /// Takes so many bytes more. Returns false, and takes none, where others have too many.
    pub fn grow(&mut self, n_bytes: u64) -> bool {
        let mut all = self.store.lock();
        if n_bytes > all.max_bytes.saturating_sub(all.reserved) {
            return false;
        }
        all.reserved += n_bytes;
        all.make_room(0);
        drop(all);
        self.n_bytes += n_bytes;
        true
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.store.lock().reserved -= self.n_bytes;
    }
}

impl Frames {
    fn n_bytes(&self) -> u64 {
        self.ledger.n_bytes() + self.reserved
    }

    /// Forgets groups until so many bytes more fit.
    fn make_room(&mut self, n_bytes: u64) {
        while self.n_bytes() + n_bytes > self.max_bytes
            && let Some(oldest) = self.ledger.oldest()
        {
            self.forget(oldest);
        }
    }

    fn forget(&mut self, name: GroupName) {
        self.frames.remove(&name);
        self.ledger.remove(name);
    }
}

impl GroupStore for HostStore {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        let frames = &self.lock().frames;
        let there = names.iter().map(|name| frames.contains_key(name));
        Ok(there.collect())
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        let mut all = self.lock();
        let frames = names.iter().map(|name| {
            all.ledger.touch(*name);
            all.frames.get(name).cloned()
        });
        Ok(frames.collect())
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        let mut all = self.lock();
        if all.frames.contains_key(&name) {
            all.ledger.touch(name);
            return Ok(Kept::Known);
        }
        let n_bytes = frame.len() as u64;
        if n_bytes > all.max_bytes {
            let max = all.max_bytes;
            return Err(StoreError::TooLarge { n_bytes, max });
        }
        if n_bytes > all.max_bytes - all.reserved {
            return Err(StoreError::Full);
        }
        all.make_room(n_bytes);
        all.frames.insert(name, Arc::clone(frame));
        all.ledger.insert(name, n_bytes);
        Ok(Kept::New)
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.lock().forget(name);
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
        // What is reserved takes the place of groups, and nothing takes its place.
        for n in 0..3 {
            store.put(name(n), &frame).unwrap();
        }
        let mut reserved = store.reserve(5).unwrap();
        assert_eq!(store.has(&all).unwrap(), [false, true, true, false]);
        assert!(store.reserve(26).is_none() && !reserved.grow(26));
        assert!(reserved.grow(20));
        assert_eq!((store.n_bytes(), store.max_bytes()), (25, 30));
        let refused = store.put(name(0), &frame).unwrap_err();
        assert!(matches!(refused, StoreError::Full), "{refused}");
        drop(reserved);
        assert_eq!(store.n_bytes(), 0);
        // A clone is the same store.
        store.clone().put(name(0), &frame).unwrap();
        assert_eq!(store.has(&[name(0)]).unwrap(), [true]);
    }
}
