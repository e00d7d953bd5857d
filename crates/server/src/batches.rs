//! [`Batches`]: files of requests that are answered while their client does something else.
//!
//! Invariant: a line is answered as its request alone would be, by the endpoint that it names, with
//! the key of its batch and the priority `batch`; a line that fails ends no other. A tenant finds
//! its own batches alone. Kept in memory: a server that starts again has none.

mod lines;
mod run;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};

use crate::api::params::{now, random_id};
use crate::auth::Tenant;
use crate::error::ApiError;

pub(crate) use lines::read;
pub(crate) use run::run;

/// Batches of one key that are kept, with those that are computed.
const MAX_BATCHES: usize = 100;

/// The state of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchStatus {
    /// Its lines are wrong, or its answers have no room.
    Failed,
    InProgress,
    Completed,
    Cancelling,
    Cancelled,
}

/// A batch that a client wants.
#[derive(Clone, Debug)]
pub(crate) struct NewBatch {
    pub(crate) input_file: String,
    pub(crate) endpoint: String,
    pub(crate) window: String,
    pub(crate) metadata: Option<Map<String, Value>>,
}

/// The numbers of lines, by what became of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LineCounts {
    pub(crate) total: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
}

/// A batch.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) id: String,
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
pub(crate) struct Batches(Mutex<BTreeMap<Tenant, VecDeque<Batch>>>);

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
    /// Keeps a batch; where there are too many, the oldest goes that is over.
    ///
    /// # Errors
    /// [`ApiError`] 429 where all that are kept are computed.
    pub(crate) fn keep(&self, tenant: Tenant, batch: Batch) -> Result<(), ApiError> {
        let mut shelves = self.lock();
        let shelf = shelves.entry(tenant).or_default();
        if shelf.len() >= MAX_BATCHES {
            let over = shelf.iter().position(|batch| batch.status.is_over());
            let Some(over) = over else {
                let message = format!("{MAX_BATCHES} batches of this key are computed already");
                return Err(ApiError::busy(message, 60));
            };
            shelf.remove(over);
        }
        shelf.push_back(batch);
        Ok(())
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
        let shelves = self.lock();
        let batches = shelves.get(&tenant).into_iter().flatten().rev();
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
        let mut shelves = self.lock();
        let mut batches = shelves.get_mut(&tenant).into_iter().flatten();
        let batch = batches.find(|batch| batch.id == id);
        batch
            .map(change)
            .ok_or_else(|| ApiError::unknown_id("batch", id))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tenant, VecDeque<Batch>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A batch whose lines are computed.
#[derive(Clone, Debug)]
pub(crate) struct BatchWork {
    pub(crate) id: String,
    pub(crate) tenant: Tenant,
    pub(crate) endpoint: String,
    pub(crate) lines: Arc<Vec<lines::BatchLine>>,
}
