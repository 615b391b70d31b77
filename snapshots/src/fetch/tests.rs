//! A disk that loses what is written to it, and versions that were damaged.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::ids::{ChunkId, Fingerprint, RulesDigest};
use weighbridge_schemas::snapshot::{Chunk, SnapshotFile, SnapshotSchema};

use super::*;
use crate::chunk;
use crate::disk::{Durability, losing};
use crate::root::{Absent, Intercept, Request};

const FILES: u64 = 12;
/// The size of each.
const BYTES: u64 = 100;

/// Notes what is read of a store.
#[derive(Debug, Default)]
struct Read(Mutex<Vec<String>>);

impl Intercept for Read {
    fn before(&self, request: &Request) -> Result<()> {
        if request.name == "open" {
            self.0.lock().unwrap().push(request.key.to_string());
        }
        Ok(())
    }

    fn after(&self, _: &Request) -> Result<()> {
        Ok(())
    }
}

/// Adds up what was handled.
#[derive(Debug, Default)]
struct Handled(AtomicU64);

impl Progress for Handled {
    fn start(&self, _: u64) {}

    fn advance(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A store with a snapshot, and a folder for it.
struct House {
    at: tempfile::TempDir,
    root: Root,
    read: Arc<Read>,
    handled: Handled,
    folder: Folder,
    manifest: Arc<SnapshotManifest>,
    staged: Staged,
}

impl House {
    async fn new() -> Self {
        let at = tempfile::tempdir().unwrap();
        let root = Root::open(at.path().join("store").to_str().unwrap(), Absent::Create).unwrap();
        let model: ModelName = "m".parse().unwrap();
        let mut files = Vec::new();
        for number in 0..FILES {
            let bytes = Bytes::from(vec![u8::try_from(number).unwrap(); usize::try_from(BYTES).unwrap()]);
            let chunk = Chunk { id: ChunkId::of(&bytes), size: BYTES };
            chunk::put(&root, &model, chunk, bytes).await.unwrap();
            let name = format!("files/{number:03}");
            files.push(SnapshotFile { name, size: BYTES, artifact: true, chunks: vec![chunk] });
        }
        let manifest = SnapshotManifest {
            schema: SnapshotSchema::V1,
            model,
            run: "r".parse().unwrap(),
            step: 1,
            format: Format::Safetensors,
            checkpoint: Fingerprint::of(b"c"),
            rules: RulesDigest::of(b"p"),
            encoding_version: 1,
            files,
            tensors: vec![],
        };
        manifest::put(&root, &manifest).await.unwrap();
        let read = Arc::<Read>::default();
        let root = root.behind(read.clone());
        let folder = Folder::open(&at.path().join("served"), Durability::Synced).unwrap();
        let (manifest, handled, staged) = (Arc::new(manifest), Handled::default(), Staged::default());
        Self { at, root, read, handled, folder, manifest, staged }
    }

    async fn bring(&mut self) -> Result<Fetched> {
        let lock = self.folder.lock().await.unwrap();
        // One after the other, so that a test knows what was done before something failed.
        let limits = Limits::new(&self.root, 64 << 20, 1, Pace::default());
        let (id, manifest, place) = (self.manifest.id(), self.manifest.clone(), (&self.folder, &lock));
        bring(&self.root, &id, manifest, place, &mut self.staged, &limits, &self.handled).await
    }

    fn version(&self) -> PathBuf {
        self.folder.version(&self.manifest.id())
    }

    /// A file of the version, which is another one from now on, as if the disk had damaged it.
    fn damage(&self, number: usize) {
        let path = self.version().join(&self.manifest.files[number].name);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(path, vec![255; usize::try_from(BYTES).unwrap()]).unwrap();
    }
}

#[tokio::test]
async fn of_what_the_disk_lost_nothing_is_used_again() {
    let mut house = House::new().await;
    let staging = house.folder.path().join(".staging");
    losing::once(&staging);
    assert_eq!(house.bring().await.unwrap_err().class(), Class::Host);
    assert!(!house.version().try_exists().unwrap() && !staging.try_exists().unwrap());
    assert_eq!(house.bring().await.unwrap().bytes_read, FILES * BYTES, "all of it is fetched again");
    assert!(house.version().is_dir());
}

#[tokio::test]
async fn a_version_that_cannot_be_made_safe_is_replaced_and_linked_nowhere() {
    let mut house = House::new().await;
    house.bring().await.unwrap();
    let number = |path: PathBuf| std::fs::symlink_metadata(path).unwrap().ino();
    let file = house.version().join("files/003");
    // They are held open, so that nothing else can have their numbers.
    let open = [&house.version(), &file].map(|path| std::fs::File::open(path).unwrap());
    let (version_before, file_before) = (number(house.version()), number(file.clone()));
    // Whoever reads it finds it right.
    losing::once(&house.version());
    let fetched = house.bring().await.unwrap();
    assert_eq!(fetched.bytes_read, 0, "what can be read of it need not come from the store");
    assert_ne!((number(house.version()), number(file)), (version_before, file_before));
    drop(open);
    // It is remembered until another one is in its place.
    losing::once(&house.version());
    losing::once(&house.folder.path().join(".staging"));
    assert_eq!(house.bring().await.unwrap_err().class(), Class::Host);
    let version = number(house.version());
    house.bring().await.unwrap();
    assert_ne!(number(house.version()), version);
}

#[tokio::test]
async fn a_damaged_version_is_read_once_and_what_is_right_in_it_is_used() {
    let mut house = House::new().await;
    house.bring().await.unwrap();
    let last = house.manifest.files.len() - 1;
    house.damage(last);
    let gone = layout::chunk(&house.manifest.model, &house.manifest.files[last].chunks[0].id).to_string();
    let (chunk, away) = (house.at.path().join("store").join(&gone), house.at.path().join("away"));
    std::fs::rename(&chunk, &away).unwrap();
    house.read.0.lock().unwrap().clear();
    let right = (FILES - 1) * BYTES;
    // What is right is seen, and copied; from then on that is known.
    for handled in [2 * right, right, right] {
        house.handled = Handled::default();
        assert_eq!(house.bring().await.unwrap_err().class(), Class::Integrity);
        assert_eq!(house.handled.0.load(Ordering::Relaxed), handled);
    }
    assert!(house.read.0.lock().unwrap().iter().all(|key| *key == gone), "the rest is there");
    std::fs::rename(&away, &chunk).unwrap();
    assert_eq!(house.bring().await.unwrap().bytes_read, BYTES);
    assert_eq!(house.bring().await.unwrap().bytes_read, 0);
}
