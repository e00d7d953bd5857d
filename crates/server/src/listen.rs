//! [`serve`]: accepts connections until it is told to end, then lets those go on that must.
//!
//! Invariant: a client that sends no complete head in time is cut off, and so is one that reads nothing
//! of what it is sent; when `serve` returns, no connection is left. Knows no API.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::serve::{Listener, ListenerExt};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;
use tower::util::MapRequest;

use crate::app::App;

/// How long the head of a request may take to come, and a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(75);

/// How long connections may take to end, after their last answer.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// Bytes of a request's head.
const MAX_HEAD: usize = 64 << 10;

/// Serves a listener until `stop` ends; then refuses requests, waits for texts as long as the
/// configuration of the app says, and ends all connections.
pub async fn serve(
    listener: TcpListener,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let listener = listener.tap_io(|stream| {
        // Pieces go out at once, not when a packet is full.
        let _slower_only = stream.set_nodelay(true);
    });
    serve_on(listener, app, router, stop).await;
}

/// As [`serve`], on a Unix socket.
#[cfg(unix)]
pub async fn serve_unix(
    listener: tokio::net::UnixListener,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    serve_on(listener, app, router, stop).await;
}

async fn serve_on<L: Listener>(
    mut listener: L,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let mut connections = JoinSet::new();
    let mut end = pin!(async {
        stop.await;
        app.drain().await;
    });
    loop {
        tokio::select! {
            (stream, _) = listener.accept() => {
                connections.spawn(connection(stream, router.clone(), app.clone()));
            }
            Some(_ended) = connections.join_next() => {}
            () = &mut end => break,
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(CLOSE_TIME, all).await.is_err() {
        connections.shutdown().await;
    }
}

async fn connection<S>(stream: S, router: Router, app: App)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let with_body = |request: hyper::Request<Incoming>| -> Request { request.map(Body::new) };
    let service = TowerToHyperService::new(MapRequest::new(router, with_body));
    // A body is dropped with its connection, and what it holds with the body.
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(app.config().write_time));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = app.closing() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
    }
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll};

    use axum::routing::get;
    use bytes::Bytes;
    use futures_core::Stream;
    use tokio::net::UnixStream;
    use tokio::sync::oneshot;
    use tokio::time::{Instant, sleep, timeout};

    use super::*;
    use crate::app::ServerConfig;

    /// A body without end. Dropped, it tells that.
    struct Endless {
        _dropped: oneshot::Sender<()>,
    }

    impl Stream for Endless {
        type Item = Result<Bytes, Infallible>;

        fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
            Poll::Ready(Some(Ok(Bytes::from_static(&[b'x'; 512]))))
        }
    }

    fn app() -> App {
        let config = ServerConfig {
            write_time: Duration::from_secs(2),
            ..ServerConfig::default()
        };
        App::new(Vec::new(), config)
    }

    fn on_runtime(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn a_client_that_stops_reading_is_cut_off_and_one_that_reads_is_not() {
        on_runtime(async {
            let (dropped, mut is_dropped) = oneshot::channel();
            let body = Arc::new(Mutex::new(Some(Endless { _dropped: dropped })));
            let endless = move || {
                let body = body.lock().unwrap().take().unwrap();
                async { Body::from_stream(body) }
            };
            let router = Router::new().route("/", get(endless));
            let (client, stream) = UnixStream::pair().unwrap();
            let connection = tokio::spawn(connection(stream, router, app()));
            client.writable().await.unwrap();
            let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
            assert_eq!(client.try_write(request).unwrap(), request.len());
            // It reads for longer than the time, a piece now and then.
            let until = Instant::now() + Duration::from_secs(3);
            let mut read = vec![0; 1 << 16];
            while Instant::now() < until {
                sleep(Duration::from_millis(20)).await;
                client.readable().await.unwrap();
                assert!(client.try_read(&mut read).unwrap() > 0);
            }
            let state = is_dropped.try_recv();
            assert_eq!(state, Err(oneshot::error::TryRecvError::Empty));
            // Then it reads nothing.
            let cut_off = timeout(Duration::from_secs(60), connection).await;
            cut_off.unwrap().unwrap();
            assert!(is_dropped.await.is_err());
        });
    }
}
