//! Files that `torch.save` writes: state dicts, and whole trainer objects.
//!
//! Since torch 1.6 such a file is a zip archive (see `zip`): `data.pkl` holds the object, with a token for
//! every storage, and `data/KEY` the bytes of one. The object is flattened (`flatten`); what is no tensor is
//! listed and passed over. Tensors keep their offsets and strides: many may view one storage, which may be far larger
//! than what is viewed, and none is ever copied. All of it is read by rules, and nothing of it is run.
//!
//! A tensor may also be larger than its storage (expanded: many elements are one), and many names may share a storage.
//! Since each becomes a dense tensor of its own, a small file could stand for any amount of data: both are bounded.
//!
//! Sparse, quantized and other tensors that are not dense arrays of a supported type are put aside, each with the
//! reason; whoever wants to publish one gets it as an error.

use std::collections::HashMap;
use std::sync::Arc;

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::ids::Fingerprint;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use super::archive::Archive;
use super::flatten::{self, Flat};
use super::pickle::{self, Pickle, Place};
use super::room::Room;
use super::saved_tensor::SavedTensor;
use super::unpack::Readable;
use super::{detect, zip};
use crate::checkpoint::{Checkpoint, Location, Others, Slice, Tensor};
use crate::error::{Class, ReadError, Result};
use crate::source::{Source, SourceFile};

/// What the fingerprint's digest begins with.
const FINGERPRINT_DOMAIN: &[u8] = b"weighbridge torch.save fingerprint v1";

/// Lists the tensors of the torch.save file that was named, or of the only one in a folder.
///
/// # Errors
/// [`Class::UnsupportedFormat`] for files of other kinds and folders of several, and a class that says what is wrong
/// with the archive, its object or its tensors.
pub fn open(source: Source) -> Result<Checkpoint> {
    let name = match source.entry() {
        Some(name) => name.to_owned(),
        None => detect::only_torch_save(&source.names()?)?,
    };
    let file = source.file(&name)?;
    let budget = source.metadata_left();
    let listing = detect::check_torch_save(&file).and_then(|()| Listing::of(&file, budget));
    let listing = listing.map_err(|error| error.in_file(&name))?;
    let Listing { fingerprint, tensors, unreadable, others, notes } = listing;
    Ok(Checkpoint { source, format: Format::TorchSave, fingerprint, tensors, unreadable, others, notes })
}

/// What a file holds.
struct Listing {
    fingerprint: Fingerprint,
    tensors: Vec<Tensor>,
    unreadable: Vec<(TensorName, ReadError)>,
    others: Others,
    notes: Vec<String>,
}

impl Listing {
    /// Reads `file`, whose metadata may have `budget` bytes.
    fn of(file: &Arc<SourceFile>, budget: u64) -> Result<Self> {
        let bytes = Readable::File(file);
        let (length, entries) = (file.len(), limits::TORCH_SAVE_ENTRIES);
        let archive = Archive { bytes: &bytes, offset: 0, length, entries, is_metadata: true };
        let (place, directory_bytes) = archive.directory()?;
        let directory = zip::Directory::parse(&directory_bytes, &place)?;
        let prefix = directory.prefix()?;
        check_kind(&directory, prefix)?;
        archive.check_byteorder(&directory, prefix)?;
        let pickled = directory.get(&format!("{prefix}data.pkl"))?;
        let pickled = archive.data(&directory, &pickled, limits::PICKLE_BYTES)?;
        let pickle = pickle::parse(&pickled, Place::Tensors)?;

        let mut room = Room::new(budget, (directory_bytes.len() as u64).saturating_add(pickled.len() as u64));
        let Flat { tensors: flat, others } = flatten::flatten(&pickle, &mut room)?;
        let mut found = Found { directory: &directory, prefix, readable: Vec::new(), unreadable: Vec::new() };
        for (name, value) in flat {
            let saved = SavedTensor::of(&pickle, value);
            room.slices(1, saved.as_ref().map_or(0, |saved| saved.sizes.len()))?;
            found.add(&name, saved).map_err(|error| error.of_tensor(name.as_str()))?;
        }
        found.check(&pickle, file.len(), &others)?;
        let mut notes = others.notes();
        if !directory.has_checksums {
            notes.push(
                "the file records no checksums (torch.serialization.set_crc32_options): damage to it goes unseen"
                    .to_owned(),
            );
        }
        Ok(Self {
            fingerprint: fingerprint(&directory_bytes, &pickled, length),
            tensors: found.locate(&archive, file)?,
            unreadable: found.unreadable,
            others,
            notes,
        })
    }
}

