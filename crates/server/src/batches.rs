//! [`Batches`]: files of requests that are answered while their client does something else.
//!
//! Invariant: a line is answered as its request alone would be, by the endpoint that it names, with
//! the key of its batch and the priority `batch`; a line that fails ends no other. A tenant finds
//! its own batches alone. They are in memory, and a server that starts again has none; or they are
//! in a [`KeptDir`], too, where the next one finds them, and computes those that were not over.

mod lines;
mod run;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cellar_engine::batch_file::BatchLine;
use cellar_engine::serve::TenantId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::auth::Tenant;
use crate::error::ApiError;
use crate::ids::{now, random_id};
use crate::kept::KeptDir;

pub(crate) use run::{begin, resume};

/// Batches of one key that are kept, with those that are computed.
const MAX_BATCHES: usize = 100;

/// What the names of their files end with in a directory.
const ENDING: &str = ".batch";

/// The state of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// Its lines are wrong, or its answers have no room.
    Failed,
    InProgress,
    Completed,
    Cancelling,
    Cancelled,
}

/// A batch that a client wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NewBatch {
    pub(crate) input_file: String,
    pub(crate) endpoint: String,
    pub(crate) window: String,
    pub(crate) metadata: Option<Map<String, Value>>,
}

/// The numbers of lines, by what became of them.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LineCounts {
    pub(crate) total: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
}

/// A batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) id: String,
    owner: u64,
    /// Later batches have higher ones.
    number: u64,
    pub(crate) wanted: NewBatch,
    pub(crate) status: BatchStatus,
    pub(crate) counts: LineCounts,
    /// OpenAI's objects of what is wrong.
    pub(crate) errors: Vec<Value>,
    pub(crate) output_file: Option<String>,
    pub(crate) error_file: Option<String>,
    created: u64,
    ended: Option<u64>,
}

/// The batches of a server.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    /// By tenant, the oldest first.
    shelves: Mutex<BTreeMap<TenantId, VecDeque<Batch>>>,
    /// The number of the next batch. Held while one is written, so that the last one written is as
    /// the batch is.
    next: Mutex<u64>,
    dir: OnceLock<Arc<KeptDir>>,
    /// Those that the server before this one did not end.
    unfinished: Mutex<Vec<Batch>>,
}

impl BatchStatus {
    /// OpenAI's word.
    fn word(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }

    /// True if nothing is computed any more.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Cancelled)
    }
}

impl Batch {
    /// One that is computed from now on.
    pub(crate) fn new(wanted: NewBatch) -> Self {
        Self {
            id: random_id("batch_"),
            owner: 0,
            number: 0,
            wanted,
            status: BatchStatus::InProgress,
            counts: LineCounts::default(),
            errors: Vec::new(),
            output_file: None,
            error_file: None,
            created: now(),
            ended: None,
        }
    }

    /// It ends like this.
    pub(crate) fn end(&mut self, status: BatchStatus) {
        self.status = status;
        self.ended = Some(now());
    }

    /// OpenAI's object.
    pub(crate) fn object(&self) -> Value {
        let at = |status| (self.status == status).then_some(self.ended).flatten();
        let errors = match self.errors.as_slice() {
            [] => Value::Null,
            errors => json!({"object": "list", "data": errors}),
        };
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.wanted.endpoint,
            "errors": errors,
            "input_file_id": self.wanted.input_file,
            "completion_window": self.wanted.window,
            "status": self.status.word(),
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created,
            "in_progress_at": self.created,
            "expires_at": null,
            "finalizing_at": null,
            "completed_at": at(BatchStatus::Completed),
            "failed_at": at(BatchStatus::Failed),
            "expired_at": null,
            "cancelling_at": null,
            "cancelled_at": at(BatchStatus::Cancelled),
            "request_counts": {
                "total": self.counts.total,
                "completed": self.counts.completed,
                "failed": self.counts.failed,
            },
            "metadata": self.wanted.metadata,
        })
    }
}

impl Batches {
    /// Keeps batches in a directory, too, from now on, and takes those that are there. One that is
    /// damaged is named in the log, and stays where it is.
    ///
    /// # Errors
    /// Where the directory cannot be read.
    pub(crate) fn keep_in(&self, dir: &Arc<KeptDir>) -> io::Result<()> {
        let mut found = Vec::new();
        for name in dir.names(ENDING)? {
            let read = dir.read(&name);
            match read.and_then(|bytes| Ok(serde_json::from_slice::<Batch>(&bytes)?)) {
                Ok(batch) => found.push(batch),
                Err(error) => {
                    let path = dir.path(&name);
                    tracing::error!(%error, path = %path.display(), "a batch is not taken");
                }
            }
        }
        found.sort_by_key(|batch| batch.number);
        let mut next = lock(&self.next);
        *next = found.last().map_or(*next, |batch| batch.number + 1);
        for mut batch in found {
            match batch.status {
                BatchStatus::Cancelling => batch.end(BatchStatus::Cancelled),
                BatchStatus::InProgress => {
                    batch.counts = LineCounts {
                        total: batch.counts.total,
                        ..LineCounts::default()
                    };
                    lock(&self.unfinished).push(batch.clone());
                }
                _ => {}
            }
            let mut shelves = lock(&self.shelves);
            let shelf = shelves.entry(TenantId(batch.owner)).or_default();
            shelf.push_back(batch);
        }
        // Set once: the server takes one directory, before the first request.
        let _first = self.dir.set(Arc::clone(dir));
        Ok(())
    }

