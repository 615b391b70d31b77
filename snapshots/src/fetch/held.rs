//! Chunks that other versions in the folder hold: they are copied from there, and the store is not asked.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::snapshot::{MANIFEST_FILE, SnapshotManifest};

use super::plan::{Piece, pieces};
use crate::chunk;
use crate::disk::open_regular;
use crate::error::{Result, StoreError};

/// Where chunks lie in other versions.
pub(super) type Held = BTreeMap<ChunkId, (PathBuf, u64)>;

/// Where other versions than `id` say that they hold chunks of `missing`. A version that cannot be read is passed over.
pub(super) fn find(versions: &Path, id: &SnapshotId, missing: &[Piece]) -> Held {
    let mut held = Held::new();
    let mut wanted: BTreeMap<ChunkId, u64> =
        missing.iter().map(|piece| (piece.chunk.id, piece.chunk.size)).collect();
    let own = id.to_string();
    let others = fs::read_dir(versions).into_iter().flatten().filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        (name != own && name.parse::<SnapshotId>().is_ok()).then_some(name)
    });
    for other in others {
        if wanted.is_empty() {
            break;
        }
        let version = versions.join(&other);
        let manifest = match manifest(&version) {
            Ok(manifest) => manifest,
            Err(error) => {
                tracing::debug!(version = other, %error, "nothing is taken from it");
                continue;
            }
        };
        for piece in pieces(&version, &manifest) {
            if wanted.get(&piece.chunk.id) == Some(&piece.chunk.size) {
                wanted.remove(&piece.chunk.id);
                held.insert(piece.chunk.id, (piece.file, piece.offset));
            }
        }
    }
    held
}

/// What a version says of itself. It is believed in nothing: its chunks are checked as they are copied.
fn manifest(version: &Path) -> io::Result<SnapshotManifest> {
    let other = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let found = fs::symlink_metadata(version)?;
    if !found.is_dir() {
        return Err(other(&"it is no folder"));
    }
    let most = limits::SNAPSHOT_MANIFEST_BYTES as u64;
    let file = open_regular(&version.join(MANIFEST_FILE), File::options().read(true))?;
    if file.metadata()?.len() > most {
        return Err(other(&"its manifest is too large"));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    SnapshotManifest::parse(&bytes).map_err(|error| other(&error))
}

/// Copies a chunk out of another version; whether it was what it has to be. What was written if not is overwritten by
/// whoever brings the right bytes.
pub(super) fn copy(
    (path, offset): &(PathBuf, u64),
    piece: &Piece,
    take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    let opened = open_regular(path, File::options().read(true));
    let file = opened.map_err(|error| StoreError::io(path.display(), &error))?;
    chunk::copy_at(&file, *offset, piece.chunk, take)
}
