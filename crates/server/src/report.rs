//! [`RequestReport`]: what a request did, for an [`ObserveRequests`] once it has ended.
//!
//! Invariant: each POST that was let in is reported once, after the last of its texts has ended or its client
//! has gone. Knows no wire; without an observer nothing is kept.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};
use cellar_engine::FinishReason;
use cellar_engine::serve::Usage;

use crate::trace::TraceParent;

/// Takes reports of what requests did.
pub trait ObserveRequests: Debug + Send + Sync {
    /// A request has ended. Called where it ended, often on the thread of all connections: it must not
    /// wait.
    fn ended(&self, report: RequestReport);
}

/// What a request did.
#[derive(Clone, Debug)]
pub struct RequestReport {
    /// How it came.
    pub method: Method,
    /// The path of its endpoint, with the names of what varies.
    pub route: String,
    /// The trace that it belongs to.
    pub parent: Option<TraceParent>,
    /// The status of its answer; `None` where the client went before there was one.
    pub status: Option<StatusCode>,
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
        /// What it took.
        usage: Usage,
    },
    /// By an error.
    Failed,
    /// Its client has gone.
    Cancelled,
}

tokio::task_local! {
    /// The recorder of the request that is handled.
    pub(crate) static CURRENT: Recorder;
}

/// Records a request until all copies are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(Arc<Recording>);

#[derive(Debug)]
struct Recording {
    observer: Arc<dyn ObserveRequests>,
    began: Instant,
    report: Mutex<Option<RequestReport>>,
}

impl Recorder {
    /// `None` where a request is not to be reported.
    pub(crate) fn of(
        observer: Option<&Arc<dyn ObserveRequests>>,
        request: &Request,
    ) -> Option<Self> {
        if request.method() != Method::POST {
            return None;
        }
        let route = request.extensions().get::<MatchedPath>();
        let report = RequestReport {
            method: request.method().clone(),
            route: route.map_or_else(String::new, |route| route.as_str().to_owned()),
            parent: TraceParent::of(request.headers()),
            status: None,
            began: SystemTime::now(),
            took: Duration::ZERO,
            texts: Vec::new(),
        };
        Some(Self(Arc::new(Recording {
            observer: Arc::clone(observer?),
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

    /// There is an answer.
    pub(crate) fn answered(&self, status: StatusCode) {
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
            self.observer.ended(report);
        }
    }
}
