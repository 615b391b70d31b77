//! What a store's failure means, and how it is told.
//!
//! Only what is known to pass is tried again: no connection, a timeout, a broken body, and the statuses 408, 429 and
//! 5xx. `object_store` names some statuses by variants of its error; of all others only the text tells the number, and
//! so it is with what keeps a connection from ever coming about. The text of a failure may hold URLs with signatures,
//! so queries are cut off, and of an answer's XML only the code and the message are shown.

use std::error::Error as StdError;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

use crate::error::{Class, ReadError};

/// The longest text of a store's that is shown, in characters.
const SHOWN_CHARACTERS: usize = 300;

/// What `object_store` puts before the status of an answer that was no success.
const STATUS: &str = "Server returned non-2xx status code: ";
/// Codes with which a store answers 400 where the credentials or the region are at fault.
const ACCESS_CODES: [&str; 6] = [
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
];
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
        "an endpoint of http:// needs AWS_ALLOW_HTTP=true (GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP)",
    ),
];

/// Why a request failed, by what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// There is no such object.
    Missing(String),
    /// The store does not let these credentials in, or there are none.
    Refused(String),
    /// No connection that may be used comes about: what stands in the way, and the way out.
    Untrusted(String),
    /// The object is not what it was.
    Changed,
    /// The object ends before the range that was asked for.
    OutOfRange(String),
    /// It may pass. How often it was tried, once that is at an end.
    Transient(String, u32),
    /// Trying again fails again.
    Permanent(String),
}

impl Failure {
    /// What `error` means; `in_body`: it broke an answer that had begun well.
    pub(super) fn of(error: &object_store::Error, in_body: bool) -> Self {
        use object_store::Error as Store;
        let told = tell(error);
        match error {
            Store::NotFound { .. } => Self::Missing(told),
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => Self::Refused(told),
            Store::Precondition { .. } => Self::Changed,
            Store::InvalidPath { .. } => {
                let way_out = "rename or remove such objects, or name one object instead of a prefix";
                Self::Permanent(format!("a key is no plain path: {told}; {way_out}"))
            }
            Store::Generic { .. } => match status(error) {
                Some(404) => Self::Missing(told),
                Some(401 | 403) => Self::Refused(told),
                Some(300..=399) => Self::Refused(format!("{told}: the bucket may lie in another region")),
                Some(400) if told.ends_with("400 Bad Request") => {
                    Self::Refused(format!("{told}: an expired token, or the wrong region"))
                }
                Some(400) if ACCESS_CODES.iter().any(|code| told.starts_with(code)) => Self::Refused(told),
                Some(416) => Self::OutOfRange(told),
                Some(408 | 429 | 500..=599) => Self::Transient(told, 0),
                Some(_) => Self::Permanent(told),
                None => Self::without_status(error, told, in_body),
            },
            _ => Self::Permanent(told),
        }
    }

    /// What a failure means that is no answer with a status.
    fn without_status(error: &object_store::Error, told: String, in_body: bool) -> Self {
        let says = |words: &str| chain(error).any(|cause| cause.to_string().contains(words));
        let way_out = UNTRUSTED.iter().find(|(words, _)| says(words)).map(|(_, way_out)| way_out);
        if let Some(way_out) = way_out {
            return Self::Untrusted(format!("{told}; {way_out}"));
        }
        if says("Received redirect without LOCATION") {
            return Self::Refused(told);
        }
        if says("object was only") {
            return Self::OutOfRange(told);
        }
        if METADATA_SERVICES.iter().any(|address| says(address)) {
            return Self::Refused("there are no credentials in the environment".to_owned());
        }
        if in_body || may_pass(error) { Self::Transient(told, 0) } else { Self::Permanent(told) }
    }

