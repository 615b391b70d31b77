//! What a store's failure means, and how it is told.
//!
//! Only what is known to pass is tried again: no connection, silence, a broken body, and the statuses 408, 409, 429
//! and 5xx (but 501 and 507). Everything else is told at once, with the way out. A failure never shows what may be
//! secret: of an answer it shows status, code and message, of a URL no query.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::time::Duration;

use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path as Key;

use super::THROTTLED_PAUSE;
use super::address::Client;
use super::answers::{Answer, line};
use crate::error::{Class, StoreError};

/// Codes of a store that says: no such bucket.
const NO_BUCKET: [&str; 2] = ["NoSuchBucket", "ContainerNotFound"];
/// Codes that say: the request's time is too far from the store's.
const SKEWED: [&str; 2] = ["RequestTimeTooSkewed", "RequestExpired"];
/// Codes that say: these credentials are no longer good.
const EXPIRED: [&str; 4] = ["ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException"];
/// Codes that say: the bucket lies elsewhere.
const ELSEWHERE: [&str; 4] = [
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
];
/// Codes that say: less, please.
const THROTTLED: [&str; 5] =
    ["SlowDown", "RequestLimitExceeded", "TooManyRequests", "ServerBusy", "ThrottlingException"];
/// Codes that say: there is no room.
const FULL: [&str; 3] = ["QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"];
/// Codes of an API that says: what the store has is not what it must be.
const DAMAGED: [&str; 1] = ["integrity"];
/// Where credentials are looked for in a cloud's own machines, if the environment names none.
const METADATA_SERVICES: [&str; 3] = ["169.254.169.254", "metadata.google.internal", "169.254.170.2"];
/// Words of failures that no further try mends, and the way out.
const UNTRUSTED: [(&str, &str); 3] = [
    (
        "invalid peer certificate",
        "trusted are the system's roots, or else those that SSL_CERT_FILE or SSL_CERT_DIR name",
    ),
    ("too many redirects", "check the endpoint"),
    (
        "URL scheme is not allowed",
        "an endpoint of http:// has to be allowed: allow_http under [bucket] in weighbridge.toml, or \
         AWS_ALLOW_HTTP=true (GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP)",
    ),
];

/// Why a request failed, by what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// There is no such object.
    Absent(String),
    /// There is no such bucket.
    NoBucket,
    /// There is an object of that name already.
    Present,
    /// The object is not what it was when reading it began.
    Changed,
    /// Whoever answers for the store found that it is not what it must be.
    Damaged(String),
    /// It is larger than it may be.
    TooLarge {
        /// Its size.
        size: u64,
        /// The most that is right.
        limit: u64,
    },
    /// The store does not let these credentials do it.
    Denied(String),
    /// They were good once.
    Expired(String),
    /// This machine's clock and the store's are too far apart.
    Skewed(String),
    /// The bucket lies in another region.
    Elsewhere(String),
    /// No connection that may be used comes about: what stands in the way, and the way out.
    Untrusted(String),
    /// There is no room.
    Full(String),
    /// It may pass, after so long at the least; how often it was tried, and for how long, once that is at an end.
    Passing(String, Duration, Option<(u32, Duration)>),
    /// Trying again fails again.
    Permanent(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(told) => f.write_str(told),
            Self::NoBucket => f.write_str("there is no such bucket"),
            Self::Present => f.write_str("there is such an object already"),
            Self::Changed => f.write_str("the object was changed while it was read"),
            Self::TooLarge { size, limit } => {
                write!(f, "it has {size} bytes, where at most {limit} can be right")
            }
            Self::Denied(told)
            | Self::Damaged(told)
            | Self::Expired(told)
            | Self::Skewed(told)
            | Self::Elsewhere(told)
            | Self::Untrusted(told)
            | Self::Full(told)
            | Self::Passing(told, ..)
            | Self::Permanent(told) => f.write_str(told),
        }
    }
}

impl Failure {
    /// What `error` means.
    pub(super) fn of(error: &object_store::Error) -> Self {
        use object_store::Error as Store;
        if let Some(answer) = chain(error).find_map(|cause| cause.downcast_ref::<Answer>()) {
            return Self::answered(answer);
        }
        let last = || chain(error).last().map_or_else(String::new, ToString::to_string);
        match error {
            Store::NotFound { .. } | Store::Generic { .. }
                if NO_BUCKET.iter().any(|code| last().contains(code)) =>
            {
                Self::NoBucket
            }
            Store::NotFound { .. } => Self::Absent(tell(error)),
            // Of many that are deleted at once each has an answer of its own, within one that went well.
            Store::Generic { .. } if last().contains("(code: AccessDenied)") => Self::Denied(tell(error)),
            Store::AlreadyExists { .. } => Self::Present,
            Store::Precondition { .. } | Store::NotModified { .. } => Self::Changed,
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => Self::Denied(tell(error)),
            Store::Generic { .. } => Self::unanswered(error),
            _ => Self::Permanent(tell(error)),
        }
    }

