//! From a URL to a store: a path or `file://`, or a bucket's `s3://`, `gs://`, `az://`. Writes to a folder are synced
//! to disk before they count, unless it was opened without; what a bucket has taken is durable.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{ListResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};

use weighbridge_schemas::time::Timestamp;

use crate::bucket::{self, Bucket};
pub use crate::disk::Durability;
use crate::error::{Class, Result, StoreError};
use crate::left;
use crate::local::Local;
use crate::outside;
use crate::pace::Pace;
use crate::sign::{Signers, Trust};

mod remove;

pub(crate) use remove::Moment;

/// How often what was there, and then was not, is written.
const COLLECTED: usize = 10;
/// Objects that are listed at a time.
const PAGE: usize = 1000;

/// A store's root.
#[derive(Debug, Clone)]
pub struct Root {
    place: Place,
    intercept: Option<Arc<dyn Intercept>>,
    signers: Option<Arc<Signers>>,
    trust: Option<Arc<Trust>>,
}

/// Where a store lies.
#[derive(Debug, Clone)]
enum Place {
    /// In a folder of this machine: what writes there is ours, what reads there is the library's.
    Folder(Arc<Local>, Arc<LocalFileSystem>),
    /// In a bucket.
    Bucket(Arc<Bucket>),
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: Key,
    /// Its size in bytes.
    pub size: u64,
    /// When it was put, by the store's clock.
    pub modified: Timestamp,
}

impl From<ObjectMeta> for Listed {
    fn from(meta: ObjectMeta) -> Self {
        let modified = i128::from(meta.last_modified.timestamp_nanos_opt().unwrap_or_default());
        Self { key: meta.location, size: meta.size, modified: Timestamp::from_nanoseconds(modified) }
    }
}

/// What stands between a [`Root`] and its store: it may slow requests down, have them fail before or after they were
/// done, or end the process there. Called on threads that may wait.
pub trait Intercept: fmt::Debug + Send + Sync {
    /// Before a request; an error takes the request's place, and nothing is done.
    ///
    /// # Errors
    /// What the caller is to be told.
    fn before(&self, request: &Request) -> Result<()>;

    /// After a request that succeeded; an error takes the place of what it gave.
    ///
    /// # Errors
    /// What the caller is to be told.
    fn after(&self, request: &Request) -> Result<()>;
}

/// A request to the store.
#[derive(Debug, Clone)]
pub struct Request {
    /// `put_if_absent`, `put_ahead`, `put_advice`, `get`, `size`, `list`, `delete`, `holds`, `open` or `secure`.
    pub name: &'static str,
    /// Of what.
    pub key: Key,
    /// How many bytes it writes.
    pub bytes: usize,
}

/// Whether a store that is not there yet is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// It is made.
    Create,
    /// It is an error.
    Refuse,
}

/// Whether a put-if-absent wrote anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The object was absent, and is there now.
    Written,
    /// There was an object of that name already.
    Present,
}

impl Root {
    /// Opens the store at `location`: a path, or a `file://` URL. What is put there is synced to disk.
    ///
    /// # Errors
    /// As [`Self::open_with`].
    pub fn open(location: &str, absent: Absent) -> Result<Self> {
        Self::open_with(location, absent, Durability::Synced)
    }

    /// Opens the store at `location`: a path, or a URL.
    ///
    /// # Errors
    /// As [`Self::open_as`].
    pub fn open_with(location: &str, absent: Absent, durability: Durability) -> Result<Self> {
        Self::open_as(location, absent, durability, &bucket::Options::default())
    }

