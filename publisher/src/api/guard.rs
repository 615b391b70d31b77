//! What stands before every request: who asks, how much they ask at once, and how long they wait.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use governor::clock::{Clock, DefaultClock};
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use super::answers::Refusal;
use super::tokens::{Caller, Tokens};
use crate::metrics::api::Api as Figures;

/// How long a request may take to be answered, unless its caller says less. Answers that are streams go on for longer.
const LONGEST: Duration = Duration::from_secs(60);
/// Tokens that are not known, from one address, a second; and so many more at once.
const BAD_A_SECOND: u32 = 5;
const BAD_AT_ONCE: u32 = 20;
/// Addresses that are remembered for that before those that have been quiet are forgotten.
const ADDRESSES: usize = 10_000;
/// Paths that are answered to anybody: they tell of the server's health, and nothing of the store.
const OPEN: [&str; 3] = ["/live", "/ready", "/grpc.health.v1.Health/"];

/// The connection that a request came over.
#[derive(Debug, Clone)]
pub struct Connection {
    /// Whence.
    pub peer: SocketAddr,
    /// Set once no more is to be begun on it: streams end then.
    pub closing: watch::Receiver<bool>,
}

/// How much each caller may ask.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Requests a second, and as many at once after a quiet second.
    pub requests_a_second: NonZeroU32,
    /// Requests that are being answered at the same time; a stream is one for as long as it goes on.
    pub at_once: usize,
}

type Rates<K> = RateLimiter<K, HashMapStateStore<K>, DefaultClock>;

/// Who may ask, and how much.
#[derive(Debug)]
pub struct Gate {
    tokens: Option<Arc<Tokens>>,
    bounds: Bounds,
    rates: Rates<String>,
    bad: Rates<IpAddr>,
    places: Mutex<HashMap<String, Arc<Semaphore>>>,
    figures: Arc<Figures>,
}

impl Gate {
    /// Lets those in whose token is known; without `tokens`, everybody.
    #[must_use]
    pub fn new(tokens: Option<Arc<Tokens>>, bounds: Bounds, figures: Arc<Figures>) -> Self {
        let of_bad = NonZeroU32::new(BAD_A_SECOND).unwrap_or(NonZeroU32::MIN);
        let burst = NonZeroU32::new(BAD_AT_ONCE).unwrap_or(NonZeroU32::MIN);
        Self {
            tokens,
            bounds,
            rates: RateLimiter::hashmap(Quota::per_second(bounds.requests_a_second)),
            bad: RateLimiter::hashmap(Quota::per_second(of_bad).allow_burst(burst)),
            places: Mutex::default(),
            figures,
        }
    }

    /// Who `caller` is now; `None` where their token is not known any more.
    #[must_use]
    pub fn again(&self, caller: &Caller) -> Option<Caller> {
        self.tokens.as_ref().map_or_else(|| Some(caller.clone()), |tokens| tokens.again(caller))
    }

    fn caller(&self, headers: &HeaderMap, peer: SocketAddr) -> Result<Caller, Refusal> {
        let Some(tokens) = &self.tokens else { return Ok(Caller::local()) };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = given.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        if let Some(caller) = token.and_then(|token| tokens.caller(token)) {
            return Ok(caller);
        }
        if self.bad.len() > ADDRESSES {
            self.bad.retain_recent();
        }
        self.bad.check_key(&peer.ip()).map_err(|until| {
            let again = until.wait_time_from(DefaultClock::default().now());
            Refusal::over_limit("too many requests without a valid token from this address", again)
        })?;
        Err(Refusal::unknown_caller())
    }

    /// A place for one more request of this caller.
    fn place(&self, caller: &Caller) -> Result<OwnedSemaphorePermit, Refusal> {
        self.rates.check_key(&caller.name().to_owned()).map_err(|until| {
            let again = until.wait_time_from(DefaultClock::default().now());
            let most = self.bounds.requests_a_second;
            Refusal::over_limit(format!("more than {most} requests a second by this token"), again)
        })?;
        let places = {
            // As many as there are tokens.
            let mut all = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let places = all
                .entry(caller.name().to_owned())
                .or_insert_with(|| Arc::new(Semaphore::new(self.bounds.at_once)));
            Arc::clone(places)
        };
        places.try_acquire_owned().map_err(|_| {
            let most = self.bounds.at_once;
            let why = format!("more than {most} requests and streams at once by this token; end some first");
            Refusal::over_limit(why, Duration::from_secs(1))
        })
    }
}

/// Answers a request, or says why not.
pub async fn guard(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let is_rpc = is_rpc(request.headers());
    let method = method(&request, is_rpc);
    let _at_hand = gate.figures.begin();
    let answered = admitted(&gate, request, next).await;
    let (code, response) = match answered {
        Ok(response) => (code(&response, is_rpc), response),
        Err(refusal) => {
            gate.figures.refused(refusal.class());
            let response =
                if is_rpc { refusal.status().into_http::<Body>() } else { refusal.into_response() };
            (code(&response, is_rpc), response)
        }
    };
    gate.figures.answered(&method, &code);
    response
}

async fn admitted(gate: &Gate, mut request: Request, next: Next) -> Result<Response, Refusal> {
    let path = request.uri().path();
    if OPEN.iter().any(|open| path.starts_with(open)) {
        return Ok(next.run(request).await);
    }
    // Only browsers send one, and no page of the web has business here.
    if request.headers().contains_key(header::ORIGIN) {
        return Err(Refusal::forbidden("requests of web pages are not answered"));
    }
    let connection = request.extensions().get::<Connection>();
    let peer = connection.map_or(SocketAddr::from(([0, 0, 0, 0], 0)), |connection| connection.peer);
    let caller = gate.caller(request.headers(), peer)?;
    let place = gate.place(&caller)?;
    let limit = deadline(request.headers()).unwrap_or(LONGEST).min(LONGEST);
    request.extensions_mut().insert(caller);
    let response = timeout(limit, next.run(request)).await.map_err(|_| Refusal::too_late())?;
    // The place is taken until the last byte has gone.
    Ok(response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _ = &place;
            frame
        }))
    }))
}

fn is_rpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}

/// How long the caller will wait, as gRPC has it: up to eight digits, and a unit.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
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
        let fast = gate.place(&caller).unwrap_err();
        assert!(fast.status().message().contains("a second"));
    }
}
