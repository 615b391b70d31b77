//! A store in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage.
//!
//! | room | holds |
//! |---|---|
//! | [`address`] | from a URL and options to a client |
//! | `profile` | keys of S3 in the files that Amazon's own tools keep |
//! | `uploads` | uploads that were begun and not ended (S3) |
//! | `answers` | what a store's answers say beside their bodies: its clock, its errors, how long to wait |
//! | `failure` | what a failure means, and the way out |
//!
//! Each request is tried again while its failure may pass (no connection, a broken body, 408, 409, 429, 5xx), with
//! pauses that double and are shortened by chance, at least as long as the store asks for, until the store has been
//! patient for [`Options::patience`]. A body that breaks goes on at the byte where it broke. So many requests are on
//! their way at once as [`Options::requests`] allows, whatever asks for them.

pub mod address;
mod answers;
mod failure;
mod profile;
mod uploads;

use std::future::Future;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{
    GetOptions, GetRange, ListResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

pub use address::{Client, Options, check, check_endpoint, client, is_below, is_bucket, plain_client};
pub(crate) use address::{api_client, install_cryptography};

use crate::error::{Result, StoreError};
use crate::pace::Pace;
use crate::root::Put;
use crate::unfinished::Unfinished;
use answers::Answers;
use failure::Failure;

/// The pause before the second try.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, unless the store asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The shortest pause where the store asks for fewer requests and does not say how long to wait.
const THROTTLED_PAUSE: Duration = Duration::from_secs(1);
/// After how long people are told that a request is tried again.
const SAID_AFTER: Duration = Duration::from_secs(5);
/// How long a store may be silent within a request.
const SILENCE: Duration = Duration::from_secs(60);
/// Even who is impatient waits so long for an answer.
const LEAST_SILENCE: Duration = Duration::from_secs(10);
/// How slowly a body may go out before its request counts as stuck, in bytes a second.
const SLOWEST: u64 = 256 << 10;
/// Bytes that are taken from a body before the number of tries starts anew.
const PROGRESS_BYTES: u64 = 64 << 10;

/// A bucket, and how it is spoken to.
#[derive(Debug)]
pub(crate) struct Bucket {
    client: Client,
    requests: Semaphore,
    patience: Duration,
}

/// A request that is tried again.
struct Tries {
    began: Instant,
    made: u32,
    /// Whether people were told.
    said: bool,
}

impl Tries {
    fn new() -> Self {
        Self { began: Instant::now(), made: 0, said: false }
    }

    /// Waits until it is time to try again, or gives the failure back where that is no use.
    async fn after(&mut self, failure: Failure, patience: Duration) -> std::result::Result<(), Failure> {
        self.made = self.made.saturating_add(1);
        let Some(least) = failure.passes() else { return Err(failure) };
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.made.min(16).saturating_sub(1)).min(LONGEST_PAUSE);
        let pause = doubled.mul_f64(0.5 + fastrand::f64() / 2.0);
        // What the store asks for is kept to, and not by all at the same moment.
        let pause = pause.max(least.mul_f64(1.0 + fastrand::f64() / 4.0));
        if self.began.elapsed() + pause > patience {
            return Err(failure.after(self.made, self.began.elapsed()));
        }
        if self.began.elapsed() > SAID_AFTER && !self.said {
            self.said = true;
            tracing::warn!(%failure, patience = ?patience, "the store is tried again");
        }
        tracing::debug!(%failure, ?pause, tries = self.made, "trying again");
        sleep(pause).await;
        Ok(())
    }
}

impl Bucket {
    pub(crate) fn new(client: Client, options: &Options) -> Self {
        let requests = Semaphore::new(options.requests.clamp(1, Semaphore::MAX_PERMITS));
        Self { client, requests, patience: options.patience }
    }

    /// The URL, for people.
    pub(crate) fn shown(&self) -> &str {
        &self.client.shown
    }

    /// What tells this store from others.
    pub(crate) fn identity(&self) -> String {
        self.client.identity()
    }

    /// Where requests go and the bucket's region, where these are said.
    pub(crate) fn destination(&self) -> (Option<&str>, Option<&str>) {
        self.client.destination()
    }

