//! What a store's failure means, and how it is told.
//!
//! Only what is known to pass is tried again: no connection, a timeout, a broken body, and the statuses 408, 429 and
//! 5xx. `object_store` names some statuses by variants of its error; of all others only the text tells the number. The
//! text of a failure may hold URLs with signatures, so queries are cut off, and of an answer's XML only the code and
//! the message are shown.

use std::error::Error as StdError;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

use crate::error::{Class, ReadError};

/// The longest text of a store's that is shown, in characters.
const SHOWN_CHARACTERS: usize = 300;

/// Why a request failed, by what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// There is no such object.
    Missing(String),
    /// The store does not let these credentials in.
    Refused(String),
    /// The object is not what it was.
    Changed,
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
            Store::Generic { .. } => match status(error) {
                Some(408 | 429 | 500..=599) => Self::Transient(told, 0),
                Some(_) => Self::Permanent(told),
                None if in_body || may_pass(error) => Self::Transient(told, 0),
                None => Self::Permanent(told),
            },
            _ => Self::Permanent(told),
        }
    }

    /// The error to report: `what` cannot be read.
    pub(super) fn into_error(self, what: &str) -> ReadError {
        match self {
            Self::Missing(told) => ReadError::new(Class::NotFound, format!("{what} is absent: {told}")),
            Self::Refused(told) => {
                let detail = format!(
                    "the store does not allow it: {told}; check the credentials in the environment, and that they \
                     may read and list this place"
                );
                ReadError::new(Class::Unreadable, detail)
            }
            Self::Changed => super::changed(),
            Self::Transient(told, tries) => {
                let detail =
                    format!("{what} cannot be read: {told}; given up after {tries} tries, try again later");
                ReadError::new(Class::Unreachable, detail)
            }
            Self::Permanent(told) => {
                ReadError::new(Class::Unreadable, format!("{what} cannot be read: {told}"))
            }
        }
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
        let digits = text.strip_prefix("Server returned non-2xx status code: ")?.get(..3)?;
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
        return shorten(&format!("{code}: {message}"));
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
            let text = format!("Server returned non-2xx status code: {status} Reason: body");
            let failure = Failure::of(&generic(text), true);
            assert_eq!(matches!(failure, Failure::Transient(..)), passes, "{status}");
        }
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