    /// Those that the server before this one did not end, once.
    fn take_unfinished(&self) -> Vec<Batch> {
        std::mem::take(&mut lock(&self.unfinished))
    }

    /// Keeps a batch; where there are too many, the oldest goes that is over.
    ///
    /// # Errors
    /// [`ApiError`] 429 where all that are kept are computed, 507 where it cannot be written.
    pub(crate) fn keep(&self, tenant: Tenant, mut batch: Batch) -> Result<(), ApiError> {
        let mut next = lock(&self.next);
        batch.owner = tenant.id().0;
        batch.number = *next;
        let gone = self.too_many(tenant)?;
        self.write(&batch).map_err(|error| {
            ApiError::no_room_for_file(format!("the batch cannot be kept: {error}"))
        })?;
        *next += 1;
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(tenant.id()).or_default();
        shelf.push_back(batch);
        if let Some(gone) = gone {
            shelf.retain(|batch| batch.id != gone);
            if let Some(dir) = self.dir.get() {
                // One that stays is found by the next server, and goes then.
                let _stays = dir.remove(&kept_name(&gone));
            }
        }
        Ok(())
    }

    /// The batch that makes room for another, where one has to.
    ///
    /// # Errors
    /// [`ApiError`] 429 where all are computed.
    fn too_many(&self, tenant: Tenant) -> Result<Option<String>, ApiError> {
        let shelves = lock(&self.shelves);
        let batches = || shelves.get(&tenant.id()).into_iter().flatten();
        if batches().count() < MAX_BATCHES {
            return Ok(None);
        }
        match batches().find(|batch| batch.status.is_over()) {
            Some(over) => Ok(Some(over.id.clone())),
            None => {
                let message = format!("{MAX_BATCHES} batches of this key are computed already");
                Err(ApiError::busy(message, 60))
            }
        }
    }

    /// Writes a batch as it is now, where there is a directory. Where that fails, the next server
    /// finds it as it was before, and computes it again.
    pub(crate) fn save(&self, tenant: Tenant, id: &str) {
        let _alone = lock(&self.next);
        let written = match self.get(tenant, id) {
            Ok(batch) => self.write(&batch),
            Err(_) => return, // it had to make room
        };
        if let Err(error) = written {
            tracing::error!(%error, id, "a batch cannot be written");
        }
    }

    fn write(&self, batch: &Batch) -> io::Result<()> {
        let Some(dir) = self.dir.get() else {
            return Ok(());
        };
        dir.write(&kept_name(&batch.id), &[&serde_json::to_vec(batch)?])
    }

    /// The batch of this id.
    ///
    /// # Errors
    /// [`ApiError`] 404 where this tenant has none.
    pub(crate) fn get(&self, tenant: Tenant, id: &str) -> Result<Batch, ApiError> {
        self.change(tenant, id, |batch| batch.clone())
    }

    /// Those of a tenant, the newest first.
    pub(crate) fn list(&self, tenant: Tenant) -> Vec<Batch> {
        let shelves = lock(&self.shelves);
        let batches = shelves.get(&tenant.id()).into_iter().flatten().rev();
        batches.cloned().collect()
    }

    /// Changes a batch.
    ///
    /// # Errors
    /// [`ApiError`] 404 where this tenant has none.
    pub(crate) fn change<T>(
        &self,
        tenant: Tenant,
        id: &str,
        change: impl FnOnce(&mut Batch) -> T,
    ) -> Result<T, ApiError> {
        let mut shelves = lock(&self.shelves);
        let mut batches = shelves.get_mut(&tenant.id()).into_iter().flatten();
        let batch = batches.find(|batch| batch.id == id);
        batch
            .map(change)
            .ok_or_else(|| ApiError::unknown_id("batch", id))
    }
}

fn kept_name(id: &str) -> String {
    format!("{id}{ENDING}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A batch whose lines are computed.
#[derive(Clone, Debug)]
pub(crate) struct BatchWork {
    pub(crate) id: String,
    pub(crate) tenant: Tenant,
    pub(crate) endpoint: String,
    pub(crate) lines: Arc<Vec<BatchLine>>,
}

impl BatchWork {
    fn new(tenant: Tenant, batch: &Batch, lines: Vec<BatchLine>) -> Self {
        Self {
            id: batch.id.clone(),
            tenant,
            endpoint: batch.wanted.endpoint.clone(),
            lines: Arc::new(lines),
        }
    }
}
