//! Preempted requests whose state goes on to files, also to files that cannot be written, vanish,
//! or come back as others: texts are what they are alone, and nothing is left.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cellar_engine::serve::{Counters, ServiceConfig, SwapDisk};
use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, GroupName, GroupStore, Kept, SealedPayload, StoreError,
    StoreKey, Tier, TierConfig,
};
use cellar_trace::{ReplayConfig, Trace, replay};

use crate::service::models::{Case, Generated, preempting};
use crate::service::swap::{Room, alone, serve};

/// What goes wrong with files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Each takes its time.
    Slow,
    /// Every second one is not written.
    FullDisk,
    /// The directory is removed after the second.
    Vanishes,
    /// Each is half as long as it was.
    CutOff,
    /// A byte of each is another.
    Damaged,
    /// Each is read as the first one.
    Exchanged,
    /// The thread that writes them panics at the third.
    Panics,
}

impl Fault {
    /// Whether what is read is not what was written.
    fn changes_files(self) -> bool {
        matches!(self, Self::CutOff | Self::Damaged | Self::Exchanged)
    }
}

#[derive(Debug)]
struct FaultyStore {
    store: DirectoryStore,
    dir: PathBuf,
    fault: Fault,
    n_written: usize,
    /// The frame of the first state.
    first: Option<Arc<[u8]>>,
    /// The number of states that came back as others.
    n_wrong: Arc<AtomicU64>,
}

impl FaultyStore {
    /// The file of a state.
    fn path_of(&self, name: GroupName) -> PathBuf {
        let paths = fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().path());
        let mut paths = paths.filter(|path| path.extension().is_some_and(|end| end == "part"));
        let start = format!("{name}.");
        let is_it = |path: &PathBuf| {
            let file = path.file_name().and_then(|file| file.to_str());
            file.unwrap().starts_with(&start)
        };
        paths.find(is_it).unwrap()
    }
}

impl GroupStore for FaultyStore {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        self.store.has(names)
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        assert_eq!(names.len(), 1, "each state is small");
        if self.fault == Fault::Slow {
            std::thread::sleep(Duration::from_millis(3));
        }
        let frames = self.store.get(names)?;
        let (frames, is_wrong) = match self.fault {
            Fault::Exchanged => (vec![self.first.clone()], frames[0] != self.first),
            Fault::CutOff | Fault::Damaged => (frames, true),
            _ => (frames, false),
        };
        self.n_wrong.fetch_add(is_wrong.into(), Ordering::Relaxed);
        Ok(frames)
    }

    fn put(&mut self, _name: GroupName, _frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        panic!("states are pinned")
    }

    fn pin(&mut self, name: GroupName, sealed: &SealedPayload<'_>) -> Result<(), StoreError> {
        self.n_written += 1;
        if self.first.is_none() {
            self.first = Some(sealed.parts().concat().into());
        }
        match self.fault {
            Fault::FullDisk if self.n_written.is_multiple_of(2) => return Err(StoreError::Full),
            Fault::Vanishes if self.n_written == 3 => fs::remove_dir_all(&self.dir).unwrap(),
            Fault::Slow => std::thread::sleep(Duration::from_millis(3)),
            Fault::Panics if self.n_written == 3 => panic!("as the test wants"),
            _ => {}
        }
        self.store.pin(name, sealed)?;
        match self.fault {
            Fault::CutOff => {
                let file = OpenOptions::new().write(true).open(self.path_of(name));
                file.unwrap().set_len(sealed.n_bytes() / 2).unwrap();
            }
            Fault::Damaged => {
                let mut damaged = sealed.parts().concat();
                let middle = damaged.len() / 2;
                damaged[middle] ^= 1;
                fs::write(self.path_of(name), damaged).unwrap();
            }
            _ => {}
        }
        Ok(())
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        self.store.evict(name)
    }
}

/// The store of a directory for states alone.
fn open(dir: &Path) -> DirectoryStore {
    let dir = dir.to_owned();
    let max_bytes = u64::MAX;
    DirectoryStore::open(DirectoryConfig { dir, max_bytes }).unwrap()
}

struct Served {
    texts: Vec<Generated>,
    counters: Counters,
    trace: Vec<u8>,
    /// Files that came back as others.
    n_wrong: u64,
}