    /// What an error in a body means that had begun well.
    pub(super) fn of_body(error: &object_store::Error) -> Self {
        Self::broken(&format!("the answer broke off: {}", tell(error)))
    }

    /// A body that is not what was announced.
    pub(super) fn broken(told: &str) -> Self {
        Self::Passing(told.to_owned(), Duration::ZERO, None)
    }

    /// Nothing came.
    pub(super) fn silent(limit: Duration) -> Self {
        Self::broken(&format!("the store did not answer within {} s", limit.as_secs()))
    }

    fn answered(answer: &Answer) -> Self {
        let told = answer.to_string();
        let is = |codes: &[&str]| codes.contains(&answer.code.as_str());
        if is(&SKEWED) {
            return Self::Skewed(told);
        }
        if is(&EXPIRED) {
            return Self::Expired(told);
        }
        if is(&FULL) {
            return Self::Full(told);
        }
        if is(&DAMAGED) {
            return Self::Damaged(told);
        }
        if is(&ELSEWHERE) || matches!(answer.status, 300..=399) {
            let region = answer.region.as_ref();
            let region = region
                .map_or(String::new(), |region| format!("; the bucket lies in region {}", line(region)));
            return Self::Elsewhere(format!("{told}{region}"));
        }
        let wait = answer.wait.unwrap_or_default();
        if is(&THROTTLED) {
            return Self::Passing(told, wait.max(THROTTLED_PAUSE), None);
        }
        match answer.status {
            409 if answer.code == "BlobAlreadyExists" => Self::Present,
            429 | 503 => Self::Passing(told, wait.max(THROTTLED_PAUSE), None),
            501 => Self::Permanent(told),
            507 => Self::Full(told),
            408 | 409 | 500..=599 => Self::Passing(told, wait, None),
            401 | 403 => Self::Denied(told),
            400 if answer.code == "InvalidAccessKeyId" || answer.code.is_empty() => Self::Denied(told),
            404 => Self::Absent(told),
            416 => Self::Changed,
            _ => Self::Permanent(told),
        }
    }

    /// What a failure means that is no answer.
    fn unanswered(error: &object_store::Error) -> Self {
        let told = tell(error);
        let says = |words: &str| chain(error).any(|cause| cause.to_string().contains(words));
        if let Some((_, way_out)) = UNTRUSTED.iter().find(|(words, _)| says(words)) {
            return Self::Untrusted(format!("{told}; {way_out}"));
        }
        if METADATA_SERVICES.iter().any(|address| says(address)) {
            return Self::Denied("there are no credentials in the environment".to_owned());
        }
        if may_pass(error) { Self::broken(&told) } else { Self::Permanent(told) }
    }

    /// How long to wait at the least before the next try; `None` where there should be none.
    pub(super) fn passes(&self) -> Option<Duration> {
        match self {
            Self::Passing(_, wait, None) => Some(*wait),
            _ => None,
        }
    }

    /// The same, at the end of patience.
    pub(super) fn after(self, tries: u32, elapsed: Duration) -> Self {
        match self {
            Self::Passing(told, wait, None) => Self::Passing(told, wait, Some((tries, elapsed))),
            failure => failure,
        }
    }

    /// The error to report of a request about `key`.
    pub(super) fn into_error(self, key: &Key, client: &Client, ahead: Option<i64>) -> StoreError {
        let at = format!("{}/{key}", client.shown.trim_end_matches('/'));
        let told = self.to_string();
        let (class, why) = match self {
            Self::Absent(_) => (Class::NotFound, "there is no such object in the store".to_owned()),
            Self::NoBucket => {
                let why =
                    format!("there is no such bucket; make it, or check --store; {}", client.region_hint());
                (Class::NotFound, why)
            }
            Self::Present => (Class::Conflict, told),
            Self::Changed | Self::Damaged(_) | Self::TooLarge { .. } => (Class::Integrity, told),
            Self::Denied(_) => {
                (Class::AccessDenied, format!("the store does not allow it: {told}; {}", client.access))
            }
            Self::Expired(_) => {
                let why = format!("the credentials have expired: {told}; renew them: {}", client.access);
                (Class::AccessDenied, why)
            }
            Self::Skewed(_) => {
                let by = ahead.map_or(String::new(), |ahead| {
                    let word = if ahead > 0 { "behind" } else { "ahead of" };
                    format!(" ({} s {word} the store's)", ahead.abs())
                });
                let why = format!(
                    "this machine's clock is wrong{by}: {told}; set it right (NTP), and run it again"
                );
                (Class::AccessDenied, why)
            }
            Self::Elsewhere(_) => {
                let why = format!("the bucket is in another region: {told}; {}", client.region_hint());
                (Class::AccessDenied, why)
            }
            Self::Untrusted(_) => (Class::AccessDenied, told),
            Self::Full(_) => (Class::DiskFull, format!("{told}; make room there, and run it again")),
            Self::Passing(_, _, tried) => {
                let tried = tried.map_or(String::new(), |(tries, elapsed)| {
                    format!("; given up after {tries} tries in {} s", elapsed.as_secs())
                });
                (Class::Unreachable, format!("{told}{tried}; is {} reachable?", client.endpoint_hint()))
            }
            Self::Permanent(_) => (Class::Refused, format!("the store refuses it: {told}")),
        };
        StoreError::new(class, at, why)
    }
}