    /// Opens the store at `location`: a path, or a URL. Of a bucket nothing is asked yet, and nothing is made: its
    /// first request tells whether it is there.
    ///
    /// # Errors
    /// [`Class::BadLocation`]; of a folder [`Class::NotFound`] where it is absent and `absent` refuses,
    /// [`Class::ReadOnly`].
    pub fn open_as(
        location: &str,
        absent: Absent,
        durability: Durability,
        options: &bucket::Options,
    ) -> Result<Self> {
        let place = if bucket::is_bucket(location) {
            let (client, prefix) = bucket::client(location, options)?;
            Place::Bucket(Arc::new(Bucket::new(client.below(&prefix), options)))
        } else {
            let path = folder(&local_path(location)?, absent)?;
            let shown = path.display();
            let store = LocalFileSystem::new_with_prefix(&path)
                .map_err(|error| StoreError::store(&shown, &error))?
                .with_fsync(durability == Durability::Synced);
            Place::Folder(Arc::new(Local::new(path, durability)), Arc::new(store))
        };
        Ok(Self { place, intercept: None, signers: None, trust: None })
    }

    /// The same store, behind `intercept`.
    #[must_use]
    pub fn behind(mut self, intercept: Arc<dyn Intercept>) -> Self {
        self.intercept = Some(intercept);
        self
    }

    /// The same store; snapshots and channel entries that are written through it are signed.
    #[must_use]
    pub fn signing(mut self, signers: Signers) -> Self {
        self.signers = Some(Arc::new(signers));
        self
    }

    /// The same store; snapshots and channel entries that no trusted key has signed are refused.
    #[must_use]
    pub fn trusting(mut self, trust: Trust) -> Self {
        self.trust = Some(Arc::new(trust));
        self
    }

    /// Who signs what is written.
    #[must_use]
    pub fn signers(&self) -> Option<&Signers> {
        self.signers.as_deref()
    }

    /// Whose signature is demanded of what is read.
    #[must_use]
    pub fn trust(&self) -> Option<&Trust> {
        self.trust.as_deref()
    }

    /// Does `work` on this thread, unless something stands in the way.
    fn request<T>(
        &self,
        name: &'static str,
        key: &Key,
        bytes: usize,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(intercept) = &self.intercept else { return work() };
        let request = Request { name, key: key.clone(), bytes };
        intercept.before(&request)?;
        let done = work()?;
        intercept.after(&request)?;
        Ok(done)
    }

    /// As [`Self::request`], of work that waits by itself.
    async fn request_async<T>(
        &self,
        name: &'static str,
        key: &Key,
        bytes: usize,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let Some(intercept) = self.intercept.clone() else { return work.await };
        let request = Request { name, key: key.clone(), bytes };
        let told = apart(name, move || intercept.before(&request).map(|()| (intercept, request)));
        let (intercept, request) = told.await?;
        let done = work.await?;
        apart(name, move || intercept.after(&request)).await?;
        Ok(done)
    }

