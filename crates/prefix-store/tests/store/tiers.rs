//! Tiers: what comes out, in time, whatever their stores do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cellar_prefix_store::{
    Busy, DirectoryConfig, DirectoryStore, FrameFault, GroupName, GroupStore, HostStore, Job,
    JobId, Kept, Outcome, StoreError, Tier, TierConfig, TierCounts,
};

use crate::{LONG, fetch, frame, in_time, key, name, names_of, store};

pub(crate) fn host(config: TierConfig) -> Tier {
    Tier::start(key(1), vec![Box::new(HostStore::new(1 << 20))], config).unwrap()
}

/// A store that waits for permission before each answer, and may be broken.
#[derive(Debug)]
struct Held {
    inner: HostStore,
    go: Receiver<Result<(), &'static str>>,
    n_asked: Arc<AtomicUsize>,
}

impl Held {
    fn new() -> (Self, Sender<Result<(), &'static str>>, Arc<AtomicUsize>) {
        let (send, go) = channel();
        let n_asked = Arc::default();
        let held = Self {
            inner: HostStore::new(1 << 20),
            go,
            n_asked: Arc::clone(&n_asked),
        };
        (held, send, n_asked)
    }

    fn wait(&self) -> Result<(), StoreError> {
        self.n_asked.fetch_add(1, Ordering::Relaxed);
        let answer = self.go.recv().unwrap_or(Err("the test is over"));
        answer.map_err(|reason| StoreError::Unreachable {
            reason: reason.to_owned(),
        })
    }
}

impl GroupStore for Held {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        self.wait()?;
        self.inner.has(names)
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        self.wait()?;
        self.inner.get(names)
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        self.wait()?;
        self.inner.put(name, frame)
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.inner.evict(name)
    }
}

pub(crate) fn get(id: u64, names: &[GroupName], deadline: Instant) -> Job {
    Job::Get {
        id: JobId(id),
        names: names.to_vec(),
        deadline,
    }
}

pub(crate) fn put(n: u8, n_bytes: usize) -> Job {
    Job::Put {
        name: name(n),
        payload: vec![n; n_bytes].into(),
    }
}

#[test]
fn a_prefix_comes_back_up_to_what_is_missing() {
    let tier = host(TierConfig::default());
    let tokens: Vec<u32> = (0..5 * 256).collect();
    let names = names_of(&key(1), 7, &tokens);
    store(&tier, &names[..3], |at| vec![at as u8; 1000]);
    store(&tier, &names[4..], |at| vec![at as u8; 1000]);
    let found = fetch(&tier, 1, &names);
    assert_eq!(found, [0, 1, 2].map(|n| vec![n; 1000]));
    tier.submit(Job::Probe {
        id: JobId(2),
        names: names.clone(),
        deadline: in_time(),
    })
    .unwrap();
    let probed = tier.next_within(LONG);
    assert!(
        matches!(
            probed,
            Some(Outcome::Probed {
                id: JobId(2),
                n_found: 3
            })
        ),
        "{probed:?}"
    );
    // Another salt, or another key, shares nothing.
    for other in [names_of(&key(1), 8, &tokens), names_of(&key(2), 7, &tokens)] {
        assert!(other.iter().all(|name| !names.contains(name)));
        assert!(fetch(&tier, 3, &other).is_empty());
    }
    assert!(tier.next().is_none());
    let TierCounts {
        n_fetched,
        n_stored,
        n_failed,
        ..
    } = tier.counts();
    assert_eq!((n_fetched, n_stored, n_failed), (3, 4, 0));
}

/// Damaged, cut off, foreign, older, forged and swapped groups are refused, counted and removed, so
/// that the next put stores the right one.
#[test]
fn wrong_groups_never_come_out() {
    let dir = tempfile::tempdir().unwrap();
    let config = || DirectoryConfig {
        dir: dir.path().to_owned(),
        max_bytes: 1 << 20,
    };
    let good = frame(name(1), b"right").to_vec();
    let edit = |at: usize, to: u8| {
        let mut frame = good.clone();
        frame[at] = to;
        frame
    };
    let forged = cellar_prefix_store::Group::seal(&key(9), name(1), b"wrong").unwrap();
    let wrong = [
        edit(66, 0xff),
        good[..good.len() - 1].to_vec(),
        b"something else".to_vec(),
        Vec::new(),
        edit(8, 9),
        forged.frame().to_vec(),
        frame(name(2), b"another").to_vec(),
    ];
    let mut n_refused = 0;
    for bytes in wrong {
        std::fs::write(dir.path().join(format!("{}.group", name(1))), &bytes).unwrap();
        let directory = DirectoryStore::open(config()).unwrap();
        let tier = Tier::start(key(1), vec![Box::new(directory)], TierConfig::default()).unwrap();
        assert!(fetch(&tier, 1, &[name(1)]).is_empty());
        n_refused += tier.counts().n_refused;
        let is_forged = bytes == forged.frame().to_vec();
        assert_eq!(tier.counts().n_forged, u64::from(is_forged));
        store(&tier, &[name(1)], |_| b"right".to_vec());
        assert_eq!(tier.counts().n_stored, 1);
        assert_eq!(fetch(&tier, 2, &[name(1)]), [b"right"]);
    }
    assert_eq!(n_refused, 7);
    assert_eq!(FrameFault::Damaged.to_string(), "it is damaged");
}

