//! The queue of a tier in all orders of its threads that locks allow, by loom, up to so many
//! preemptions.
//!
//! The tier's own source is compiled here once more, with loom's locks and threads in the place of
//! the standard library's. `LOOM_MAX_PREEMPTIONS=4` tries more. No time passes in these models:
//! who waits for an outcome that never comes waits for ever, which loom calls a deadlock.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_prefix_store::{
    GroupName, GroupStore, Job, JobId, Kept, MIN_SECRET, Outcome, SealedPayload, StoreError,
    StoreKey,
};
use thread_orders::in_all_orders;

#[path = "../src/tier/mod.rs"]
#[allow(dead_code, unreachable_pub)] // what the engine alone asks of it
mod tier;

use tier::{Tier, TierConfig};

// The tier's neighbours, by the names that it uses.
mod counts {
    pub(crate) use cellar_prefix_store::TierCounts;
}
mod error {
    pub(crate) use cellar_prefix_store::StoreError;
}
mod frame {
    pub(crate) use cellar_prefix_store::{FrameFault, Group, SealedPayload};
}
mod job {
    pub(crate) use cellar_prefix_store::{Busy, Job, JobId, Outcome};
}
mod key {
    pub(crate) use cellar_prefix_store::{GroupName, StoreKey};
}
mod rates {
    pub(crate) use cellar_prefix_store::Rates;
}
mod store {
    pub(crate) use cellar_prefix_store::{GroupStore, Kept};
}

/// Loom's, by the names of the module that the tier uses.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::{Builder as ThreadBuilder, JoinHandle};
    pub(crate) use thread_orders::Condvar;
}

/// A store in memory, which all of its handles share.
#[derive(Clone, Debug, Default)]
struct SharedStore(Arc<std::sync::Mutex<Vec<StoredFrame>>>);

type StoredFrame = (GroupName, Arc<[u8]>);

impl SharedStore {
    fn find(&self, name: GroupName) -> Option<Arc<[u8]>> {
        let groups = self.0.lock().unwrap();
        let found = groups.iter().find(|(own, _)| *own == name);
        found.map(|(_, frame)| Arc::clone(frame))
    }
}

impl GroupStore for SharedStore {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        let names = names.iter();
        Ok(names.map(|&name| self.find(name).is_some()).collect())
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        Ok(names.iter().map(|&name| self.find(name)).collect())
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        if self.find(name).is_some() {
            return Ok(Kept::Known);
        }
        self.0.lock().unwrap().push((name, Arc::clone(frame)));
        Ok(Kept::New)
    }

    fn pin(&mut self, name: GroupName, sealed: &SealedPayload<'_>) -> Result<(), StoreError> {
        let frame = sealed.parts().concat();
        self.0.lock().unwrap().push((name, Arc::from(frame)));
        Ok(())
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.0.lock().unwrap().retain(|(own, _)| *own != name);
        Ok(())
    }
}

const FOR_EVER: Duration = Duration::from_secs(3600);

fn start(n_threads: usize) -> (Tier, SharedStore) {
    let store = SharedStore::default();
    let handle = || -> Box<dyn GroupStore> { Box::new(store.clone()) };
    let handles = (0..n_threads).map(|_| handle()).collect();
    let key = StoreKey::new(&[1; MIN_SECRET]).unwrap();
    let tier = Tier::start(key, handles, TierConfig::default()).unwrap();
    (tier, store)
}

fn name(number: u8) -> GroupName {
    GroupName([number; 32])
}

fn put(number: u8) -> Job {
    Job::Put {
        name: name(number),
        payload: Arc::from([number]),
    }
}

fn get(id: u64, number: u8) -> Job {
    Job::Get {
        id: JobId(id),
        names: vec![name(number)],
        deadline: Instant::now() + FOR_EVER,
    }
}

