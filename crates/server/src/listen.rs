//! [`serve`]: accepts connections until it is told to end, then lets those go on that must.
//!
//! Invariant: a client that sends no complete head in time is cut off, and so is one that reads
//! nothing of what it is sent; no client has more connections than it may; where the system has no
//! room for a new connection, idle ones end. When `serve` returns, no connection is left. Knows no
//! API.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroUsize;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_io_timeout::TimeoutStream;
use tower::util::MapRequest;

use crate::api;
use crate::app::App;
use crate::batches;
use crate::places::{NoPlace, Place, PlaceLimits, Places};
use crate::tls::Tls;

/// How long the head of a request may take to come, and a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(75);

/// The most time of a handshake of TLS.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// How long connections may take to end, after their last answer.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// Bytes of a request's head.
const MAX_HEAD: usize = 64 << 10;

/// The pause after a connection that could not be accepted, in which others can end.
const PAUSE: Duration = Duration::from_millis(100);

/// Time between two lines of the log about connections that are not accepted.
const WARN_TIME: Duration = Duration::from_secs(10);

/// A source of connections.
trait Accept {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next connection, and where it comes from.
    async fn accept(&self) -> io::Result<(Self::Stream, Option<IpAddr>)>;
}

impl Accept for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<(Self::Stream, Option<IpAddr>)> {
        let (stream, address) = Self::accept(self).await?;
        // Pieces go out at once, not when a packet is full.
        let _slower_only = stream.set_nodelay(true);
        Ok((stream, Some(address.ip())))
    }
}

#[cfg(unix)]
impl Accept for tokio::net::UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn accept(&self) -> io::Result<(Self::Stream, Option<IpAddr>)> {
        Ok((Self::accept(self).await?.0, None))
    }
}

/// Serves a listener until `stop` ends; then refuses requests, waits for texts as long as the
/// configuration of the app says, and ends all connections.
pub async fn serve(
    listener: TcpListener,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    serve_on(listener, None, app, router, stop).await;
}

/// As [`serve`], with connections that TLS encrypts.
pub async fn serve_tls(
    listener: TcpListener,
    tls: Tls,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    serve_on(listener, Some(tls), app, router, stop).await;
}

/// As [`serve`], on a Unix socket.
#[cfg(unix)]
pub async fn serve_unix(
    listener: tokio::net::UnixListener,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    serve_on(listener, None, app, router, stop).await;
}

async fn serve_on<L: Accept>(
    listener: L,
    tls: Option<Tls>,
    app: App,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    batches::resume(&app, &api::routes(&app));
    let mut connections = JoinSet::new();
    let mut end = pin!(async {
        stop.await;
        app.drain().await;
    });
    let limit = app.config().max_client_connections;
    let clients = Places::default();
    let end_idle = watch::Sender::new(());
    let (mut next, mut warnings) = (Instant::now(), Warnings::default());
    loop {
        let accept = async {
            sleep_until(next).await;
            listener.accept().await
        };
        tokio::select! {
            accepted = accept => match accepted {
                Ok((stream, address)) => match place_of(&clients, address, limit) {
                    Ok(place) => {
                        let ends = end_idle.subscribe();
                        let tls = tls.clone();
                        let (router, app) = (router.clone(), app.clone());
                        let connection = secured(stream, tls, router, app, ends);
                        connections.spawn(with_place(place, connection));
                    }
                    Err(_) => warnings.too_many(address),
                },
                Err(error) if is_of_client(&error) => {}
                Err(error) => {
                    next = Instant::now() + PAUSE;
                    end_idle.send_replace(());
                    warnings.cannot_accept(&error, connections.len());
                }
            },
            Some(_ended) = connections.join_next() => {}
            () = &mut end => break,
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if timeout(CLOSE_TIME, all).await.is_err() {
        connections.shutdown().await;
    }
}

/// A place for a connection of a client; `None` where it needs none: without a limit, or without an
/// address.
///
/// # Errors
/// [`NoPlace`] where the client has as many as it may.
fn place_of(
    clients: &Places<IpAddr>,
    address: Option<IpAddr>,
    limit: Option<NonZeroUsize>,
) -> Result<Option<Place<IpAddr>>, NoPlace> {
    let (Some(limit), Some(address)) = (limit, address) else {
        return Ok(None);
    };
    let limits = PlaceLimits {
        of_one: limit.get(),
        of_all: usize::MAX,
    };
    clients.take(client_of(address), limits).map(Some)
}

/// The client of a connection: an IPv4 address, or the 64 bits of an IPv6 address that name a
/// network. What a proxy says of others is not looked at.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(network))
        }
        address => address,
    }
}

