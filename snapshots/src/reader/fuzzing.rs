//! What must hold of a version's folder, whatever lies in it. The fuzz target `version` calls this, and tests that
//! replay its corpus.

use std::fs;
use std::io;
use std::path::Path;

use half::{bf16, f16};

use weighbridge_schemas::encoding::Encoding;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::snapshot::{MANIFEST_FILE, SnapshotManifest};

use super::{Element, LookupError, Options, Row, Table, Tensor, Version};
use crate::error::Class;

/// Most bytes of files that an input gets: those of larger ones are left short, and have to be refused.
const FILES_BYTES: u64 = 1 << 20;
/// Widest row that is decoded.
const WIDTH: usize = 1 << 16;

/// Makes a version of `input` in `folder`, which exists and is empty, opens it, reads it, and empties the folder again.
/// The input is the length of a manifest (4 bytes, little-endian), the manifest, and what its files are filled with,
/// over and over.
///
/// # Errors
/// Where the folder cannot be written.
///
/// # Panics
/// Where something does not hold.
pub fn version(folder: &Path, input: &[u8]) -> io::Result<()> {
    let Some((length, rest)) = input.split_first_chunk() else { return Ok(()) };
    let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX).min(rest.len());
    let (json, filling) = rest.split_at(length);
    let at = folder.join(SnapshotId::of(json).to_string());
    fs::create_dir(&at)?;
    fs::write(at.join(MANIFEST_FILE), json)?;
    let parsed = SnapshotManifest::parse(json);
    let whole = match &parsed {
        Ok(manifest) => fill(&at, manifest, filling)?,
        Err(_) => false,
    };
    let opened = Version::open(&at, &Options::default());
    assert_eq!(opened.is_ok(), whole, "{:?}", opened.err());
    let verified = Version::open(&at, &Options { verify: true, threads: 2, ..Options::default() });
    match opened {
        Ok(version) => {
            assert_eq!(verified.is_ok(), chunks_are_right(&version), "{:?}", verified.err());
            read(&version);
        }
        Err(error) => {
            assert_eq!(error.class(), Class::Integrity, "{error}");
            assert_eq!(verified.err(), Some(error));
        }
    }
    fs::remove_dir_all(&at)
}

/// Writes the manifest's files; whether all of them have their sizes.
fn fill(at: &Path, manifest: &SnapshotManifest, filling: &[u8]) -> io::Result<bool> {
    let filling = if filling.is_empty() { &[0] } else { filling };
    let mut left = FILES_BYTES;
    for file in &manifest.files {
        let size = file.size.min(left);
        left -= size;
        let path = at.join(&file.name);
        fs::create_dir_all(path.parent().unwrap_or(at))?;
        let bytes: Vec<u8> =
            filling.iter().copied().cycle().take(usize::try_from(size).unwrap_or(0)).collect();
        fs::write(path, bytes)?;
    }
    Ok(manifest.bytes() <= FILES_BYTES)
}

fn chunks_are_right(version: &Version) -> bool {
    version.manifest().files.iter().all(|file| {
        let mut left = version.file(&file.name).unwrap_or_default();
        file.chunks.iter().all(|chunk| {
            let (bytes, behind) = left.split_at(usize::try_from(chunk.size).unwrap_or(left.len()));
            left = behind;
            ChunkId::of(bytes) == chunk.id
        })
    })
}

fn read(version: &Version) {
    assert_eq!(version.tensors().count(), version.manifest().tensors.len());
    assert!(matches!(version.tensor("\n"), Err(LookupError::UnknownTensor { .. })));
    for tensor in version.tensors() {
        let described = tensor.described();
        assert_eq!(described.stored_bytes(), Some(tensor.bytes().len() as u64));
        read_in_place(&tensor);
        match version.table(described.name.as_str()) {
            Ok(table) => read_rows(&table),
            Err(error) => assert!(described.shape.len() != 2, "{error}"),
        }
    }
}

fn read_in_place(tensor: &Tensor<'_>) {
    fn one<T: Element>(tensor: &Tensor<'_>) -> usize {
        match tensor.values::<T>() {
            Ok(values) => {
                assert_eq!(tensor.dtype(), T::DTYPE);
                assert_eq!(size_of_val(values), tensor.bytes().len());
                1
            }
            Err(LookupError::WrongType { .. }) => 0,
            Err(error) => {
                assert!(!tensor.bytes().as_ptr().cast::<T>().is_aligned(), "{error}");
                1
            }
        }
    }
    let floats = one::<f64>(tensor) + one::<f32>(tensor) + one::<f16>(tensor) + one::<bf16>(tensor);
    let signed = one::<i64>(tensor) + one::<i32>(tensor) + one::<i16>(tensor) + one::<i8>(tensor);
    let unsigned = one::<u64>(tensor) + one::<u32>(tensor) + one::<u16>(tensor) + one::<u8>(tensor);
    assert!(floats + signed + unsigned <= 1);
}

/// Some rows, each compared with what its bytes decode to.
fn read_rows(table: &Table<'_>) {
    let (rows, width, described) = (table.rows(), table.width(), table.tensor().described());
    assert!(matches!(table.row(rows), Err(LookupError::RowOutOfRange { .. })));
    assert!(matches!(table.row(u64::MAX), Err(LookupError::RowOutOfRange { .. })));
    if width > WIDTH {
        return;
    }
    let mut decoded = vec![1.0; width];
    let too_long = table.decode_row(0, &mut vec![0.0; width + 1]);
    assert!(matches!(too_long, Err(LookupError::WrongBuffer { .. })));
    let are_floats = described.encoding != Encoding::Keep || described.source_dtype.is_float();
    for row in [0, rows / 2, rows.saturating_sub(1)].into_iter().filter(|row| *row < rows) {
        let stored = match table.row(row) {
            Ok(stored) => stored,
            Err(error) => {
                assert!(matches!(error, LookupError::DamagedRemapping { .. }), "{error}");
                continue;
            }
        };
        match table.decode_row(row, &mut decoded) {
            Ok(found) => {
                let mut expected = vec![0.0; width];
                let decodes = stored.is_none_or(|stored| {
                    described.form().decode_row(described.source_dtype, stored, &mut expected)
                });
                assert!(decodes && (are_floats || stored.is_none()));
                assert_eq!(found, if stored.is_some() { Row::Kept } else { Row::Pruned });
                assert!(expected.iter().map(|x| x.to_bits()).eq(decoded.iter().map(|x| x.to_bits())));
            }
            Err(error) => assert!(!are_floats, "{error}"),
        }
    }
}
