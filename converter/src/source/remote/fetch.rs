//! Requests to a store: bounded in number, resumed where they break, tried again within a budget.
//!
//! A request fails for good after [`TRIES`] tries that brought nothing to speak of; tries that brought
//! [`PROGRESS_BYTES`] start the count anew. Between tries it waits 0.1 s, then twice as long each time up to 5 s, each
//! time shortened by up to half by chance. A try ends when 30 s have brought neither [`PROGRESS_BYTES`] nor the rest;
//! the first 30 s include the wait for the answer. So a request either gets on by [`PROGRESS_BYTES`] within about 4
//! minutes or fails, and it fails within about 10 seconds where the store refuses at once. A listing has 4 minutes
//! for all its tries and pages.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ListResult, ObjectMeta, ObjectStore};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::blocks::SMALL_BYTES;
use super::failure::Failure;
use super::{Pin, changed, given_up};
use crate::error::{ReadError, Result};

/// Requests on their way at once, for one source.
pub(super) const REQUESTS: usize = 12;
/// Tries before a request is given up.
pub(super) const TRIES: u32 = 8;
/// The wait behind the first try.
pub(super) const BACKOFF: Duration = Duration::from_millis(100);
/// The longest wait between tries.
const LONGEST_BACKOFF: Duration = Duration::from_secs(5);
/// How long a store may take to bring [`PROGRESS_BYTES`], or less where less is to come.
const SILENCE: Duration = Duration::from_secs(30);
/// How long a listing may take, in all its pages and tries.
const LISTING: Duration = Duration::from_secs(240);
/// How long one try to list a folder may take, in all its pages.
const LISTING_TRY: Duration = Duration::from_secs(100);
/// How many bytes make a try worth another one.
const PROGRESS_BYTES: usize = 64 << 10;

/// Sends requests.
#[derive(Debug)]
pub(super) struct Fetcher {
    store: Arc<dyn ObjectStore>,
    requests: Semaphore,
    backoff: Duration,
    /// For messages: how the store is told who reads.
    access: &'static str,
}

/// How often a request was tried.
#[derive(Debug)]
pub(super) struct Tries {
    made: u32,
    backoff: Duration,
    /// Seeded by chance, so that many readers do not come back all at once.
    chance: RandomState,
}

impl Tries {
    pub(super) fn new(backoff: Duration) -> Self {
        Self { made: 0, backoff, chance: RandomState::new() }
    }

    /// Waits until it is time to try again after `failure`, or gives it back where that is no use.
    pub(super) async fn after(&mut self, failure: Failure) -> Result<(), Failure> {
        self.made = self.made.saturating_add(1);
        match failure {
            Failure::Transient(told, _) if self.made >= TRIES => Err(Failure::Transient(told, self.made)),
            Failure::Transient(..) => {
                sleep(self.pause()).await;
                Ok(())
            }
            failure => Err(failure),
        }
    }

    fn pause(&self) -> Duration {
        let doubled = self.backoff.saturating_mul(1 << self.made.saturating_sub(1).min(16));
        let longest = doubled.min(LONGEST_BACKOFF);
        let share = u32::try_from(self.chance.hash_one(self.made) % 128).unwrap_or(0);
        longest.saturating_sub(longest.saturating_mul(share) / 256)
    }
}

impl Fetcher {
    pub(super) fn new(store: Arc<dyn ObjectStore>, backoff: Duration, access: &'static str) -> Self {
        Self { store, requests: Semaphore::new(REQUESTS), backoff, access }
    }

    /// The error to report: `what` cannot be read.
    pub(super) fn error(&self, failure: Failure, what: &str) -> ReadError {
        failure.into_error(what, self.access)
    }

    /// A failure to read at byte `at` of an object that was there.
    fn lost(&self, failure: Failure, at: u64) -> ReadError {
        match failure {
            Failure::Missing(_) => changed(),
            failure => self.error(failure, &format!("byte {at}")),
        }
    }

