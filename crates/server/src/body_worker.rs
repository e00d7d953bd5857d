//! [`BodyWorker`]: the thread on which requests with large bodies are handled, and [`read_body`],
//! which reads bodies within a budget and sends the large ones there.
//!
//! Invariant: what takes time in proportion to a large body (parsing, reading fields, dropping,
//! writing a large answer) is done on this thread, and its tokenizers and templates on threads of
//! its own. So neither connections nor small requests wait for it, and it waits for none of them.
//! Knows no JSON.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Instrument;

use crate::app::App;
use crate::error::ApiError;
use crate::report::{self, Recorder};

/// The time in which the body of a request has to come.
const BODY_TIME: Duration = Duration::from_secs(60);

/// The time that a large body waits for room next to others.
const ROOM_TIME: Duration = Duration::from_secs(10);

/// Seconds after which a client may try again whose body found no room.
const RETRY_SECONDS: u64 = 5;

/// Bytes of a body that is handled where it comes: parsing it takes well below a millisecond.
const SMALL: usize = 64 << 10;

/// Bytes of a body whose values leave so much free memory that it goes back to the system.
const HUGE: usize = 1 << 20;

/// Large bodies of the largest size that are held at once.
const N_LARGEST: usize = 8;

/// Bytes after which reading lets other connections go first: several bodies that are there at once
/// would each be read whole otherwise.
const STRIDE: usize = 256 << 10;

/// Threads of the worker that tokenize, render and compile schemas.
const N_PREPARING: usize = 2;

/// The bytes of large bodies that a server holds at once.
pub(crate) fn body_budget(max_body: usize) -> usize {
    max_body.saturating_mul(N_LARGEST).min(u32::MAX as usize)
}

/// The place of a large body in the budget, until all copies are dropped.
#[derive(Clone, Debug)]
pub(crate) struct BodyPermit {
    _permit: Arc<OwnedSemaphorePermit>,
}

/// A thread with a runtime of its own. It ends when this is dropped, and what runs on it is
/// cancelled.
#[derive(Debug)]
pub(crate) struct BodyWorker {
    handle: Handle,
    _until: oneshot::Sender<()>,
}

impl BodyWorker {
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(N_PREPARING)
            .thread_name("cellar-large")
            .build()?;
        let handle = runtime.handle().clone();
        let (until, dropped) = oneshot::channel::<()>();
        let run = move || {
            let _dropped = runtime.block_on(dropped);
            runtime.shutdown_background();
        };
        let name = "cellar-large".to_owned();
        std::thread::Builder::new().name(name).spawn(run)?;
        Ok(Self {
            handle,
            _until: until,
        })
    }

    /// What a future gives that runs on this thread. Dropped, it cancels that.
    async fn run(
        &self,
        future: impl Future<Output = Response> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let mut task = JoinSet::new();
        let future = future.in_current_span();
        match Recorder::current() {
            Some(recorder) => {
                task.spawn_on(report::CURRENT.scope(recorder, future), &self.handle);
            }
            None => {
                task.spawn_on(future, &self.handle);
            }
        }
        let ended = task.join_next().await.ok_or_else(ApiError::shutting_down)?;
        ended.map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Does work when a thread that prepares is free.
    fn run_later(&self, work: impl FnOnce() + Send + 'static) {
        self.handle.spawn_blocking(work);
    }
}

/// Does work that takes time on a thread for such work.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(error.to_string()))
}

/// Reads the body of each POST before its handler, which runs on the worker where the body is
/// large.
pub(crate) async fn read_body(State(app): State<App>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let whole = timeout(BODY_TIME, collect(&app, &parts.headers, body)).await;
    let whole = whole.unwrap_or_else(|_| Err(ApiError::too_slow(BODY_TIME.as_secs())));
    let (bytes, room) = match whole {
        Ok(whole) => whole,
        Err(error) => {
            app.metrics().refused(&error);
            return error.into_response();
        }
    };
    let n_bytes = bytes.len();
    let mut request = Request::from_parts(parts, Body::from(bytes));
    let Some(room) = room else {
        return next.run(request).await;
    };
    request.extensions_mut().insert(room);
    let Some(worker) = app.body_worker() else {
        return next.run(request).await;
    };
    let ended = worker.run(next.run(request)).await;
    if n_bytes > HUGE {
        worker.run_later(return_heap);
    }
    ended.unwrap_or_else(IntoResponse::into_response)
}