/// The texts of a service with so many bytes in memory, and files in `dir`.
fn serve_with(
    case: &Case,
    bytes: u64,
    config: &ServiceConfig,
    (dir, fault): (&Path, Fault),
) -> Served {
    let n_wrong = Arc::default();
    let store = FaultyStore {
        store: open(dir),
        dir: dir.to_owned(),
        fault,
        n_written: 0,
        first: None,
        n_wrong: Arc::clone(&n_wrong),
    };
    let key = StoreKey::random().unwrap();
    let disk = SwapDisk {
        tier: Tier::start(key, vec![Box::new(store)], TierConfig::default()).unwrap(),
        n_bytes: 1 << 30,
    };
    let disk = Some(disk);
    let (texts, counters, trace) = serve(
        case,
        Room {
            bytes,
            disk,
            host: None,
        },
        config,
    );
    Served {
        texts,
        counters,
        trace,
        n_wrong: n_wrong.load(Ordering::Relaxed),
    }
}

/// The same. A request may go on before the thread that writes has completed its file, and then
/// reads none: where all did, and files are to come back as others, they are served again.
fn served(case: &Case, bytes: u64, config: &ServiceConfig, files: (&Path, Fault)) -> Served {
    let mut served = serve_with(case, bytes, config, files);
    for _ in 0..20 {
        if !files.1.changes_files() || served.n_wrong > 0 || config.preempt_every.is_some() {
            break;
        }
        served = serve_with(case, bytes, config, files);
    }
    served
}

/// How many bytes states have in the mean.
fn mean_bytes(case: &Case, config: &ServiceConfig) -> u64 {
    let room = Room {
        bytes: 1 << 30,
        ..Room::default()
    };
    let (_, counters, _) = serve(case, room, config);
    counters.n_swapped_bytes / counters.n_swapped_out.max(1)
}

fn check(case: &Case) {
    let alone = alone(case);
    // Preempted after every third step, a request goes on at once, perhaps before its file is
    // complete; where memory is short, it waits until another one has ended. States are never short
    // here.
    let waits = preempting(match case.name {
        "stories-mamba" => 3,
        _ => 0,
    });
    let root = tempfile::tempdir().unwrap();
    for fault in [
        Fault::None,
        Fault::Slow,
        Fault::FullDisk,
        Fault::Vanishes,
        Fault::CutOff,
        Fault::Damaged,
        Fault::Exchanged,
        Fault::Panics,
    ] {
        let dir = root.path().join(format!("{fault:?}"));
        let config = if fault.changes_files() {
            waits
        } else {
            preempting(3)
        };
        // Half of it is less than most have.
        let bytes = mean_bytes(case, &config) * 3 / 2;
        let Served {
            texts,
            counters,
            trace,
            n_wrong,
        } = served(case, bytes, &config, (&dir, fault));
        let name = format!("{}, {fault:?}: {n_wrong} wrong, {counters:?}", case.name);
        assert_eq!(texts, alone, "{name}");
        assert!(counters.n_spilled_bytes > 0, "{name}");
        match fault {
            Fault::None | Fault::Slow => {
                assert!(counters.n_swapped_in > 0, "{name}");
                assert_eq!(counters.n_swap_lost, 0, "{name}");
                check_trace(&trace, &counters);
            }
            // What is not written stays where it is.
            Fault::FullDisk => assert_eq!(counters.n_swap_lost, 0, "{name}"),
            Fault::CutOff | Fault::Damaged | Fault::Exchanged => {
                let goes_on_at_once = config.preempt_every.is_some();
                assert!(goes_on_at_once || n_wrong > 0, "{name}");
                assert_eq!(counters.n_swap_lost, n_wrong, "{name}");
            }
            Fault::Vanishes | Fault::Panics => {}
        }
        let left = fs::read_dir(&dir).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{name}: files are left");
    }
}

/// The trace has what went to files, and a replay sends as much as its budget allows.
fn check_trace(bytes: &[u8], counters: &Counters) {
    let trace = Trace::read(bytes).unwrap();
    assert_eq!(trace.recorded().n_spilled_bytes, counters.n_spilled_bytes);
    let replayed = replay(&trace, &ReplayConfig::default()).unwrap();
    assert!(replayed.n_spilled_bytes > 0, "{replayed:?}");
    let without = ReplayConfig {
        swap_disk_bytes: Some(0),
        ..ReplayConfig::default()
    };
    let without = replay(&trace, &without).unwrap();
    assert_eq!(without.n_spilled_bytes, 0);
}

for_each_memory!(check);
