//! An HTTP proxy between a client and a [`Server`] that understands requests well enough to fail as stores do.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::{StreamExt, TryStreamExt, stream};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, HOST, IF_NONE_MATCH, TRANSFER_ENCODING};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use jiff::fmt::rfc2822;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::faults::{Answer, Asked, At, Chances, Counts, Entry, Fault, Orders, Rule};
use super::signing::Signer;
use super::{ACCOUNT, BUCKET, Kind, Server};

/// The length that a body of unknown length is taken for.
const UNKNOWN_LENGTH: u64 = 64 << 10;

/// A proxy on a port of its own. Without orders everything passes as it is. When it is dropped, its connections end.
#[derive(Debug)]
pub struct FaultyProxy {
    port: u16,
    shared: Arc<Shared>,
    /// Ends the proxy by going away.
    _alive: watch::Sender<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    /// The path of the bucket, with slashes.
    root: String,
    signer: Signer,
    orders: Mutex<Orders>,
}

/// The connection to the client has to end.
#[derive(Debug)]
struct Ends;

impl std::fmt::Display for Ends {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("the connection ends here")
    }
}

impl std::error::Error for Ends {}

impl FaultyProxy {
    /// A proxy in front of `server`. What it does by chance is the same for the same seed and the same requests.
    ///
    /// # Panics
    /// Where no port or no thread can be had.
    #[must_use]
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub fn start(server: &Server, seed: u64) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let root = match server.kind() {
            Kind::SeaweedFs | Kind::Moto => format!("/{BUCKET}/"),
            Kind::Azurite => format!("/{ACCOUNT}/{BUCKET}/"),
        };
        let upstream = (Ipv4Addr::LOCALHOST, server.port()).into();
        let (signer, orders) = (Signer::new(server.kind()), Mutex::new(Orders::new(seed)));
        let shared = Arc::new(Shared { upstream, root, signer, orders });
        let (alive, ended) = watch::channel(());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let served = Arc::clone(&shared);
        std::thread::spawn(move || runtime.block_on(serve(listener, served, ended)));
        Self { port, shared, _alive: alive }
    }

    /// Its port at `127.0.0.1`.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on `fault` is done to the requests that `when` picks. All rules that pick a request hold for it.
    pub fn always(&self, fault: Fault, when: impl Fn(&Asked) -> bool + Send + Sync + 'static) -> Rule {
        self.times(u64::MAX, fault, when)
    }

    /// As [`Self::always`], but to so many requests alone.
    pub fn times(
        &self,
        most: u64,
        fault: Fault,
        when: impl Fn(&Asked) -> bool + Send + Sync + 'static,
    ) -> Rule {
        let rule = Rule::new(most, fault, when);
        self.shared.orders().rules.push(rule.clone());
        rule
    }

    /// From now on faults happen by chance, to requests that no rule picks.
    pub fn by_chance(&self, chances: Chances) {
        self.shared.orders().chances = Some(chances);
    }

    /// Everything passes again: no rules, no chances.
    pub fn pass(&self) {
        let mut orders = self.shared.orders();
        orders.rules.clear();
        orders.chances = None;
    }

    /// What has passed so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.orders().counts.clone()
    }

    /// The last 10,000 requests whose answer has begun, or that have ended without one.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        self.shared.orders().log.iter().cloned().collect()
    }

    /// Counts from 0 again, with an empty log.
    pub fn forget(&self) {
        let mut orders = self.shared.orders();
        orders.counts = Counts::default();
        orders.log.clear();
    }
}

/// Serves until the proxy is dropped.
async fn serve(listener: std::net::TcpListener, shared: Arc<Shared>, mut ended: watch::Receiver<()>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let accept = async {
        loop {
            let Ok((client, _)) = listener.accept().await else { continue };
            let _ = client.set_nodelay(true);
            let shared = Arc::clone(&shared);
            let service = service_fn(move |request| Arc::clone(&shared).handle(request));
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(client), service),
            );
        }
    };
    tokio::select! {
        () = accept => {}
        _ = ended.changed() => {}
    }
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Ends> {
        let asked = Asked::new(&request, &self.root);
        let faults = self.orders().faults_of(&asked);
        let answer = self.answer(request, &faults).await;
        let status = answer.as_ref().ok().map(|answer| answer.status().as_u16());
        self.orders().note(asked.clone(), status);
        answer.map(|answer| if asked.is_get() { answer.map(|body| self.count_read(body)) } else { answer })
    }

    async fn answer(
        self: &Arc<Self>,
        request: Request<Incoming>,
        faults: &[Fault],
    ) -> Result<Response<Body>, Ends> {
        for fault in faults {
            if let Fault::Delay(delay) = fault {
                tokio::time::sleep(*delay).await;
            }
        }
        if faults.iter().any(|fault| matches!(fault, Fault::DropBefore)) {
            return Err(Ends);
        }
        let request = request.map(|body| self.count_written(Body::new(body)));
        let own = faults.iter().find_map(|fault| match fault {
            Fault::Answer(answer) => Some(answer),
            _ => None,
        });
        let mut answer = if let Some(own) = own {
            drain(request.into_body()).await?;
            own_answer(own)?
        } else {
            let answer = self.forward(self.changed_request(request, faults)?).await?;
            if faults.iter().any(|fault| matches!(fault, Fault::DropAfter)) {
                drain(answer.into_body()).await?;
                return Err(Ends);
            }
            answer
        };
        for fault in faults {
            answer = changed_answer(answer, fault)?;
        }
        Ok(answer)
    }

    /// The request as the server sees it.
    fn changed_request(&self, mut request: Request<Body>, faults: &[Fault]) -> Result<Request<Body>, Ends> {
        request.headers_mut().remove(CONNECTION);
        let mut is_changed = false;
        for fault in faults {
            match fault {
                Fault::IgnoreIfNoneMatch => {
                    is_changed |= request.headers_mut().remove(IF_NONE_MATCH).is_some();
                }
                Fault::BodyOf(key) => {
                    *request.uri_mut() = format!("{}{key}", self.root).parse::<Uri>().map_err(|_| Ends)?;
                    is_changed = true;
                }
                Fault::CutRequest(at) => {
                    let length = length(request.headers());
                    request = request.map(|body| limited(body, byte(*at, length), true));
                }
                _ => {}
            }
        }
        if is_changed {
            let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
            let (url, method) = (format!("http://{host}{}", request.uri()), request.method().clone());
            self.signer.sign(&method, &url, request.headers_mut()).then_some(()).ok_or(Ends)?;
        }
        Ok(request)
    }

    /// On a connection of its own: one that has been idle may be closed by the server at any moment.
    async fn forward(&self, request: Request<Body>) -> Result<Response<Body>, Ends> {
        let server = TcpStream::connect(self.upstream).await.map_err(|_| Ends)?;
        let _ = server.set_nodelay(true);
        let made = hyper::client::conn::http1::handshake(TokioIo::new(server)).await;
        let (mut sender, connection) = made.map_err(|_| Ends)?;
        tokio::spawn(connection);
        let mut answer = sender.send_request(request).await.map_err(|_| Ends)?;
        for header in [CONNECTION, TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
            answer.headers_mut().remove(header);
        }
        Ok(answer.map(Body::new))
    }

    fn count_read(self: &Arc<Self>, body: Body) -> Body {
        let shared = Arc::clone(self);
        let count = move |bytes: &Bytes| shared.orders().counts.read += bytes.len() as u64;
        Body::from_stream(body.into_data_stream().inspect_ok(count))
    }

    fn count_written(self: &Arc<Self>, body: Body) -> Body {
        let shared = Arc::clone(self);
        let count = move |bytes: &Bytes| shared.orders().counts.written += bytes.len() as u64;
        Body::from_stream(body.into_data_stream().inspect_ok(count))
    }
}