    /// The folder of this machine that the store lies in; `None` for a bucket.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(local, _) => Some(local.folder()),
            Place::Bucket(_) => None,
        }
    }

    /// Whether the store lies in a bucket.
    #[must_use]
    pub fn is_bucket(&self) -> bool {
        matches!(self.place, Place::Bucket(_))
    }

    /// What tells this store from others.
    #[must_use]
    pub fn identity(&self) -> String {
        match &self.place {
            Place::Folder(local, _) => local.folder().display().to_string(),
            Place::Bucket(bucket) => bucket.identity(),
        }
    }

    /// The time by the store's clock, as far as it is known: a bucket tells it with each answer.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let ahead = match &self.place {
            Place::Folder(..) => 0,
            Place::Bucket(bucket) => bucket.ahead(),
        };
        Timestamp::from_nanoseconds(outside::nanoseconds() + i128::from(ahead) * 1_000_000_000)
    }

    /// Writes `bytes` under `key` if nothing is there yet. Durable when it returns; and everything that was put before
    /// is on the disk before its name appears. [`Put::Present`] may be the word for a put of one's own, whose answer
    /// was lost: whoever gets it reads what is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails; an object that is there already is no error.
    pub async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        let local = match &self.place {
            Place::Folder(local, _) => Arc::clone(local),
            Place::Bucket(bucket) => {
                let put = bucket.put_if_absent(key, bytes.clone());
                return self.request_async("put_if_absent", key, bytes.len(), put).await;
            }
        };
        let (root, key) = (self.clone(), key.clone());
        apart("writing", move || {
            root.request("put_if_absent", &key, bytes.len(), || {
                local.settle()?;
                let put = local.put(&key, &bytes)?;
                match put {
                    Put::Written => local.settle()?,
                    Put::Present => local.secure(&key)?,
                }
                Ok(put)
            })
        })
        .await
    }

    /// Writes `bytes` under `key` if nothing is there yet. Its name may be lost if the machine crashes soon: for
    /// history, on which nothing rests.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn put_history(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        let local = match &self.place {
            Place::Folder(local, _) => Arc::clone(local),
            Place::Bucket(_) => return self.put_if_absent(key, bytes).await,
        };
        let (root, key) = (self.clone(), key.clone());
        apart("writing", move || root.request("put_ahead", &key, bytes.len(), || local.put(&key, &bytes)))
            .await
    }

    /// Sees to it that the object under `key`, which is there, is on the disk.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) async fn secure(&self, key: &Key) -> Result<()> {
        let Place::Folder(local, _) = &self.place else { return Ok(()) };
        let (root, key, local) = (self.clone(), key.clone(), Arc::clone(local));
        apart("syncing", move || root.request("secure", &key, 0, || local.secure(&key))).await
    }

    /// Writes `bytes`, which alone can lie under `key`, unless they are there already. In a folder they are on the disk
    /// when it returns, and their name is before the next [`Self::put_if_absent`] puts anything. What is there is
    /// compared: byte by byte in a folder, by its size in a bucket.
    ///
    /// # Errors
    /// [`Class::Integrity`] where something else is there; else as the store fails.
    pub(crate) async fn put_content(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        let other = |key: &Key| {
            let why = "the stored chunk does not hold what its name says; move it away and publish again";
            StoreError::new(Class::Integrity, key, why)
        };
        let local = match &self.place {
            Place::Folder(local, _) => Arc::clone(local),
            Place::Bucket(bucket) => {
                match self.size(key).await? {
                    Some(size) if size == bytes.len() as u64 => return Ok(Put::Present),
                    Some(_) => return Err(other(key)),
                    None => {}
                }
                let length = bytes.len();
                self.request_async("put_ahead", key, length, bucket.put(key, bytes)).await?;
                return Ok(Put::Written);
            }
        };
        let (root, key) = (self.clone(), key.clone());
        apart("writing", move || {
            for _ in 0..COLLECTED {
                let put = root.request("put_ahead", &key, bytes.len(), || local.put(&key, &bytes))?;
                if put == Put::Written {
                    return Ok(put);
                }
                match root.request("holds", &key, 0, || local.holds(&key, &bytes))? {
                    Some(true) => return Ok(put),
                    Some(false) => return Err(other(&key)),
                    // It was there, and has been collected since.
                    None => {}
                }
            }
            let why = format!("it was there, and then gone, {COLLECTED} times; run it again");
            Err(StoreError::new(Class::Conflict, &key, why))
        })
        .await
    }

    /// Opens the object under `key` in a folder, on this thread; `None` where nothing is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) fn open_object(&self, key: &Key) -> Result<Option<std::fs::File>> {
        match &self.place {
            Place::Folder(local, _) => self.request("open", key, 0, || local.open(key)),
            Place::Bucket(_) => Err(StoreError::io(key, &io::ErrorKind::Unsupported.into())),
        }
    }

    /// Writes `bytes` under `key`, whatever is there. For advice only.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn put_advice(&self, key: &Key, bytes: Bytes) -> Result<()> {
        let length = bytes.len();
        let put = async {
            match &self.place {
                Place::Folder(local, store) => {
                    local.path(key)?;
                    let put = store.put(key, PutPayload::from_bytes(bytes)).await;
                    put.map(drop).map_err(|error| StoreError::store(key, &error))
                }
                Place::Bucket(bucket) => bucket.put(key, bytes).await,
            }
        };
        self.request_async("put_advice", key, length, put).await
    }

    /// The bytes under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`Class::Integrity`] where the object is larger than `limit` bytes; else as the store fails.
    pub async fn get(&self, key: &Key, limit: usize) -> Result<Option<Bytes>> {
        self.get_paced(key, limit, &Pace::default()).await
    }

    /// As [`Self::get`], no faster than `pace` where the store is a bucket.
    pub(crate) async fn get_paced(&self, key: &Key, limit: usize, pace: &Pace) -> Result<Option<Bytes>> {
        let get = async {
            match &self.place {
                Place::Folder(local, store) => {
                    local.path(key)?;
                    get_of(store, key, limit).await
                }
                Place::Bucket(bucket) => bucket.get(key, limit as u64, pace).await,
            }
        };
        self.request_async("get", key, 0, get).await
    }

    /// What is known of the object under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn look(&self, key: &Key) -> Result<Option<Listed>> {
        let look = async {
            let found = match &self.place {
                Place::Folder(local, store) => {
                    local.path(key)?;
                    match store.head(key).await {
                        Ok(found) => Some(found),
                        Err(object_store::Error::NotFound { .. }) => None,
                        Err(error) => return Err(StoreError::store(key, &error)),
                    }
                }
                Place::Bucket(bucket) => bucket.head(key).await?,
            };
            Ok(found.map(Listed::from))
        };
        self.request_async("size", key, 0, look).await
    }

    /// The size of the object under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn size(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.look(key).await?.map(|found| found.size))
    }

    /// The keys below `folder`, sorted; only those behind `after`, where it is given.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn keys(&self, folder: &Key, after: Option<&Key>) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        self.walk(folder, after, |listed| {
            keys.push(listed.key);
            Ok(())
        })
        .await?;
        keys.sort_unstable();
        Ok(keys)
    }

    /// Hands every object below `folder`, behind `after` where it is given, to `take`: so that a listing of any length
    /// takes little memory. A bucket's come in the order of their keys, a folder's in none.
    ///
    /// # Errors
    /// [`StoreError`] where the store or `take` fails.
    pub async fn walk(
        &self,
        folder: &Key,
        after: Option<&Key>,
        mut take: impl FnMut(Listed) -> Result<()> + Send,
    ) -> Result<()> {
        let walk = async {
            match &self.place {
                Place::Folder(local, store) => {
                    local.check()?;
                    let mut listed = match after {
                        Some(after) => store.list_with_offset(Some(folder), after),
                        None => store.list(Some(folder)),
                    };
                    let failed = |error| StoreError::store(folder, &error);
                    while let Some(meta) = listed.try_next().await.map_err(failed)? {
                        take(meta.into())?;
                    }
                    Ok(())
                }
                Place::Bucket(bucket) => {
                    let mut after = after.cloned();
                    loop {
                        let page = bucket.list(folder, after.as_ref(), PAGE).await?;
                        let full = page.len() >= PAGE;
                        after = page.last().map(|meta| meta.location.clone());
                        for meta in page {
                            take(meta.into())?;
                        }
                        if !full {
                            return Ok(());
                        }
                    }
                }
            }
        };
        self.request_async("list", folder, 0, walk).await
    }

    /// What lies directly in `folder`: objects and folders.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn entries(&self, folder: &Key) -> Result<ListResult> {
        let entries = async {
            match &self.place {
                Place::Folder(local, store) => {
                    local.check()?;
                    let listed = store.list_with_delimiter(Some(folder)).await;
                    let mut listed = listed.map_err(|error| StoreError::store(folder, &error))?;
                    // What gc has emptied is there no more, as in a bucket.
                    let mut folders = Vec::with_capacity(listed.common_prefixes.len());
                    for prefix in listed.common_prefixes {
                        if left::holds_a_file(&local.path(&prefix)?) {
                            folders.push(prefix);
                        }
                    }
                    listed.common_prefixes = folders;
                    Ok(listed)
                }
                Place::Bucket(bucket) => bucket.entries(folder).await,
            }
        };
        self.request_async("list", folder, 0, entries).await
    }
}

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Folder(local, _) => local.folder().display().fmt(f),
            Place::Bucket(bucket) => f.write_str(bucket.shown()),
        }
    }
}

