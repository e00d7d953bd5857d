//! The page at `/`, which chats and shows the memory, and `GET /view/events`, its stream.
//!
//! The stream begins with the layout, a whole frame and the last events, then come changes, at most
//! ten a second; a viewer that is slow misses frames. The layout names the loaded models, of which
//! a viewer may choose another (`?model=`); `models` names them once they are others. The id of
//! each update names the events up to it: a viewer that sends it as `Last-Event-ID` gets a whole
//! frame and the events that it missed. A stream ends after a while with `renew`, so that a place
//! is kept only by who comes again. Invariant: the page needs no key and has no data; the stream
//! needs that of an admin where there are keys. Loads nothing from elsewhere.

mod page;
mod wire;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use bytes::Bytes;
use cellar_engine::serve::Watcher;
use futures_core::Stream;
use model_core::tokenizer::Tokenizer;
use serde_json::json;
use tokio::time::{Interval, Sleep};

use crate::api::on_get;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::model::{Job, Work};
use crate::places::Place;
use crate::query::ModelQuery;
use crate::stream::{EVENT_STREAM, UNBUFFERED, named_event};

pub(crate) use page::{asset, is_asset, is_for_browser, page};

/// The most that watch at once.
pub(crate) const MAX_VIEWERS: usize = 16;

/// After so long without an update a comment is sent, so that a viewer that is gone is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The stream of frames and events of the model that is named, or else of the first loaded one that
/// continues texts. It loads none: it waits for it, and goes on with it when it was unloaded.
pub(crate) fn events() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               query: ModelQuery,
               headers: HeaderMap| {
            tenant.check_admin()?;
            let named = match &query.model {
                Some(name) => Some(app.registry().find_now(name).await?),
                None => None,
            };
            if let Some((job, id)) = named.and_then(|at| app.registry().job(at))
                && job != Job::Texts
            {
                return Err(job.is_not(Job::Texts, &id));
            }
            let place = app.view(tenant)?;
            let stream = ViewStream::new(app, named, place, &headers);
            let headers = [
                (CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM)),
                (CACHE_CONTROL, HeaderValue::from_static("no-store")),
                UNBUFFERED,
            ];
            Ok::<Response, ApiError>((headers, Body::from_stream(stream)).into_response())
        },
    )
}

/// The model and the event from which a viewer goes on.
fn last_event(headers: &HeaderMap) -> Option<(String, u64)> {
    let id = headers.get("last-event-id")?.to_str().ok()?;
    let (instance, event) = id.split_once('.')?;
    Some((instance.to_owned(), event.parse().ok()?))
}

/// What is watched: a model that is loaded. It may be unloaded meanwhile.
struct Watched {
    watcher: Watcher,
    tokenizer: Arc<Tokenizer>,
    instance: String,
    sent: wire::Sent,
}

struct ViewStream {
    app: App,
    /// The number of the model that is wanted.
    named: Option<usize>,
    watched: Option<Watched>,
    /// The models that can be watched, as the viewer knows them.
    models: Vec<String>,
    /// Comes when a model may have been loaded or unloaded.
    change: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Where the viewer goes on.
    last_event: Option<(String, u64)>,
    keep_alive: Interval,
    /// Until the viewer has to come again; `None` once it was told.
    place: Option<Pin<Box<Sleep>>>,
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    _place: Place<Tenant>,
}

impl ViewStream {
    fn new(app: App, named: Option<usize>, view_place: Place<Tenant>, headers: &HeaderMap) -> Self {
        let mut keep_alive = tokio::time::interval(KEEP_ALIVE);
        keep_alive.reset();
        Self {
            named,
            watched: None,
            models: Vec::new(),
            change: Box::pin(app.registry().next_change()),
            last_event: last_event(headers),
            keep_alive,
            place: Some(Box::pin(tokio::time::sleep(app.config().view_time))),
            closing: Box::pin(app.closing()),
            app,
            _place: view_place,
        }
    }

    /// Watches the model, where it is loaded; gives the event that the stream of one begins with.
    fn begin(&mut self) -> Option<String> {
        let registry = self.app.registry();
        let at = self.named.or_else(|| registry.first_loaded(Job::Texts))?;
        let model = registry.status(at)?.model?;
        let Work::Texts(service) = model.work() else {
            return None;
        };
        let instance = model.instance().to_owned();
        let watcher = match self.last_event.take() {
            Some((last, event)) if last == instance => service.watch_from(event),
            // What happened before is shown, too, as far as it is kept.
            _ => service.watch_from(0),
        };
        let mut layout = wire::layout(service.memory_layout());
        layout["model"] = json!(model.id());
        layout["architecture"] = json!(model.architecture());
        layout["n_ctx"] = json!(service.prompt_limits().n_tokens);
        layout["can_chat"] = json!(model.template_source().is_some());
        layout["version"] = json!(env!("CARGO_PKG_VERSION"));
        layout["instance"] = json!(instance);
        self.models = loaded_models(&self.app);
        layout["models"] = json!(self.models);
        self.watched = Some(Watched {
            watcher,
            tokenizer: Arc::clone(model.tokenizer()),
            instance,
            sent: wire::Sent::default(),
        });
        Some(named_event("layout", &layout))
    }

    /// The next of what is watched; `None` where its model was unloaded.
    fn poll_watched(&mut self, cx: &mut Context<'_>) -> Option<Poll<String>> {
        let watched = self.watched.as_mut()?;
        match watched.watcher.poll_update(cx) {
            Poll::Ready(Some(update)) => {
                let json = watched.sent.update(&update, &watched.tokenizer);
                let id = format!("{}.{}", watched.instance, update.next_event);
                let event = format!("event: update\nid: {id}\ndata: {json}\n\n");
                Some(Poll::Ready(event))
            }
            Poll::Ready(None) => {
                self.watched = None;
                None
            }
            Poll::Pending => Some(Poll::Pending),
        }
    }

    /// The next event, of a model that may be loaded only now.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        // First, so that a change after a look below is one that the next look sees.
        while self.change.as_mut().poll(cx).is_ready() {
            self.change = Box::pin(self.app.registry().next_change());
        }
        if let Some(Poll::Ready(event)) = self.poll_watched(cx) {
            return Poll::Ready(event);
        }
        if self.watched.is_none()
            && let Some(layout) = self.begin()
        {
            return Poll::Ready(layout);
        }
        let models = loaded_models(&self.app);
        if models == self.models {
            return Poll::Pending;
        }
        let event = named_event("models", &json!({ "models": models }));
        self.models = models;
        Poll::Ready(event)
    }
}

/// The names of the models that can be watched.
fn loaded_models(app: &App) -> Vec<String> {
    let models = app.models().into_iter();
    let models = models.filter(|model| model.service().is_some());
    models.map(|model| model.id).collect()
}

impl Stream for ViewStream {
    type Item = std::io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.closing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        let Some(place) = &mut this.place else {
            return Poll::Ready(None);
        };
        if place.as_mut().poll(cx).is_ready() {
            this.place = None;
            return Poll::Ready(Some(Ok(named_event("renew", &json!({})).into())));
        }
        match this.poll_event(cx) {
            Poll::Ready(event) => {
                this.keep_alive.reset();
                Poll::Ready(Some(Ok(event.into())))
            }
            Poll::Pending => match this.keep_alive.poll_tick(cx) {
                Poll::Ready(_) => Poll::Ready(Some(Ok(Bytes::from_static(b": still here\n\n")))),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}
