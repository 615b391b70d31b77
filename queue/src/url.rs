//! From a queue's URL to the queue.
//!
//! Errors name the scheme alone: the rest of a URL may hold a password.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::OnceCell;
use weighbridge_schemas::error::shorten;

use crate::amqp::{Address, Amqp};
use crate::clock::Clock;
use crate::embedded::Embedded;
use crate::error::Error;
use crate::message::Message;
use crate::{Depth, Lease, Queue, Taker};

/// For how long the first opening of a queue that may be opened later waits.
const AT_FIRST: Duration = Duration::from_millis(500);

/// For how long a call waits for another process that writes, unless told otherwise.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Opens the queue at `url`: `embedded:PATH`, where PATH is a folder of this machine, made where it is absent; or a
/// broker's, `amqp://` or `amqps://`, whose exchanges and queues are made when they are first needed.
///
/// # Errors
/// [`Error::Refused`] where the URL is none of a queue, or what lies there is no queue of this version;
/// [`Error::Unreachable`] where it cannot be opened now.
pub fn open(url: &str, clock: Arc<dyn Clock>) -> Result<Arc<dyn Queue>, Error> {
    open_with(url, clock, PATIENCE)
}

/// As [`open`]; no call waits longer than `patience` for another process that writes, or for the broker's answer.
///
/// # Errors
/// As [`open`].
pub fn open_with(url: &str, clock: Arc<dyn Clock>, patience: Duration) -> Result<Arc<dyn Queue>, Error> {
    match Place::of(url)? {
        Place::Folder(folder) => Ok(Arc::new(Embedded::open(folder, clock, patience)?)),
        Place::Broker(address) => {
            let queue = Amqp::new(*address, clock, patience)?;
            queue.connect()?;
            Ok(Arc::new(queue))
        }
    }
}

/// Whether there is a queue at `url`; none is made.
///
/// # Errors
/// [`Error::Refused`] where the URL is none of a queue; [`Error::Unreachable`] where that cannot be told.
pub fn is_there(url: &str, clock: Arc<dyn Clock>) -> Result<bool, Error> {
    match Place::of(url)? {
        Place::Folder(folder) => Embedded::is_there(folder),
        Place::Broker(address) => Amqp::new(*address, clock, PATIENCE)?.is_there(),
    }
}

/// As [`open_with`]; but one that cannot be opened now is opened by the first call that can, and until then every call
/// says why not.
///
/// # Errors
/// [`Error::Refused`], as [`open`].
pub fn open_patiently(url: &str, clock: Arc<dyn Clock>, patience: Duration) -> Result<Arc<dyn Queue>, Error> {
    let not_yet = |error: &Error| tracing::warn!(%error, "the queue cannot be opened yet");
    if let Place::Broker(address) = Place::of(url)? {
        let queue = Amqp::new(*address, clock, patience)?;
        match queue.connect() {
            Err(error @ Error::Refused { .. }) => return Err(error),
            Err(error) => not_yet(&error),
            Ok(()) => {}
        }
        return Ok(Arc::new(queue));
    }
    // Whoever starts is not to stand still for long: what is locked now is opened by a call.
    match open_with(url, Arc::clone(&clock), patience.min(AT_FIRST)) {
        Ok(_) => open_with(url, clock, patience),
        Err(error @ Error::Unreachable { .. }) => {
            not_yet(&error);
            Ok(Arc::new(Later { url: url.to_owned(), clock, patience, opened: OnceCell::new() }))
        }
        Err(error) => Err(error),
    }
}

/// A queue that could not be opened yet.
#[derive(Debug)]
struct Later {
    url: String,
    clock: Arc<dyn Clock>,
    patience: Duration,
    opened: OnceCell<Arc<dyn Queue>>,
}

impl Later {
    async fn queue(&self) -> Result<&Arc<dyn Queue>, Error> {
        let (url, clock, patience) = (self.url.clone(), Arc::clone(&self.clock), self.patience);
        let open = || async move {
            let opening = tokio::task::spawn_blocking(move || open_with(&url, clock, patience));
            opening.await.unwrap_or_else(|failed| {
                let why = format!("opening it was broken off ({failed})");
                Err(Error::Unreachable { what: "queue".to_owned(), why })
            })
        };
        self.opened.get_or_try_init(open).await
    }
}