/// The folder at `path`, made where that is wanted.
fn folder(path: &Path, absent: Absent) -> Result<PathBuf> {
    let shown = path.display();
    if absent == Absent::Create {
        std::fs::create_dir_all(path).map_err(|error| match StoreError::io(&shown, &error) {
            failed if failed.class() == Class::NotFound => {
                StoreError::new(Class::Unreachable, &shown, format!("it cannot be made: {error}"))
            }
            failed => failed,
        })?;
    }
    if !path.is_dir() {
        let why = "there is no store here; publish into it first, or name another with --store";
        return Err(StoreError::new(Class::NotFound, shown, why));
    }
    Ok(path.to_path_buf())
}

async fn get_of(store: &LocalFileSystem, key: &Key, limit: usize) -> Result<Option<Bytes>> {
    let found = match store.get(key).await {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(StoreError::store(key, &error)),
    };
    if usize::try_from(found.meta.size).is_ok_and(|size| size <= limit) {
        return found.bytes().await.map(Some).map_err(|error| StoreError::store(key, &error));
    }
    let why = format!("it has {} bytes, where at most {limit} can be right", found.meta.size);
    Err(StoreError::new(Class::Integrity, key, why))
}

/// Does what takes long off the I/O threads.
pub(crate) async fn apart<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| StoreError::new(Class::Unreachable, what, error.to_string()))?
}