/// A store that hangs: jobs end by their deadlines, and nobody who submits one waits.
#[test]
fn a_store_that_hangs_costs_no_more_than_the_deadline() {
    let (held, go, n_asked) = Held::new();
    let tier = Tier::start(key(1), vec![Box::new(held)], TierConfig::default()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(50);
    for id in 0..10 {
        tier.submit(get(id, &[name(1)], deadline)).unwrap();
    }
    let mut ended = Vec::new();
    while let Some(outcome) = tier.next_within(Duration::from_millis(500)) {
        match outcome {
            Outcome::Failed {
                id,
                error: StoreError::TimedOut,
            } => ended.push(id.0),
            other => panic!("{other:?}"),
        }
    }
    ended.sort();
    assert_eq!(ended, (0..10).collect::<Vec<_>>());
    // Only the first reached the store; what it says now is nobody's any more.
    go.send(Ok(())).unwrap();
    go.send(Ok(())).unwrap();
    store(&tier, &[name(1)], |_| b"one".to_vec());
    assert_eq!(n_asked.load(Ordering::Relaxed), 2);
    go.send(Ok(())).unwrap();
    assert_eq!(fetch(&tier, 11, &[name(1)]), [b"one"]);
    assert!(tier.next().is_none());
}

#[test]
fn a_cancelled_read_has_no_outcome() {
    let (held, go, _) = Held::new();
    let tier = Tier::start(key(1), vec![Box::new(held)], TierConfig::default()).unwrap();
    tier.submit(get(1, &[name(1)], in_time())).unwrap();
    tier.submit(get(2, &[name(1)], in_time())).unwrap();
    tier.submit(get(3, &[name(1)], in_time())).unwrap();
    tier.cancel(JobId(1));
    tier.cancel(JobId(2));
    for _ in 0..3 {
        go.send(Ok(())).unwrap();
    }
    let outcome = tier.next_within(LONG);
    assert!(
        matches!(outcome, Some(Outcome::Got { id: JobId(3), .. })),
        "{outcome:?}"
    );
    assert!(tier.next_within(Duration::from_millis(50)).is_none());
}

/// A store that is down is left alone for a while, and is used again after it.
#[test]
fn a_store_that_is_down_is_left_alone() {
    let (held, go, n_asked) = Held::new();
    let config = TierConfig {
        retry_after: Duration::from_millis(200),
        ..TierConfig::default()
    };
    let tier = Tier::start(key(1), vec![Box::new(held)], config).unwrap();
    go.send(Err("connection refused")).unwrap();
    tier.submit(get(1, &[name(1)], in_time())).unwrap();
    let outcome = tier.next_within(LONG);
    assert!(
        matches!(outcome, Some(Outcome::Failed { .. })),
        "{outcome:?}"
    );
    let began = Instant::now();
    if tier.is_down() {
        tier.submit(get(2, &[name(1)], in_time())).unwrap();
        let outcome = tier.next_within(LONG);
        let is_left = n_asked.load(Ordering::Relaxed) == 1;
        // Unless this machine is so slow that the pause is over.
        assert!(
            is_left || began.elapsed() > Duration::from_millis(100),
            "{outcome:?}"
        );
        if is_left {
            assert!(
                matches!(outcome, Some(Outcome::Failed { .. })),
                "{outcome:?}"
            );
        }
    }
    while tier.is_down() {
        std::thread::sleep(Duration::from_millis(5));
    }
    go.send(Ok(())).unwrap();
    go.send(Ok(())).unwrap();
    store(&tier, &[name(1)], |_| b"one".to_vec());
    assert_eq!(fetch(&tier, 3, &[name(1)]), [b"one"]);
    assert_eq!(tier.counts().n_down, 1);
}

/// Reads go before writes; writes wait within their limit, each group once.
#[test]
fn writes_wait_and_are_bounded() {
    let (held, go, _) = Held::new();
    let config = TierConfig {
        max_waiting_bytes: 1000,
        ..TierConfig::default()
    };
    let tier = Tier::start(key(1), vec![Box::new(held)], config).unwrap();
    for n in 0..10 {
        tier.submit(put(n, 100)).unwrap();
    }
    tier.submit(put(3, 100)).unwrap();
    assert_eq!(tier.submit(put(10, 1)), Err(Busy));
    assert!(!tier.flush(Duration::from_millis(20)));
    // The store is in its first write; the read comes next.
    tier.submit(get(1, &[name(0), name(9)], in_time())).unwrap();
    go.send(Ok(())).unwrap();
    go.send(Ok(())).unwrap();
    match tier.next_within(LONG) {
        Some(Outcome::Got { groups, .. }) => assert_eq!(groups.len(), 1),
        other => panic!("{other:?}"),
    }
    (0..9).for_each(|_| go.send(Ok(())).unwrap());
    assert!(tier.flush(LONG));
    let counts = tier.counts();
    assert_eq!((counts.n_stored, counts.n_not_stored), (10, 1));
    tier.submit(put(10, 1)).unwrap();
    // What waits at the end is lost; nothing hangs.
    drop(go);
    drop(tier);
}

/// Many threads, many handles of one directory: each group that comes out is right.
#[test]
fn threads_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let open = || -> Box<dyn GroupStore> {
        let config = DirectoryConfig {
            dir: dir.path().to_owned(),
            max_bytes: 20_000,
        };
        Box::new(DirectoryStore::open(config).unwrap())
    };
    let tiers: Vec<Tier> = (0..2)
        .map(|_| Tier::start(key(1), vec![open(), open()], TierConfig::default()).unwrap())
        .collect();
    let n_found = Mutex::new(0);
    std::thread::scope(|scope| {
        for tier in &tiers {
            let n_found = &n_found;
            scope.spawn(move || {
                for round in 0..20 {
                    for n in 0..30 {
                        tier.submit(put(n, 800)).unwrap();
                    }
                    assert!(tier.flush(LONG));
                    for n in 0..30 {
                        let found = fetch(tier, round * 100 + u64::from(n), &[name(n)]);
                        assert!(found.iter().all(|found| *found == vec![n; 800]));
                        *n_found.lock().unwrap() += found.len();
                    }
                }
            });
        }
    });
    assert!(*n_found.lock().unwrap() > 100);
    assert_eq!(
        tiers
            .iter()
            .map(|tier| tier.counts().n_refused)
            .sum::<u64>(),
        0
    );
}

