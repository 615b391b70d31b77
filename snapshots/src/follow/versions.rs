//! The versions that lie in a followed folder: which are known to be right, and which are kept.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::host::Target;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_schemas::time::Timestamp;

use super::note::Note;
use crate::disk::Durability;
use crate::error::{Result, StoreError};
use crate::fetch::{Folder, described, make_folder, remove};
use crate::sign::Trust;

/// Where versions go that are being removed.
const REMOVED: &str = ".removed";

/// What is served where it is not known which entry led there: its number is 0, and its time is when it came here.
pub(super) fn target_of(folder: &Folder, id: SnapshotId) -> Option<Target> {
    let manifest = described(&folder.version(&id), &id).ok()?;
    let found = fs::symlink_metadata(folder.version(&id)).ok()?;
    let at = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
    let at = Timestamp::from_nanoseconds(at);
    let (run, step) = (manifest.run, manifest.step);
    Some(Target { snapshot: id, sequence: 0, run, step, created_at: at, when: at })
}

/// Whether the version that `entry` points at is there, was verified in this folder before, and was not touched since.
pub(super) fn is_verified(folder: &Folder, note: &Note, entry: &ChannelEntry, trust: Option<&Trust>) -> bool {
    let Some(noted) = note.verified.get(&entry.snapshot) else { return false };
    let id = &entry.snapshot;
    let Ok(manifest) = described(&folder.version(id), id) else { return false };
    let is_named = manifest.run == entry.run && manifest.step == entry.step;
    is_named && stamp(folder, entry.snapshot, &manifest, trust).is_ok_and(|stamp| stamp == *noted)
}