/// Checks that `location` can name a store, without looking for one.
///
/// # Errors
/// [`Class::BadLocation`].
pub fn check_location(location: &str) -> Result<()> {
    if bucket::is_bucket(location) {
        return bucket::check(location);
    }
    local_path(location).map(drop)
}

fn local_path(location: &str) -> Result<PathBuf> {
    let bad = |why: &str| StoreError::new(Class::BadLocation, location, why);
    if location.is_empty() {
        return Err(bad("a store is a path, or a URL: file://, s3://, gs:// or az://"));
    }
    if !location.contains("://") {
        return Ok(Path::new(location).to_path_buf());
    }
    let url = url::Url::parse(location).map_err(|error| bad(&format!("it is no URL: {error}")))?;
    match url.scheme() {
        "file" => url.to_file_path().map_err(|()| bad("a file:// URL has an absolute path and no host")),
        scheme => {
            Err(bad(&format!("{scheme}:// stores are not supported; use file://, s3://, gs:// or az://")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations() {
        assert_eq!(local_path("a/b").unwrap(), Path::new("a/b"));
        assert_eq!(local_path("file:///a%20b").unwrap(), Path::new("/a b"));
        for location in ["", "hdfs://bucket", "file://host/a", "file:", "://"] {
            let opened = local_path(location);
            assert!(opened.is_err() || location == "file:", "{location}");
        }
    }

    #[tokio::test]
    async fn put_if_absent_has_one_winner_and_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let key = Key::from("a/b");
        let puts = (0..16u8).map(|n| {
            let (root, key) = (root.clone(), key.clone());
            tokio::spawn(async move { root.put_if_absent(&key, Bytes::from(vec![n; 100])).await.unwrap() })
        });
        let mut won = 0;
        for put in puts.collect::<Vec<_>>() {
            won += usize::from(put.await.unwrap() == Put::Written);
        }
        assert_eq!(won, 1);
        let kept = root.get(&key, 100).await.unwrap().unwrap();
        assert!(kept.iter().all(|&byte| byte == kept[0]) && kept.len() == 100);
        assert_eq!(root.get(&key, 99).await.unwrap_err().class(), Class::Integrity);
        assert_eq!(root.get(&Key::from("absent"), 99).await.unwrap(), None);
    }
}