    /// The error to report: `what` cannot be read; `access` says how a store is told who reads.
    pub(super) fn into_error(self, what: &str, access: &str) -> ReadError {
        let (class, detail) = match self {
            Self::Missing(told) => (Class::NotFound, format!("{what} is absent: {told}")),
            Self::Refused(told) => {
                (Class::AccessDenied, format!("the store does not allow it: {told}; {access}"))
            }
            Self::Untrusted(told) => (Class::AccessDenied, format!("{what} cannot be read: {told}")),
            Self::Changed => return super::changed(),
            Self::Transient(told, 0) => {
                (Class::Unreachable, format!("{what} cannot be read: {told}; try again later"))
            }
            Self::Transient(told, tries) => {
                let detail =
                    format!("{what} cannot be read: {told}; given up after {tries} tries, try again later");
                (Class::Unreachable, detail)
            }
            Self::OutOfRange(told) | Self::Permanent(told) => {
                (Class::Unreadable, format!("{what} cannot be read: {told}"))
            }
        };
        ReadError::new(class, detail)
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
            // Unknown and undecodable answers are bodies that broke off: ranges are never compressed.
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

/// The status of an answer that was no success, from the text in which `object_store` tells it.
fn status(error: &object_store::Error) -> Option<u16> {
    chain(error).find_map(|cause| {
        let text = cause.to_string();
        let digits = text.strip_prefix(STATUS)?.get(..3)?;
        digits.parse().ok()
    })
}

/// A failure in a line, without secrets: the code and message of an answer in XML, else the innermost causes.
fn tell(error: &object_store::Error) -> String {
    let text = chain(error).last().map_or_else(String::new, ToString::to_string);
    let whole = chain(error).map(ToString::to_string).find(|text| text.contains("<Code>"));
    if let Some(whole) = whole {
        let code = element(&whole, "Code").unwrap_or_default();
        let message = element(&whole, "Message").unwrap_or_default();
        return shorten(format!("{code}: {message}").trim_end_matches(": "));
    }
    if let Some((_, answer)) = text.split_once(STATUS) {
        // A body that is a page for people says nothing in a line.
        let answer = answer.split_once('<').map_or(answer, |(status, _)| status);
        return shorten(&format!("the store answered {}", answer.trim().trim_end_matches(':')));
    }
    // Statuses come without a cause; below an HTTP failure the cause itself says most.
    let outer = chain(error).find_map(|cause| cause.downcast_ref::<HttpError>()).map(ToString::to_string);
    match outer {
        Some(outer) if !outer.contains(&text) => shorten(&format!("{outer}: {text}")),
        _ => shorten(&text),
    }
}

/// The text of the first element `name`.
fn element<'t>(xml: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once('<').map(|(text, _)| text)
}

/// One line of bounded length, and without the queries of URLs, which may hold signatures.
fn shorten(text: &str) -> String {
    let words = text.split_whitespace().map(|word| match (word.find("://"), word.find('?')) {
        (Some(scheme), Some(query)) if scheme < query => {
            let end = word.rfind([')', '"', '\'', ',']).filter(|&end| end > query).unwrap_or(word.len());
            format!("{}{}", word.get(..query).unwrap_or_default(), word.get(end..).unwrap_or_default())
        }
        _ => word.to_owned(),
    });
    let line = words.collect::<Vec<_>>().join(" ");
    let line: String = line.chars().filter(|character| !character.is_control()).collect();
    match line.char_indices().nth(SHOWN_CHARACTERS) {
        Some((cut, _)) => format!("{}...", line.get(..cut).unwrap_or_default()),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use object_store::path::Path;

    use super::*;

    fn generic(source: impl Into<Box<dyn StdError + Send + Sync>>) -> object_store::Error {
        object_store::Error::Generic { store: "test", source: source.into() }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let reset = || io::Error::new(io::ErrorKind::ConnectionReset, "reset");
        assert!(matches!(Failure::of(&generic(reset()), false), Failure::Transient(..)));
        assert!(matches!(Failure::of(&generic("odd"), false), Failure::Permanent(_)));
        assert!(matches!(Failure::of(&generic("odd"), true), Failure::Transient(..)));
        for (status, passes) in [(503, true), (500, true), (429, true), (400, false), (301, false)] {
            let failure = Failure::of(&answered(&format!("{status} Reason: body")), true);
            assert_eq!(matches!(failure, Failure::Transient(..)), passes, "{status}");
        }
    }

    fn answered(text: &str) -> object_store::Error {
        generic(format!("{STATUS}{text}"))
    }

    #[test]
    fn who_is_not_let_in_is_told_the_way_out() {
        let table = [
            ("403 Forbidden: <Error><Code>AccessDenied</Code></Error>", "AccessDenied; SET"),
            ("401 Unauthorized: ", "the store answered 401 Unauthorized; SET"),
            ("301 Moved Permanently: ", "region; SET"),
            ("400 Bad Request: ", "expired token, or the wrong region; SET"),
            ("400 Bad Request: <Error><Code>ExpiredToken</Code><Message>m</Message></Error>", "m; SET"),
        ];
        for (text, end) in table {
            let error = Failure::of(&answered(text), false).into_error("it", "SET");
            assert_eq!(error.class(), Class::AccessDenied, "{text}");
            assert!(error.to_string().ends_with(end), "{error}");
        }
        let error = Failure::of(&answered("404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"), false);
        assert_eq!(error.into_error("it", "SET").class(), Class::NotFound);
        let unanswered = generic("error sending request for http://169.254.169.254/latest/api/token");
        assert!(matches!(Failure::of(&unanswered, false), Failure::Refused(_)));
    }

    #[test]
    fn what_no_try_mends_is_not_tried_again() {
        for (words, way_out) in UNTRUSTED {
            let failure = Failure::of(&generic(io::Error::other(words)), true);
            let error = failure.into_error("it", "");
            assert_eq!(error.class(), Class::AccessDenied, "{words}");
            assert!(error.to_string().ends_with(way_out), "{error}");
        }
        let empty_segment = Path::parse("a//b").unwrap_err();
        let failure = Failure::of(&object_store::Error::InvalidPath { source: empty_segment }, false);
        assert!(failure.into_error("it", "").to_string().contains("rename or remove"));
    }

    #[test]
    fn pages_for_people_are_cut() {
        let error = answered("500 Internal Server Error: <!doctype html> <html>long</html>");
        assert_eq!(tell(&error), "the store answered 500 Internal Server Error");
    }

    #[test]
    fn signatures_are_never_shown() {
        let text = "GET (https://host/b/k?X-Amz-Signature=abc&sig=def) failed: http://h/x?sig=1";
        assert_eq!(shorten(text), "GET (https://host/b/k) failed: http://h/x");
        let xml = "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code>\
                   <Message>The token has expired</Message><Token>secret</Token></Error>";
        assert_eq!(tell(&generic(xml)), "ExpiredToken: The token has expired");
    }
}
