//! What writes that came to no end left behind: no reader sees it, and nobody else removes it. Garbage collection asks
//! [`Root::unfinished`] for it.
//!
//! In a folder these are files `NAME#NUMBER`, which our own writes and `object_store`'s begin as. A file that is being
//! written was changed a moment ago; so only the older ones are left-overs.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path as Key;

use weighbridge_schemas::time::Timestamp;

use crate::error::{Result, StoreError};
use crate::local::Local;
use crate::root::{Place, Root, apart};

/// A write that came to no end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// What was to be written.
    pub key: Key,
    /// What tells it from others of that key: the upload's id, or the number behind the file's name.
    pub id: String,
    /// How many bytes of it there are, where that is known.
    pub bytes: Option<u64>,
    /// When it was begun (S3), or last gone on with (a folder).
    pub begun: Timestamp,
}

impl Root {
    /// What writes to this store left unfinished longer than `older_than` ago, by its clock: uploads that nobody ended
    /// (S3), files of processes that were killed (a folder). Google's and Azure's stores are given up to themselves:
    /// there it is nothing (Azure drops what was not committed within a week; Google's lifecycle rules end uploads).
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn unfinished(&self, older_than: Duration) -> Result<Vec<Unfinished>> {
        let nothing = Key::default();
        let found = async {
            match &self.place {
                Place::Folder(local, _) => {
                    let local = Arc::clone(local);
                    apart("listing", move || in_folder(&local)).await
                }
                Place::Bucket(bucket) => bucket.unfinished().await,
            }
        };
        let mut found = self.request_async("list", &nothing, 0, found).await?;
        let age = u64::try_from(older_than.as_nanos()).unwrap_or(u64::MAX);
        // The store's clock is known once it has answered.
        let now = self.now().nanoseconds();
        found.retain(|one| one.begun.nanoseconds().saturating_add(age) <= now);
        Ok(found)
    }

    /// Removes what [`Self::unfinished`] found; that it is not there any more is right too.
    ///
    /// # Errors
    /// [`StoreError`] where the store fails.
    pub async fn abandon(&self, one: &Unfinished) -> Result<()> {
        let abandon = async {
            match &self.place {
                Place::Folder(local, _) => {
                    let (local, one) = (Arc::clone(local), one.clone());
                    apart("deleting", move || remove(&local, &one)).await
                }
                Place::Bucket(bucket) => bucket.abandon(one).await,
            }
        };
        self.request_async("delete", &one.key, 1, abandon).await
    }
}

/// The left-overs in a folder, of any age.
fn in_folder(local: &Local) -> Result<Vec<Unfinished>> {
    local.check()?;
    let mut found = Vec::new();
    let mut folders = vec![local.folder().to_path_buf()];
    while let Some(folder) = folders.pop() {
        let failed = |error| StoreError::io(folder.display(), &error);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // It went meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => found.extend(of(local.folder(), &entry.path())),
                _ => {}
            }
        }
    }
    found.sort_by(|one, other| (&one.key, &one.id).cmp(&(&other.key, &other.id)));
    Ok(found)
}

/// What the file at `path` is a left-over of; `None` where it is none, or goes at this moment.
fn of(root: &Path, path: &Path) -> Option<Unfinished> {
    let relative = path.strip_prefix(root).ok()?.to_str()?;
    let (name, number) = relative.rsplit_once('#')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let key = Key::parse(name).ok().filter(|_| is_number)?;
    let found = fs::symlink_metadata(path).ok()?;
    let changed = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
    let begun = Timestamp::from_nanoseconds(changed);
    Some(Unfinished { key, id: number.to_owned(), bytes: Some(found.len()), begun })
}

/// Removes a left-over, unless somebody has gone on with it since it was found.
fn remove(local: &Local, one: &Unfinished) -> Result<()> {
    let mut path = local.path(&one.key)?.into_os_string();
    path.push(format!("#{}", one.id));
    let path = PathBuf::from(path);
    if of(local.folder(), &path).is_none_or(|now| now.begun != one.begun) {
        return Ok(());
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io(path.display(), &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::root::Absent;

    #[tokio::test]
    async fn only_old_left_overs_of_killed_writers_go() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("models/m/chunks")).unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let old_ones = ["models/m/chunks/ab#1", "models/m/chunks/ab#2", "top#10"];
        let others = ["models/m/chunks/ab", "models/m/chunks/live#1", "models/m/chunks/ab#x", "no#"];
        for name in old_ones.iter().chain(&others) {
            fs::write(at(name), "torn").unwrap();
            if *name != "models/m/chunks/live#1" {
                fs::File::options().write(true).open(at(name)).unwrap().set_modified(old).unwrap();
            }
        }
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let found = root.unfinished(Duration::from_secs(3600)).await.unwrap();
        let names: Vec<_> = found.iter().map(|one| format!("{}#{}", one.key, one.id)).collect();
        assert_eq!(names, old_ones);
        assert!(found.iter().all(|one| one.bytes == Some(4)));
        assert_eq!(root.unfinished(Duration::ZERO).await.unwrap().len(), 4);

        // Somebody goes on with one of them.
        fs::write(at("top#10"), "more").unwrap();
        for one in &found {
            root.abandon(one).await.unwrap();
            root.abandon(one).await.unwrap();
        }
        for name in others.iter().chain(&["top#10"]) {
            assert!(at(name).is_file(), "{name}");
        }
        assert!(!at(old_ones[0]).is_file() && !at(old_ones[1]).is_file());
    }
}
