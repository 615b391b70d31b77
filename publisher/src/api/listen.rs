//! Connections: taken, secured, bounded, and ended. One port answers gRPC (HTTP/2) and plain HTTP (HTTP/1.1 or 2).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use futures::FutureExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::guard::Connection;
use super::strangers::{Stranger, Strangers};
use super::tls::Tls;
use crate::metrics::api::Api as Figures;
use crate::worker::Stop;

/// How long the secure part of a connection may take to be made.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a request's headers may take to come.
const HEADERS: Duration = Duration::from_secs(10);
/// How long a connection is kept over which nobody who is known has asked anything.
const STRANGER: Duration = Duration::from_secs(15);
/// How long what was sent may not be acknowledged, or not be taken, in milliseconds: then the other side is gone.
const GONE: u32 = 60_000;
/// How often a quiet connection is asked whether it is still there, and how long it may take to say so.
const PING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// Requests at once on one connection.
const STREAMS: u32 = 256;
/// Largest set of headers, in bytes.
const HEADER_BYTES: u32 = 16 << 10;
/// Bytes of answers that are kept for a stream, or a connection of HTTP/1.1, that does not read them; and the largest
/// set of headers in HTTP/1.1.
const BUFFER: usize = 64 << 10;
/// How long to wait when no connection can be accepted, as when there are too many open files.
const PAUSE: Duration = Duration::from_millis(200);

/// The share of all connections that may come from one address before anybody who is known has asked over them.
const STRANGERS_SHARE: usize = 4;
/// So many may in any case.
const STRANGERS: usize = 16;

/// How connections are kept.
#[derive(Debug, Clone, Copy)]
pub struct Lives {
    /// Connections at once; more wait to be accepted.
    pub connections: usize,
    /// How long one is kept; then nothing more is begun on it, and its streams are asked to end.
    pub age: Duration,
    /// How long what was begun on it may take then, and when the server stops.
    pub grace: Duration,
}

/// Answers on `listener` until told to stop, and until what was begun then has ended.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    router: Router,
    lives: Lives,
    figures: Arc<Figures>,
    mut stop: Stop,
) {
    let free = Arc::new(Semaphore::new(lives.connections));
    let strangers = Strangers::new((lives.connections / STRANGERS_SHARE).max(STRANGERS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            let permit = Arc::clone(&free).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = stop.wait() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "a connection is not accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(stranger) = strangers.admit(peer.ip()) else {
            figures.refused("strangers");
            continue;
        };
        let (tls, router, stop, going) = (tls.clone(), router.clone(), stop.clone(), figures.connect());
        connections.spawn(async move {
            secured(stream, (peer, stranger), tls, router, lives, stop).await;
            drop((permit, going));
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn secured(
    stream: TcpStream,
    (peer, stranger): (SocketAddr, Stranger),
    tls: Option<Arc<Tls>>,
    router: Router,
    lives: Lives,
    stop: Stop,
) {
    // Heartbeats and small answers go at once.
    let _ = stream.set_nodelay(true);
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, GONE);
    let Some(tls) = tls else { return answered(stream, (peer, stranger), router, lives, stop).await };
    match timeout(HANDSHAKE, tls.accept(stream)).await {
        Ok(Ok(stream)) => answered(stream, (peer, stranger), router, lives, stop).await,
        Ok(Err(error)) => tracing::debug!(%peer, %error, "no secure connection"),
        Err(_) => tracing::debug!(%peer, "no secure connection in time"),
    }
}

async fn answered<S>(
    stream: S,
    (peer, stranger): (SocketAddr, Stranger),
    router: Router,
    lives: Lives,
    mut stop: Stop,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (close, closing) = watch::channel(false);
    // Those that came together do not have to come again together.
    let old = Instant::now() + lives.age.mul_f64(1.0 - fastrand::f64() / 10.0);
    let known = Arc::new(Notify::new());
    let told = Arc::clone(&known);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(Connection {
            peer,
            closing: closing.clone(),
            known: Arc::clone(&told),
        });
        // A router answers every request, if only to say that there is nothing.
        tower_call(router.clone(), request)
    });
    let http = http();
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let over = async {
        if timeout(STRANGER, known.notified()).await.is_ok() {
            drop(stranger);
            sleep_until(old).await;
        }
    };
    tokio::select! {
        _ = connection.as_mut() => return,
        () = over => {}
        () = stop.wait() => {}
    }
    let _ = close.send(true);
    connection.as_mut().graceful_shutdown();
    // Whoever does not end by then is cut off: nobody may keep a connection by not reading.
    if timeout(lives.grace, connection).await.is_err() {
        tracing::debug!(%peer, "a connection is cut off");
    }
}

async fn tower_call(
    router: Router,
    request: Request,
) -> Result<axum::response::Response, std::convert::Infallible> {
    use hyper::service::Service;
    hyper_util::service::TowerToHyperService::new(router)
        .call(request)
        .map(|answer| match answer {
            Ok(response) => Ok(response),
            Err(never) => match never {},
        })
        .await
}

fn http() -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS).max_buf_size(BUFFER);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADER_BYTES)
        .max_send_buf_size(BUFFER);
    http
}
