//! [`SwapDir`]: files of swapped states in a directory.
//!
//! ```text
//! cellar-swap-OWNER.lock               locked while the service that owns the others lives
//! cellar-swap-OWNER-NUMBER.state       a state; `.state.part` while it is written
//! ```
//!
//! Invariant: a file is complete under its name and only this user reads it. Removed are files of
//! this owner, and those of owners whose lock file is there and is not locked: their process is
//! dead. Every other file stays as it is. Knows nothing of what is in the files, but how long they
//! are.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::swap_files::SwapFiles;

const PREFIX: &str = "cellar-swap-";
const LOCK: &str = ".lock";
const STATE: &str = ".state";
const PART: &str = ".part";

/// Hexadecimal digits of an owner.
const OWNER_LEN: usize = 32;

/// Names that are tried: each was taken, or its file was removed before it was locked.
const MAX_ATTEMPTS: usize = 16;

/// A directory for the states of preempted requests of one service.
#[derive(Debug)]
pub struct SwapDir {
    dir: PathBuf,
    owner: String,
    /// Held as long as this is there.
    _lock: File,
}

impl SwapDir {
    /// Makes the directory where there is none, removes what services of dead processes left in it,
    /// and takes it. Other services may use it at the same time.
    ///
    /// # Errors
    /// Those of the system: where the directory cannot be made or written, or has no locks.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(dir)?;
        remove_leftovers(dir)?;
        for _ in 0..MAX_ATTEMPTS {
            let owner = new_owner();
            let path = dir.join(format!("{PREFIX}{owner}{LOCK}"));
            let lock = match create(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            match lock.try_lock() {
                // Another service may have taken it for a leftover before.
                Ok(()) if path.exists() => {
                    return Ok(Self {
                        dir: dir.to_owned(),
                        owner,
                        _lock: lock,
                    });
                }
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => {
                    let _gone = fs::remove_file(&path);
                    return Err(error);
                }
            }
        }
        Err(io::Error::other("no file could be locked in it"))
    }

    fn path(&self, number: u64) -> PathBuf {
        let Self { dir, owner, .. } = self;
        dir.join(format!("{PREFIX}{owner}-{number}{STATE}"))
    }
}

impl SwapFiles for SwapDir {
    fn write(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(number);
        let part = path.with_extension("state.part");
        let written = create(&part).and_then(|mut file| file.write_all(bytes));
        let renamed = written.and_then(|()| fs::rename(&part, &path));
        if renamed.is_err() {
            let _gone = fs::remove_file(&part); // why it was not written is the error
        }
        renamed
    }

