//! [`DirectoryStore`]: groups as files of one directory, which several processes may share.
//!
//! ```text
//! NAME.group                a group: 64 hexadecimal digits
//! NAME.PROCESS-NUMBER.part  one that is being written, or is this process's alone: it is locked
//!                           while its process lives
//! store.lock                locked by the process that makes room; made when that is needed
//! ```
//!
//! Invariants: a file under the name of a group was written whole, or lost bytes to a power
//! failure, which its seal shows; a process that dies leaves at most parts without a lock, which
//! the next one removes. The index is the directory itself, so no file of it can be wrong: what
//! others put, this process finds. Files that are links, too large, or of other users are never
//! opened, counted or removed. Groups are not synced one by one: a lost one is computed again.

mod disk;
mod scan;

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use self::scan::{FoundGroup, Part, is_ours, owner_of};
pub use disk::{Disk, SystemDisk};

use crate::error::StoreError;
use crate::frame::{MAX_FRAME, SealedPayload};
use crate::key::GroupName;
use crate::ledger::Ledger;
use crate::store::{GroupStore, Kept};

const GROUP: &str = ".group";
const PART: &str = ".part";
const LOCK: &str = "store.lock";

/// When room is made, this part of the budget is left: making room means to look at the directory.
const ROOM: f64 = 0.1;

/// Where groups are kept, and how many bytes of them.
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// The directory; it is made where there is none.
    pub dir: PathBuf,
    /// The bytes that groups of all processes together may take, pinned ones too. Each process
    /// counts what it wrote since it looked last, so for a moment they may take more, by what the
    /// others wrote.
    pub max_bytes: u64,
}

/// Groups as files.
#[derive(Debug)]
pub struct DirectoryStore<D: Disk = SystemDisk> {
    config: DirectoryConfig,
    disk: D,
    /// The owner of the directory, to whom all groups belong.
    owner: u32,
    /// What was there when the directory was looked at last, and what this process put since.
    ledger: Ledger,
    /// Bytes of the parts of all processes, in the same way: no others go for them.
    part_bytes: u64,
    pinned: HashMap<GroupName, PinnedGroup>,
}

/// A group of one handle: a part that never gets the name of a group.
#[derive(Debug)]
struct PinnedGroup {
    path: PathBuf,
    /// Locked as long as it is open.
    file: File,
    n_bytes: u64,
}

impl DirectoryStore {
    /// Makes the directory where there is none, removes what dead processes left, and finds the
    /// groups that are there.
    ///
    /// # Errors
    /// [`StoreError::Unsafe`] where others may write the directory, or it is another user's;
    /// [`StoreError::System`].
    pub fn open(config: DirectoryConfig) -> Result<Self, StoreError> {
        Self::open_on(config, SystemDisk)
    }
}

impl<D: Disk> DirectoryStore<D> {
    /// As [`DirectoryStore::open`], on another disk.
    ///
    /// # Errors
    /// As [`DirectoryStore::open`].
    pub fn open_on(config: DirectoryConfig, disk: D) -> Result<Self, StoreError> {
        let failed = |source| {
            let what = format!("cannot make the directory '{}'", config.dir.display());
            StoreError::system(what, source)
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&config.dir).map_err(failed)?;
        let owner = scan::check_directory(&config.dir)?;
        let mut store = Self {
            config,
            disk,
            owner,
            ledger: Ledger::default(),
            part_bytes: 0,
            pinned: HashMap::new(),
        };
        // A container gives each process the same number: names are free once these are gone.
        store.remove_parts();
        store.check_owner()?;
        store.look();
        store.make_room(0)?;
        Ok(store)
    }

    /// The bytes that groups take, as far as this process knows.
    pub fn n_bytes(&self) -> u64 {
        self.ledger.n_bytes() + self.part_bytes
    }

    fn path(&self, name: GroupName) -> PathBuf {
        self.config.dir.join(format!("{name}{GROUP}"))
    }

