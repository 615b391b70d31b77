//! What the proxy is told to do to which requests, and what it has seen.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::{Request, StatusCode};

/// How many requests the log holds at most; older ones leave it.
const LOG: usize = 10_000;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// `GET` and so on.
    pub method: String,
    /// Without escapes; empty for a request to the bucket itself.
    pub key: String,
    /// As it was sent.
    pub query: String,
    /// Whether it has the header `If-None-Match`.
    pub if_none_match: bool,
}

impl Asked {
    /// `root` is the path of the bucket, with slashes.
    pub(super) fn new<B>(request: &Request<B>, root: &str) -> Self {
        let path = request.uri().path();
        let key = path.strip_prefix(root).unwrap_or_default();
        Self {
            method: request.method().to_string(),
            key: percent_encoding::percent_decode_str(key).decode_utf8_lossy().into_owned(),
            query: request.uri().query().unwrap_or_default().to_owned(),
            if_none_match: request.headers().contains_key("if-none-match"),
        }
    }

    /// Whether it reads an object.
    #[must_use]
    pub fn is_get(&self) -> bool {
        self.method == "GET" && !self.key.is_empty()
    }

    /// Whether it writes an object, or a part of one.
    #[must_use]
    pub fn is_put(&self) -> bool {
        self.method == "PUT" && !self.key.is_empty()
    }
}

/// An answer that the proxy gives by itself; the server hears nothing of the request.
#[derive(Debug, Clone)]
pub struct Answer {
    pub(super) status: StatusCode,
    pub(super) code: String,
    pub(super) headers: Vec<(String, String)>,
}

impl Answer {
    /// An error document with this code.
    ///
    /// # Panics
    /// Where there can be no such status.
    #[must_use]
    #[expect(clippy::expect_used, reason = "only tests use it")]
    pub fn new(status: u16, code: &str) -> Self {
        let status = StatusCode::from_u16(status).expect("a status of HTTP");
        Self { status, code: code.to_owned(), headers: Vec::new() }
    }

    /// With another header.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The store is busy.
    #[must_use]
    pub fn slow_down() -> Self {
        Self::new(503, "SlowDown")
    }

    /// The store failed.
    #[must_use]
    pub fn internal_error() -> Self {
        Self::new(500, "InternalError")
    }

    /// Another conditional request for the key was under way; nothing is stored.
    #[must_use]
    pub fn conflict() -> Self {
        Self::new(409, "ConditionalRequestConflict")
    }

    /// The condition does not hold; nothing is stored.
    #[must_use]
    pub fn precondition_failed() -> Self {
        Self::new(412, "PreconditionFailed")
    }

    /// The bucket is in another region; there is no `Location`.
    #[must_use]
    pub fn other_region(region: &str) -> Self {
        Self::new(301, "PermanentRedirect").with("x-amz-bucket-region", region)
    }

    /// The client's clock is wrong; with [`Fault::ShiftDate`] the answer says by how much.
    #[must_use]
    pub fn time_too_skewed() -> Self {
        Self::new(403, "RequestTimeTooSkewed")
    }

    /// The session's credentials have ended.
    #[must_use]
    pub fn expired_token() -> Self {
        Self::new(400, "ExpiredToken")
    }

    /// The client may not do this.
    #[must_use]
    pub fn access_denied() -> Self {
        Self::new(403, "AccessDenied")
    }
}

/// A place in a body.
#[derive(Debug, Clone, Copy)]
pub enum At {
    /// Behind so many bytes.
    Byte(u64),
    /// Behind this part of the whole, from 0 to 1.
    Part(f64),
}

