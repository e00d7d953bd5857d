//! [`serve`]: accepts connections until it is told to end, then lets those go on that must.
//!
//! Invariant: a client that sends no complete head in time is cut off, and when `serve` returns, no
//! connection is left. Knows no API.

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
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
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
