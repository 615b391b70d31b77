//! What stands before every request: who asks, how much they ask at once, and how long they wait.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout_at};

use super::answers::Refusal;
use super::shares::Shares;
use super::strangers::Strangers;
use super::tokens::{Caller, Tokens};
use super::turns::Turns;
use crate::metrics::api::Api as Figures;

/// How long a request may take to be answered, unless its caller says less. Answers that are streams go on for longer.
const LONGEST: Duration = Duration::from_secs(60);
/// How long a request waits for its turn, where its caller asks for more a second than is allowed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Tokens that are not known, from one address, a second; and so many at once.
const BAD_A_SECOND: NonZeroU32 = NonZeroU32::MIN.saturating_add(4);
const BAD_AT_ONCE: NonZeroU32 = NonZeroU32::MIN.saturating_add(19);
/// Paths that are answered to anybody: they tell of the server's health, and nothing of the store.
const OPEN: &str = "/grpc.health.v1.Health/";
/// How long such a request may take to come, and to be answered.
const OPEN_PATIENCE: Duration = Duration::from_secs(3);
/// Such requests at once from one address.
const OPEN_OF_ONE: usize = 8;
/// Requests of one caller, and of all who are not known, whose answers have not begun; more wait. Each may take as much
/// memory as the largest message has bytes.
const AT_HAND: usize = 96;
/// Longest reason of a request that makes no sense, in bytes.
const REASON_BYTES: usize = 1024;

/// The connection that a request came over.
#[derive(Debug, Clone)]
pub struct Connection {
    /// Whence.
    pub peer: SocketAddr,
    /// Set once no more is to be begun on it: streams end then.
    pub closing: watch::Receiver<bool>,
    /// Told once somebody who is known has asked something.
    pub known: Arc<Notify>,
}

/// How much each caller may ask.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Requests a second, and as many at once after a quiet second.
    pub requests_a_second: NonZeroU32,
    /// Requests that are being answered at the same time; a stream is one for as long as it goes on.
    pub at_once: usize,
}

/// Who may ask, and how much.
#[derive(Debug)]
pub struct Gate {
    tokens: Option<Arc<Tokens>>,
    bounds: Bounds,
    turns: Turns<String>,
    bad: Turns<IpAddr>,
    /// Lines in the log about them.
    bad_told: Turns<()>,
    /// Requests and streams of one caller that are being answered.
    places: Shares,
    /// Requests of one caller whose answers have not begun: what has come of their messages is in memory.
    hands: Shares,
    /// The same of what is answered to anybody; and how many of them come from where.
    open: Semaphore,
    open_from: Strangers,
    figures: Arc<Figures>,
}

impl Gate {
    /// Lets those in whose token is known; without `tokens`, everybody.
    #[must_use]
    pub fn new(tokens: Option<Arc<Tokens>>, bounds: Bounds, figures: Arc<Figures>) -> Self {
        let a_second = bounds.requests_a_second;
        Self {
            tokens,
            bounds,
            turns: Turns::new(a_second, a_second, PATIENCE),
            bad: Turns::new(BAD_A_SECOND, BAD_AT_ONCE, Duration::ZERO),
            bad_told: Turns::new(NonZeroU32::MIN, NonZeroU32::MIN, Duration::ZERO),
            places: Shares::new(bounds.at_once),
            hands: Shares::new(AT_HAND),
            open: Semaphore::new(AT_HAND),
            open_from: Strangers::new(OPEN_OF_ONE),
            figures,
        }
    }

    /// Who `caller` is now; `None` where their token is not known any more.
    #[must_use]
    pub fn again(&self, caller: &Caller) -> Option<Caller> {
        self.tokens.as_ref().map_or_else(|| Some(caller.clone()), |tokens| tokens.again(caller))
    }

    fn caller(&self, request: &Request, peer: SocketAddr) -> Result<Caller, Refusal> {
        let Some(tokens) = &self.tokens else {
            // A page of the web whose name was made to mean this machine sends its own name.
            return if is_of_this_machine(request.uri(), request.headers()) {
                Ok(Caller::local())
            } else {
                let why = "without tokens only requests to localhost, or to an IP address, are answered";
                Err(Refusal::forbidden(why))
            };
        };
        let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = given.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        if let Some(caller) = token.and_then(|token| tokens.caller(token)) {
            return Ok(caller);
        }
        let now = Instant::now();
        if self.bad_told.take((), now).is_ok() {
            tracing::warn!(from = %peer.ip(), has_token = token.is_some(), "a request without a valid token");
        }
        self.bad.take(neighbourhood(peer.ip()), now).map_err(|again| {
            Refusal::over_limit("too many requests without a valid token from this address", again)
        })?;
        Err(Refusal::unknown_caller())
    }