    /// Makes a file, and refuses a directory of another user than its owner.
    fn check_owner(&self) -> Result<(), StoreError> {
        let dir = &self.config.dir;
        let failed = |source| {
            StoreError::system(
                format!("no file can be made in '{}'", dir.display()),
                source,
            )
        };
        let probe = self.part_of(GroupName([0; 32]));
        let file = self.disk.create(&probe).map_err(failed)?;
        let owner = owner_of(&file);
        let _gone = self.disk.remove(&probe); // the next process removes it otherwise
        if owner.map_err(failed)? == self.owner {
            return Ok(());
        }
        Err(StoreError::Unsafe {
            path: dir.clone(),
            reason: "it is another user's: name one of your own",
        })
    }

    /// Another path for each call.
    fn part_of(&self, name: GroupName) -> PathBuf {
        static N_PARTS: AtomicU64 = AtomicU64::new(0);
        let number = N_PARTS.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        let part = format!("{name}.{process}-{number}{PART}");
        self.config.dir.join(part)
    }

    /// Waits until no other process makes room.
    fn lock(&self) -> Result<File, StoreError> {
        let path = self.config.dir.join(LOCK);
        let failed =
            |source| StoreError::system(format!("cannot lock '{}'", path.display()), source);
        let file = disk::open_lock(&path).map_err(failed)?;
        if owner_of(&file).map_err(failed)? != self.owner {
            let reason = "it is another user's: remove it";
            return Err(StoreError::Unsafe { path, reason });
        }
        file.lock().map_err(failed)?;
        Ok(file)
    }

    /// Finds what is there: other processes put and remove groups, too.
    fn look(&mut self) {
        let mut found: Vec<FoundGroup> = scan::groups(&self.config.dir, self.owner).collect();
        // Whatever clocks did meanwhile: times are only compared with one another.
        found.sort_by_key(|group| (group.modified, group.name));
        let mut ledger = Ledger::default();
        for group in found {
            ledger.insert(group.name, group.n_bytes);
        }
        self.ledger = ledger;
        let parts = scan::parts(&self.config.dir, self.owner);
        self.part_bytes = parts.map(|part| part.n_bytes).sum();
    }

    /// Removes groups where so many bytes more do not fit, and then some.
    fn make_room(&mut self, n_bytes: u64) -> Result<(), StoreError> {
        let max = self.config.max_bytes;
        if self.n_bytes() + n_bytes <= max {
            return Ok(());
        }
        let _lock = self.lock()?;
        self.look();
        if self.n_bytes() + n_bytes <= max {
            return Ok(());
        }
        let target = max.saturating_sub((max as f64 * ROOM) as u64);
        while self.n_bytes() + n_bytes > target
            && let Some(oldest) = self.ledger.oldest()
        {
            // One that cannot be removed is found again by the next look.
            let _gone = self.disk.remove(&self.path(oldest));
            self.ledger.remove(oldest);
        }
        if self.n_bytes() + n_bytes > max && n_bytes > 0 {
            return Err(StoreError::Full);
        }
        Ok(())
    }

    /// Removes the parts of processes that are dead: their locks ended with them.
    fn remove_parts(&self) {
        for Part { path, .. } in scan::parts(&self.config.dir, self.owner) {
            let is_dead = disk::open_file(&path)
                .is_ok_and(|file| is_ours(&file, self.owner) && file.try_lock().is_ok());
            if is_dead {
                let _gone = self.disk.remove(&path); // one that stays is tried by the next process
            }
        }
    }

    /// Writes a part, which stays locked as long as it is open.
    fn write_part(&self, name: GroupName, frame: &[&[u8]]) -> io::Result<(PathBuf, File)> {
        let part = self.part_of(name);
        let mut file = self.disk.create(&part)?;
        // On a file system without locks, no process takes it for dead either.
        let _locked = file.lock();
        let mut pieces = frame.iter();
        match pieces.try_for_each(|piece| self.disk.write(&mut file, piece)) {
            Ok(()) => Ok((part, file)),
            Err(error) => {
                let _gone = self.disk.remove(&part); // why it was not written is the error
                Err(error)
            }
        }
    }

    /// Writes a part, and gives it its name.
    fn write(&self, name: GroupName, frame: &[u8]) -> io::Result<()> {
        let (part, _locked) = self.write_part(name, &[frame])?;
        let renamed = self.disk.rename(&part, &self.path(name));
        if renamed.is_err() {
            let _gone = self.disk.remove(&part); // why it has no name is the error
        }
        renamed
    }

