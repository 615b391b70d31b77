//! From a URL to a store: `file://` and plain paths. Writes to a local store are synced to disk before they count,
//! unless it was opened without.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

pub use crate::disk::Durability;
use crate::error::{Class, Result, StoreError};
use crate::local::Local;
use crate::sign::{Signers, Trust};

/// A store's root.
#[derive(Debug, Clone)]
pub struct Root {
    store: Arc<dyn ObjectStore>,
    local: Arc<Local>,
    intercept: Option<Arc<dyn Intercept>>,
    signers: Option<Arc<Signers>>,
    trust: Option<Arc<Trust>>,
}

/// What stands between a [`Root`] and its store: it may slow requests down, have them fail before or after they were
/// done, or end the process there. Called on threads that may wait.
pub trait Intercept: std::fmt::Debug + Send + Sync {
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
    /// `put_if_absent`, `put_ahead`, `put_advice`, `get`, `size`, `list`, `holds`, `open` or `secure`.
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

    /// Opens the store at `location`: a path, or a `file://` URL.
    ///
    /// # Errors
    /// [`Class::BadLocation`], [`Class::NotFound`] where it is absent and `absent` refuses, [`Class::ReadOnly`].
    pub fn open_with(location: &str, absent: Absent, durability: Durability) -> Result<Self> {
        let path = local_path(location)?;
        let shown = path.display();
        if absent == Absent::Create {
            std::fs::create_dir_all(&path).map_err(|error| match StoreError::io(&shown, &error) {
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
        let store =
            LocalFileSystem::new_with_prefix(&path).map_err(|error| StoreError::store(&shown, &error))?;
        let store = Arc::new(store.with_fsync(durability == Durability::Synced));
        Ok(Self {
            store,
            local: Arc::new(Local::new(path, durability)),
            intercept: None,
            signers: None,
            trust: None,
        })
    }

    /// The same store, behind `intercept`.
    #[must_use]
    pub fn behind(mut self, intercept: Arc<dyn Intercept>) -> Self {
        self.intercept = Some(intercept);
        self
    }

    /// Does `work` on this thread, unless something stands in the way.
    fn request<T>(
        &self,
        name: &'static str,
        key: &Key,
        bytes: usize,
        work: impl FnOnce(&Local) -> Result<T>,
    ) -> Result<T> {
        let Some(intercept) = &self.intercept else { return work(&self.local) };
        let request = Request { name, key: key.clone(), bytes };
        intercept.before(&request)?;
        let done = work(&self.local)?;
        intercept.after(&request)?;
        Ok(done)
    }

    /// As [`Self::request`], of work that waits by itself.
    async fn request_async<T>(
        &self,
        name: &'static str,
        key: &Key,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let Some(intercept) = self.intercept.clone() else { return work.await };
        let request = Request { name, key: key.clone(), bytes: 0 };
        let told = apart(name, move || intercept.before(&request).map(|()| (intercept, request)));
        let (intercept, request) = told.await?;
        let done = work.await?;
        apart(name, move || intercept.after(&request)).await?;
        Ok(done)
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// The folder of this machine that the store lies in.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.local.folder()
    }

    /// Writes `bytes` under `key` if nothing is there yet. Durable when it returns; and everything that was put before
    /// is on the disk before its name appears.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails; an object that is there already is no error.
    pub async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        let (root, key) = (self.clone(), key.clone());
        apart("writing", move || {
            root.request("put_if_absent", &key, bytes.len(), |local| {
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
        let (root, key) = (self.clone(), key.clone());
        apart("writing", move || root.put_ahead(&key, &bytes)).await
    }

    /// Sees to it that the object under `key`, which is there, is on the disk.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) async fn secure(&self, key: &Key) -> Result<()> {
        let (root, key) = (self.clone(), key.clone());
        apart("syncing", move || root.request("secure", &key, 0, |local| local.secure(&key))).await
    }

    /// Writes `bytes` under `key` if nothing is there yet, on this thread. The bytes are on the disk when it returns;
    /// their name is before the next [`Self::put_if_absent`] puts anything.
    ///
    /// # Errors
    /// As [`Self::put_if_absent`].
    pub(crate) fn put_ahead(&self, key: &Key, bytes: &[u8]) -> Result<Put> {
        self.request("put_ahead", key, bytes.len(), |local| local.put(key, bytes))
    }

    /// Whether the object under `key` is `bytes`, read on this thread. If it is, it is on the disk.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) fn holds(&self, key: &Key, bytes: &[u8]) -> Result<bool> {
        self.request("holds", key, 0, |local| local.holds(key, bytes))
    }

    /// Opens the object under `key`, on this thread; `None` where nothing is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) fn open_object(&self, key: &Key) -> Result<Option<File>> {
        self.request("open", key, 0, |local| local.open(key))
    }

    /// Writes `bytes` under `key`, whatever is there. For advice only.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn put_advice(&self, key: &Key, bytes: Bytes) -> Result<()> {
        self.local.path(key)?;
        self.request_async("put_advice", key, async {
            let put = self.store.put(key, PutPayload::from_bytes(bytes)).await;
            put.map(drop).map_err(|error| StoreError::store(key, &error))
        })
        .await
    }

    /// The bytes under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`Class::Integrity`] where the object is larger than `limit` bytes; else as the store fails.
    pub async fn get(&self, key: &Key, limit: usize) -> Result<Option<Bytes>> {
        self.local.path(key)?;
        self.request_async("get", key, self.get_now(key, limit)).await
    }

    async fn get_now(&self, key: &Key, limit: usize) -> Result<Option<Bytes>> {
        let found = match self.store.get(key).await {
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

    /// The size of the object under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.local.path(key)?;
        self.request_async("size", key, async {
            match self.store.head(key).await {
                Ok(found) => Ok(Some(found.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(StoreError::store(key, &error)),
            }
        })
        .await
    }

    /// The keys below `folder`, sorted; only those behind `after`, where it is given.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn keys(&self, folder: &Key, after: Option<&Key>) -> Result<Vec<Key>> {
        self.local.check()?;
        self.request_async("list", folder, async {
            let listed = match after {
                Some(after) => self.store.list_with_offset(Some(folder), after),
                None => self.store.list(Some(folder)),
            };
            let listed = listed.map_ok(|meta| meta.location).try_collect::<Vec<_>>().await;
            let mut keys = listed.map_err(|error| StoreError::store(folder, &error))?;
            keys.sort_unstable();
            Ok(keys)
        })
        .await
    }

    /// What lies directly in `folder`: objects and folders.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn entries(&self, folder: &Key) -> Result<object_store::ListResult> {
        self.local.check()?;
        self.request_async("list", folder, async {
            let listed = self.store.list_with_delimiter(Some(folder)).await;
            listed.map_err(|error| StoreError::store(folder, &error))
        })
        .await
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
    local_path(location).map(drop)
}

fn local_path(location: &str) -> Result<PathBuf> {
    let bad = |why: &str| StoreError::new(Class::BadLocation, location, why);
    if location.is_empty() {
        return Err(bad("a store is a path or a file:// URL"));
    }
    if !location.contains("://") {
        return Ok(Path::new(location).to_path_buf());
    }
    let url = url::Url::parse(location).map_err(|error| bad(&format!("it is no URL: {error}")))?;
    match url.scheme() {
        "file" => url.to_file_path().map_err(|()| bad("a file:// URL has an absolute path and no host")),
        scheme => Err(bad(&format!("{scheme}:// stores are not supported in this version; use file://"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations() {
        assert_eq!(local_path("a/b").unwrap(), Path::new("a/b"));
        assert_eq!(local_path("file:///a%20b").unwrap(), Path::new("/a b"));
        for location in ["", "s3://bucket", "file://host/a", "file:", "://"] {
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
