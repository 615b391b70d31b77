//! What a process answers to those who watch it: `/live`, `/ready`, `/metrics`, over HTTP/1.1, one request a
//! connection.
//!
//! Everything is bounded: connections at once, the size and the time of a request, the time of an answer. Whoever asks
//! slowly, or for ever, costs a few kilobytes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use weighbridge_schemas::error::Kind;

use crate::error::{Exit, Failure, Result};
use crate::metrics::{MEDIA_TYPE, Metrics};
use crate::worker::Health;

/// Most connections at once; more wait to be accepted.
const CONNECTIONS: usize = 32;
/// Largest request that is read, in bytes: a line and its headers. Bodies are not read.
const REQUEST_BYTES: usize = 16 << 10;
/// How long a request's headers may take to come.
const HEADERS: Duration = Duration::from_secs(5);
/// How long a connection may stay, its answer included.
const CONNECTION: Duration = Duration::from_secs(20);
/// How long to wait when no connection can be accepted, as when there are too many open files.
const PAUSE: Duration = Duration::from_millis(200);

/// A process that is watched.
pub trait Watched: Send + Sync {
    /// Whether it turns; if not, why, in one line.
    ///
    /// # Errors
    /// Why not, for people.
    fn alive(&self) -> std::result::Result<(), String>;

    /// Whether it does what it is there for; if not, why, in one line.
    ///
    /// # Errors
    /// Why not, for people.
    fn ready(&self) -> std::result::Result<(), String>;

    /// Its figures, in the form of OpenMetrics.
    fn figures(&self) -> String;
}

/// A worker that is watched.
#[derive(Debug, Clone)]
pub struct Working {
    /// How it is.
    pub health: Arc<Health>,
    /// What it does.
    pub metrics: Arc<Metrics>,
}

impl Watched for Working {
    fn alive(&self) -> std::result::Result<(), String> {
        self.health.alive()
    }

    fn ready(&self) -> std::result::Result<(), String> {
        self.health.ready()
    }

    fn figures(&self) -> String {
        self.metrics.set_ready(self.health.ready().is_ok());
        self.metrics.text()
    }
}

/// A port that is listened on.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    address: SocketAddr,
}

impl Port {
    /// Takes the port; 0 takes a free one.
    ///
    /// # Errors
    /// Where it cannot be taken: exit code 5.
    pub async fn take(address: SocketAddr) -> Result<Self> {
        let taken = TcpListener::bind(address).await.and_then(|listener| {
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        });
        taken.map_err(|error| cannot_listen("--listen", address, &error))
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers, for as long as this runs.
    pub async fn answer(self, watched: Arc<dyn Watched>) {
        let service = TowerToHyperService::new(router(watched));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(HEADERS)
            .max_buf_size(REQUEST_BYTES)
            .keep_alive(false);
        let free = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&free).acquire_owned().await else { return };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!(%error, "a connection is not accepted");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let connection = http.serve_connection(TokioIo::new(stream), service.clone());
            tokio::spawn(async move {
                // Whoever went away, or was too slow, need not be told.
                let _ = timeout(CONNECTION, connection).await;
                drop(permit);
            });
        }
    }
}

/// Why a port cannot be taken that `option` asks for.
pub(crate) fn cannot_listen(option: &str, address: SocketAddr, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there; stop it, or name another port (0 takes a free one)".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address; name one that it has, such as 127.0.0.1 or 0.0.0.0".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            format!("{error}; name a port from 1024 on, or let this user take it")
        }
        _ => error.to_string(),
    };
    Failure {
        kind: Kind::Transient,
        class: "cannot_listen",
        message: format!("{option} {address}: {why}"),
        exit: Exit::Unreachable,
    }
}

fn router(watched: Arc<dyn Watched>) -> Router {
    // Every other path is answered by 404, every other method by 405.
    Router::new()
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(watched)
}

async fn live(State(watched): State<Arc<dyn Watched>>) -> Response {
    plain("alive", watched.alive())
}