    /// A place for one more request of this caller.
    fn place(&self, caller: &Caller) -> Result<OwnedSemaphorePermit, Refusal> {
        self.places.take(caller.name(), "requests and streams")
    }

    /// When it is this caller's turn, who has to be answered until `end`.
    fn turn(&self, caller: &Caller, end: Instant) -> Result<Instant, Refusal> {
        let now = Instant::now();
        let refused = |again| {
            let most = self.bounds.requests_a_second;
            Refusal::over_limit(format!("more than {most} requests a second by this token"), again)
        };
        let wait = self.turns.take(caller.name().to_owned(), now).map_err(refused)?;
        if wait.is_zero() || now + wait < end { Ok(now + wait) } else { Err(refused(wait)) }
    }
}

/// Answers a request, or says why not.
pub async fn guard(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let is_rpc = is_rpc(request.method(), request.uri(), request.headers());
    let method = method(&request, is_rpc);
    let _at_hand = gate.figures.begin();
    let answered = admitted(&gate, request, next, is_rpc).await;
    let response = match answered {
        Ok(response) if is_rpc => response,
        Ok(response) => in_our_words(response).await,
        Err(refusal) => {
            gate.figures.refused(refusal.class());
            if is_rpc { refusal.status().into_http::<Body>() } else { refusal.into_response() }
        }
    };
    gate.figures.answered(&method, &code(&response, is_rpc));
    response
}

async fn admitted(
    gate: &Arc<Gate>,
    mut request: Request,
    next: Next,
    is_rpc: bool,
) -> Result<Response, Refusal> {
    let connection = request.extensions().get::<Connection>();
    let peer = connection.map_or(SocketAddr::from(([0, 0, 0, 0], 0)), |connection| connection.peer);
    if request.uri().path().starts_with(OPEN) {
        let again = Duration::from_secs(1);
        let full = || Refusal::over_limit("too many requests about the server's health at once", again);
        let _one = gate.open_from.admit(peer.ip()).ok_or_else(full)?;
        let answer = async {
            let _hand = gate.open.acquire().await;
            next.run(request).await
        };
        return timeout_at(Instant::now() + OPEN_PATIENCE, answer).await.map_err(|_| Refusal::too_late());
    }
    // Only browsers send one, and no page of the web has business here.
    if request.headers().contains_key(header::ORIGIN) {
        return Err(Refusal::forbidden("requests of web pages are not answered"));
    }
    let caller = gate.caller(&request, peer)?;
    if let Some(connection) = connection {
        connection.known.notify_one();
    }
    if !is_rpc && !request.uri().path().starts_with("/v1/") {
        return Err(Refusal::nothing("there is nothing at this path"));
    }
    let place = gate.place(&caller)?;
    let began = Instant::now();
    let asked = deadline(request.headers());
    let end = began + asked.unwrap_or(LONGEST).min(LONGEST);
    let turn = gate.turn(&caller, end)?;
    request.extensions_mut().insert(caller.clone());
    let hands = gate.hands.of(caller.name());
    let answer = async {
        sleep_until(turn).await;
        let _hand = hands.acquire_owned().await;
        next.run(request).await
    };
    let response = timeout_at(end, answer).await.map_err(|_| Refusal::too_late())?;
    // A timer tells of it up to a millisecond late.
    if asked.is_some_and(|asked| began.elapsed() >= asked) {
        return Err(Refusal::too_late());
    }
    // More than a day is as good as none, and within what a timer can count.
    let left =
        asked.filter(|asked| *asked < 1440 * LONGEST).map(|asked| asked.saturating_sub(began.elapsed()));
    let deadline = left.map(|left| Box::pin(sleep(left)));
    let gate = Arc::clone(gate);
    Ok(response.map(|body| {
        Body::new(Sent { body: Some(body), has_begun: false, is_rpc, deadline, caller, gate, _place: place })
    }))
}