/// Gives the pages of freed values back to the system. The C library of Linux keeps them, for each
/// thread its own: eight parsed bodies of 8 MB would hold 200 MB for as long as the server runs.
fn return_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` only takes a number, and every thread may call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// All bytes of a body, and its room where it is large.
async fn collect(
    app: &App,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<(Vec<u8>, Option<BodyPermit>), ApiError> {
    let limit = app.config().max_body;
    let length = headers.get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limit) {
        return Err(ApiError::too_large(limit));
    }
    let (mut bytes, mut room) = (Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::invalid(format!("the body of the request broke off: {error}"))
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let n_bytes = bytes.len() + data.len();
        if n_bytes > limit {
            return Err(ApiError::too_large(limit));
        }
        if n_bytes > SMALL && room.is_none() {
            room = Some(reserve(app, length.unwrap_or(limit), ROOM_TIME).await?);
        }
        let n_strides = bytes.len() / STRIDE;
        bytes.extend_from_slice(&data);
        if n_bytes / STRIDE > n_strides {
            tokio::task::yield_now().await;
        }
    }
    Ok((bytes, room))
}

/// BodyPermit for a body of so many bytes, which others may have to leave first, within this time.
async fn reserve(app: &App, n_bytes: usize, wait: Duration) -> Result<BodyPermit, ApiError> {
    let n_permits = u32::try_from(n_bytes).unwrap_or(u32::MAX);
    let permit = Arc::clone(app.bodies()).acquire_many_owned(n_permits);
    match timeout(wait, permit).await {
        Ok(Ok(permit)) => Ok(BodyPermit {
            _permit: Arc::new(permit),
        }),
        _ => {
            let budget = body_budget(app.config().max_body);
            let message = format!(
                "a body of {n_bytes} bytes has no room: large bodies that are read may take {budget} bytes \
                 together"
            );
            Err(ApiError::busy(message, RETRY_SECONDS))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::sync::{Mutex, mpsc};

    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use axum::routing::post;
    use tower::ServiceExt;

    use super::*;
    use crate::app::ServerConfig;

    fn on_runtime<T>(test: impl Future<Output = T>) -> T {
        let mut runtime = Builder::new_current_thread();
        runtime.enable_all().build().unwrap().block_on(test)
    }

    fn request(n_bytes: usize) -> Request {
        let body = Body::from(vec![b'x'; n_bytes]);
        Request::post("/").body(body).unwrap()
    }

    /// A large body is handled while the thread of the connections answers others, and while a
    /// template or a tokenizer works for it.
    #[test]
    fn a_large_body_holds_up_no_small_one() {
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let app = App::new(Vec::new(), ServerConfig::default());
        let handler = async move |request: Request| {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            if body.len() > SMALL {
                // Held up as by a body that takes long, on this thread and on another one.
                let wait = Duration::from_secs(60);
                held.lock().unwrap().recv_timeout(wait).unwrap();
                let held = Arc::clone(&held);
                let wait = move || held.lock().unwrap().recv_timeout(wait).unwrap();
                run_blocking(wait).await.unwrap();
            }
            body.len().to_string()
        };
        let route = post(handler).route_layer(from_fn_with_state(app.clone(), read_body));
        let router = Router::new().route("/", route).with_state(app);
        on_runtime(async {
            let large = tokio::spawn(router.clone().oneshot(request(SMALL + 1)));
            for _ in 0..2 {
                let small = router.clone().oneshot(request(SMALL)).await.unwrap();
                let bytes = small.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(bytes, SMALL.to_string());
                assert!(!large.is_finished());
                release.send(()).unwrap();
            }
            let large = large.await.unwrap().unwrap();
            let bytes = large.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(bytes, (SMALL + 1).to_string());
        });
    }

    #[test]
    fn a_large_body_waits_for_room() {
        let config = ServerConfig {
            max_body: 100,
            ..ServerConfig::default()
        };
        let app = App::new(Vec::new(), config);
        on_runtime(async {
            let rooms = [400, 400].map(|n| reserve(&app, n, Duration::ZERO));
            let [first, second] = rooms;
            let (first, _second) = (first.await.unwrap(), second.await.unwrap());
            let refused = reserve(&app, 100, Duration::ZERO).await.unwrap_err();
            assert_eq!(refused.status, 429);
            assert!(refused.message.contains("800 bytes"), "{refused}");
            let waiting = {
                let app = app.clone();
                tokio::spawn(async move { reserve(&app, 100, Duration::from_secs(60)).await })
            };
            let copy = first.clone();
            drop(first);
            assert!(reserve(&app, 1, Duration::ZERO).await.is_err());
            drop(copy);
            waiting.await.unwrap().unwrap();
        });
    }
}