/// The payloads of a fetch.
fn fetched(outcome: Option<Outcome>) -> (JobId, Vec<Vec<u8>>) {
    let Some(Outcome::Got { id, groups }) = outcome else {
        panic!("{outcome:?}");
    };
    let payloads = groups.iter().map(|group| group.payload().to_vec());
    (id, payloads.collect())
}

/// A thread that is about to sleep, or sleeps, comes to each job; who waits for writes and outcomes
/// is woken.
#[test]
fn no_wake_up_is_lost() {
    in_all_orders(3, || {
        let (tier, _) = start(1);
        tier.submit(put(1)).unwrap();
        assert!(tier.flush(FOR_EVER));
        tier.submit(get(7, 1)).unwrap();
        let outcome = tier.next_within(FOR_EVER);
        assert_eq!(fetched(outcome), (JobId(7), vec![vec![1]]));
        assert!(tier.next().is_none());
    });
}

/// Two threads share the jobs: each write is done once, and each read has one outcome.
#[test]
fn each_job_is_done_once() {
    in_all_orders(2, || {
        let (tier, store) = start(2);
        for job in [put(1), put(2), put(1), get(7, 3)] {
            tier.submit(job).unwrap();
        }
        let outcome = tier.next_within(FOR_EVER);
        assert_eq!(fetched(outcome), (JobId(7), vec![]));
        assert!(tier.flush(FOR_EVER));
        let counts = tier.counts();
        // The same group, once more: not at all while it waits, else it was there already.
        assert_eq!(counts.n_stored, 2);
        assert!(counts.n_known <= 1 && counts.n_not_stored == 0);
        assert_eq!(store.0.lock().unwrap().len(), 2);
        assert!(tier.next().is_none());
    });
}

/// A read that is given up has no outcome, or had it before; the one behind it has its own.
#[test]
fn what_is_cancelled_has_no_outcome_afterwards() {
    in_all_orders(3, || {
        let (tier, _) = start(1);
        tier.submit(get(1, 1)).unwrap();
        tier.submit(get(2, 2)).unwrap();
        tier.cancel(JobId(1));
        let before = tier.next();
        let mut ids: Vec<JobId> = before
            .map(|outcome| fetched(Some(outcome)).0)
            .into_iter()
            .collect();
        if !ids.contains(&JobId(2)) {
            let outcome = tier.next_within(FOR_EVER);
            ids.push(fetched(outcome).0);
        }
        // At the end at the latest, the second has its outcome, and the first none any more.
        if ids == [JobId(1)] {
            ids.push(fetched(tier.next_within(FOR_EVER)).0);
        }
        assert!(ids == [JobId(2)] || ids == [JobId(1), JobId(2)], "{ids:?}");
        assert!(tier.next().is_none());
    });
}

/// A pin has one outcome, and none is kept whose bytes are not needed any more when its turn comes.
#[test]
fn a_pin_has_one_outcome() {
    in_all_orders(2, || {
        let (tier, store) = start(2);
        let bytes = Arc::new(vec![1]);
        for (id, payload) in [(8, Arc::clone(&bytes)), (9, Arc::new(vec![2]))] {
            let (id, names) = (JobId(id), vec![name(id as u8)]);
            tier.submit(Job::Pin { id, names, payload }).unwrap();
        }
        let mut ids = [(); 2].map(|()| tier.next_within(FOR_EVER).unwrap().id());
        ids.sort_unstable();
        assert_eq!(ids, [JobId(8), JobId(9)]);
        assert!(tier.next().is_none());
        assert!(store.find(name(8)).is_some() && store.find(name(9)).is_none());
    });
}

/// A tier ends whatever waits, and whatever its threads do.
#[test]
fn a_tier_ends_with_jobs_under_way() {
    in_all_orders(3, || {
        let (tier, store) = start(2);
        tier.submit(put(1)).unwrap();
        tier.submit(get(7, 1)).unwrap();
        drop(tier);
        assert!(store.0.lock().unwrap().len() <= 1);
        assert_eq!(Arc::strong_count(&store.0), 1, "a thread goes on");
    });
}
