//! The live view of the memory: the page at `/`, and `GET /view/events`, the stream behind it.
//!
//! The stream begins with the layout and a whole frame, then come changes, at most ten a second; a
//! viewer that is slow misses frames. The id of each update names the events up to it: a viewer that
//! sends it as `Last-Event-ID` gets a whole frame and the events that it missed. Invariant: the page
//! needs no key and has no data; the stream needs one where there are keys. Loads nothing from
//! elsewhere.

mod page;
mod wire;

use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use bytes::Bytes;
use engine::serve::Watcher;
use futures_core::Stream;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Interval;

use crate::api::on_get;
use crate::api::params::random_id;
use crate::app::App;
use crate::error::ApiError;
use crate::model::{Job, ServedModel};
use crate::stream::{EVENT_STREAM, named_event};

pub(crate) use page::{asset, is_asset, is_for_browser, page};

/// The most that watch at once.
pub(crate) const MAX_VIEWERS: usize = 16;

/// After so long without an update a comment is sent, so that a viewer that is gone is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Of this process: numbers of events mean nothing in another.
static INSTANCE: LazyLock<String> = LazyLock::new(|| random_id(""));

/// The stream of frames and events of the first model that continues texts.
pub(crate) fn events() -> MethodRouter<App> {
    on_get(async |State(app): State<App>, headers: HeaderMap| {
        let model = Arc::clone(app.model_for(None, Job::Texts)?);
        let permit = app.view()?;
        let stream = ViewStream::new(&app, model, permit, &headers)?;
        let headers = [
            (CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM)),
            (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        ];
        Ok::<Response, ApiError>((headers, Body::from_stream(stream)).into_response())
    })
}

/// The events from which a viewer goes on, where it watched this process.
fn last_event(headers: &HeaderMap) -> Option<u64> {
    let id = headers.get("last-event-id")?.to_str().ok()?;
    let (instance, event) = id.split_once('.')?;
    let event = event.parse().ok()?;
    (instance == INSTANCE.as_str()).then_some(event)
}

struct ViewStream {
    watcher: Watcher,
    model: Arc<ServedModel>,
    /// What comes first.
    begin: Option<String>,
    sent: wire::Sent,
    keep_alive: Interval,
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    _permit: OwnedSemaphorePermit,
}

impl ViewStream {
    fn new(
        app: &App,
        model: Arc<ServedModel>,
        permit: OwnedSemaphorePermit,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let service = model.service()?;
        let watcher = match last_event(headers) {
            Some(event) => service.watch_from(event),
            None => service.watch(),
        };
        let mut layout = wire::layout(service.memory_layout());
        layout["model"] = json!(model.id());
        layout["architecture"] = json!(model.architecture());
        layout["n_ctx"] = json!(service.prompt_limits().n_tokens);
        layout["can_chat"] = json!(model.template_source().is_some());
        layout["version"] = json!(env!("CARGO_PKG_VERSION"));
        layout["instance"] = json!(INSTANCE.as_str());
        let mut keep_alive = tokio::time::interval(KEEP_ALIVE);
        keep_alive.reset();
        Ok(Self {
            watcher,
            begin: Some(named_event("layout", &layout)),
            sent: wire::Sent::default(),
            keep_alive,
            closing: Box::pin(app.closing()),
            model,
            _permit: permit,
        })
    }
}

impl Stream for ViewStream {
    type Item = std::io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(begin) = this.begin.take() {
            return Poll::Ready(Some(Ok(begin.into())));
        }
        if this.closing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        match this.watcher.poll_update(cx) {
            Poll::Ready(Some(update)) => {
                let json = this.sent.update(&update, this.model.tokenizer());
                let id = format!("{}.{}", *INSTANCE, update.next_event);
                this.keep_alive.reset();
                let event = format!("event: update\nid: {id}\ndata: {json}\n\n");
                Poll::Ready(Some(Ok(event.into())))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => match this.keep_alive.poll_tick(cx) {
                Poll::Ready(_) => Poll::Ready(Some(Ok(Bytes::from_static(b": still here\n\n")))),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}
