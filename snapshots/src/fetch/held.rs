//! What versions in the folder hold: chunks are copied from there, and the store is not asked. So too from a damaged
//! version that is to be replaced.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::snapshot::{MANIFEST_FILE, SnapshotFile, SnapshotManifest};

use super::folder::folders_of;
use super::plan::{Piece, pieces};
use crate::chunk;
use crate::disk::open_regular;
use crate::error::{Result, StoreError};

/// Where chunks lie in versions.
pub(super) type Held = BTreeMap<ChunkId, (PathBuf, u64)>;

/// What versions say that they hold. They are believed in nothing: what is taken from them is checked.
#[derive(Debug)]
pub(super) struct Others {
    others: Vec<(PathBuf, SnapshotManifest)>,
    /// The version that is to be replaced, and what it would hold if it were right.
    damaged: Option<(PathBuf, Arc<SnapshotManifest>)>,
}

impl Others {
    /// The versions beside `id` that can be read, and what lies there in the place of `id` itself.
    pub(super) fn than(id: &SnapshotId, wanted: &Arc<SnapshotManifest>, versions: &Path) -> Self {
        let own = id.to_string();
        let others = fs::read_dir(versions).into_iter().flatten().filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            if name == own || name.parse::<SnapshotId>().is_err() {
                return None;
            }
            let version = versions.join(&name);
            match manifest(&version) {
                Ok(manifest) => Some((version, manifest)),
                Err(error) => {
                    tracing::debug!(version = name, %error, "nothing is taken from it");
                    None
                }
            }
        });
        let (others, version) = (others.collect(), versions.join(&own));
        let is_there = fs::symlink_metadata(&version).is_ok_and(|found| found.is_dir());
        Self { others, damaged: is_there.then(|| (version, Arc::clone(wanted))) }
    }

    /// Where chunks of `missing` lie.
    pub(super) fn chunks(&self, missing: &[Piece]) -> Held {
        let mut held = Held::new();
        let mut wanted: BTreeMap<ChunkId, u64> =
            missing.iter().map(|piece| (piece.chunk.id, piece.chunk.size)).collect();
        let others = self.others.iter().map(|(version, manifest)| (version, manifest));
        let damaged = self.damaged.iter().map(|(version, manifest)| (version, &**manifest));
        for (version, manifest) in others.chain(damaged) {
            if wanted.is_empty() {
                break;
            }
            for piece in pieces(version, manifest) {
                if wanted.get(&piece.chunk.id) == Some(&piece.chunk.size) {
                    wanted.remove(&piece.chunk.id);
                    held.insert(piece.chunk.id, (piece.file, piece.offset));
                }
            }
        }
        held
    }

    /// Where files with these very chunks lie. The damaged version's own are copied at best: that the disk lost what
    /// was written to them is not seen by reading them.
    pub(super) fn files(&self, wanted: &SnapshotFile) -> impl Iterator<Item = PathBuf> {
        let is_wanted = |file: &&SnapshotFile| !file.chunks.is_empty() && file.chunks == wanted.chunks;
        self.others.iter().filter_map(move |(version, manifest)| {
            let file = manifest.files.iter().find(is_wanted)?;
            // A folder on the way that is a link leads elsewhere.
            let is_inside =
                |folder: &str| fs::symlink_metadata(version.join(folder)).is_ok_and(|folder| folder.is_dir());
            folders_of(&file.name).all(is_inside).then(|| version.join(&file.name))
        })
    }
}

/// What a version says of itself; whether that has the hash that is the version's name, is not looked at.
pub(super) fn manifest(version: &Path) -> io::Result<SnapshotManifest> {
    SnapshotManifest::parse(&manifest_bytes(version)?).map_err(|error| invalid(error.to_string()))
}

/// The manifest of a version, where it is the one that its name is the hash of.
pub(crate) fn described(version: &Path, id: &SnapshotId) -> io::Result<SnapshotManifest> {
    let bytes = manifest_bytes(version)?;
    if SnapshotId::of(&bytes) != *id {
        return Err(invalid("its manifest does not have the hash that is the version's name".to_owned()));
    }
    SnapshotManifest::parse(&bytes).map_err(|error| invalid(error.to_string()))
}

fn manifest_bytes(version: &Path) -> io::Result<Vec<u8>> {
    let found = fs::symlink_metadata(version)?;
    if !found.is_dir() {
        return Err(invalid("it is no folder".to_owned()));
    }
    let most = limits::SNAPSHOT_MANIFEST_BYTES as u64;
    let file = open_regular(&version.join(MANIFEST_FILE), File::options().read(true))?;
    if file.metadata()?.len() > most {
        return Err(invalid("its manifest is too large".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Copies a chunk out of another version; whether it was what it has to be. What was written if not is overwritten by
/// whoever brings the right bytes.
pub(super) fn copy(
    (path, offset): &(PathBuf, u64),
    piece: &Piece,
    take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    let opened = open_regular(path, File::options().read(true));
    let file = opened.map_err(|error| StoreError::own(path.display(), &error))?;
    chunk::copy_at(&file, *offset, piece.chunk, take)
}