/// What the proxy does to a request or its answer. A body that is shorter than a place in it passes unchanged.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Answers by itself, once all of the request has come.
    Answer(Answer),
    /// Passes the request on after so long.
    Delay(Duration),
    /// Passes on one request in so long, of all that are throttled.
    Throttle(Duration),
    /// Ends the connection; the server hears nothing.
    DropBefore,
    /// Ends the connection in place of the answer: it is done, and nobody is told.
    DropAfter,
    /// Ends both connections within the request's body.
    CutRequest(At),
    /// Ends the connection within the answer's body.
    CutAnswer(At),
    /// Changes one byte of the answer's body.
    FlipByte(u64),
    /// Changes every byte of the answer's body.
    WrongBytes,
    /// Leaves out what stands behind so many bytes of the answer's body, and says so in `Content-Length`.
    Truncate(u64),
    /// Answers as for another key, which is given as it stands in a URL.
    BodyOf(String),
    /// The answer's `Date` is off by so many seconds.
    ShiftDate(i64),
    /// The server does not see `If-None-Match`: who comes last wins too.
    IgnoreIfNoneMatch,
}

/// How likely which fault is for each request that no rule matches, from 0 to 1. At most one of them happens to a
/// request, delays aside.
#[derive(Debug, Clone, Default)]
pub struct Chances {
    /// Of [`Fault::CutAnswer`], anywhere.
    pub cut_answer: f64,
    /// Of [`Fault::CutRequest`], anywhere.
    pub cut_request: f64,
    /// Of [`Fault::DropBefore`].
    pub drop_before: f64,
    /// Of [`Fault::DropAfter`].
    pub drop_after: f64,
    /// Of [`Answer::internal_error`].
    pub internal_error: f64,
    /// Of [`Answer::slow_down`].
    pub slow_down: f64,
    /// What that one says in `Retry-After`, in seconds.
    pub retry_after: Option<u32>,
    /// Of [`Answer::conflict`], for requests with `If-None-Match`.
    pub conflict: f64,
    /// Of [`Answer::precondition_failed`], for requests with `If-None-Match`.
    pub precondition_failed: f64,
    /// Of a delay.
    pub delay: f64,
    /// How long that one is at most.
    pub longest_delay: Duration,
}

impl Chances {
    fn draw(&self, asked: &Asked, random: &mut fastrand::Rng) -> Vec<Fault> {
        let mut faults = Vec::new();
        // As many draws for each request, so that they do not depend on what was drawn before.
        let (delay, long, which, at) = (random.f64(), random.f64(), random.f64(), At::Part(random.f64()));
        if delay < self.delay {
            faults.push(Fault::Delay(self.longest_delay.mul_f64(long)));
        }
        let mut busy = Answer::slow_down();
        if let Some(seconds) = self.retry_after {
            busy = busy.with("retry-after", &seconds.to_string());
        }
        let conditional = if asked.if_none_match { 1.0 } else { 0.0 };
        let choices = [
            (self.cut_answer, Fault::CutAnswer(at)),
            (self.cut_request, Fault::CutRequest(at)),
            (self.drop_before, Fault::DropBefore),
            (self.drop_after, Fault::DropAfter),
            (self.internal_error, Fault::Answer(Answer::internal_error())),
            (self.slow_down, Fault::Answer(busy)),
            (self.conflict * conditional, Fault::Answer(Answer::conflict())),
            (self.precondition_failed * conditional, Fault::Answer(Answer::precondition_failed())),
        ];
        let mut reached = 0.0;
        faults.extend(choices.into_iter().find_map(|(chance, fault)| {
            reached += chance;
            (which < reached).then_some(fault)
        }));
        faults
    }
}

/// A rule that was given to the proxy.
#[derive(Clone)]
pub struct Rule(Arc<Given>);

struct Given {
    when: Box<dyn Fn(&Asked) -> bool + Send + Sync>,
    most: u64,
    fault: Fault,
    fired: AtomicU64,
    ended: AtomicBool,
}

impl fmt::Debug for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}, {} times so far", self.0.fault, self.fired())
    }
}

impl Rule {
    pub(super) fn new(
        most: u64,
        fault: Fault,
        when: impl Fn(&Asked) -> bool + Send + Sync + 'static,
    ) -> Self {
        let (fired, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        Self(Arc::new(Given { when: Box::new(when), most, fault, fired, ended }))
    }

    /// To how many requests it was done so far.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.0.fired.load(Ordering::SeqCst)
    }

    /// It is done to no request any more.
    pub fn end(&self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }

    /// One thread asks at a time.
    fn fault_of(&self, asked: &Asked) -> Option<Fault> {
        let is_due =
            !self.0.ended.load(Ordering::SeqCst) && self.fired() < self.0.most && (self.0.when)(asked);
        is_due.then(|| {
            self.0.fired.fetch_add(1, Ordering::SeqCst);
            self.0.fault.clone()
        })
    }
}

/// A request of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The request.
    pub asked: Asked,
    /// The answer's status; `None` where the connection ended in its place.
    pub status: Option<u16>,
    /// When that was.
    pub when: Instant,
}

/// What has passed since the start, or since it was last forgotten.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// How many requests came, by method.
    pub requests: BTreeMap<String, u64>,
    /// How many bytes of objects went to clients.
    pub read: u64,
    /// How many bytes of requests' bodies came from clients.
    pub written: u64,
    /// How many requests something was done to.
    pub faults: u64,
}

/// What the proxy is told, and what it has seen.
#[derive(Debug)]
pub(super) struct Orders {
    pub(super) rules: Vec<Rule>,
    pub(super) chances: Option<Chances>,
    pub(super) counts: Counts,
    pub(super) log: VecDeque<Entry>,
    random: fastrand::Rng,
    /// When the next throttled request may pass.
    next: Option<Instant>,
}

impl Orders {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            rules: Vec::new(),
            chances: None,
            counts: Counts::default(),
            log: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            next: None,
        }
    }

    /// What is done to a request that has come; throttling has become a delay.
    pub(super) fn faults_of(&mut self, asked: &Asked) -> Vec<Fault> {
        *self.counts.requests.entry(asked.method.clone()).or_default() += 1;
        let mut faults: Vec<_> = self.rules.iter().filter_map(|rule| rule.fault_of(asked)).collect();
        if faults.is_empty()
            && let Some(chances) = &self.chances
        {
            faults = chances.draw(asked, &mut self.random);
        }
        self.counts.faults += u64::from(!faults.is_empty());
        let now = Instant::now();
        for fault in &mut faults {
            if let Fault::Throttle(pause) = *fault {
                let turn = self.next.map_or(now, |next| next.max(now));
                self.next = Some(turn + pause);
                *fault = Fault::Delay(turn - now);
            }
        }
        faults
    }

    pub(super) fn note(&mut self, asked: Asked, status: Option<u16>) {
        if self.log.len() == LOG {
            self.log.pop_front();
        }
        self.log.push_back(Entry { asked, status, when: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same_and_conditions_are_needed() {
        let chances = Chances { conflict: 1.0, delay: 0.5, ..Chances::default() };
        let mut asked =
            Asked { method: "PUT".into(), key: "a".into(), query: String::new(), if_none_match: true };
        let draw = |asked: &Asked, seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            (0..50).map(|_| format!("{:?}", chances.draw(asked, &mut random))).collect::<Vec<_>>()
        };
        assert_eq!(draw(&asked, 7), draw(&asked, 7));
        assert_ne!(draw(&asked, 7), draw(&asked, 8));
        assert!(draw(&asked, 7).iter().all(|faults| faults.contains("ConditionalRequestConflict")));
        asked.if_none_match = false;
        assert!(!draw(&asked, 7).iter().any(|faults| faults.contains("ConditionalRequestConflict")));
    }

    #[test]
    fn the_log_is_bounded_and_a_rule_ends() {
        let asked =
            Asked { method: "GET".into(), key: "a".into(), query: String::new(), if_none_match: false };
        let mut orders = Orders::new(1);
        for _ in 0..LOG + 5 {
            orders.note(asked.clone(), Some(200));
        }
        assert_eq!(orders.log.len(), LOG);
        let rule = Rule::new(2, Fault::DropBefore, Asked::is_get);
        orders.rules.push(rule.clone());
        let done = (0..5).filter(|_| !orders.faults_of(&asked).is_empty()).count();
        assert_eq!((done, rule.fired(), orders.counts.faults), (2, 2, 2));
        assert_eq!(orders.counts.requests["GET"], 5);
    }
}