/// `error` and everything that caused it, from the outside in.
fn chain<'e>(error: &'e (dyn StdError + 'static)) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// Whether nothing was answered at all, or not to the end.
fn may_pass(error: &object_store::Error) -> bool {
    chain(error).any(|cause| {
        if let Some(error) = cause.downcast_ref::<HttpError>() {
            return error.kind() != HttpErrorKind::Unknown || error.source().is_some();
        }
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        matches!(
            kind,
            Some(
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::NotConnected
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::Interrupted
            )
        )
    })
}

/// A failure in a line: the innermost cause, which says most, behind what `object_store` was about.
fn tell(error: &object_store::Error) -> String {
    let text = chain(error).last().map_or_else(String::new, ToString::to_string);
    let outer = chain(error).find_map(|cause| cause.downcast_ref::<HttpError>()).map(ToString::to_string);
    let told = match outer {
        Some(outer) if !outer.contains(&text) => format!("{outer}: {text}"),
        _ => text,
    };
    // An answer's XML is for programs; URLs may carry signatures in their queries.
    let told = told.split_once('<').map_or(told.as_str(), |(told, _)| told);
    let words = told.split_whitespace().map(|word| match (word.find("://"), word.find('?')) {
        (Some(scheme), Some(query)) if scheme < query => word.get(..query).unwrap_or_default(),
        _ => word,
    });
    line(words.collect::<Vec<_>>().join(" ").trim_end_matches([':', ' ']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(status: u16, code: &str) -> Failure {
        let (wait, region) = (Some(Duration::from_secs(7)), Some("eu-west-1".to_owned()));
        let answer = Answer { status, code: code.to_owned(), message: "m".to_owned(), wait, region };
        let error = HttpError::new(HttpErrorKind::Unknown, answer);
        Failure::of(&object_store::Error::Generic { store: "S3", source: Box::new(error) })
    }

    #[test]
    fn only_what_may_pass_is_tried_again_and_not_before_the_store_says() {
        for (status, code) in
            [(503, "SlowDown"), (429, ""), (500, "InternalError"), (409, "ConditionalRequestConflict")]
        {
            assert_eq!(answered(status, code).passes(), Some(Duration::from_secs(7)), "{status}");
        }
        for (status, code) in [
            (400, "InvalidArgument"),
            (403, "AccessDenied"),
            (301, "PermanentRedirect"),
            (501, "NotImplemented"),
        ] {
            assert_eq!(answered(status, code).passes(), None, "{status}");
        }
        let reset = io::Error::new(io::ErrorKind::ConnectionReset, "reset");
        let reset = object_store::Error::Generic { store: "S3", source: Box::new(reset) };
        assert_eq!(Failure::of(&reset).passes(), Some(Duration::ZERO));
        let odd = object_store::Error::Generic { store: "S3", source: "odd".into() };
        assert_eq!(Failure::of(&odd).passes(), None);
    }

    #[test]
    fn each_failure_names_the_way_out() {
        let client = Client::of_tests();
        let table = [
            (answered(400, "ExpiredToken"), Class::AccessDenied, "expired"),
            (answered(403, "RequestTimeTooSkewed"), Class::AccessDenied, "3600 s behind the store's"),
            (answered(301, "PermanentRedirect"), Class::AccessDenied, "lies in region eu-west-1"),
            (answered(403, "AccessDenied"), Class::AccessDenied, "AWS_ACCESS_KEY_ID"),
            (answered(507, ""), Class::DiskFull, "make room"),
            (
                answered(503, "SlowDown").after(3, Duration::from_secs(9)),
                Class::Unreachable,
                "3 tries in 9 s",
            ),
            (Failure::NoBucket, Class::NotFound, "make it"),
            (Failure::Changed, Class::Integrity, "changed"),
        ];
        for (failure, class, words) in table {
            let error = failure.into_error(&Key::from("models/m"), &client, Some(3600));
            assert_eq!(error.class(), class, "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(error.to_string().starts_with("s3://bucket/p/models/m: "), "{error}");
        }
    }

    #[test]
    fn an_azure_blob_that_is_there_is_present_and_a_conflict_is_not() {
        assert_eq!(answered(409, "BlobAlreadyExists"), Failure::Present);
        assert!(answered(409, "ConditionalRequestConflict").passes().is_some());
    }
}