    pub(super) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// The next of a listing's answers; `None` at its end.
    pub(super) async fn next<T>(
        listing: &mut BoxStream<'_, object_store::Result<T>>,
    ) -> Result<Option<T>, Failure> {
        match timeout(SILENCE, listing.next()).await {
            Ok(next) => next.transpose().map_err(|error| Failure::of(&error, false)),
            Err(_) => Err(silent()),
        }
    }

    /// What lies directly below `prefix`, and the folders below it.
    pub(super) async fn list_folder(&self, prefix: &Path) -> Result<ListResult, Failure> {
        let mut tries = Tries::new(self.backoff);
        loop {
            let listing = self.store.list_with_delimiter(Some(prefix));
            let failure = match timeout(LISTING_TRY, listing).await {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(error)) => Failure::of(&error, false),
                Err(_) => late(LISTING_TRY),
            };
            tries.after(failure).await?;
        }
    }

    pub(super) fn backoff(&self) -> Duration {
        self.backoff
    }

    /// The bytes of `range`, which lies within the pinned object.
    pub(super) async fn range(&self, pin: &Pin, range: Range<u64>) -> Result<Vec<u8>> {
        let _place = self.requests.acquire().await.map_err(|_| given_up())?;
        let size = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| given_up())?;
        let mut bytes = Vec::with_capacity(size);
        let mut tries = Tries::new(self.backoff);
        loop {
            let had = bytes.len();
            let at = range.start.saturating_add(had as u64);
            let Err(failure) = self.body(pin, at..range.end, size, &mut bytes).await else {
                return Ok(bytes);
            };
            if bytes.len().saturating_sub(had) >= PROGRESS_BYTES {
                tries.made = 0;
            }
            let at = range.start.saturating_add(bytes.len() as u64);
            tries.after(failure).await.map_err(|failure| self.lost(failure, at))?;
        }
    }

    /// Appends the bytes of `range` to `bytes`, which are to be `size` then. On failure some have been appended, all of
    /// them right.
    async fn body(
        &self,
        pin: &Pin,
        range: Range<u64>,
        size: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        if range.is_empty() {
            return Ok(());
        }
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: pin.e_tag.clone(),
            ..GetOptions::default()
        };
        let deadline = Instant::now() + SILENCE;
        let answer = self.get(&pin.path, options, deadline).await.map_err(|failure| match failure {
            // It was longer when it was first seen.
            Failure::OutOfRange(_) => Failure::Changed,
            failure => failure,
        })?;
        if !pin.is(&answer.meta) {
            return Err(Failure::Changed);
        }
        if answer.range != range {
            let told = format!("bytes {:?} were asked for, and {:?} came", range, answer.range);
            return Err(Failure::Permanent(told));
        }
        collect(answer, size, bytes, deadline).await
    }

    async fn get(&self, path: &Path, options: GetOptions, deadline: Instant) -> Result<GetResult, Failure> {
        match timeout_at(deadline, self.store.get_opts(path, options)).await {
            Ok(answer) => answer.map_err(|error| Failure::of(&error, false)),
            Err(_) => Err(silent()),
        }
    }

    /// What the store says of an object.
    pub(super) async fn head(&self, path: &Path) -> Result<ObjectMeta, Failure> {
        let mut tries = Tries::new(self.backoff);
        loop {
            let options = GetOptions { head: true, ..GetOptions::default() };
            match self.get(path, options, Instant::now() + SILENCE).await {
                Ok(answer) => return Ok(answer.meta),
                Err(failure) => tries.after(failure).await?,
            }
        }
    }

    /// Pins an object by its first bytes, which come along: most objects begin with their metadata.
    pub(super) async fn look(&self, path: &Path) -> Result<(Pin, Vec<u8>), Failure> {
        let _place = self.requests.acquire().await;
        let mut tries = Tries::new(self.backoff);
        loop {
            let failure = match self.first(path).await {
                Ok(seen) => return Ok(seen),
                Err(failure) => failure,
            };
            // A range of an empty object is refused.
            if matches!(failure, Failure::OutOfRange(_) | Failure::Permanent(_)) {
                let meta = self.head(path).await?;
                return if meta.size == 0 { Ok((Pin::of(&meta), Vec::new())) } else { Err(failure) };
            }
            tries.after(failure).await?;
        }
    }

    async fn first(&self, path: &Path) -> Result<(Pin, Vec<u8>), Failure> {
        let range = Some(GetRange::Bounded(0..SMALL_BYTES as u64));
        let deadline = Instant::now() + SILENCE;
        let answer = self.get(path, GetOptions { range, ..GetOptions::default() }, deadline).await?;
        let pin = Pin::of(&answer.meta);
        let size = usize::try_from(pin.size).unwrap_or(SMALL_BYTES).min(SMALL_BYTES);
        let mut bytes = Vec::with_capacity(size);
        collect(answer, size, &mut bytes, deadline).await?;
        Ok((pin, bytes))
    }
}

