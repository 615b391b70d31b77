//! Objects of an object store, read by ranges.
//!
//! A location is one object, or a "folder": all objects whose keys begin with a prefix and a slash. Names are relative
//! keys; there are no links. An object's identity is its length, its entity tag and its version (its modification time,
//! where the store gives neither), taken when it is first seen and compared with what every answer says; requests carry
//! `If-Match` where there is a tag, so that the store itself refuses bytes of another object.
//!
//! | room | holds |
//! |---|---|
//! | [`fetch`] | one request at a time: resumed at the missing byte, tried again within a budget |
//! | [`failure`] | what a store's failure means, and how it is told without secrets |
//! | [`blocks`] | what is kept: small windows for metadata, blocks read ahead for tensors, both bounded |
//!
//! Requests run on a runtime of their own, of two threads: encoding never holds up a connection, and whoever waits for
//! bytes holds up no runtime of the caller's. The store is handed in ready: nothing here reads the environment.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio::runtime::{Builder, Handle, Runtime};

use weighbridge_schemas::limits;

use super::{changed, too_many_files};
use crate::error::{Class, ReadError, Result};
use blocks::Blocks;
use failure::Failure;
use fetch::{BACKOFF, Fetcher, REQUESTS, Tries, within_listing};

mod blocks;
mod failure;
mod fetch;
#[cfg(test)]
mod tests;

/// Threads that wait for the network.
const THREADS: usize = 2;
/// What a connection holds of a body that nobody has taken yet, at most, in bytes.
const CONNECTION_BYTES: u64 = 512 << 10;

/// A place in an object store: an object, or what lies below it.
#[derive(Clone)]
pub struct RemoteLocation {
    store: Arc<dyn ObjectStore>,
    path: Path,
    url: String,
    backoff: Duration,
    access: &'static str,
}

impl RemoteLocation {
    /// The place `path` in `store`, which messages call `url` (without credentials). The store should neither try again
    /// nor limit a whole request's time by itself: both are done here.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, path: Path, url: impl Into<String>) -> Self {
        Self { store, path, url: url.into(), backoff: BACKOFF, access: "check the credentials" }
    }

    /// Says, for messages, how the store is told who reads: the variables to set.
    #[must_use]
    pub fn with_access_hint(mut self, hint: &'static str) -> Self {
        self.access = hint;
        self
    }
}

impl fmt::Display for RemoteLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl fmt::Debug for RemoteLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A store's own form might show how it signs.
        f.debug_tuple("RemoteLocation").field(&self.url).finish()
    }
}

/// Objects below one prefix.
#[derive(Debug)]
pub(super) struct Prefix {
    io: Arc<Io>,
    path: Path,
}

/// What all objects of a source share.
#[derive(Debug)]
struct Io {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
    fetcher: Arc<Fetcher>,
    blocks: Arc<Blocks>,
    objects: AtomicU64,
}

/// An object as it was when first seen.
#[derive(Debug)]
pub(super) struct Object {
    io: Arc<Io>,
    pin: Arc<Pin>,
    /// Tells this source's objects apart.
    id: u64,
}

/// An object's identity.
#[derive(Debug, PartialEq, Eq)]
struct Pin {
    path: Path,
    size: u64,
    e_tag: Option<String>,
    version: Option<String>,
    /// In nanoseconds since 1970.
    modified_at: i128,
}

impl Pin {
    fn of(meta: &ObjectMeta) -> Self {
        let (seconds, rest) = (meta.last_modified.timestamp(), meta.last_modified.timestamp_subsec_nanos());
        Self {
            path: meta.location.clone(),
            size: meta.size,
            e_tag: meta.e_tag.clone(),
            version: meta.version.clone(),
            modified_at: i128::from(seconds) * 1_000_000_000 + i128::from(rest),
        }
    }

    /// Whether an answer speaks of the same object. Only what both sides give is compared.
    fn is(&self, meta: &ObjectMeta) -> bool {
        let same = |ours: &Option<String>, theirs: &Option<String>| {
            ours.is_none() || theirs.is_none() || ours == theirs
        };
        let dated = || self.e_tag.is_some() || Self::of(meta).modified_at == self.modified_at;
        self.size == meta.size
            && same(&self.e_tag, &meta.e_tag)
            && same(&self.version, &meta.version)
            && dated()
    }
}

