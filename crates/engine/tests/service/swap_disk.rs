//! Preempted requests whose state goes on to files, also to files that cannot be written, vanish,
//! or come back as others: texts are what they are alone, and nothing is left.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cellar_engine::serve::{Counters, ServiceConfig, SwapDir, SwapDisk, SwapFiles};
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
struct FaultyFiles {
    files: SwapDir,
    dir: PathBuf,
    fault: Fault,
    n_written: usize,
    first: Vec<u8>,
    /// How many files came back as others.
    n_wrong: Arc<AtomicU64>,
}

impl FaultyFiles {
    fn path_of(&self, number: u64) -> PathBuf {
        let end = format!("-{number}.state");
        let mut paths = fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().path());
        let is_it = |path: &PathBuf| path.to_str().unwrap().ends_with(&end);
        paths.find(is_it).unwrap()
    }
}

impl SwapFiles for FaultyFiles {
    fn write(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
        self.n_written += 1;
        if self.first.is_empty() {
            self.first = bytes.to_vec();
        }
        match self.fault {
            Fault::FullDisk if self.n_written.is_multiple_of(2) => {
                return Err(io::ErrorKind::StorageFull.into());
            }
            Fault::Vanishes if self.n_written == 3 => fs::remove_dir_all(&self.dir).unwrap(),
            Fault::Slow => std::thread::sleep(Duration::from_millis(3)),
            Fault::Panics if self.n_written == 3 => panic!("as the test wants"),
            _ => {}
        }
        self.files.write(number, bytes)?;
        match self.fault {
            Fault::CutOff => {
                let file = OpenOptions::new().write(true).open(self.path_of(number))?;
                file.set_len(bytes.len() as u64 / 2)?;
            }
            Fault::Damaged => {
                let mut damaged = bytes.to_vec();
                damaged[bytes.len() / 2] ^= 1;
                fs::write(self.path_of(number), damaged)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn read(&mut self, number: u64, n_bytes: u64) -> io::Result<Vec<u8>> {
        if self.fault == Fault::Slow {
            std::thread::sleep(Duration::from_millis(3));
        }
        let bytes = self.files.read(number, n_bytes);
        let (bytes, is_wrong) = match self.fault {
            Fault::Exchanged => (Ok(self.first.clone()), self.first != bytes?),
            Fault::CutOff | Fault::Damaged => (bytes, true),
            _ => (bytes, false),
        };
        self.n_wrong.fetch_add(is_wrong.into(), Ordering::Relaxed);
        bytes
    }

    fn remove(&mut self, number: u64) {
        self.files.remove(number);
    }
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
    let files = FaultyFiles {
        files: SwapDir::open(dir).unwrap(),
        dir: dir.to_owned(),
        fault,
        n_written: 0,
        first: Vec::new(),
        n_wrong: Arc::clone(&n_wrong),
    };
    let disk = SwapDisk {
        files: Box::new(files),
        n_bytes: 1 << 30,
    };
    let disk = Some(disk);
    let (texts, counters, trace) = serve(case, Room { bytes, disk }, config);
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
        disk: None,
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
        // A thread that panics leaves what the next service removes.
        let _next = SwapDir::open(&dir).unwrap();
        let is_right = left == 0 || fault == Fault::Panics;
        assert!(is_right, "{name}: {left} files are left");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "{name}");
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