    /// The bytes of a group, where there is a file that may be one.
    fn read(&self, name: GroupName) -> io::Result<Option<Arc<[u8]>>> {
        if let Some(PinnedGroup { file, n_bytes, .. }) = self.pinned.get(&name) {
            (&*file).rewind()?;
            return read_bytes(file, *n_bytes).map(Some);
        }
        let path = self.path(name);
        let file = match disk::open_file(&path) {
            Ok(file) => file,
            // Also a link: it is not followed.
            Err(error) if is_absent(&path, &error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let found = file.metadata()?;
        if !is_ours(&file, self.owner) || found.len() > MAX_FRAME {
            return Ok(None);
        }
        // The time of last use, for all processes; a file that cannot be touched is only older.
        let _touched = file.set_modified(SystemTime::now());
        read_bytes(&file, found.len()).map(Some)
    }

    fn is_there(&self, name: GroupName) -> bool {
        fs::symlink_metadata(self.path(name)).is_ok_and(|found| found.is_file())
    }

    fn failed(&self, what: &str, source: io::Error) -> StoreError {
        let dir = self.config.dir.display();
        StoreError::system(format!("cannot {what} a group in '{dir}'"), source)
    }
}

impl<D: Disk> GroupStore for DirectoryStore<D> {
    fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
        let is_there = |name| self.pinned.contains_key(name) || self.is_there(*name);
        Ok(names.iter().map(is_there).collect())
    }

    fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
        let mut frames = Vec::with_capacity(names.len());
        for name in names {
            let frame = self.read(*name);
            let frame = frame.map_err(|source| self.failed("read", source))?;
            match &frame {
                _ if self.pinned.contains_key(name) => {}
                Some(frame) => self.ledger.insert(*name, frame.len() as u64),
                None => self.ledger.remove(*name),
            }
            frames.push(frame);
        }
        Ok(frames)
    }

    fn put(&mut self, name: GroupName, frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
        let n_bytes = frame.len() as u64;
        if n_bytes > self.config.max_bytes {
            let max = self.config.max_bytes;
            return Err(StoreError::TooLarge { n_bytes, max });
        }
        if self.is_there(name) {
            return Ok(Kept::Known);
        }
        self.make_room(n_bytes)?;
        let written = self.write(name, frame);
        written.map_err(|source| self.failed("write", source))?;
        self.ledger.insert(name, n_bytes);
        Ok(Kept::New)
    }

    fn pin(&mut self, name: GroupName, sealed: &SealedPayload<'_>) -> Result<(), StoreError> {
        let n_bytes = sealed.n_bytes();
        self.make_room(n_bytes)?;
        let written = self.write_part(name, &sealed.parts());
        let (path, file) = written.map_err(|source| self.failed("write", source))?;
        self.part_bytes += n_bytes;
        let pinned = PinnedGroup {
            path,
            file,
            n_bytes,
        };
        self.pinned.insert(name, pinned);
        Ok(())
    }

    fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
        let path = match self.pinned.remove(&name) {
            Some(PinnedGroup { path, n_bytes, .. }) => {
                self.part_bytes = self.part_bytes.saturating_sub(n_bytes);
                path
            }
            None => {
                self.ledger.remove(name);
                self.path(name)
            }
        };
        match self.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("remove", error))
            }
            _ => Ok(()),
        }
    }
}

impl<D: Disk> Drop for DirectoryStore<D> {
    fn drop(&mut self) {
        for (_, PinnedGroup { path, file, .. }) in self.pinned.drain() {
            drop(file);
            let _gone = self.disk.remove(&path); // one that stays is removed by the next process
        }
    }
}

/// So many bytes of a file.
fn read_bytes(file: &File, n_bytes: u64) -> io::Result<Arc<[u8]>> {
    let mut bytes = Vec::new();
    let room = bytes.try_reserve_exact(usize::try_from(n_bytes).unwrap_or(usize::MAX));
    room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    file.take(n_bytes).read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// True if there is no file that could be opened: none, a link, a directory, or another user's.
fn is_absent(path: &Path, error: &io::Error) -> bool {
    use io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => true,
        _ => !fs::symlink_metadata(path).is_ok_and(|found| found.is_file()),
    }
}
