//! [`Files`]: what clients upload for batches, and what batches answer.
//!
//! Invariant: a tenant finds its own files alone, and all files together take no more than the
//! limit, of which each key has an equal share. Kept in memory: a server that starts again has
//! none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::api::params::{now, random_id};
use crate::auth::Tenant;
use crate::error::ApiError;

/// Files of one key.
const MAX_FILES: usize = 1000;

/// Bytes of all files.
const MAX_BYTES: usize = 256 << 20;

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct StoredFile {
    id: String,
    name: String,
    purpose: String,
    created: u64,
    pub(crate) bytes: Bytes,
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
    shelves: Mutex<BTreeMap<Tenant, BTreeMap<String, Arc<StoredFile>>>>,
}

impl StoredFile {
    /// Its name for requests.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// OpenAI's object.
    pub(crate) fn object(&self) -> Value {
        json!({
            "id": self.id,
            "object": "file",
            "bytes": self.bytes.len(),
            "created_at": self.created,
            "expires_at": null,
            "filename": self.name,
            "purpose": self.purpose,
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
        }
    }

    /// Keeps a file.
    ///
    /// # Errors
    /// [`ApiError`] 507 where the files of the key take too much.
    pub(crate) fn keep(&self, tenant: Tenant, new: NewFile) -> Result<Arc<StoredFile>, ApiError> {
        let mut shelves = self.lock();
        let shelf = shelves.entry(tenant).or_default();
        let taken: usize = shelf.values().map(|file| file.bytes.len()).sum();
        let (n_files, n_bytes, share) = (shelf.len(), new.bytes.len(), self.share);
        if n_files >= MAX_FILES || taken + n_bytes > share {
            return Err(ApiError::no_room_for_file(format!(
                "a file of {n_bytes} bytes has no room: {n_files} files of this key take {taken} bytes, and \
                 {MAX_FILES} may take {share}; delete some"
            )));
        }
        let file = Arc::new(StoredFile {
            id: random_id("file-"),
            name: new.name,
            purpose: new.purpose,
            created: now(),
            bytes: new.bytes,
        });
        shelf.insert(file.id.clone(), Arc::clone(&file));
        Ok(file)
    }

    /// The file of this id.
    ///
    /// # Errors
    /// [`ApiError`] 404 where this tenant has none.
    pub(crate) fn get(&self, tenant: Tenant, id: &str) -> Result<Arc<StoredFile>, ApiError> {
        let shelves = self.lock();
        let file = shelves.get(&tenant).and_then(|shelf| shelf.get(id));
        file.cloned()
            .ok_or_else(|| ApiError::unknown_id("file", id))
    }

    /// Those of a tenant, the newest first.
    pub(crate) fn list(&self, tenant: Tenant) -> Vec<Arc<StoredFile>> {
        let shelves = self.lock();
        let files = shelves.get(&tenant).into_iter().flat_map(BTreeMap::values);
        let mut files: Vec<_> = files.cloned().collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.created));
        files
    }

    /// Removes a file; whether this tenant had it.
    pub(crate) fn remove(&self, tenant: Tenant, id: &str) -> bool {
        let mut shelves = self.lock();
        let removed = shelves.get_mut(&tenant).and_then(|shelf| shelf.remove(id));
        removed.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tenant, BTreeMap<String, Arc<StoredFile>>>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        assert!(files.remove(tenant, half.id()));
        assert!(!files.remove(tenant, half.id()));
        files.keep(tenant, new(1)).unwrap();
        assert_eq!(files.list(tenant).len(), 2);
    }
}
