//! What is asked of a store, whichever kind it is: each request is told to whoever stands between.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{ListResult, ObjectStore, ObjectStoreExt, PutPayload};

use super::{Listed, Moment, Place, Put, Root, apart};
use crate::error::{Class, Result, StoreError};
use crate::left;
use crate::pace::Pace;

/// How often what was there, and then was not, is written.
const COLLECTED: usize = 10;
/// Objects that are listed at a time.
const PAGE: usize = 1000;

impl Root {
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
    pub(crate) fn open_object(&self, key: &Key) -> Result<Option<File>> {
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
                Place::Folder(local, _) => {
                    let (local, key) = (Arc::clone(local), key.clone());
                    apart("reading", move || local.read(&key, limit)).await
                }
                Place::Bucket(bucket) => bucket.get(key, limit as u64, pace).await,
            }
        };
        self.request_async("get", key, 0, get).await
    }

    /// The bytes from `from` on of the object under `key`, at most `most` of them, and the size of the whole; `None`
    /// where nothing is there. None of it is checked.
    ///
    /// # Errors
    /// [`Class::Refused`] where the object ends before `from`; else as the store fails.
    pub async fn get_range(&self, key: &Key, from: u64, most: usize) -> Result<Option<(Bytes, u64)>> {
        let get = async {
            match &self.place {
                Place::Folder(local, _) => {
                    let (local, key) = (Arc::clone(local), key.clone());
                    apart("reading", move || local.read_range(&key, from, most)).await
                }
                Place::Bucket(bucket) => bucket.get_range(key, from, most).await,
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
                    local.path(folder)?;
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
                    local.refuse_links(folder)?;
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

    /// Removes objects; that one is not there is right too. Only `gc` does this, and whoever tries a store out.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails; some of them may be gone then.
    pub async fn delete(&self, keys: &[Key]) -> Result<()> {
        self.delete_within(keys, self.moment(), Duration::MAX).await
    }

    /// As [`Self::delete`]; nothing more is begun once `limit` has passed since `since`. In a folder what was removed
    /// is removed from the disk too when it returns.
    ///
    /// # Errors
    /// [`Class::Conflict`] where it was too late for some; else as [`Self::delete`].
    pub(crate) async fn delete_within(&self, keys: &[Key], since: Moment, limit: Duration) -> Result<()> {
        let Some(first) = keys.first() else { return Ok(()) };
        let in_time = move |root: &Self, key: &Key| {
            let why = "it was to be deleted, and it is too late for that: this process stood still";
            let late = || StoreError::new(Class::Conflict, key, why);
            if root.passed(since) < limit { Ok(()) } else { Err(late()) }
        };
        let delete = async {
            match &self.place {
                Place::Folder(local, _) => {
                    let (root, local, keys) = (self.clone(), Arc::clone(local), keys.to_vec());
                    apart("deleting", move || {
                        for key in &keys {
                            in_time(&root, key)?;
                            local.delete(key)?;
                        }
                        local.settle()
                    })
                    .await
                }
                Place::Bucket(bucket) => {
                    in_time(self, first)?;
                    bucket.delete(keys).await
                }
            }
        };
        self.request_async("delete", first, keys.len(), delete).await
    }
}