async fn ready(State(watched): State<Arc<dyn Watched>>) -> Response {
    plain("ready", watched.ready())
}

async fn metrics(State(watched): State<Arc<dyn Watched>>) -> Response {
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], watched.figures()).into_response()
}

/// 200 and `well`, or 503 and why not: one line.
fn plain(well: &str, state: std::result::Result<(), String>) -> Response {
    match state {
        Ok(()) => (StatusCode::OK, format!("{well}\n")).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    /// What the server on `address` answers to `request`, as text.
    fn answer(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        // A server that refuses may close before all is written.
        let _ = stream.write_all(request.as_bytes());
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        String::from_utf8(text).unwrap()
    }

    /// Runs `work` beside a server.
    fn served<T: Send + 'static>(
        health: Arc<Health>,
        work: impl FnOnce(SocketAddr) -> T + Send + 'static,
    ) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let port = Port::take("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = port.address();
            tokio::select! {
                () = port.answer(Arc::new(Working { health, metrics: Arc::default() })) => {
                    unreachable!("it answers for ever")
                }
                done = tokio::task::spawn_blocking(move || work(address)) => done.unwrap(),
            }
        })
    }

    fn get(path: &str) -> String {
        format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
    }

    #[test]
    fn health_and_metrics_are_answered_and_nothing_else() {
        let health = Arc::new(Health::default());
        let told = Arc::clone(&health);
        served(health, move |address| {
            assert!(answer(address, &get("/live")).starts_with("HTTP/1.1 200 "));
            let not_yet = answer(address, &get("/ready"));
            assert!(not_yet.starts_with("HTTP/1.1 503 "), "{not_yet}");
            assert!(not_yet.ends_with(": the queue has not answered yet\n"), "{not_yet}");
            assert!(answer(address, &get("/metrics")).contains("\nweighbridge_ready 0\n"));
            told.queue_answers();
            told.store_was_read();
            assert!(answer(address, &get("/ready")).ends_with("\r\n\r\nready\n"));
            let metrics = answer(address, &get("/metrics"));
            assert!(metrics.contains(&format!("\r\ncontent-type: {MEDIA_TYPE}\r\n")), "{metrics}");
            assert!(metrics.contains("\nweighbridge_ready 1\n") && metrics.ends_with("# EOF\n"));
            let head = answer(address, "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
            assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
            for path in ["/", "/live/", "/readyz", "/../metrics", "/%6cive/x"] {
                assert!(answer(address, &get(path)).starts_with("HTTP/1.1 404 "), "{path}");
            }
            let post = answer(address, "POST /live HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc");
            assert!(post.starts_with("HTTP/1.1 405 "), "{post}");
        });
    }

    #[test]
    fn what_is_too_large_or_no_request_is_refused() {
        served(Arc::default(), |address| {
            let large = format!("GET /live HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * REQUEST_BYTES));
            let refused = answer(address, &large);
            assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 4"), "{refused}");
            let refused = answer(address, "\0\0\0\0\r\n\r\n");
            assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 400 "), "{refused}");
            assert!(answer(address, &get("/live")).starts_with("HTTP/1.1 200 "));
        });
    }

    #[test]
    fn those_who_say_nothing_are_waited_for_and_then_let_go() {
        served(Arc::default(), |address| {
            let silent: Vec<_> = (0..CONNECTIONS).map(|_| TcpStream::connect(address).unwrap()).collect();
            assert!(answer(address, &get("/live")).starts_with("HTTP/1.1 200 "));
            drop(silent);
        });
    }

    #[test]
    fn a_port_that_is_taken_is_told_with_the_way_out() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let failure = runtime.block_on(Port::take(address)).unwrap_err();
        assert_eq!((failure.class, failure.exit), ("cannot_listen", Exit::Unreachable));
        assert!(failure.message.contains(&address.to_string()) && failure.message.contains("another port"));
        let failure = runtime.block_on(Port::take("192.0.2.1:1".parse().unwrap())).unwrap_err();
        assert!(failure.message.contains("no such address"), "{failure}");
    }
}
