//! [`Files`]: what clients upload for batches, and what batches answer.
//!
//! Invariant: a tenant finds its own files alone, and all files together take no more than the
//! limit, of which each key has an equal share. They are in memory, and a server that starts again
//! has none; or they are in a [`KeptDir`], where the next one finds them.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use cellar_engine::serve::TenantId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::auth::Tenant;
use crate::error::ApiError;
use crate::ids::{now, random_id};
use crate::kept::KeptDir;

/// Files of one key.
const MAX_FILES: usize = 1000;

/// Bytes of all files.
const MAX_BYTES: usize = 256 << 20;

/// Bytes of a file's name and purpose.
const MAX_NAME: usize = 1024;

/// What the names of these files end with in a directory.
const ENDING: &str = ".file";

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct StoredFile {
    head: FileHead,
    place: FilePlace,
}

/// What is known of a file without its bytes: the first line of the one in a directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FileHead {
    id: String,
    owner: u64,
    /// Later files have higher ones.
    number: u64,
    name: String,
    purpose: String,
    created: u64,
    n_bytes: usize,
}

/// Where the bytes of a file are.
#[derive(Clone, Debug)]
enum FilePlace {
    Memory(Bytes),
    Dir(Arc<KeptDir>),
}

/// A file that is to be kept.
#[derive(Clone, Debug)]
pub(crate) struct NewFile {
    /// Its name, as the client gave it.
    pub(crate) name: String,
    /// Its purpose, such as `batch`.
    pub(crate) purpose: String,
    pub(crate) bytes: Bytes,
}

/// The files of a server.
#[derive(Debug)]
pub(crate) struct Files {
    /// Bytes of one key.
    share: usize,
    /// By tenant and id.
    shelves: Mutex<BTreeMap<TenantId, BTreeMap<String, Arc<StoredFile>>>>,
    /// The number of the next file. Held while a file is added, so that there is room for it.
    next: Mutex<u64>,
    dir: OnceLock<Arc<KeptDir>>,
}

impl FileHead {
    fn kept_name(&self) -> String {
        kept_name(&self.id)
    }
}

fn kept_name(id: &str) -> String {
    format!("{id}{ENDING}")
}

impl StoredFile {
    /// Its name for requests.
    pub(crate) fn id(&self) -> &str {
        &self.head.id
    }

    /// What it is for.
    pub(crate) fn purpose(&self) -> &str {
        &self.head.purpose
    }

    /// Its bytes. Reads them where they are in a directory.
    ///
    /// # Errors
    /// [`ApiError`] 500 where they are gone or damaged, with the file's id.
    pub(crate) fn bytes(&self) -> Result<Bytes, ApiError> {
        let FileHead { id, n_bytes, .. } = &self.head;
        let dir = match &self.place {
            FilePlace::Memory(bytes) => return Ok(bytes.clone()),
            FilePlace::Dir(dir) => dir,
        };
        let read = read(dir, &self.head.kept_name());
        let read = read.and_then(|(head, bytes)| {
            if (&head.id, head.n_bytes) == (id, *n_bytes) {
                Ok(bytes)
            } else {
                Err(io::Error::other("it is another file's"))
            }
        });
        read.map_err(|error| {
            let path = dir.path(&self.head.kept_name());
            tracing::error!(%error, path = %path.display(), "a file cannot be read");
            ApiError::internal(format!("the file '{id}' cannot be read: {error}"))
        })
    }

    /// OpenAI's object.
    pub(crate) fn object(&self) -> Value {
        let FileHead {
            id,
            name,
            purpose,
            created,
            n_bytes,
            ..
        } = &self.head;
        json!({
            "id": id,
            "object": "file",
            "bytes": n_bytes,
            "created_at": created,
            "expires_at": null,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": null,
        })
    }
}

impl Files {
    /// None so far, for so many keys.
    pub(crate) fn new(n_keys: usize) -> Self {
        Self {
            share: MAX_BYTES / n_keys.max(1),
            shelves: Mutex::default(),
            next: Mutex::default(),
            dir: OnceLock::new(),
        }
    }

    /// Keeps files in a directory from now on, and takes those that are there. One that is damaged
    /// is named in the log, and stays where it is.
    ///
    /// # Errors
    /// Where the directory cannot be read.
    pub(crate) fn keep_in(&self, dir: &Arc<KeptDir>) -> io::Result<()> {
        let mut next = lock(&self.next);
        for name in dir.names(ENDING)? {
            match read(dir, &name) {
                Ok((head, _)) => {
                    *next = (*next).max(head.number + 1);
                    let mut shelves = lock(&self.shelves);
                    let shelf = shelves.entry(TenantId(head.owner)).or_default();
                    let place = FilePlace::Dir(Arc::clone(dir));
                    shelf.insert(head.id.clone(), Arc::new(StoredFile { head, place }));
                }
                Err(error) => {
                    let path = dir.path(&name);
                    tracing::error!(%error, path = %path.display(), "a file is not taken");
                }
            }
        }
        // Set once: the server takes one directory, before the first request.
        let _first = self.dir.set(Arc::clone(dir));
        Ok(())
    }