/// What the files of a version look like without reading them: names, sizes, numbers and times. Whoever writes to one,
/// or puts another in its place, changes it, unless they put the time back. Whose signatures were demanded is in it,
/// since others may be now; and where nothing is synced, since when the machine has been running, which may have lost
/// bytes when it crashed.
pub(super) fn stamp(
    folder: &Folder,
    id: SnapshotId,
    manifest: &SnapshotManifest,
    trust: Option<&Trust>,
) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let trust = trust.map_or_else(String::new, ToString::to_string);
    hasher.update(format!("{}\n", trust.escape_debug()).as_bytes());
    if folder.durability() == Durability::Unsynced {
        hasher.update(fs::read("/proc/sys/kernel/random/boot_id")?.as_slice());
    }
    let version = folder.version(&id);
    for file in &manifest.files {
        let found = fs::symlink_metadata(version.join(&file.name))?;
        if !found.is_file() || found.len() != file.size {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it has another size"));
        }
        let (inode, seconds, nanoseconds) = (found.ino(), found.mtime(), found.mtime_nsec());
        let line = format!("{} {inode} {} {seconds} {nanoseconds}\n", file.name.escape_debug(), file.size);
        hasher.update(line.as_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Keeps the `keep` versions that were served last, what is served, and the `wanted` one, and removes all others: each
/// goes out of sight as a whole before the first of its files is removed. The folder's lock is held, and no swap is
/// under way.
pub(super) fn keep(folder: &Folder, note: &mut Note, keep: usize, wanted: Option<SnapshotId>) -> Result<()> {
    note.history.truncate(keep.max(1));
    let served = folder.points_at();
    let mut removed = Ok(());
    for id in held(folder, note) {
        if !note.history.contains(&id) && served != Some(id) && wanted != Some(id) {
            note.verified.remove(&id);
            removed = removed.and(take_away(folder, id));
        }
    }
    note.verified.retain(|id, _| folder.version(id).is_dir());
    removed.map_err(|error| StoreError::own(folder.versions().display(), &error))
}

fn take_away(folder: &Folder, id: SnapshotId) -> io::Result<()> {
    let all = removed(folder);
    make_folder(&all)?;
    fs::rename(folder.version(&id), all.join(id.to_string()))?;
    remove(&all)
}

fn removed(folder: &Folder) -> PathBuf {
    folder.path().join(REMOVED)
}

/// Removes what a process that was killed had begun to remove.
pub(super) fn clear_removed(folder: &Folder) {
    if let Err(error) = remove(&removed(folder)) {
        tracing::warn!(%error, "what was to be removed is still there");
    }
}

/// The versions that lie in the folder: those that were served last first.
pub(super) fn held(folder: &Folder, note: &Note) -> Vec<SnapshotId> {
    let id = |path: &Path| path.file_name()?.to_str()?.parse::<SnapshotId>().ok();
    let entries = fs::read_dir(folder.versions()).into_iter().flatten().flatten();
    let mut held: Vec<_> = entries.filter_map(|entry| id(&entry.path())).collect();
    let rank = |id: &SnapshotId| note.history.iter().position(|one| one == id).unwrap_or(usize::MAX);
    held.sort_unstable_by_key(|id| (rank(id), *id));
    held
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;

    use weighbridge_schemas::checkpoint::Format;
    use weighbridge_schemas::ids::{ChunkId, Fingerprint, RulesDigest};
    use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotSchema};

    use super::*;

    fn house() -> (tempfile::TempDir, Folder) {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::open(at.path(), Durability::Synced).unwrap();
        (at, folder)
    }

    #[test]
    fn those_that_were_served_last_are_kept_and_the_served_one_always() {
        let (_at, folder) = house();
        let ids: Vec<_> = (0..6u8).map(|n| SnapshotId::of(&[n])).collect();
        for id in &ids {
            fs::create_dir(folder.version(id)).unwrap();
            fs::write(folder.version(id).join("file"), "x").unwrap();
        }
        fs::create_dir(folder.versions().join("theirs")).unwrap();
        folder.flip(&ids[5]).unwrap();
        let mut note = Note::new("m@prod");
        note.history = vec![ids[2], ids[0], ids[1]];
        note.verified = ids.iter().map(|id| (*id, String::new())).collect();
        assert_eq!(held(&folder, &note)[..3], [ids[2], ids[0], ids[1]]);
        keep(&folder, &mut note, 2, Some(ids[3])).unwrap();
        let left = BTreeSet::from([ids[0], ids[2], ids[3], ids[5]]);
        assert_eq!(held(&folder, &note).into_iter().collect::<BTreeSet<_>>(), left);
        assert_eq!(note.verified.into_keys().collect::<BTreeSet<_>>(), left);
        assert!(folder.versions().join("theirs").is_dir(), "what is no version is somebody else's");
        assert!(!removed(&folder).try_exists().unwrap());
    }

    #[test]
    fn a_file_that_was_touched_has_another_stamp() {
        let (_at, folder) = house();
        let chunk = Chunk { id: ChunkId::of(&[0; 100]), size: 100 };
        let (name, chunks) = ("model.safetensors".to_owned(), vec![chunk]);
        let manifest = SnapshotManifest {
            schema: SnapshotSchema::V1,
            model: "m".parse().unwrap(),
            run: "r".parse().unwrap(),
            step: 1,
            format: Format::Safetensors,
            checkpoint: Fingerprint::of(b"c"),
            rules: RulesDigest::of(b"p"),
            encoding_version: 1,
            files: vec![SnapshotFile { name, size: 100, artifact: false, chunks }],
            tensors: vec![],
        };
        let id = manifest.id();
        let version = folder.version(&id);
        fs::create_dir(&version).unwrap();
        let file = version.join(&manifest.files[0].name);
        let of = |trust| stamp(&folder, id, &manifest, trust);
        assert!(of(None).is_err(), "it is not there");
        fs::write(&file, vec![0; usize::try_from(manifest.files[0].size).unwrap()]).unwrap();
        let first = of(None).unwrap();
        assert_eq!(of(None).unwrap(), first);
        fs::hard_link(&file, folder.path().join("other")).unwrap();
        assert_eq!(of(None).unwrap(), first, "another name changes nothing");
        let touched = std::time::SystemTime::UNIX_EPOCH;
        File::options().write(true).open(&file).unwrap().set_modified(touched).unwrap();
        assert_ne!(of(None).unwrap(), first);
        fs::write(&file, "").unwrap();
        assert!(of(None).is_err());
    }
}
