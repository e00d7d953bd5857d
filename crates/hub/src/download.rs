//! One file from the hub to its blob: locked, resumed where it broke, verified, then named.
//!
//! Invariant: the part on disk is a prefix of the file at all times, so that a process may end
//! anywhere. Knows no models.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::cache::{Cache, INCOMPLETE};
use crate::client::{Client, FileMetadata, Listing, OpenError};
use crate::config::HubConfig;
use crate::disk;
use crate::error::HubError;
use crate::hash::Hasher;
use crate::pull::Event;

/// Attempts in a row that bring no byte.
const MAX_ATTEMPTS: u32 = 5;

/// The interval between attempts at a lock that another process holds.
const LOCK_INTERVAL: Duration = Duration::from_millis(200);

const BUFFER: usize = 256 << 10;

/// A file to download.
pub(crate) struct FileDownload<'a> {
    pub(crate) client: &'a Client,
    pub(crate) config: &'a HubConfig,
    pub(crate) cache: &'a Cache,
    pub(crate) listing: &'a Listing,
    pub(crate) path: &'a str,
    pub(crate) metadata: &'a FileMetadata,
}

impl FileDownload<'_> {
    /// The blob's path.
    pub(crate) fn blob(&self) -> PathBuf {
        let blobs = self.cache.blobs(&self.listing.repo);
        blobs.join(self.metadata.etag.as_str())
    }

    fn part(&self) -> PathBuf {
        let mut name = self.blob().into_os_string();
        name.push(INCOMPLETE);
        name.into()
    }

    fn is_complete(&self) -> bool {
        fs::metadata(self.blob()).is_ok_and(|data| data.len() == self.metadata.n_bytes)
    }

    /// Bytes that are on disk already.
    pub(crate) fn n_present(&self) -> u64 {
        if self.is_complete() {
            return self.metadata.n_bytes;
        }
        let part = fs::metadata(self.part()).map(|data| data.len());
        part.unwrap_or(0).min(self.metadata.n_bytes)
    }

    /// Downloads what is missing. `on_event` gets [`Event::Progress`] with this file's bytes.
    pub(crate) fn run(&self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), HubError> {
        if self.is_complete() {
            return Ok(());
        }
        let blobs = self.cache.blobs(&self.listing.repo);
        fs::create_dir_all(&blobs).map_err(HubError::disk("create", &blobs))?;
        let _lock = self.lock(on_event)?;
        // The process that held the lock may have done the work.
        if self.is_complete() {
            return Ok(());
        }
        let path = self.part();
        let n_bytes = self.metadata.n_bytes;
        let part = PartialFile::open(path, n_bytes, self.metadata.etag.hasher(n_bytes));
        let mut part = part.map_err(HubError::disk("open", &self.part()))?;
        self.fill(&mut part, on_event)?;
        self.finish(part)
    }

    /// Waits until no other process writes this blob.
    fn lock(&self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<File, HubError> {
        let locks = self.cache.locks(&self.listing.repo);
        fs::create_dir_all(&locks).map_err(HubError::disk("create", &locks))?;
        let path = locks.join(format!("{}.lock", self.metadata.etag.as_str()));
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(HubError::disk("open", &path))?;
        let mut is_first = true;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {
                    if is_first {
                        on_event(Event::Waiting { file: self.path });
                    }
                    is_first = false;
                    thread::sleep(LOCK_INTERVAL);
                }
                // Some network file systems have no locks.
                Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
                    return Ok(file);
                }
                Err(TryLockError::Error(error)) => {
                    return Err(HubError::disk("lock", &path)(error));
                }
            }
        }
    }

    /// Downloads until the part is as long as the file.
    fn fill(
        &self,
        part: &mut PartialFile,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), HubError> {
        let n_bytes = self.metadata.n_bytes;
        let mut n_failed = 0;
        while part.n_bytes < n_bytes {
            let before = part.n_bytes;
            let reason = match self.attempt(part, on_event) {
                Ok(()) => "the server sent too little".to_owned(),
                Err(OpenError::Retry(reason)) => reason,
                Err(OpenError::NoSuchRange) => {
                    part.restart()
                        .map_err(HubError::disk("write", &part.path))?;
                    "the server has no such range of the file".to_owned()
                }
                Err(OpenError::Final(error)) => return Err(error),
            };
            if part.n_bytes >= n_bytes {
                break;
            }
            n_failed = if part.n_bytes > before {
                1
            } else {
                n_failed + 1
            };
            if n_failed >= MAX_ATTEMPTS {
                return Err(HubError::Broken {
                    file: self.path.to_owned(),
                    n_received: part.n_bytes,
                    n_bytes,
                    reason,
                });
            }
            on_event(Event::Retrying {
                file: self.path,
                reason: &reason,
            });
            thread::sleep(self.config.retry_wait * 2u32.pow(n_failed - 1));
        }
        Ok(())
    }

    /// Appends what one request brings.
    fn attempt(
        &self,
        part: &mut PartialFile,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), OpenError> {
        let mut download = self.client.open(self.listing, self.path, part.n_bytes)?;
        if download.offset != part.n_bytes {
            let restarted = part.restart().map_err(HubError::disk("write", &part.path));
            restarted.map_err(OpenError::Final)?;
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            on_event(Event::Progress {
                n_bytes: part.n_bytes,
            });
            let n_read = match download.reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n_read) => n_read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(OpenError::Retry(error.to_string())),
            };
            let wanted = self.metadata.n_bytes;
            if part.n_bytes + n_read as u64 > wanted {
                let _ = fs::remove_file(&part.path);
                return Err(OpenError::Final(HubError::Answer {
                    url: self.path.to_owned(),
                    reason: format!("the server sends more than the file's {wanted} bytes"),
                }));
            }
            let written = part.append(&buffer[..n_read]);
            written.map_err(|error| OpenError::Final(self.cannot_write(part, error)))?;
        }
    }

    fn cannot_write(&self, part: &PartialFile, error: io::Error) -> HubError {
        if error.kind() != io::ErrorKind::StorageFull {
            return HubError::disk("write", &part.path)(error);
        }
        let cache = self.cache.root().to_owned();
        HubError::DiskFull {
            n_needed: self.metadata.n_bytes - part.n_bytes,
            n_free: disk::free_bytes(&cache).unwrap_or(0),
            cache,
        }
    }

    /// Verifies the hash, then gives the blob its name.
    fn finish(&self, mut part: PartialFile) -> Result<(), HubError> {
        let wanted = self.metadata.etag.as_str();
        if let Some(hasher) = part.hasher.take() {
            let kind = hasher.kind();
            let found = hasher.finish();
            if !found.eq_ignore_ascii_case(wanted) {
                fs::remove_file(&part.path).map_err(HubError::disk("remove", &part.path))?;
                return Err(HubError::Hash {
                    file: self.path.to_owned(),
                    kind,
                    wanted: wanted.to_owned(),
                    found,
                });
            }
        }
        part.file
            .sync_data()
            .map_err(HubError::disk("write", &part.path))?;
        let blob = self.blob();
        fs::rename(&part.path, &blob).map_err(HubError::disk("rename", &part.path))
    }
}

/// The beginning of a file on disk, and the hash of it.
struct PartialFile {
    path: PathBuf,
    file: File,
    n_bytes: u64,
    hasher: Option<Hasher>,
    /// The hash of nothing.
    new_hasher: Option<Hasher>,
}

impl PartialFile {
    /// Opens a part and hashes what it has; one that is longer than the file is emptied.
    fn open(path: PathBuf, max_bytes: u64, hasher: Option<Hasher>) -> io::Result<Self> {
        let file = open_part(&path)?;
        let mut part = Self {
            path,
            file,
            n_bytes: 0,
            new_hasher: hasher.clone(),
            hasher,
        };
        if part.file.metadata()?.len() > max_bytes {
            part.file.set_len(0)?;
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            match part.file.read(&mut buffer)? {
                0 => return Ok(part),
                n_read => part.count(&buffer[..n_read]),
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.count(bytes);
        Ok(())
    }

    fn count(&mut self, bytes: &[u8]) {
        self.n_bytes += bytes.len() as u64;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }

    /// Forgets all bytes.
    fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.n_bytes = 0;
        self.hasher = self.new_hasher.clone();
        Ok(())
    }
}

fn open_part(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path)
}