/// An answer's body, while it is sent. Its place is taken until the last byte has gone, and it ends when its caller's
/// deadline has passed, or their token is not known any more. What stands first was asked for by somebody who was
/// known: were it held back, nobody would be told why the connection ends.
struct Sent {
    body: Option<Body>,
    has_begun: bool,
    is_rpc: bool,
    deadline: Option<Pin<Box<Sleep>>>,
    caller: Caller,
    gate: Arc<Gate>,
    _place: OwnedSemaphorePermit,
}

impl Sent {
    /// Why it has to end now.
    fn ends(&mut self, context: &mut Context<'_>) -> Option<Refusal> {
        if self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
            return Some(Refusal::too_late());
        }
        (self.has_begun && self.gate.again(&self.caller).is_none()).then(Refusal::unknown_caller)
    }
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(refusal) = self.ends(context) else {
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let polled = Pin::new(body).poll_frame(context);
            self.has_begun |= polled.is_ready();
            return polled;
        };
        if self.body.take().is_none() {
            return Poll::Ready(None);
        }
        let status = refusal.status();
        if !self.is_rpc {
            return Poll::Ready(Some(Err(axum::Error::new(status))));
        }
        let mut trailers = HeaderMap::new();
        let added = status.add_header(&mut trailers);
        Poll::Ready(Some(added.map(|()| Frame::trailers(trailers)).map_err(axum::Error::new)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

/// What was refused on the way to a handler (a method, a path, a query that makes no sense), said as all else is.
async fn in_our_words(response: Response) -> Response {
    let status = response.status();
    let is_text =
        response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind.as_bytes().starts_with(b"text/"));
    let is_condition = matches!(status, StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE);
    if !status.is_client_error() || !is_text || is_condition {
        return response;
    }
    let (parts, body) = response.into_parts();
    let said = to_bytes(body, REASON_BYTES).await.unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let reason = if said.is_empty() { status.canonical_reason().unwrap_or_default() } else { &said };
    let mut response = Refusal::bad_request(reason).into_response();
    *response.status_mut() = status;
    if let Some(allowed) = parts.headers.get(header::ALLOW) {
        response.headers_mut().insert(header::ALLOW, allowed.clone());
    }
    response
}

/// Whether what the request calls this server is a name that no page of the web can have.
pub(super) fn is_of_this_machine(uri: &Uri, headers: &HeaderMap) -> bool {
    let named = headers.get(header::HOST).map(|host| host.to_str().unwrap_or_default());
    let Some(named) = uri.authority().map(|authority| authority.as_str()).or(named) else {
        return true;
    };
    let Ok(authority) = named.parse::<Authority>() else { return false };
    let host = authority.host();
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

/// What one party has of addresses: in IPv6 a whole network.
pub(super) fn neighbourhood(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// Whether it is a request of gRPC. What is asked for as files are is none, whatever it says that it is: refusals of
/// gRPC are answers that a cache in between could take for the file.
pub(super) fn is_rpc(method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    method == Method::POST
        && !uri.path().starts_with("/v1/")
        && kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}

/// How long the caller will wait, as gRPC has it: up to eight digits, and a unit.
pub(super) fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// What was asked, for figures: a name out of a bounded set.
fn method(request: &Request, is_rpc: bool) -> String {
    if is_rpc {
        let path = request.uri().path();
        let ours = super::METHODS.iter().find(|known| path.strip_prefix('/') == Some(known));
        return ours.map_or("other", |known| known).to_owned();
    }
    let matched = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    matched.unwrap_or("other").to_owned()
}

fn code(response: &Response, is_rpc: bool) -> String {
    let status = response.headers().get("grpc-status").and_then(|value| value.to_str().ok());
    match status.and_then(|status| status.parse::<i32>().ok()) {
        Some(code) => format!("{:?}", tonic::Code::from_i32(code)),
        // Where it is not said in front, what follows may still fail: that is not seen here.
        None if is_rpc => "Ok".to_owned(),
        None => response.status().as_u16().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read_as_grpc_writes_them() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            deadline(&headers)
        };
        assert_eq!(of("1S"), Some(Duration::from_secs(1)));
        assert_eq!(of("250m"), Some(Duration::from_millis(250)));
        assert_eq!(of("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "S", "1", "1x", "-1S", "123456789S", "1.5S"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert_eq!(deadline(&HeaderMap::new()), None);
    }

    #[test]
    fn a_caller_has_so_many_places_and_so_many_requests_a_second() {
        let bounds = Bounds { requests_a_second: NonZeroU32::new(3).unwrap(), at_once: 2 };
        let gate = Gate::new(None, bounds, Arc::default());
        let caller = Caller::local();
        let (one, two) = (gate.place(&caller).unwrap(), gate.place(&caller).unwrap());
        let full = gate.place(&caller).unwrap_err();
        assert_eq!(full.status().code(), tonic::Code::ResourceExhausted);
        assert!(full.status().message().contains("at once"));
        drop((one, two));
        drop(gate.place(&caller).unwrap());
        let (now, soon) = (Instant::now(), Instant::now() + Duration::from_millis(100));
        for _ in 0..3 {
            assert!(gate.turn(&caller, soon).unwrap() < soon);
        }
        let fast = gate.turn(&caller, soon).unwrap_err();
        assert!(fast.status().message().contains("a second"));
        assert!(gate.turn(&caller, now + LONGEST).unwrap() > soon, "who has time waits");
    }

    #[test]
    fn without_tokens_only_names_of_this_machine_are_answered() {
        let of = |uri: &str, host: Option<&str>| {
            let headers = host.map(|host| (header::HOST, host.parse().unwrap())).into_iter().collect();
            is_of_this_machine(&uri.parse().unwrap(), &headers)
        };
        for good in ["localhost", "LOCALHOST:7461", "127.0.0.1", "127.0.0.1:1", "[::1]:7461", "10.0.0.1"] {
            assert!(of("/v1", Some(good)), "{good}");
            assert!(of(&format!("http://{good}/v1"), None), "{good}");
        }
        assert!(of("/v1", None));
        for bad in ["", "example.org", "localhost.example.org:7461", "127.0.0.1.example.org", "a b", "[::1"] {
            assert!(!of("/v1", Some(bad)), "{bad}");
        }
        assert!(!of("http://example.org:7461/v1", Some("localhost")));
    }

    #[tokio::test]
    async fn an_answer_that_has_begun_ends_with_its_token_and_one_that_has_not_is_told() {
        use crate::api::tokens::{self, Role};
        use http_body_util::BodyExt;
        // Enough to be known at first, however busy the machine is.
        let soon = crate::clock::now().nanoseconds() + 3_000_000_000;
        let soon = weighbridge_schemas::time::Timestamp::from_nanoseconds(soon.into());
        let (secret, text) = tokens::new("n", &[Role::Fetch], None, Some(soon)).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let tokens = Arc::new(Tokens::read(file.path()).unwrap());
        let caller = tokens.caller(secret.reveal()).unwrap();
        let bounds = Bounds { requests_a_second: NonZeroU32::MIN, at_once: 9 };
        let gate = Arc::new(Gate::new(Some(tokens), bounds, Arc::default()));
        sleep(Duration::from_millis(3_050)).await;
        assert!(gate.again(&caller).is_none());
        for is_rpc in [true, false] {
            let pieces = ["a", "b"].map(|piece| Ok::<_, std::io::Error>(Bytes::from(piece)));
            let mut sent = Sent {
                body: Some(Body::from_stream(futures::stream::iter(pieces))),
                has_begun: false,
                is_rpc,
                deadline: None,
                caller: caller.clone(),
                gate: Arc::clone(&gate),
                _place: gate.place(&caller).unwrap(),
            };
            assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
            let second = sent.frame().await.unwrap().ok().and_then(|frame| frame.into_trailers().ok());
            let status = second.map(|trailers| trailers["grpc-status"].to_str().unwrap().to_owned());
            assert_eq!(status, is_rpc.then(|| "16".to_owned()), "the call is told, a body breaks off");
            assert!(sent.frame().await.is_none());
        }
    }

    #[test]
    fn addresses_of_one_network_count_as_one() {
        let of = |text: &str| neighbourhood(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!((of("::ffff:10.0.0.1"), of("10.0.0.2")), ("10.0.0.1".to_owned(), "10.0.0.2".to_owned()));
    }
}