    /// Uploads that were begun and not ended; none where the store is not asked for them.
    pub(crate) async fn unfinished(&self) -> Result<Vec<Unfinished>> {
        let Some(uploads) = self.client.uploads() else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        let mut after = None;
        loop {
            let request = || uploads.page(after.as_ref());
            let page = self.tried(&Key::default(), SILENCE * 4, request).await?;
            found.extend(page.uploads);
            if page.next.is_none() || page.next == after {
                return Ok(found);
            }
            after = page.next;
        }
    }

    /// Ends an upload for good.
    pub(crate) async fn abandon(&self, one: &Unfinished) -> Result<()> {
        let Some(uploads) = self.client.uploads() else { return Ok(()) };
        self.tried(&one.key, SILENCE, || uploads.abort(one)).await
    }

    fn answers(&self) -> &Answers {
        &self.client.answers
    }

    /// How far the store's clock is ahead of this machine's, in seconds, as its last answer told.
    pub(crate) fn ahead(&self) -> i64 {
        self.answers().ahead().unwrap_or(0)
    }

    /// How long a store may be silent: not much longer than it is waited for at all.
    fn silence(&self) -> Duration {
        SILENCE.min(self.patience.max(LEAST_SILENCE))
    }

    /// One attempt of a request, bounded in time, once there is room for one more.
    async fn attempt<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> std::result::Result<T, Failure> {
        let _room = self.requests.acquire().await;
        let limit = limit.min(self.silence() + limit.saturating_sub(SILENCE));
        match timeout(limit, request).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(Failure::of(&error)),
            Err(_) => Err(Failure::silent(limit)),
        }
    }

    /// A request, tried until it is answered.
    async fn answered<T, F>(
        &self,
        limit: Duration,
        request: impl Fn() -> F,
    ) -> std::result::Result<T, Failure>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut tries = Tries::new();
        loop {
            match self.attempt(limit, request()).await {
                Ok(done) => return Ok(done),
                Err(failure) => tries.after(failure, self.patience).await?,
            }
        }
    }

    /// As [`Self::answered`], of an object or folder.
    async fn tried<T, F>(&self, key: &Key, limit: Duration, request: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.answered(limit, request).await.map_err(|failure| self.told(key, failure))
    }

    fn told(&self, key: &Key, failure: Failure) -> StoreError {
        failure.into_error(key, &self.client, self.answers().ahead())
    }

    /// Writes `bytes` under `key` if nothing is there yet. Where an earlier try did it and its answer was lost, it is
    /// [`Put::Present`]: who puts reads what is there, and finds it to be its own.
    pub(crate) async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        let put = || {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            self.client.store.put_opts(key, PutPayload::from_bytes(bytes.clone()), options)
        };
        match self.answered(limit(bytes.len()), put).await {
            Ok(_) => Ok(Put::Written),
            Err(Failure::Present) => Ok(Put::Present),
            Err(failure) => Err(self.told(key, failure)),
        }
    }

    /// Writes `bytes` under `key`, whatever is there. Nothing is so large that it would have to go in parts, whose
    /// end could be forgotten.
    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<()> {
        let put = || self.client.store.put(key, PutPayload::from_bytes(bytes.clone()));
        self.tried(key, limit(bytes.len()), put).await.map(drop)
    }

    /// The bytes under `key`, at most `limit` of them; `None` where nothing is there.
    pub(crate) async fn get(&self, key: &Key, limit: u64, pace: &Pace) -> Result<Option<Bytes>> {
        let mut tries = Tries::new();
        let mut read = Reading { bytes: BytesMut::new(), of: None };
        loop {
            let before = read.bytes.len() as u64;
            match self.read_on(key, limit, &mut read, pace).await {
                Ok(()) => return Ok(Some(read.bytes.freeze())),
                Err(Failure::Absent(_)) if read.of.is_none() => return Ok(None),
                Err(failure) => {
                    if (read.bytes.len() as u64).saturating_sub(before) >= PROGRESS_BYTES {
                        tries = Tries::new();
                    }
                    tries.after(failure, self.patience).await.map_err(|failure| self.told(key, failure))?;
                }
            }
        }
    }

    /// Reads on where `read` ends, to the end of the object.
    async fn read_on(
        &self,
        key: &Key,
        limit: u64,
        read: &mut Reading,
        pace: &Pace,
    ) -> std::result::Result<(), Failure> {
        let from = read.bytes.len() as u64;
        let range = (from > 0).then_some(GetRange::Offset(from));
        // What is read on is what was begun.
        let if_match = read.of.as_ref().and_then(|meta| meta.e_tag.clone());
        let options = GetOptions { range, if_match, ..GetOptions::default() };
        let _room = self.requests.acquire().await;
        let silence = self.silence();
        let answered = timeout(silence, self.client.store.get_opts(key, options)).await;
        let found = answered.map_err(|_| Failure::silent(silence))?.map_err(|error| Failure::of(&error))?;
        let size = found.meta.size;
        if size > limit {
            return Err(Failure::TooLarge { size, limit });
        }
        if read.of.is_none() {
            // The store said how large it is, and it is within the limit.
            read.bytes.reserve(usize::try_from(size).unwrap_or(0));
            read.of = Some(found.meta.clone());
        }
        let mut body = found.into_stream();
        while let Some(run) = timeout(silence, body.next()).await.map_err(|_| Failure::silent(silence))? {
            let run = run.map_err(|error| Failure::of_body(&error))?;
            if (read.bytes.len() + run.len()) as u64 > size {
                return Err(Failure::broken("the store sent more than the object has"));
            }
            read.bytes.extend_from_slice(&run);
            pace.take(run.len() as u64).await;
        }
        if (read.bytes.len() as u64) < size {
            return Err(Failure::broken("the store sent less than the object has"));
        }
        Ok(())
    }

    /// The bytes from `from` on under `key`, at most `most` of them, and the size of the whole.
    pub(crate) async fn get_range(&self, key: &Key, from: u64, most: usize) -> Result<Option<(Bytes, u64)>> {
        let range = GetRange::Bounded(from..from.saturating_add(most as u64));
        let get = || async {
            let options = GetOptions { range: Some(range.clone()), ..GetOptions::default() };
            let found = self.client.store.get_opts(key, options).await?;
            let size = found.meta.size;
            Ok((found.bytes().await?, size))
        };
        match self.answered(limit(most), get).await {
            Ok(found) => Ok(Some(found)),
            Err(Failure::Absent(_)) => Ok(None),
            Err(failure) => Err(self.told(key, failure)),
        }
    }

    /// What is known of the object under `key`; `None` where nothing is there.
    pub(crate) async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>> {
        match self.answered(SILENCE, || self.client.store.head(key)).await {
            Ok(found) => Ok(Some(found)),
            Err(Failure::Absent(_)) => Ok(None),
            Err(failure) => Err(self.told(key, failure)),
        }
    }

    /// What lies directly in `folder`.
    pub(crate) async fn entries(&self, folder: &Key) -> Result<ListResult> {
        self.tried(folder, SILENCE * 2, || self.client.store.list_with_delimiter(Some(folder))).await
    }

    /// Up to `most` objects below `folder`, behind `after`, in the order of their keys.
    pub(crate) async fn list(
        &self,
        folder: &Key,
        after: Option<&Key>,
        most: usize,
    ) -> Result<Vec<ObjectMeta>> {
        self.tried(folder, SILENCE, || async {
            let listed = match after {
                Some(after) => self.client.store.list_with_offset(Some(folder), after),
                None => self.client.store.list(Some(folder)),
            };
            listed.take(most).try_collect().await
        })
        .await
    }

    /// Removes objects; that one is not there is right too.
    pub(crate) async fn delete(&self, keys: &[Key]) -> Result<()> {
        let Some(first) = keys.first() else { return Ok(()) };
        self.tried(first, SILENCE * 4, || async {
            let keys: Vec<object_store::Result<Key>> = keys.iter().cloned().map(Ok).collect();
            let keys = futures::stream::iter(keys).boxed();
            let mut deleted = self.client.store.delete_stream(keys);
            while let Some(done) = deleted.next().await {
                match done {
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
        .await
    }
}

/// An object on its way in.
struct Reading {
    bytes: BytesMut,
    of: Option<ObjectMeta>,
}

/// How long a request with a body of so many bytes may take.
fn limit(bytes: usize) -> Duration {
    SILENCE + Duration::from_secs(bytes as u64 / SLOWEST)
}