fn own_answer(answer: &Answer) -> Result<Response<Body>, Ends> {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{0}</Code><Message>{0}, says the test</Message>\
         <RequestId>test</RequestId></Error>",
        answer.code
    );
    let mut response = Response::builder().status(answer.status).header(CONTENT_TYPE, "application/xml");
    for (name, value) in &answer.headers {
        response = response.header(name, value);
    }
    // Azure's code; a HEAD has no other.
    response.header("x-ms-error-code", &answer.code).body(text.into()).map_err(|_| Ends)
}

/// The answer as the client sees it.
fn changed_answer(mut answer: Response<Body>, fault: &Fault) -> Result<Response<Body>, Ends> {
    Ok(match *fault {
        Fault::CutAnswer(at) => {
            let length = length(answer.headers());
            answer.map(|body| limited(body, byte(at, length), true))
        }
        Fault::Truncate(most) => {
            if let Some(length) = length(answer.headers()) {
                answer.headers_mut().insert(CONTENT_LENGTH, length.min(most).into());
            }
            answer.map(|body| limited(body, most, false))
        }
        Fault::FlipByte(at) => answer.map(|body| changed(body, move |place| place == at)),
        Fault::WrongBytes => answer.map(|body| changed(body, |_| true)),
        Fault::ShiftDate(seconds) => {
            let said = answer.headers().get(DATE).and_then(|date| date.to_str().ok());
            let date = said.and_then(|date| rfc2822::parse(date).ok()).map(|date| date.timestamp());
            let shifted =
                date.unwrap_or_else(jiff::Timestamp::now) + jiff::SignedDuration::from_secs(seconds);
            let text =
                rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&shifted).map_err(|_| Ends)?;
            answer.headers_mut().insert(DATE, HeaderValue::from_str(&text).map_err(|_| Ends)?);
            answer
        }
        _ => answer,
    })
}

async fn drain(body: Body) -> Result<(), Ends> {
    body.into_data_stream().try_for_each(|_| async { Ok(()) }).await.map_err(|_| Ends)
}

fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a place by chance"
)]
fn byte(at: At, length: Option<u64>) -> u64 {
    match at {
        At::Byte(at) => at,
        At::Part(part) => (part * length.unwrap_or(UNKNOWN_LENGTH) as f64) as u64,
    }
}

/// As far as `most` bytes; a body that is longer then breaks, or just ends.
fn limited(body: Body, most: u64, breaks: bool) -> Body {
    let rest = Some((body.into_data_stream(), most));
    Body::from_stream(stream::unfold(rest, move |rest| async move {
        let (mut data, left) = rest?;
        if left == 0 {
            // What came before is sent meanwhile.
            tokio::time::sleep(Duration::from_millis(5)).await;
            return breaks.then(|| (Err(io::Error::other(Ends)), None));
        }
        let mut bytes = match data.next().await? {
            Ok(bytes) => bytes,
            Err(error) => return Some((Err(io::Error::other(error)), None)),
        };
        bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        let left = left - bytes.len() as u64;
        Some((Ok(bytes), Some((data, left))))
    }))
}

/// With other bytes at the places that `is_changed` picks.
fn changed(body: Body, is_changed: impl Fn(u64) -> bool + Send + 'static) -> Body {
    let mut place = 0;
    Body::from_stream(body.into_data_stream().map_ok(move |bytes| {
        let changed =
            bytes.iter().zip(place..).map(|(byte, at)| if is_changed(at) { !byte } else { *byte }).collect();
        place += bytes.len() as u64;
        let changed: Vec<u8> = changed;
        Bytes::from(changed)
    }))
}