/// Refuses programs: TorchScript and exported archives have code beside their tensors.
fn check_kind(directory: &zip::Directory<'_>, prefix: &str) -> Result<()> {
    let is_script = directory.find(&format!("{prefix}constants.pkl")).is_some();
    if is_script { Err(zip::script()) } else { Ok(()) }
}

/// The digest of the directory (names, sizes and checksums of all storages), the object and the file's length.
fn fingerprint(directory: &[u8], pickle: &[u8], length: u64) -> Fingerprint {
    let mut hasher = blake3::Hasher::new();
    for part in [FINGERPRINT_DOMAIN, directory, pickle, &length.to_le_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    Fingerprint::from_bytes(*hasher.finalize().as_bytes())
}

/// The tensors of a file, by name, and the entries that hold their storages.
struct Found<'d, 'p> {
    directory: &'d zip::Directory<'d>,
    prefix: &'d str,
    readable: Vec<(TensorName, SavedTensor<'p>, zip::Entry<'d>)>,
    unreadable: Vec<(TensorName, ReadError)>,
}

impl<'p> Found<'_, 'p> {
    fn add(&mut self, name: &TensorName, saved: Result<SavedTensor<'p>>) -> Result<()> {
        let saved = match saved {
            Err(error) if matches!(error.class(), Class::BadDtype | Class::UnsupportedObject) => {
                self.unreadable.push((name.clone(), error.of_tensor(name.as_str())));
                return Ok(());
            }
            saved => saved?,
        };
        let entry = self.directory.get(&format!("{}data/{}", self.prefix, saved.key))?;
        saved.check_storage(entry.length)?;
        self.readable.push((name.clone(), saved, entry));
        Ok(())
    }

    /// Checks that there is something, and that it does not take more than a file of `length` bytes may stand for.
    fn check(&self, pickle: &Pickle<'_>, length: u64, others: &Others) -> Result<()> {
        if self.readable.is_empty() && self.unreadable.is_empty() {
            let what = match pickle.root() {
                pickle::Value::Dict(_) | pickle::Value::List(_) | pickle::Value::Tuple(_) => "its object",
                _ => "its object is no dict or list, and",
            };
            let why = format!("{what} holds no tensor, and {} other values", others.count);
            return Err(ReadError::new(Class::NoTensors, why));
        }
        let (mut all, mut expanded) = (0u64, 0u64);
        for (name, saved, _) in &self.readable {
            all = all.saturating_add(saved.bytes());
            if saved.is_expanded() {
                expanded = expanded.saturating_add(saved.bytes());
            }
            let most = length.saturating_mul(limits::SHARED_TIMES).saturating_add(limits::EXPANDED_BYTES);
            if expanded > limits::EXPANDED_BYTES || all > most {
                let why = format!(
                    "up to here, {all} bytes of tensors, {expanded} of them expanded, would come out of a file \
                     of {length} bytes; the most are {most} and {}: make tensors contiguous, and share less, \
                     before they are saved",
                    limits::EXPANDED_BYTES
                );
                return Err(ReadError::new(Class::LimitExceeded, why).of_tensor(name.as_str()));
            }
        }
        Ok(())
    }

    /// The tensors, each with the place of its elements.
    fn locate(&self, archive: &Archive<'_, '_>, file: &Arc<SourceFile>) -> Result<Vec<Tensor>> {
        let storages: HashMap<_, _> =
            self.readable.iter().map(|(_, _, entry)| (entry.header, *entry)).collect();
        let records = archive.records(storages.into_values().collect())?;
        let tensor = |(name, saved, entry): &(TensorName, SavedTensor<'_>, zip::Entry<'_>)| {
            let record = records.get(&entry.header).copied().ok_or_else(|| {
                let why = "its storage was not found again";
                ReadError::new(Class::ZipMissingEntry, why).of_tensor(name.as_str())
            })?;
            let storage = saved.within(record, self.directory.has_checksums);
            let storage = storage.map_err(|error| error.of_tensor(name.as_str()))?;
            Ok(whole(name, saved, Location::Strided { file: Arc::clone(file), storage }))
        };
        self.readable.iter().map(tensor).collect()
    }
}

/// A tensor that is one slice.
fn whole(name: &TensorName, saved: &SavedTensor<'_>, location: Location) -> Tensor {
    let (shape, offsets) = (saved.sizes.clone(), vec![0; saved.sizes.len()]);
    let slice = Slice { offsets, sizes: shape.clone(), location };
    Tensor { name: name.clone(), dtype: saved.dtype, shape, slices: vec![slice] }
}

#[cfg(test)]
mod tests;