/// Appends an answer's body to `bytes`, which are to be `size` then. Whatever brings [`PROGRESS_BYTES`] before the
/// `deadline` moves it on.
async fn collect(
    answer: GetResult,
    size: usize,
    bytes: &mut Vec<u8>,
    mut deadline: Instant,
) -> Result<(), Failure> {
    let mut body = answer.into_stream();
    let mut goal = bytes.len().saturating_add(PROGRESS_BYTES);
    loop {
        match timeout_at(deadline, body.next()).await {
            Err(_) => return Err(silent()),
            Ok(Some(Err(error))) => return Err(Failure::of(&error, true)),
            Ok(Some(Ok(part))) if part.len() > size.saturating_sub(bytes.len()) => {
                return Err(Failure::Permanent("the answer is longer than what was asked for".to_owned()));
            }
            Ok(Some(Ok(part))) => {
                bytes.extend_from_slice(&part);
                if bytes.len() >= goal {
                    goal = bytes.len().saturating_add(PROGRESS_BYTES);
                    deadline = Instant::now() + SILENCE;
                }
            }
            Ok(None) if bytes.len() == size => return Ok(()),
            Ok(None) => {
                let missing = size.saturating_sub(bytes.len());
                return Err(Failure::Transient(format!("the answer ended {missing} bytes early"), 0));
            }
        }
    }
}

/// Bounds a whole listing, with all its tries.
pub(super) async fn within_listing<T>(
    listing: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    timeout(LISTING, listing).await.unwrap_or_else(|_| Err(late(LISTING)))
}

fn late(after: Duration) -> Failure {
    Failure::Transient(format!("the listing took over {} s", after.as_secs()), 0)
}

fn silent() -> Failure {
    Failure::Transient(format!("{} s brought next to nothing from the store", SILENCE.as_secs()), 0)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use bytes::Bytes;
    use object_store::{Attributes, GetResultPayload};

    use super::*;

    /// An answer of `size` bytes that come one by one.
    fn trickle(size: u64, each: Duration) -> GetResult {
        let parts = futures::stream::repeat(Bytes::from_static(b"x")).then(move |part| async move {
            sleep(each).await;
            Ok(part)
        });
        GetResult {
            payload: GetResultPayload::Stream(parts.boxed()),
            meta: ObjectMeta {
                location: Path::from("a"),
                last_modified: SystemTime::UNIX_EPOCH.into(),
                size,
                e_tag: None,
                version: None,
            },
            range: 0..size,
            attributes: Attributes::default(),
            extensions: Default::default(),
        }
    }

    #[test]
    fn a_body_that_trickles_counts_as_silent() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let size = 4 * PROGRESS_BYTES;
            let mut bytes = Vec::new();
            let answer = trickle(size as u64, Duration::from_millis(1));
            let deadline = Instant::now() + Duration::from_millis(50);
            let ended = collect(answer, size, &mut bytes, deadline).await;
            assert_eq!(ended, Err(silent()));
            assert!(bytes.len() < PROGRESS_BYTES, "{}", bytes.len());
        });
    }
}
