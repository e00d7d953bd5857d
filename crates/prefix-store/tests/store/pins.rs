//! Bytes that tiers pin, and stores that cannot or that panic.

use std::sync::Arc;

use cellar_prefix_store::{
    Busy, DirectoryConfig, DirectoryStore, GroupName, GroupStore, Job, JobId, Kept, Outcome,
    StoreError, Tier, TierConfig,
};

use crate::tiers::{get, host, put};
use crate::{LONG, fetch, in_time, key, name};

fn pin(id: u64, names: &[GroupName], payload: &Arc<Vec<u8>>) -> Job {
    Job::Pin {
        id: JobId(id),
        names: names.to_vec(),
        payload: Arc::clone(payload),
    }
}

/// Bytes that are pinned as several groups come back in order, and are gone when they are evicted.
#[test]
fn pinned_bytes_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirectoryStore::open(DirectoryConfig {
        dir: dir.path().to_owned(),
        max_bytes: 1 << 20,
    });
    let stores: Vec<Box<dyn GroupStore>> = vec![Box::new(store.unwrap())];
    let tier = Tier::start(key(1), stores, TierConfig::default()).unwrap();
    let names = [1, 2, 3].map(name);
    // One byte more than three equal pieces, and fewer bytes than pieces.
    for n_bytes in [1000, 2, 0] {
        let payload: Vec<u8> = (0..n_bytes).map(|at| at as u8).collect();
        let payload = Arc::new(payload);
        tier.submit(pin(1, &names, &payload)).unwrap();
        let pinned = tier.next_within(LONG);
        assert!(
            matches!(pinned, Some(Outcome::Pinned { id: JobId(1) })),
            "{pinned:?}"
        );
        assert_eq!(Arc::strong_count(&payload), 1, "the job has no bytes");
        assert_eq!(fetch(&tier, 2, &names).concat(), *payload);
        let names = names.to_vec();
        tier.submit(Job::Evict { names }).unwrap();
        // In order: what is written next, is after it.
        tier.submit(put(9, 10)).unwrap();
        assert!(tier.flush(LONG));
        assert!(fetch(&tier, 3, &[1, 2, 3].map(name)).is_empty());
    }
    // Nobody needs these bytes any more: they are not written.
    tier.submit(pin(4, &names, &Arc::default())).unwrap();
    let pinned = tier.next_within(LONG);
    assert!(matches!(pinned, Some(Outcome::Pinned { .. })), "{pinned:?}");
    assert!(fetch(&tier, 5, &names).is_empty());
}

/// A store that cannot pin says so, and one that fails at the second piece keeps none.
#[test]
fn what_cannot_be_pinned_is_not_there() {
    let payload = Arc::new(vec![1; 3000]);
    let names = [1, 2, 3].map(name);
    let tier = host(TierConfig::default());
    tier.submit(pin(1, &names, &payload)).unwrap();
    let refused = tier.next_within(LONG);
    assert!(
        matches!(
            refused,
            Some(Outcome::Failed {
                id: JobId(1),
                error: StoreError::Unpinnable
            })
        ),
        "{refused:?}"
    );
    let dir = tempfile::tempdir().unwrap();
    let store = DirectoryStore::open(DirectoryConfig {
        dir: dir.path().to_owned(),
        max_bytes: 2000,
    });
    let stores: Vec<Box<dyn GroupStore>> = vec![Box::new(store.unwrap())];
    let tier = Tier::start(key(1), stores, TierConfig::default()).unwrap();
    tier.submit(pin(1, &names, &payload)).unwrap();
    let refused = tier.next_within(LONG);
    assert!(
        matches!(
            refused,
            Some(Outcome::Failed {
                error: StoreError::Full,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(fetch(&tier, 2, &names).is_empty());
    assert!(!tier.is_down());
}

/// A store that panics when it is asked for more than one group.
#[derive(Debug)]
struct Panics;

impl GroupStore for Panics {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        Ok(vec![false; names.len()])
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        assert!(names.len() < 2, "as the test wants");
        Ok(vec![None; names.len()])
    }

    fn put(&mut self, _name: GroupName, _frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        Ok(Kept::New)
    }

    fn evict(&mut self, _name: GroupName) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Jobs of a thread that panics fail at once; with the last thread, all do, and no more are taken.
#[test]
fn a_store_that_panics_fails_its_jobs() {
    let stores: Vec<Box<dyn GroupStore>> = vec![Box::new(Panics), Box::new(Panics)];
    let tier = Tier::start(key(1), stores, TierConfig::default()).unwrap();
    let names = [1, 2].map(name);
    for id in [1, 2] {
        assert!(fetch(&tier, 10 + id, &names[..1]).is_empty(), "it works");
        tier.submit(get(id, &names, in_time())).unwrap();
        let failed = tier.next_within(LONG);
        assert!(
            matches!(
                failed,
                Some(Outcome::Failed { id: of, error: StoreError::Unreachable { .. } }) if of == JobId(id)
            ),
            "{failed:?}"
        );
    }
    assert!(tier.next().is_none());
    let payload = Arc::new(vec![1]);
    assert_eq!(tier.submit(get(3, &names, in_time())), Err(Busy));
    assert_eq!(tier.submit(pin(4, &names, &payload)), Err(Busy));
    assert_eq!(tier.submit(put(5, 10)), Err(Busy));
    assert!(tier.flush(LONG));
}