    /// Keeps a file. Writes it where there is a directory.
    ///
    /// # Errors
    /// [`ApiError`] 507 where the files of the key take too much or it cannot be written, 400 where
    /// its name is too long.
    pub(crate) fn keep(&self, tenant: Tenant, new: NewFile) -> Result<Arc<StoredFile>, ApiError> {
        let n_name = new.name.len() + new.purpose.len();
        if n_name > MAX_NAME {
            return Err(ApiError::invalid(format!(
                "the name and the purpose of the file have {n_name} bytes: {MAX_NAME} at most"
            )));
        }
        let mut next = lock(&self.next);
        self.check_room(tenant, new.bytes.len())?;
        let head = FileHead {
            id: random_id("file-"),
            owner: tenant.id().0,
            number: *next,
            name: new.name,
            purpose: new.purpose,
            created: now(),
            n_bytes: new.bytes.len(),
        };
        let place = match self.dir.get() {
            None => FilePlace::Memory(new.bytes),
            Some(dir) => {
                write(dir, &head, &new.bytes).map_err(|error| {
                    ApiError::no_room_for_file(format!("the file cannot be kept: {error}"))
                })?;
                FilePlace::Dir(Arc::clone(dir))
            }
        };
        *next += 1;
        let file = Arc::new(StoredFile { head, place });
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(tenant.id()).or_default();
        shelf.insert(file.head.id.clone(), Arc::clone(&file));
        Ok(file)
    }

    fn check_room(&self, tenant: Tenant, n_bytes: usize) -> Result<(), ApiError> {
        let shelves = lock(&self.shelves);
        let files = || shelves.get(&tenant.id()).into_iter().flatten();
        let taken: usize = files().map(|(_, file)| file.head.n_bytes).sum();
        let (n_files, share) = (files().count(), self.share);
        if n_files >= MAX_FILES || taken + n_bytes > share {
            return Err(ApiError::no_room_for_file(format!(
                "a file of {n_bytes} bytes has no room: {n_files} files of this key take {taken} bytes, and \
                 {MAX_FILES} may take {share}; delete some"
            )));
        }
        Ok(())
    }

    /// The file of this id.
    ///
    /// # Errors
    /// [`ApiError`] 404 where this tenant has none.
    pub(crate) fn get(&self, tenant: Tenant, id: &str) -> Result<Arc<StoredFile>, ApiError> {
        let shelves = lock(&self.shelves);
        let file = shelves.get(&tenant.id()).and_then(|shelf| shelf.get(id));
        file.cloned()
            .ok_or_else(|| ApiError::unknown_id("file", id))
    }

    /// Those of a tenant, the newest first.
    pub(crate) fn list(&self, tenant: Tenant) -> Vec<Arc<StoredFile>> {
        let shelves = lock(&self.shelves);
        let files = shelves.get(&tenant.id()).into_iter().flatten();
        let mut files: Vec<_> = files.map(|(_, file)| Arc::clone(file)).collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.head.number));
        files
    }

    /// Removes a file.
    ///
    /// # Errors
    /// [`ApiError`] 404 where this tenant has none, 500 where it cannot be removed from its
    /// directory; it is there then.
    pub(crate) fn remove(&self, tenant: Tenant, id: &str) -> Result<(), ApiError> {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.get_mut(&tenant.id());
        let file = shelf.and_then(|shelf| Some((shelf.get(id)?.place.clone(), shelf)));
        let (place, shelf) = file.ok_or_else(|| ApiError::unknown_id("file", id))?;
        if let FilePlace::Dir(dir) = place
            && let Err(error) = dir.remove(&kept_name(id))
            && error.kind() != io::ErrorKind::NotFound
        {
            let message = format!("the file '{id}' cannot be removed: {error}");
            return Err(ApiError::internal(message));
        }
        shelf.remove(id);
        Ok(())
    }
}

fn write(dir: &KeptDir, head: &FileHead, bytes: &[u8]) -> io::Result<()> {
    let mut line = serde_json::to_vec(head)?;
    line.push(b'\n');
    dir.write(&head.kept_name(), &[&line, bytes])
}

/// The first line of a file, and what is behind it.
fn read(dir: &KeptDir, name: &str) -> io::Result<(FileHead, Bytes)> {
    let bytes = dir.read(name)?;
    let end = bytes.iter().position(|&byte| byte == b'\n');
    let end = end.unwrap_or(bytes.len());
    let head: FileHead = serde_json::from_slice(bytes.get(..end).unwrap_or_default())?;
    let contents = bytes.slice((end + 1).min(bytes.len())..);
    if name != head.kept_name() || contents.len() != head.n_bytes {
        return Err(io::Error::other("it is another file's"));
    }
    Ok((head, contents))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn a_key_has_its_share() {
        let files = Files::new(2);
        let new = |n: usize| NewFile {
            name: "a".to_owned(),
            purpose: "batch".to_owned(),
            bytes: Bytes::from(vec![b'a'; n]),
        };
        let tenant = Tenant::default();
        let half = files.keep(tenant, new(MAX_BYTES / 4)).unwrap();
        files.keep(tenant, new(MAX_BYTES / 4)).unwrap();
        let error = files.keep(tenant, new(1)).unwrap_err();
        assert_eq!(error.status, 507, "{error}");
        files.remove(tenant, half.id()).unwrap();
        assert_eq!(files.remove(tenant, half.id()).unwrap_err().status, 404);
        files.keep(tenant, new(1)).unwrap();
        assert_eq!(files.list(tenant).len(), 2);
    }

    #[test]
    fn long_names_are_refused() {
        let new = NewFile {
            name: "a".repeat(MAX_NAME),
            purpose: "b".to_owned(),
            bytes: Bytes::new(),
        };
        let error = Files::new(1).keep(Tenant::default(), new).unwrap_err();
        assert!(
            error.status == 400 && error.message.contains("1025 bytes"),
            "{error}"
        );
    }
}
