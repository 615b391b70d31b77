//! From a URL to a store: a path or `file://`, or a bucket's `s3://`, `gs://`, `az://`. Writes to a folder are synced
//! to disk before they count, unless it was opened without; what a bucket has taken is durable.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectMeta;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;

use weighbridge_schemas::time::Timestamp;

use crate::api::Api;
use crate::bucket::{self, Bucket};
pub use crate::disk::Durability;
use crate::error::{Class, Result, StoreError};
use crate::left;
use crate::local::Local;
use crate::outside;
use crate::sign::{Signers, Trust};

mod requests;

/// A store's root.
#[derive(Debug, Clone)]
pub struct Root {
    pub(crate) place: Place,
    intercept: Option<Arc<dyn Intercept>>,
    signers: Option<Arc<Signers>>,
    trust: Option<Arc<Trust>>,
    /// The API that answers in the store's place.
    api: Option<Arc<Api>>,
}

/// Where a store lies.
#[derive(Debug, Clone)]
pub(crate) enum Place {
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

/// A moment by two clocks: the machine's, which nobody sets and which goes on while it sleeps, and the store's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    running: Duration,
    told: Timestamp,
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
        Ok(Self { place, intercept: None, signers: None, trust: None, api: None })
    }

    /// The store behind an API: its immutable objects can be read, and channels looked up.
    ///
    /// # Errors
    /// Where no client can be built.
    pub fn behind_api(api: &Arc<Api>, options: &bucket::Options) -> Result<Self> {
        let place = Place::Bucket(Arc::new(Bucket::new(api.client()?, options)));
        Ok(Self { place, intercept: None, signers: None, trust: None, api: Some(Arc::clone(api)) })
    }

    /// The API that answers in the store's place; `None` where the store itself is asked.
    #[must_use]
    pub fn api(&self) -> Option<&Arc<Api>> {
        self.api.as_ref()
    }

    /// The same store, behind `intercept`.
    #[must_use]
    pub fn behind(mut self, intercept: Arc<dyn Intercept>) -> Self {
        self.intercept = Some(intercept);
        self
    }

    /// The same store; snapshots, channel entries and results of parts that are written through it are signed.
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

    /// The same root, which demands no signature.
    #[must_use]
    pub fn trusting_nobody(mut self) -> Self {
        self.trust = None;
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

    /// Whose signature is enough on what publishers take from each other: that of its own keys, and of those that are
    /// demanded; `None` where nobody signs and nothing is demanded.
    #[must_use]
    pub fn believed(&self) -> Option<Trust> {
        match self.signers() {
            Some(signers) => Some(Trust::in_own(signers, self.trust())),
            None => self.trust().cloned(),
        }
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
    pub(crate) async fn request_async<T>(
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
        Timestamp::from_nanoseconds(outside::nanoseconds() + i128::from(self.ahead()) * 1_000_000_000)
    }

    /// How far the store's clock is ahead of this machine's, in seconds, as far as it is known.
    #[must_use]
    pub fn ahead(&self) -> i64 {
        match &self.place {
            Place::Folder(..) => 0,
            Place::Bucket(bucket) => bucket.ahead(),
        }
    }

    /// Where requests go and the bucket's region, where these are said.
    #[must_use]
    pub fn destination(&self) -> (Option<&str>, Option<&str>) {
        match &self.place {
            Place::Folder(..) => (None, None),
            Place::Bucket(bucket) => bucket.destination(),
        }
    }

    /// This moment.
    pub(crate) fn moment(&self) -> Moment {
        Moment { running: outside::running(), told: self.now() }
    }

    /// How long ago `since` was: what the clock that told more says. One that was set forward makes others take for
    /// old what is not, and one that stands still while the machine sleeps hides that time has passed.
    pub(crate) fn passed(&self, since: Moment) -> Duration {
        let told = self.now().nanoseconds().saturating_sub(since.told.nanoseconds());
        outside::running().saturating_sub(since.running).max(Duration::from_nanos(told))
    }

    /// Removes folders below `folder` that hold nothing, and in which nothing was done for longer than `age`, where the
    /// store is a folder.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) async fn drop_empty_folders(&self, folder: &Key, age: Duration) -> Result<()> {
        let Place::Folder(local, _) = &self.place else { return Ok(()) };
        let (local, folder) = (Arc::clone(local), folder.clone());
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let before = i128::from(self.now().nanoseconds().saturating_sub(age));
        apart("looking for empty folders", move || {
            let dropped = left::drop_empty(&local.path(&folder)?, before);
            dropped.map_err(|error| StoreError::io(&folder, &error))
        })
        .await
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
    let scheme = location.split_once(':').map_or("", |(scheme, _)| scheme).to_ascii_lowercase();
    if ["s3", "gs", "az"].contains(&scheme.as_str()) {
        return Err(bad("a bucket's URL begins with s3://, gs:// or az://, in small letters"));
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
    use bytes::Bytes;

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