#[async_trait]
impl Queue for Later {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        self.queue().await?.send(message).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.queue().await?.lease(taker, time).await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.queue().await?.extend(lease, time).await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.queue().await?.done(lease).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.queue().await?.retry(lease, delay).await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.queue().await?.depth().await
    }

    async fn prepare(&self) -> Result<(), Error> {
        self.queue().await?.prepare().await
    }

    fn longest_hold(&self) -> Option<Duration> {
        self.opened.get().and_then(|queue| queue.longest_hold())
    }
}

/// Whether `url` is of a queue, as far as can be told without opening it.
///
/// # Errors
/// [`Error::Refused`] where it is not.
pub fn check(url: &str) -> Result<(), Error> {
    Place::of(url).map(|_| ())
}

/// The URL without its password, for people.
#[must_use]
pub fn shown(url: &str) -> String {
    match Place::of(url) {
        Ok(Place::Folder(_)) => url.to_owned(),
        Ok(Place::Broker(address)) => address.shown().to_owned(),
        Err(_) => format!("{}:...", shorten(url.split_once(':').map_or("", |(scheme, _)| scheme))),
    }
}

/// Where a queue is.
enum Place<'a> {
    Folder(&'a Path),
    Broker(Box<Address>),
}

impl<'a> Place<'a> {
    fn of(url: &'a str) -> Result<Self, Error> {
        let refused = |what: String, why: &str| Err(Error::Refused { what, why: why.to_owned() });
        let Some((scheme, rest)) = url.split_once(':') else {
            return refused("queue URL".to_owned(), "it has no scheme; use embedded:PATH, or amqp://HOST");
        };
        let what = format!("queue URL {:?}", format!("{}:...", shorten(scheme)));
        match scheme {
            "embedded" if rest.is_empty() => refused(what, "it names no folder; use embedded:PATH"),
            "embedded" if rest.contains('\0') => refused(what, "a path holds no NUL"),
            // Is the first part of `//a/b` a host or a folder? Nobody should have to guess.
            "embedded" if rest.starts_with("//") && !rest.starts_with("///") => {
                refused(what, "it has two slashes; use embedded:PATH, with one slash or none before PATH")
            }
            "embedded" => Ok(Self::Folder(Path::new(rest))),
            "amqp" | "amqps" => Ok(Self::Broker(Box::new(Address::parse(url)?))),
            _ => refused(what, "no such kind of queue; use embedded:PATH, amqp://HOST or amqps://HOST"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_as_it_is_written() {
        for path in ["/a b/c", "a/../b", "./x%20y", "///a", "c:d"] {
            let url = format!("embedded:{path}");
            assert!(matches!(Place::of(&url), Ok(Place::Folder(folder)) if folder == Path::new(path)));
            assert_eq!(shown(&url), url);
        }
    }

    #[test]
    fn looking_for_a_queue_makes_none() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("embedded:{}/a", folder.path().display());
        let clock = || Arc::new(crate::clock::SystemClock::new());
        assert!(!is_there(&url, clock()).unwrap());
        assert!(!folder.path().join("a").try_exists().unwrap());
        open(&url, clock()).unwrap();
        assert!(is_there(&url, clock()).unwrap());
    }

    #[tokio::test]
    async fn a_queue_that_cannot_be_opened_yet_is_opened_when_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("queue");
        std::fs::write(&place, "in the way").unwrap();
        let url = format!("embedded:{}", place.display());
        let clock = Arc::new(crate::clock::SystemClock::new());
        let queue = open_patiently(&url, clock, PATIENCE).unwrap();
        assert!(matches!(queue.depth().await, Err(Error::Unreachable { .. })));
        std::fs::remove_file(&place).unwrap();
        assert!(queue.depth().await.unwrap().iter().all(|class| class.ready == 0));
    }

    #[test]
    fn what_is_no_queue_is_refused_with_the_way_out_and_without_secrets() {
        for url in [
            "",
            "x",
            "embedded:",
            "embedded://a/b",
            "embedded:a\0",
            "amqp://u:secret@",
            "amqps://u:secret@h:x",
            "kafka://u:secret@h",
            "Embedded:/secret",
        ] {
            let error = check(url).unwrap_err();
            assert!(matches!(error, Error::Refused { .. }), "{url}");
            let text = error.to_string();
            assert!(!text.contains("secret"), "{text}");
            assert!(!shown(url).contains("secret"), "{url}");
        }
        assert_eq!(shown("amqp://me:secret@h/v"), "amqp://me@h/v");
    }
}
