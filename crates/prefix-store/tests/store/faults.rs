//! A disk that is full, and a process that dies, at each step of a write.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, Disk, Group, GroupStore, SealedPayload, StoreError, SystemDisk,
};

use crate::{frame, key, name};

/// What happens at the step that fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// There is no room: half of what is written is there.
    Full,
    /// The process dies: this step is half done, and no step after it is done.
    Death,
}

/// A disk on which one step fails.
#[derive(Debug)]
struct FaultyDisk {
    fault: Fault,
    /// Steps until it fails.
    left: Arc<AtomicU64>,
}

impl FaultyDisk {
    /// True for the step that fails and, where the process died, for all after it.
    fn fails(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        match self.fault {
            Fault::Full => left == 1,
            Fault::Death => left <= 1,
        }
    }

    fn step<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.fails() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        act()
    }
}

impl Disk for FaultyDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        self.step(|| SystemDisk.create(path))
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        if self.fails() {
            SystemDisk.write(file, &bytes[..bytes.len() / 2])?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        SystemDisk.write(file, bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(|| SystemDisk.remove(path))
    }
}

/// After each failure, every group that is there is whole, nothing else is left, and the store goes
/// on.
#[test]
fn every_step_of_a_write_may_fail() {
    let mut n_failed = 0;
    for fault in [Fault::Full, Fault::Death] {
        for at in 1..30 {
            let dir = tempfile::tempdir().unwrap();
            let config = DirectoryConfig {
                dir: dir.path().to_owned(),
                // Room for four: some writes remove others first.
                max_bytes: 4 * frame(name(0), &[0; 200]).len() as u64,
            };
            let left = Arc::new(AtomicU64::new(0));
            let disk = FaultyDisk {
                fault: Fault::Full,
                left: Arc::clone(&left),
            };
            let mut store = DirectoryStore::open_on(config.clone(), disk).unwrap();
            drop(store);
            let disk = FaultyDisk {
                fault,
                left: Arc::new(AtomicU64::new(at + 2)),
            };
            let opened = DirectoryStore::open_on(config.clone(), disk);
            store = opened.unwrap();
            let mut kept = Vec::new();
            for n in 0..6 {
                match store.put(name(n), &frame(name(n), &[n; 200])) {
                    Ok(_) => kept.push(n),
                    Err(StoreError::Full) => {
                        n_failed += 1;
                        if fault == Fault::Full {
                            // No part of it is there, and the next attempt works.
                            let parts = std::fs::read_dir(dir.path()).unwrap().flatten();
                            let names = parts.map(|part| part.file_name().into_string().unwrap());
                            let rest: Vec<_> =
                                names.filter(|name| name.ends_with("part")).collect();
                            assert!(rest.is_empty(), "step {at}: {rest:?}");
                            store.put(name(n), &frame(name(n), &[n; 200])).unwrap();
                            kept.push(n);
                        } else {
                            break;
                        }
                    }
                    Err(error) => panic!("{fault:?} at {at}: {error}"),
                }
            }
            drop(store);
            let mut store = DirectoryStore::open(config.clone()).unwrap();
            assert!(store.n_bytes() <= config.max_bytes);
            let last = kept.last().copied();
            for n in 0..6 {
                let found = store.get(&[name(n)]).unwrap().remove(0);
                if let Some(found) = &found {
                    Group::open(&key(1), name(n), found.clone()).unwrap();
                }
                // The last one that was kept is there.
                assert!(Some(n) != last || found.is_some(), "{fault:?} at {at}: {n}");
            }
            let files = std::fs::read_dir(dir.path()).unwrap().flatten();
            let rest = files.filter(|file| {
                let name = file.file_name().into_string().unwrap();
                !name.ends_with(".group") && name != "store.lock"
            });
            assert_eq!(rest.count(), 0, "{fault:?} at {at}");
        }
    }
    assert!(n_failed > 20, "{n_failed} steps failed");
}

/// A disk that is full stays full: each put is refused, and what is there stays.
#[test]
fn a_full_disk_refuses_and_keeps() {
    #[derive(Debug)]
    struct FullDisk;

    impl Disk for FullDisk {
        fn create(&self, path: &Path) -> io::Result<File> {
            SystemDisk.create(path)
        }

        fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
            SystemDisk.write(file, &bytes[..1])?;
            Err(io::ErrorKind::StorageFull.into())
        }

        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            SystemDisk.rename(from, to)
        }

        fn remove(&self, path: &Path) -> io::Result<()> {
            SystemDisk.remove(path)
        }
    }

    let dir = tempfile::tempdir().unwrap();
    let config = DirectoryConfig {
        dir: dir.path().to_owned(),
        max_bytes: 10_000,
    };
    let mut store = DirectoryStore::open(config.clone()).unwrap();
    store.put(name(1), &frame(name(1), b"one")).unwrap();
    let mut store = DirectoryStore::open_on(config, FullDisk).unwrap();
    for n in 2..5 {
        let refused = store.put(name(n), &frame(name(n), b"more")).unwrap_err();
        assert!(matches!(refused, StoreError::Full), "{refused}");
        assert!(!refused.is_down());
        let sealed = SealedPayload::new(&key(1), name(n), b"more").unwrap();
        let refused = store.pin(name(n), &sealed).unwrap_err();
        assert!(matches!(refused, StoreError::Full), "{refused}");
    }
    assert_eq!(store.has(&[name(1), name(2)]).unwrap(), [true, false]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
