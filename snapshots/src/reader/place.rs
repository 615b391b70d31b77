//! Which folder a version is opened from.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use weighbridge_schemas::ids::SnapshotId;

use crate::error::{Class, Result, StoreError};

/// A version's folder as it was found. One that has taken its name meanwhile is another place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) folder: PathBuf,
    pub(super) id: SnapshotId,
    device: u64,
    inode: u64,
}

impl Place {
    /// The folder at `path`, or where the link `path` leads: the link is read once.
    pub(super) fn find(path: &Path) -> Result<Self> {
        // Without a slash at the end, which would have a link followed.
        let path: PathBuf = path.components().collect();
        let folder = match fs::read_link(&path) {
            Ok(target) => path.parent().unwrap_or(Path::new("")).join(target),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => path.clone(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let why = "there is no such version, or link to one; fetch a snapshot into the folder first";
                return Err(StoreError::new(Class::NotFound, path.display(), why));
            }
            Err(error) => return Err(StoreError::own(path.display(), &error)),
        };
        let name = folder.file_name().and_then(|name| name.to_str());
        let Some(id) = name.and_then(|name| name.parse().ok()) else {
            let why = format!("{} is not named by a snapshot's id: it is no version", folder.display());
            return Err(StoreError::new(Class::Refused, path.display(), why));
        };
        match fs::symlink_metadata(&folder) {
            Ok(found) if found.is_dir() => Ok(Self { folder, id, device: found.dev(), inode: found.ino() }),
            Ok(_) => Err(StoreError::new(Class::Refused, folder.display(), "it is no folder")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let why = "the version is gone; fetch it again";
                Err(StoreError::new(Class::NotFound, folder.display(), why))
            }
            Err(error) => Err(StoreError::own(folder.display(), &error)),
        }
    }
}