impl Io {
    fn new(location: &RemoteLocation) -> Result<Self> {
        let built = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("weighbridge-store")
            .enable_all()
            .build();
        let runtime = built.map_err(|error| {
            ReadError::new(Class::Unreadable, format!("no threads to read with can be started: {error}"))
        })?;
        Ok(Self {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
            fetcher: Arc::new(Fetcher::new(Arc::clone(&location.store), location.backoff, location.access)),
            blocks: Arc::default(),
            objects: AtomicU64::new(0),
        })
    }

    /// Runs `future` on the threads for requests and waits for what it gives.
    fn wait<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Result<T> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.handle.spawn(async move {
            // Nobody waits any more: the answer is of no use.
            let _ = sender.send(future.await);
        });
        receiver.recv().map_err(|_| given_up())
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Never waits: the last holder may be a thread that must not.
            runtime.shutdown_background();
        }
    }
}

impl Prefix {
    /// What lies at `location`: an object, told by its prefix and name; else all that lies below it.
    pub(super) fn open(location: &RemoteLocation) -> Result<(Self, Option<String>)> {
        let io = Arc::new(Io::new(location)?);
        let path = location.path.clone();
        let fetcher = Arc::clone(&io.fetcher);
        let found = io.wait(async move { probe(&fetcher, &path).await })?;
        match found.map_err(|failure| io.fetcher.error(failure, "it"))? {
            Found::Object => {
                let mut parts: Vec<_> = location.path.as_ref().split('/').collect();
                let name = parts.pop().unwrap_or_default().to_owned();
                let path = Path::parse(parts.join("/")).map_err(|error| bad_name(&error))?;
                Ok((Self { io, path }, Some(name)))
            }
            Found::Prefix => Ok((Self { io, path: location.path.clone() }, None)),
            Found::Nothing => {
                let detail = "there is no such object, and none below it";
                Err(ReadError::new(Class::NotFound, detail))
            }
        }
    }

    pub(super) fn set_memory(&self, memory: u64) {
        self.io.blocks.set_memory(memory);
    }

    pub(super) fn cache_bytes(&self) -> u64 {
        self.io.blocks.bytes(REQUESTS) + REQUESTS as u64 * CONNECTION_BYTES
    }

    /// Names directly below the prefix.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let (fetcher, prefix) = (Arc::clone(&self.io.fetcher), self.path.clone());
        let listed = self.io.wait(async move { within_listing(fetcher.list_folder(&prefix)).await })?;
        let listed = listed.map_err(|failure| self.io.fetcher.error(failure, "the list of objects"))?;
        if listed.objects.len() > limits::FILES {
            return Err(too_many_files());
        }
        let names = listed.objects.iter().map(|object| below(&self.path, &object.location));
        let mut names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// The names of all objects below the prefix, sorted.
    pub(super) fn tree(&self) -> Result<Vec<String>> {
        let (fetcher, prefix) = (Arc::clone(&self.io.fetcher), self.path.clone());
        let listed = self.io.wait(async move { within_listing(list(&fetcher, &prefix)).await })?;
        let names = listed.map_err(|failure| self.io.fetcher.error(failure, "the list of objects"))?;
        let Some(mut names) = names else { return Err(too_many_files()) };
        names.sort_unstable();
        Ok(names)
    }

    /// The object at `name`, a relative key.
    pub(super) fn object(&self, name: &str) -> Result<Object> {
        let key =
            if self.path.as_ref().is_empty() { name.to_owned() } else { format!("{}/{name}", self.path) };
        let path = Path::parse(key).map_err(|error| bad_name(&error))?;
        let fetcher = Arc::clone(&self.io.fetcher);
        let (pin, first) = match self.io.wait(async move { fetcher.look(&path).await })? {
            Ok(seen) => seen,
            Err(Failure::Missing(_)) => {
                return Err(ReadError::new(Class::NotFound, "the object is absent"));
            }
            Err(failure) => return Err(self.io.fetcher.error(failure, "it")),
        };
        let id = self.io.objects.fetch_add(1, Ordering::Relaxed);
        self.io.blocks.keep_window(id, 0, first);
        Ok(Object { io: Arc::clone(&self.io), pin: Arc::new(pin), id })
    }
}

/// The key of `object` relative to `prefix`, which it lies below.
fn below(prefix: &Path, object: &Path) -> String {
    let key = object.as_ref();
    key.strip_prefix(prefix.as_ref()).unwrap_or(key).trim_start_matches('/').to_owned()
}