#[test]
fn groups_are_found_wherever_they_are() {
    let tier = host(TierConfig::default());
    let there = [7, 64, 99];
    store(&tier, &there.map(name), |at| vec![at as u8; 10]);
    let id = JobId(1);
    let names: Vec<GroupName> = (0..100).map(name).collect();
    let deadline = in_time();
    tier.submit(Job::Find {
        id,
        names,
        deadline,
    })
    .unwrap();
    let Some(Outcome::Found { is_there, .. }) = tier.next_within(LONG) else {
        panic!("nothing is found");
    };
    let found = (0_u8..).zip(is_there).filter(|(_, is_there)| *is_there);
    assert_eq!(found.map(|(n, _)| n).collect::<Vec<_>>(), there);
}

/// Waits until a store was asked so often.
fn until_asked(n_asked: &AtomicUsize, n: usize) {
    let began = Instant::now();
    while n_asked.load(Ordering::Relaxed) < n {
        assert!(began.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The store is not asked for what nobody waits for any more.
#[test]
fn a_read_that_is_late_does_not_reach_the_store() {
    let (held, go, n_asked) = Held::new();
    let tier = Tier::start(key(1), vec![Box::new(held)], TierConfig::default()).unwrap();
    let (deadline, names) = (Instant::now(), vec![name(1)]);
    for job in [
        Job::Probe {
            id: JobId(1),
            names: names.clone(),
            deadline,
        },
        Job::Find {
            id: JobId(2),
            names: names.clone(),
            deadline,
        },
        get(3, &names, deadline),
        get(4, &names, in_time()),
    ] {
        tier.submit(job).unwrap();
    }
    // The last one is the first that comes to the store.
    until_asked(&n_asked, 1);
    let mut late: Vec<u64> = Vec::new();
    while let Some(outcome) = tier.next() {
        late.push(match outcome {
            Outcome::Probed { id, n_found: 0 } => id.0,
            Outcome::Found { id, is_there } if is_there == [false] => id.0,
            Outcome::Got { id, groups } if groups.is_empty() => id.0,
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(late, [1, 2, 3]);
    go.send(Ok(())).unwrap();
    let outcome = tier.next_within(LONG);
    assert!(
        matches!(outcome, Some(Outcome::Got { id: JobId(4), .. })),
        "{outcome:?}"
    );
    assert_eq!(n_asked.load(Ordering::Relaxed), 1);
}

/// A read that is given up in its middle asks for no more.
#[test]
fn a_cancelled_read_stops_between_two_questions() {
    let (held, go, n_asked) = Held::new();
    let tier = Tier::start(key(1), vec![Box::new(held)], TierConfig::default()).unwrap();
    let names: Vec<GroupName> = (0..9).map(name).collect();
    (0..9).for_each(|_| go.send(Ok(())).unwrap());
    store(&tier, &names, |_| b"some".to_vec());
    tier.submit(get(1, &names, in_time())).unwrap();
    until_asked(&n_asked, 10);
    tier.cancel(JobId(1));
    go.send(Ok(())).unwrap();
    go.send(Ok(())).unwrap();
    assert_eq!(fetch(&tier, 2, &names[..1]), [b"some"]);
    assert_eq!(
        n_asked.load(Ordering::Relaxed),
        11,
        "eight of nine groups, then one"
    );
}

#[test]
fn reads_that_wait_are_bounded() {
    let (held, go, n_asked) = Held::new();
    let config = TierConfig {
        max_waiting_reads: 2,
        ..TierConfig::default()
    };
    let tier = Tier::start(key(1), vec![Box::new(held)], config).unwrap();
    tier.submit(get(1, &[name(1)], in_time())).unwrap();
    until_asked(&n_asked, 1);
    let mut submit = |id| tier.submit(get(id, &[name(1)], in_time()));
    assert_eq!([2, 3, 4].map(&mut submit), [Ok(()), Ok(()), Err(Busy)]);
    (0..3).for_each(|_| go.send(Ok(())).unwrap());
    for id in 1..=3 {
        let outcome = tier.next_within(LONG);
        let is_next = matches!(&outcome, Some(Outcome::Got { id: of, .. }) if of.0 == id);
        assert!(is_next, "{outcome:?}");
    }
}

/// A store with one group that is not what its name says, which cannot be removed; it does not say
/// what it has.
#[derive(Debug)]
struct Stuck;

impl GroupStore for Stuck {
    fn has(&mut self, _: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        Err(StoreError::Full)
    }

    fn get(&mut self, _: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        Ok(vec![Some(frame(name(2), b"another"))])
    }

    fn put(&mut self, _: GroupName, _: &Arc<[u8]>) -> Result<Kept, StoreError> {
        Err(StoreError::Full)
    }

    fn evict(&mut self, _: GroupName) -> Result<(), StoreError> {
        Err(StoreError::Full)
    }
}

/// A group that is refused and cannot be removed is refused again. A store that answers, if only
/// with errors, is not down.
#[test]
fn a_store_that_refuses_is_asked_again() {
    let tier = Tier::start(key(1), vec![Box::new(Stuck)], TierConfig::default()).unwrap();
    for n in 1..=2 {
        assert!(fetch(&tier, n, &[name(1)]).is_empty());
        assert_eq!(tier.counts().n_refused, n);
        tier.submit(Job::Find {
            id: JobId(10 + n),
            names: vec![name(1)],
            deadline: in_time(),
        })
        .unwrap();
        let outcome = tier.next_within(LONG);
        assert!(
            matches!(
                outcome,
                Some(Outcome::Failed {
                    error: StoreError::Full,
                    ..
                })
            ),
            "{outcome:?}"
        );
        assert!(!tier.is_down());
    }
    assert_eq!((tier.counts().n_failed, tier.counts().n_down), (2, 0));
}

/// What was taken and cannot be stored is lost, which is more than not to be taken.
#[test]
fn what_a_store_does_not_keep_is_counted() {
    let tier = Tier::start(key(1), vec![Box::new(Stuck)], TierConfig::default()).unwrap();
    for n in 1..=2 {
        tier.submit(put(n, 10)).unwrap();
    }
    assert!(tier.flush(LONG));
    let counts = tier.counts();
    assert_eq!(
        (counts.n_lost, counts.n_not_stored, counts.n_stored),
        (2, 2, 0)
    );
    assert_eq!((counts + counts).n_lost, 4);
}