    fn read(&mut self, number: u64, n_bytes: u64) -> io::Result<Vec<u8>> {
        let file = File::open(self.path(number))?;
        let found = file.metadata()?.len();
        if found != n_bytes {
            let what = format!("the file has {found} bytes, not {n_bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let mut bytes = Vec::new();
        let room = bytes.try_reserve_exact(usize::try_from(n_bytes).unwrap_or(usize::MAX));
        room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        file.take(n_bytes).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn remove(&mut self, number: u64) {
        // Where it cannot be removed now, it is when the service ends, or by the next one.
        let _gone = fs::remove_file(self.path(number));
    }
}

impl Drop for SwapDir {
    fn drop(&mut self) {
        remove_owner(&self.dir, &self.owner);
    }
}

/// A new file that this user alone reads.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Different for each service of each process.
fn new_owner() -> String {
    static N_OWNERS: AtomicU64 = AtomicU64::new(0);
    let number = N_OWNERS.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos() as u64);
    let (process, number) = (std::process::id(), number as u32);
    format!("{process:08x}{number:08x}{now:016x}")
}

/// The owner whose lock file has this name.
fn locked_owner(name: &str) -> Option<&str> {
    let owner = name.strip_prefix(PREFIX)?.strip_suffix(LOCK)?;
    let is_owner = owner.len() == OWNER_LEN && owner.bytes().all(|b| b.is_ascii_hexdigit());
    is_owner.then_some(owner)
}

/// Whether a file of this name is a state of an owner.
fn is_state_of(name: &str, owner: &str) -> bool {
    let number = name.strip_prefix(PREFIX).and_then(|rest| {
        let number = rest.strip_prefix(owner)?.strip_prefix('-')?;
        number
            .strip_suffix(PART)
            .unwrap_or(number)
            .strip_suffix(STATE)
    });
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(dir)?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.collect())
}

/// Removes the files of owners that are dead: their lock file is not locked.
fn remove_leftovers(dir: &Path) -> io::Result<()> {
    for name in names(dir)? {
        let Some(owner) = locked_owner(&name) else {
            continue;
        };
        // One that cannot be opened is another user's.
        let Ok(lock) = OpenOptions::new().write(true).open(dir.join(&name)) else {
            continue;
        };
        if lock.try_lock().is_ok() {
            remove_owner(dir, owner);
        }
    }
    Ok(())
}

/// Removes the files of an owner, the lock file last, and only where no state is left.
fn remove_owner(dir: &Path, owner: &str) {
    let states = names(dir).unwrap_or_default();
    let states = states.iter().filter(|name| is_state_of(name, owner));
    let removed = states.map(|name| fs::remove_file(dir.join(name)));
    if removed.filter(Result::is_err).count() == 0 {
        let _gone = fs::remove_file(dir.join(format!("{PREFIX}{owner}{LOCK}")));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn sorted(dir: &Path) -> Vec<String> {
        let mut names = names(dir).unwrap();
        names.sort();
        names
    }

    #[test]
    fn files_come_back_and_are_gone_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("new/swap");
        let mut files = SwapDir::open(&dir).unwrap();
        files.write(7, b"seven").unwrap();
        files.write(8, b"").unwrap();
        assert_eq!(sorted(&dir).len(), 3);
        assert_eq!(files.read(7, 5).unwrap(), b"seven");
        assert_eq!(files.read(8, 0).unwrap(), b"");
        assert!(files.read(7, 4).is_err());
        assert!(files.read(9, 0).is_err());
        files.remove(7);
        files.remove(7);
        assert!(files.read(7, 5).is_err());
        drop(files);
        assert_eq!(sorted(&dir), [""; 0]);
    }

    #[cfg(unix)]
    #[test]
    fn other_users_cannot_read_them() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("swap");
        let mut files = SwapDir::open(&dir).unwrap();
        files.write(1, b"text").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&dir), 0o700);
        for name in sorted(&dir) {
            assert_eq!(mode(&dir.join(&name)), 0o600, "{name}");
        }
    }

    /// Of the files in a directory, those of dead owners go, and no others.
    #[test]
    fn what_dead_processes_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let dead = "0".repeat(OWNER_LEN);
        let unlocked = "1".repeat(OWNER_LEN);
        let mut alive = SwapDir::open(dir).unwrap();
        alive.write(3, b"alive").unwrap();
        let kept = [
            // Without a lock file, its owner is not known to be dead.
            format!("{PREFIX}{unlocked}-1{STATE}"),
            format!("{PREFIX}{dead}-x{STATE}"),
            format!("{PREFIX}{dead}-1{STATE}.txt"),
            format!("{PREFIX}{dead}-{STATE}"),
            format!("{PREFIX}123{LOCK}"),
            format!("other-{dead}{LOCK}"),
            "notes.txt".to_owned(),
        ];
        let gone = [
            format!("{PREFIX}{dead}{LOCK}"),
            format!("{PREFIX}{dead}-1{STATE}"),
            format!("{PREFIX}{dead}-27{STATE}{PART}"),
        ];
        for name in kept.iter().chain(&gone) {
            fs::write(dir.join(name), "").unwrap();
        }
        let second = SwapDir::open(dir).unwrap();
        let names = sorted(dir);
        assert!(kept.iter().all(|name| names.contains(name)), "{names:?}");
        assert!(!gone.iter().any(|name| names.contains(name)), "{names:?}");
        assert_eq!(alive.read(3, 5).unwrap(), b"alive");
        assert_ne!(alive.owner, second.owner);
        drop((alive, second));
        assert_eq!(sorted(dir).len(), kept.len());
    }

    /// A directory that is gone refuses, and leaves nothing.
    #[test]
    fn a_directory_that_vanishes_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("swap");
        let mut files = SwapDir::open(&dir).unwrap();
        files.write(1, b"one").unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert!(files.write(2, b"two").is_err());
        assert!(files.read(1, 3).is_err());
        drop(files);
        assert!(!dir.exists());
    }
}
