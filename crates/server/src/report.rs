//! [`RequestReport`]: what a request did, for each [`ObserveRequests`] once it has ended; and its
//! id.
//!
//! Invariant: each request is reported once, after the last of its texts has ended or its client
//! has gone, and its answer has its id. Knows no wire; without an observer nothing is kept.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use cellar_engine::FinishReason;
use cellar_engine::serve::Usage;

use crate::app::App;
use crate::error::ApiError;
use crate::ids::random_id;
use crate::trace::TraceParent;

/// The header with the id of a request, in both directions.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Characters of an id that a client gives.
const MAX_ID: usize = 128;

/// Takes reports of what requests did.
pub trait ObserveRequests: Debug + Send + Sync {
    /// A request has ended. Called where it ended, often on the thread of all connections: it must
    /// not wait.
    fn ended(&self, report: &RequestReport);
}

/// What a request did.
#[derive(Clone, Debug)]
pub struct RequestReport {
    /// Its id: the one that its client gave, or else one of ours.
    pub id: String,
    /// How it came.
    pub method: Method,
    /// Its path, without the query.
    pub path: String,
    /// The path of its endpoint, with the names of what varies; empty where there is none.
    pub route: String,
    /// True if its host and its key are those of somebody who may use the server.
    pub is_let_in: bool,
    /// The trace that it belongs to.
    pub parent: Option<TraceParent>,
    /// The status of its answer; `None` where the client went before there was one.
    pub status: Option<StatusCode>,
    /// Why it was refused or failed, where it was before its answer began.
    pub reason: Option<String>,
    /// The model that it got, where it got one.
    pub model: Option<String>,
    /// When it came.
    pub began: SystemTime,
    /// How long it took, to the end of its texts.
    pub took: Duration,
    /// The texts that it asked for, in the order in which they ended.
    pub texts: Vec<TextReport>,
}

/// What became of a text.
#[derive(Clone, Debug)]
pub struct TextReport {
    /// The model.
    pub model: String,
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// When it was submitted, from when its request came.
    pub began: Duration,
    /// How long it took.
    pub took: Duration,
    /// What it took of the model; where it ended early, until then.
    pub usage: Usage,
    /// How it ended.
    pub end: TextEnd,
}

/// How a text ended.
#[derive(Clone, Debug)]
pub enum TextEnd {
    /// It is whole.
    Finished {
        /// Why it ended there.
        reason: FinishReason,
    },
    /// By an error.
    Failed,
    /// Its client has gone.
    Cancelled,
}

/// Gives a request its id, and reports it.
pub(crate) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let id = id_of(request.headers()).unwrap_or_else(|| random_id("req_"));
    let recorder = Recorder::of(&app.config().observers, &id, &request);
    let run = ID.scope(id.clone(), next.run(request));
    let mut response = match recorder {
        Some(recorder) => {
            let response = CURRENT.scope(recorder.clone(), run).await;
            recorder.answered(response.status());
            response
        }
        None => run.await,
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// The id that a client gave its request: as long and as plain as ids are, so that a line of the
/// log stays a line.
fn id_of(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_plain = !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|b| b.is_ascii_graphic());
    is_plain.then(|| id.to_owned())
}

/// The id of the request that is handled on this task.
pub(crate) fn request_id() -> Option<String> {
    ID.try_with(Clone::clone).ok()
}

tokio::task_local! {
    /// The id of the request that is handled.
    pub(crate) static ID: String;

    /// The recorder of the request that is handled.
    pub(crate) static CURRENT: Recorder;
}

impl TextEnd {
    /// It in a word: as OpenAI's `finish_reason`, or `error` or `cancelled`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Finished { reason, .. } => match reason {
                FinishReason::Length | FinishReason::ContextFull => "length",
                FinishReason::Cancelled => "cancelled",
                _ => "stop",
            },
            Self::Failed => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Records a request until all copies are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(Arc<Recording>);

#[derive(Debug)]
struct Recording {
    observers: Vec<Arc<dyn ObserveRequests>>,
    began: Instant,
    report: Mutex<Option<RequestReport>>,
}

impl Recorder {
    /// `None` where there are no observers.
    fn of(observers: &[Arc<dyn ObserveRequests>], id: &str, request: &Request) -> Option<Self> {
        if observers.is_empty() {
            return None;
        }
        let route = request.extensions().get::<MatchedPath>();
        let report = RequestReport {
            id: id.to_owned(),
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            route: route.map_or_else(String::new, |route| route.as_str().to_owned()),
            is_let_in: false,
            parent: TraceParent::of(request.headers()),
            status: None,
            reason: None,
            model: None,
            began: SystemTime::now(),
            took: Duration::ZERO,
            texts: Vec::new(),
        };
        Some(Self(Arc::new(Recording {
            observers: observers.to_vec(),
            began: Instant::now(),
            report: Mutex::new(Some(report)),
        })))
    }

    /// That of the request that is handled on this task.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// How long ago the request came.
    pub(crate) fn elapsed(&self) -> Duration {
        self.0.began.elapsed()
    }

    /// It may use the server.
    pub(crate) fn let_in(&self) {
        self.change(|report| report.is_let_in = true);
    }

    /// It gets this model.
    pub(crate) fn uses(&self, model: &str) {
        self.change(|report| report.model = Some(model.to_owned()));
    }

    /// Its answer is this error.
    pub(crate) fn refused(&self, error: &ApiError) {
        self.change(|report| report.reason = Some(error.message.clone()));
    }

    /// There is an answer.
    fn answered(&self, status: StatusCode) {
        self.change(|report| report.status = Some(status));
    }

    /// A text has ended.
    pub(crate) fn text(&self, text: TextReport) {
        self.change(|report| report.texts.push(text));
    }

    fn change(&self, change: impl FnOnce(&mut RequestReport)) {
        let report = self.0.report.lock();
        if let Some(report) = &mut *report.unwrap_or_else(PoisonError::into_inner) {
            change(report);
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let report = self.report.get_mut();
        let report = report.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut report) = report {
            report.took = self.began.elapsed();
            for observer in &self.observers {
                observer.ended(&report);
            }
        }
    }
}