/// True if a connection ended before it was accepted.
fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// Lines of the log, one of a kind in a while.
#[derive(Debug, Default)]
struct Warnings {
    too_many: Option<Instant>,
    cannot_accept: Option<Instant>,
}

impl Warnings {
    fn too_many(&mut self, address: Option<IpAddr>) {
        if is_due(&mut self.too_many) {
            let address = address.map(tracing::field::display);
            tracing::warn!(
                address,
                "a client has as many connections as it may, and gets no other"
            );
        }
    }

    fn cannot_accept(&mut self, error: &io::Error, n_connections: usize) {
        if is_due(&mut self.cannot_accept) {
            tracing::warn!(
                %error,
                n_connections,
                "a connection cannot be accepted: idle ones are closed"
            );
        }
    }
}

/// True if it was said last long ago; then it is said now.
fn is_due(last: &mut Option<Instant>) -> bool {
    let is_due = last.is_none_or(|last| last.elapsed() >= WARN_TIME);
    if is_due {
        *last = Some(Instant::now());
    }
    is_due
}

async fn with_place(place: Option<Place<IpAddr>>, connection: impl Future<Output = ()>) {
    connection.await;
    drop(place);
}

/// Serves a connection, once it is encrypted where it is to be.
async fn secured<S>(
    stream: S,
    tls: Option<Tls>,
    router: Router,
    app: App,
    end_idle: watch::Receiver<()>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Some(tls) = tls else {
        return connection(stream, router, app, end_idle).await;
    };
    let encrypted = tokio::select! {
        encrypted = timeout(HANDSHAKE_TIME, tls.accept(stream)) => encrypted,
        () = app.closing() => return,
    };
    match encrypted {
        Ok(Ok(stream)) => connection(stream, router, app, end_idle).await,
        Ok(Err(error)) => tracing::debug!(%error, "a client and this server agree on no TLS"),
        Err(_) => tracing::debug!("a client did not end the handshake of TLS in time"),
    }
}

async fn connection<S>(stream: S, router: Router, app: App, mut end_idle: watch::Receiver<()>)
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
    let asked_to_end = async {
        tokio::select! {
            () = app.closing() => {}
            // Without a sender nothing is accepted any more.
            Ok(()) = end_idle.changed() => {}
        }
    };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = asked_to_end => {
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
    use tokio::time::{Instant, sleep};

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
            let connection = tokio::spawn(connection(stream, router, app(), watch::channel(()).1));
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

    #[test]
    fn a_client_is_an_address_or_a_network() {
        let client = |address: &str| client_of(address.parse().unwrap()).to_string();
        assert_eq!(client("10.0.0.1"), "10.0.0.1");
        assert_eq!(client("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(client("2001:db8::1"), client("2001:db8::2"));
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        let clients = Places::default();
        let place = |address: &str| {
            let limit = NonZeroUsize::new(1);
            place_of(&clients, Some(address.parse().unwrap()), limit)
        };
        let _first = place("2001:db8::1").unwrap();
        assert_eq!(place("2001:db8::2").unwrap_err(), NoPlace::OfOne);
        assert!(
            place_of(&clients, None, NonZeroUsize::new(1))
                .unwrap()
                .is_none()
        );
    }
}
