//! One snapshot, opened and mapped.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use memmap2::Mmap;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::snapshot::{MANIFEST_FILE, SnapshotManifest, SnapshotTensor};

use super::error::LookupError;
use super::mapped::{self, Options, damaged};
use super::place::Place;
use super::table::Table;
use super::tensor::Tensor;
use crate::error::{Result, StoreError};

/// A fetched snapshot: its manifest, and its files mapped into memory. It can be read by any number of threads.
#[derive(Debug)]
pub struct Version {
    place: Place,
    manifest: SnapshotManifest,
    /// In the manifest's order.
    files: Vec<Mmap>,
    /// By name, the tensor's and its file's indices.
    tensors: HashMap<TensorName, (usize, usize)>,
    /// By name, the file's index.
    names: HashMap<String, usize>,
}

impl Version {
    /// Opens the version at `path`: `DIR/versions/ID`, or a link to it such as `DIR/current`, which is read once.
    ///
    /// # Errors
    /// [`Class::NotFound`](crate::error::Class::NotFound) where there is none,
    /// [`Class::Integrity`](crate::error::Class::Integrity) where its manifest or its files are not what its name says;
    /// else as the folder fails.
    pub fn open(path: &Path, options: &Options) -> Result<Self> {
        Self::open_unless(Place::find(path)?, options, &AtomicBool::new(false))
    }

    /// Gives up when `stop` is set.
    pub(super) fn open_unless(place: Place, options: &Options, stop: &AtomicBool) -> Result<Self> {
        let manifest = read_manifest(&place)?;
        let files = mapped::map_all(&place.folder, &manifest.files, options.pages)?;
        if options.verify {
            mapped::verify(&place.folder, &manifest.files, &files, options.threads, stop)?;
        }
        let names: HashMap<_, _> =
            manifest.files.iter().enumerate().map(|(at, file)| (file.name.clone(), at)).collect();
        let mut tensors = HashMap::with_capacity(manifest.tensors.len());
        for (at, tensor) in manifest.tensors.iter().enumerate() {
            // The manifest has been checked: every tensor lies within a file of it.
            if let Some(&file) = names.get(&tensor.file) {
                tensors.insert(tensor.name.clone(), (at, file));
            }
        }
        Ok(Self { place, manifest, files, tensors, names })
    }

    /// The snapshot's id.
    #[must_use]
    pub const fn id(&self) -> SnapshotId {
        self.place.id
    }

    /// What the snapshot says of itself: model, run, step, files, tensors.
    #[must_use]
    pub const fn manifest(&self) -> &SnapshotManifest {
        &self.manifest
    }

    /// Where it was opened.
    pub(super) const fn place(&self) -> &Place {
        &self.place
    }

    /// The bytes of a file, by its name in the manifest: artifacts have paths.
    #[must_use]
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.names.get(name).and_then(|&at| self.files.get(at)).map(|map| &**map)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`LookupError::UnknownTensor`].
    pub fn tensor(&self, name: &str) -> std::result::Result<Tensor<'_>, LookupError> {
        let place = self.tensors.get(name).copied();
        let found = place
            .and_then(|(tensor, file)| Some((self.manifest.tensors.get(tensor)?, self.files.get(file)?)));
        let found = found.and_then(|(tensor, file)| Some(Tensor::new(tensor, bytes_of(tensor, file)?)));
        found.ok_or_else(|| LookupError::UnknownTensor { name: name.to_owned(), snapshot: self.id() })
    }

    /// The table of this name: a tensor of two dimensions. For a pruned one its remapping is looked up too.
    ///
    /// # Errors
    /// [`LookupError::UnknownTensor`], [`LookupError::NotATable`].
    pub fn table(&self, name: &str) -> std::result::Result<Table<'_>, LookupError> {
        let tensor = self.tensor(name)?;
        let remapping = match &tensor.described().pruned {
            Some(pruned) => Some(self.tensor(pruned.index_remapping.as_str())?),
            None => None,
        };
        Table::new(tensor, remapping)
    }

    /// All tensors, in the manifest's order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.manifest.tensors.iter().filter_map(|tensor| self.tensor(tensor.name.as_str()).ok())
    }
}

fn bytes_of<'v>(tensor: &SnapshotTensor, file: &'v [u8]) -> Option<&'v [u8]> {
    file.get(usize::try_from(tensor.begin).ok()?..usize::try_from(tensor.end).ok()?)
}

/// The manifest in a version's folder, whose name is its hash.
fn read_manifest(place: &Place) -> Result<SnapshotManifest> {
    let path = place.folder.join(MANIFEST_FILE);
    let file = mapped::open(&path)?;
    let most = limits::SNAPSHOT_MANIFEST_BYTES;
    let mut bytes = Vec::new();
    let read = file.take(most as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| StoreError::own(path.display(), &error))?;
    if bytes.len() > most {
        return Err(damaged(&path, &format!("it has more than {most} bytes")));
    }
    if SnapshotId::of(&bytes) != place.id {
        return Err(damaged(&path, "its hash is not the id that the version's folder is named by"));
    }
    SnapshotManifest::parse(&bytes).map_err(|error| damaged(&path, &error.to_string()))
}
