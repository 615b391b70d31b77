//! What is removed from a store, and how long ago something was.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path as Key;

use weighbridge_schemas::time::Timestamp;

use super::{Place, Root, apart};
use crate::error::{Class, Result, StoreError};
use crate::{left, outside};

/// A moment by two clocks: the machine's, which nobody sets and which goes on while it sleeps, and the store's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    running: Duration,
    told: Timestamp,
}

impl Root {
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

    /// Removes objects; that one is not there is right too. Only `gc` does this, and whoever tries a store out.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails; some of them may be gone then.
    pub async fn delete(&self, keys: &[Key]) -> Result<()> {
        self.delete_within(keys, self.moment(), Duration::MAX).await
    }

    /// As [`Self::delete`]; nothing more is begun once `limit` has passed since `since`. In a folder what was removed
    /// is gone from the disk too when it returns.
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

    /// What processes that were killed left below `folder`, where the store is a folder: files without a name, and
    /// folders without a file; nothing that is younger than `age`. It is removed where `remove` says so.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub(crate) async fn left(&self, folder: &Key, age: Duration, remove: bool) -> Result<Vec<String>> {
        let Place::Folder(local, _) = &self.place else { return Ok(Vec::new()) };
        let (local, folder) = (Arc::clone(local), folder.clone());
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let before = i128::from(self.now().nanoseconds().saturating_sub(age));
        apart("looking for what was left", move || {
            let path = local.path(&folder)?;
            let left = left::files(&path, before, remove);
            let left = left.map_err(|error| StoreError::io(&folder, &error))?;
            let names = left.iter().filter_map(|path| path.strip_prefix(local.folder()).ok());
            Ok(names.map(|name| name.display().to_string()).collect())
        })
        .await
    }
}
