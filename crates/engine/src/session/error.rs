//! [`ServiceError`]: why a request is refused or has failed.

use std::sync::Arc;

use cellar_scheduler::{RequestError, RequestId};

use crate::error::EngineError;

/// Why a request is refused or has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The request, or a limit of the service, is refused.
    #[error(transparent)]
    Refused(#[from] RequestError),
    /// An option makes no sense, no token could be chosen, or the step of this request failed when
    /// it was computed alone.
    #[error(transparent)]
    Engine(Arc<EngineError>),
    /// The thread could not be started.
    #[error("the service cannot start a thread: {reason}")]
    NoThread {
        /// Why, in the system's words.
        reason: String,
    },
    /// A trace cannot be written.
    #[error("the trace cannot be written: {reason}")]
    TraceUnwritable {
        /// Why, in the system's words.
        reason: String,
    },
    /// Saved prefixes are not what would be computed here.
    #[error("the cached prefixes are not restored: {reason}")]
    PrefixesRefused {
        /// What is different.
        reason: String,
    },
    /// Cached prefixes cannot be changed while requests, which may share some, are computed.
    #[error("{n_requests} requests are computed: wait until none is")]
    RequestsLive {
        /// How many.
        n_requests: usize,
    },
    /// A text that cannot go on or be saved: it is still computed, has failed, or was not to be
    /// kept ([`TextRequest::retention`](super::TextRequest::retention)).
    #[error(
        "request {request} has no text that is kept: it goes on, has failed, or was to be given up at its end"
    )]
    NotParked {
        /// The request.
        request: RequestId,
    },
    /// The service has ended before the request did.
    #[error("the service has ended")]
    Stopped,
}

impl From<EngineError> for ServiceError {
    fn from(error: EngineError) -> Self {
        Self::Engine(Arc::new(error))
    }
}
