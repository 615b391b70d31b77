//! From a URL to a store: `file://` and plain paths. Writes to a local store are synced to disk before they count.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

use crate::error::{Class, Result, StoreError};

/// A store's root.
#[derive(Debug, Clone)]
pub struct Root {
    store: Arc<dyn ObjectStore>,
    folder: PathBuf,
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
    /// Opens the store at `location`: a path, or a `file://` URL.
    ///
    /// # Errors
    /// [`Class::BadLocation`], [`Class::NotFound`] where it is absent and `absent` refuses, [`Class::ReadOnly`].
    pub fn open(location: &str, absent: Absent) -> Result<Self> {
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
        Ok(Self { store: Arc::new(store.with_fsync(true)), folder: path })
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// The folder of this machine that the store lies in.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Refuses a key whose path has a link in it: a link below the root may lead out of the store, and a store is
    /// nobody's to redirect.
    fn check_links(&self, key: &Key) -> Result<()> {
        let mut path = self.folder.clone();
        for part in key.parts() {
            path.push(part.as_ref());
            match std::fs::symlink_metadata(&path) {
                Ok(found) if found.is_symlink() => {
                    let why = "it is a link, which a store does not follow; put what it points at in its place, \
                               or link the store's root as a whole";
                    return Err(StoreError::new(Class::Refused, path.display(), why));
                }
                Ok(_) => {}
                // What is not there, or cannot be looked at, is the operation's own to tell.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Writes `bytes` under `key` if nothing is there yet. Durable when it returns.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails; an object that is there already is no error.
    pub async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Put> {
        self.check_links(key)?;
        match self.store.put_opts(key, PutPayload::from_bytes(bytes), PutMode::Create.into()).await {
            Ok(_) => Ok(Put::Written),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Put::Present),
            Err(error) => Err(StoreError::store(key, &error)),
        }
    }

    /// Writes `bytes` under `key`, whatever is there. For advice only.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn put_advice(&self, key: &Key, bytes: Bytes) -> Result<()> {
        self.check_links(key)?;
        let put = self.store.put(key, PutPayload::from_bytes(bytes)).await;
        put.map(drop).map_err(|error| StoreError::store(key, &error))
    }

    /// The bytes under `key`, or `None` where nothing is there.
    ///
    /// # Errors
    /// [`Class::Integrity`] where the object is larger than `limit` bytes; else as the store fails.
    pub async fn get(&self, key: &Key, limit: usize) -> Result<Option<Bytes>> {
        self.check_links(key)?;
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
        self.check_links(key)?;
        match self.store.head(key).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(StoreError::store(key, &error)),
        }
    }
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