enum Found {
    Object,
    Prefix,
    Nothing,
}

async fn probe(fetcher: &Fetcher, path: &Path) -> Result<Found, Failure> {
    // The root of a bucket is no object.
    if !path.as_ref().is_empty() {
        match fetcher.head(path).await {
            Ok(_) => return Ok(Found::Object),
            Err(Failure::Missing(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    within_listing(begin(fetcher, path)).await
}

/// Whether there is anything below `path`.
async fn begin(fetcher: &Fetcher, path: &Path) -> Result<Found, Failure> {
    let mut tries = Tries::new(fetcher.backoff());
    loop {
        match Fetcher::next(&mut fetcher.store().list(Some(path))).await {
            Ok(None) => return Ok(Found::Nothing),
            Ok(Some(_)) => return Ok(Found::Prefix),
            Err(failure) => tries.after(failure).await?,
        }
    }
}

/// All names below `prefix`; `None` where there are more than [`limits::FILES`].
async fn list(fetcher: &Fetcher, prefix: &Path) -> Result<Option<Vec<String>>, Failure> {
    let mut tries = Tries::new(fetcher.backoff());
    'again: loop {
        let mut names = Vec::new();
        let mut objects = fetcher.store().list(Some(prefix));
        loop {
            let object = match Fetcher::next(&mut objects).await {
                Ok(Some(object)) => object,
                Ok(None) => break,
                Err(failure) => {
                    tries.after(failure).await?;
                    continue 'again;
                }
            };
            let name = below(prefix, &object.location);
            if !name.is_empty() {
                names.push(name);
            }
            if names.len() > limits::FILES {
                return Ok(None);
            }
        }
        return Ok(Some(names));
    }
}

impl Object {
    pub(super) fn len(&self) -> u64 {
        self.pin.size
    }

    pub(super) fn modified_at(&self) -> i128 {
        self.pin.modified_at
    }

    /// Fills `buffer`, which lies within the object, from what is kept or read ahead.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.io.blocks.read(self, buffer, offset)
    }

    /// The `size` bytes at `offset`, which lie within the object, by one request of exactly these unless they are
    /// kept already.
    pub(super) fn read_once(&self, size: usize, offset: u64) -> Result<Vec<u8>> {
        if size < blocks::SMALL_BYTES {
            let mut bytes = vec![0; size];
            self.read(&mut bytes, offset)?;
            return Ok(bytes);
        }
        self.fetch(offset, size as u64)
    }

    fn fetch(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let (fetcher, pin) = (Arc::clone(&self.io.fetcher), Arc::clone(&self.pin));
        self.io.wait(async move { fetcher.range(&pin, offset..offset.saturating_add(length)).await })?
    }
}

/// Asks the store for every one of `objects`, by their names, some at once.
pub(super) fn check_unchanged(objects: &[(&str, &Object)]) -> Result<()> {
    let Some((_, first)) = objects.first() else { return Ok(()) };
    let pins: Vec<_> =
        objects.iter().map(|(name, object)| ((*name).to_owned(), Arc::clone(&object.pin))).collect();
    let fetcher = Arc::clone(&first.io.fetcher);
    first.io.wait(async move {
        let asked = futures::stream::iter(pins.into_iter().map(|(name, pin)| {
            let fetcher = Arc::clone(&fetcher);
            async move { check(&fetcher, &pin).await.map_err(|error| error.in_file(name)) }
        }));
        let mut answers = asked.buffer_unordered(REQUESTS);
        while let Some(answer) = answers.next().await {
            answer?;
        }
        Ok(())
    })?
}

async fn check(fetcher: &Fetcher, pin: &Pin) -> Result<()> {
    match fetcher.head(&pin.path).await {
        Ok(meta) if pin.is(&meta) => Ok(()),
        Ok(_) | Err(Failure::Missing(_)) => Err(changed()),
        Err(failure) => Err(fetcher.error(failure, "whether it has changed")),
    }
}

fn bad_name(error: &object_store::path::Error) -> ReadError {
    ReadError::new(Class::IndexPathEscape, format!("the name is no key of an object store: {error}"))
}

fn given_up() -> ReadError {
    ReadError::new(Class::Unreachable, "reading was given up before the store answered")
}
