//! Items of a distributed checkpoint that are stored as one zstd frame each (`stream.zstd/1`), unpacked once.
//!
//! A frame has no places to start in the middle, and a table's rows are read a few hundred KiB at a time. So a frame
//! is unpacked as a whole: a small one into memory, a larger one into a file without a name in a scratch folder, which
//! is gone when nobody reads it any more. What was used longest ago is dropped first, so the scratch folder holds a
//! few tensors at a time. How large an item may become is known from the metadata: a frame that goes on beyond that is
//! refused there. The format is RFC 8878; the transform is torch's `_extension.ZStandard`.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weighbridge_schemas::limits;

use crate::checkpoint::SliceRecord;
use crate::error::{Class, ReadError, Result};
use crate::source::SourceFile;

/// The name of the transform.
pub const ZSTD: &str = "stream.zstd/1";
/// Largest unpacked item that stays in memory, in bytes.
const SMALL_BYTES: usize = 128 << 10;
/// Most unpacked items that are kept: each may be an open file.
const MOST_KEPT: usize = 256;
/// How much is unpacked, and read of the frame, at a time; in bytes.
const STEP_BYTES: usize = 128 << 10;
/// What the scratch folder may hold in any case, in bytes; larger tensors take twice their own size.
const KEPT_BYTES: u64 = 1 << 30;

/// Bytes that can be read at any place: a file of the checkpoint, or an item of one that was unpacked.
#[derive(Debug, Clone)]
pub enum Readable<'s> {
    /// A file.
    File(&'s SourceFile),
    /// An unpacked item.
    Unpacked(Arc<Unpacked>),
}

impl Readable<'_> {
    /// The checkpoint's file that the bytes are of.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::File(file) => file.name(),
            Self::Unpacked(item) => &item.name,
        }
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::File(file) => file.len(),
            Self::Unpacked(item) => item.length,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// As [`SourceFile::read_exact_at`], or [`Class::Scratch`].
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(buffer, offset),
            Self::Unpacked(item) => item.read_exact_at(buffer, offset),
        }
    }

    /// Fills `buffer` from byte `offset` on, which lies in `record`, where there is one; that of a file is checked once
    /// all of it was read.
    ///
    /// # Errors
    /// As [`Readable::read_exact_at`], and [`Class::ZipCrc`].
    pub fn read_in(&self, record: Option<SliceRecord>, buffer: &mut [u8], offset: u64) -> Result<()> {
        match (self, record) {
            (Self::File(file), Some(record)) => file.read_record_at(record, buffer, offset),
            _ => self.read_exact_at(buffer, offset),
        }
    }

    /// The `length` bytes from `offset` on. The caller checks `length` against its limit first.
    ///
    /// # Errors
    /// As [`Readable::read_exact_at`].
    pub fn read_vec_at(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        match self {
            Self::File(file) => file.read_vec_at(offset, length),
            Self::Unpacked(item) => {
                let end = offset.checked_add(length).filter(|&end| end <= item.length);
                let size = end.and_then(|_| usize::try_from(length).ok());
                let mut bytes = vec![0; size.ok_or_else(|| item.too_short(offset, length))?];
                item.read_exact_at(&mut bytes, offset)?;
                Ok(bytes)
            }
        }
    }
}

/// An item, unpacked or never packed.
#[derive(Debug)]
pub struct Unpacked {
    /// The file that it is an item of.
    name: String,
    length: u64,
    held: Held,
}

#[derive(Debug)]
enum Held {
    Memory(Vec<u8>),
    /// A file in the scratch folder, which has no name.
    Scratch(File),
}

impl Unpacked {
    /// An item that is not packed, read into memory. The caller checks `length` against its limit first.
    ///
    /// # Errors
    /// As [`SourceFile::read_exact_at`].
    pub(super) fn read(file: &SourceFile, offset: u64, length: u64) -> Result<Self> {
        let held = Held::Memory(file.read_vec_at(offset, length)?);
        Ok(Self { name: file.name().to_owned(), length, held })
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        match &self.held {
            Held::Memory(bytes) => {
                let start = usize::try_from(offset).ok();
                let end = start.and_then(|start| start.checked_add(buffer.len()));
                let part = start.zip(end).and_then(|(start, end)| bytes.get(start..end));
                buffer.copy_from_slice(part.ok_or_else(|| self.too_short(offset, buffer.len() as u64))?);
                Ok(())
            }
            Held::Scratch(file) => file.read_exact_at(buffer, offset).map_err(|error| {
                if error.kind() == io::ErrorKind::UnexpectedEof {
                    return self.too_short(offset, buffer.len() as u64);
                }
                let why = format!("the unpacked item cannot be read back from the scratch folder: {error}");
                ReadError::new(Class::Scratch, why).in_file(&self.name)
            }),
        }
    }

    fn too_short(&self, offset: u64, length: u64) -> ReadError {
        let why =
            format!("an unpacked item has {} bytes, but {length} at {offset} are declared", self.length);
        ReadError::new(Class::Truncated, why).in_file(&self.name)
    }
}

/// Unpacks items, and keeps the ones that were used last.
#[derive(Debug)]
pub struct Unpacker {
    /// Where large items go; without it they are refused.
    scratch: Option<PathBuf>,
    /// How much is kept, in bytes.
    most: u64,
    kept: Mutex<VecDeque<Kept>>,
    /// Held while a frame is unpacked: one at a time, since a frame's window is memory.
    at_work: Mutex<()>,
}

/// An item that is kept, or that somebody is unpacking.
#[derive(Debug)]
struct Kept {
    file: String,
    offset: u64,
    /// What it may take.
    most: u64,
    item: Arc<Mutex<Option<Arc<Unpacked>>>>,
}

impl Unpacker {
    /// An unpacker into the folder `scratch` for tensors of which the largest has `largest` bytes.
    #[must_use]
    pub fn new(scratch: Option<&Path>, largest: u64) -> Self {
        Self {
            scratch: scratch.map(Path::to_path_buf),
            most: largest.saturating_mul(2).max(KEPT_BYTES),
            kept: Mutex::default(),
            at_work: Mutex::default(),
        }
    }

    /// The item that is a frame of `length` bytes at `offset` of `file`, and may have `most` bytes unpacked.
    ///
    /// # Errors
    /// [`Class::ZstdMalformed`], [`Class::LimitExceeded`] where it is larger, [`Class::Scratch`] where it cannot be
    /// put down, and what reading the file gives.
    pub fn get(&self, file: &SourceFile, offset: u64, length: u64, most: u64) -> Result<Arc<Unpacked>> {
        let slot = self.slot(file.name(), offset, most);
        let mut slot = lock(&slot);
        if let Some(item) = &*slot {
            return Ok(Arc::clone(item));
        }
        let at_work = lock(&self.at_work);
        let item = Arc::new(self.unpack(file, offset, length, most).map_err(|e| e.in_file(file.name()))?);
        drop(at_work);
        *slot = Some(Arc::clone(&item));
        Ok(item)
    }

    /// The place of an item among those that are kept; what was used longest ago makes room for it.
    fn slot(&self, file: &str, offset: u64, most: u64) -> Arc<Mutex<Option<Arc<Unpacked>>>> {
        let mut kept = lock(&self.kept);
        let place = kept.iter().position(|kept| kept.offset == offset && kept.file == file);
        let wanted = place.and_then(|place| kept.remove(place));
        let wanted =
            wanted.unwrap_or_else(|| Kept { file: file.to_owned(), offset, most, item: Arc::default() });
        let item = Arc::clone(&wanted.item);
        let room = self.most.saturating_sub(wanted.most);
        let taken = |kept: &VecDeque<Kept>| kept.iter().fold(0u64, |sum, one| sum.saturating_add(one.most));
        while kept.len() >= MOST_KEPT || taken(&kept) > room {
            if kept.pop_front().is_none() {
                break;
            }
        }
        kept.push_back(wanted);
        item
    }

    fn unpack(&self, file: &SourceFile, offset: u64, length: u64, most: u64) -> Result<Unpacked> {
        let end = offset.saturating_add(length);
        let frame = BufReader::with_capacity(STEP_BYTES, Frame { file, at: offset, end });
        let decoder = zstd::stream::read::Decoder::with_buffer(frame).map(|decoder| decoder.single_frame());
        let mut decoder = decoder.map_err(|error| malformed(error, offset))?;
        decoder.window_log_max(limits::ZSTD_WINDOW_LOG).map_err(|error| malformed(error, offset))?;
        let mut unpacked =
            Unpacked { name: file.name().to_owned(), length: 0, held: Held::Memory(Vec::new()) };
        let mut buffer = vec![0; STEP_BYTES];
        loop {
            let count = decoder.read(&mut buffer).map_err(|error| malformed(error, offset))?;
            let Some(part) = buffer.get(..count).filter(|part| !part.is_empty()) else { break };
            unpacked.length = unpacked.length.saturating_add(part.len() as u64);
            if unpacked.length > most {
                let why = format!(
                    "the zstd frame at byte {offset} unpacks to more than {most} bytes, which is all that the \
                     metadata declares there"
                );
                return Err(ReadError::new(Class::LimitExceeded, why));
            }
            self.put(&mut unpacked.held, part)?;
        }
        let mut rest = decoder.finish();
        if rest.fill_buf().map_err(|error| malformed(error, offset))?.is_empty() {
            return Ok(unpacked);
        }
        let why = format!("bytes follow the zstd frame at byte {offset}, which is to be all of its item");
        Err(ReadError::new(Class::ZstdMalformed, why))
    }

    /// Adds `part` to what is unpacked already.
    fn put(&self, held: &mut Held, part: &[u8]) -> Result<()> {
        if let Held::Memory(bytes) = held {
            if bytes.len().saturating_add(part.len()) <= SMALL_BYTES {
                bytes.extend_from_slice(part);
                return Ok(());
            }
            let mut file = self.scratch_file()?;
            self.written(file.write_all(bytes))?;
            *held = Held::Scratch(file);
        }
        match held {
            Held::Scratch(file) => self.written(file.write_all(part)),
            Held::Memory(_) => Ok(()),
        }
    }

    fn scratch_file(&self) -> Result<File> {
        let Some(folder) = &self.scratch else {
            let why = "a large zstd item has to be unpacked into a scratch folder, and none was given";
            return Err(ReadError::new(Class::Scratch, why));
        };
        self.written(tempfile::tempfile_in(folder))
    }

    fn written<T>(&self, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| {
            let folder = self.scratch.as_deref().unwrap_or(Path::new("")).display();
            let why = format!(
                "a zstd item has to be unpacked into the scratch folder {folder}, which does not take it: {error}; \
                 make room there, or name another folder in the variable TMPDIR"
            );
            ReadError::new(Class::Scratch, why)
        })
    }
}

/// A range of a file, as a stream.
struct Frame<'f> {
    file: &'f SourceFile,
    at: u64,
    end: u64,
}

impl Read for Frame<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let count = left.min(buffer.len());
        let part = buffer.get_mut(..count).unwrap_or_default();
        self.file.read_exact_at(part, self.at).map_err(io::Error::other)?;
        self.at = self.at.saturating_add(count as u64);
        Ok(count)
    }
}

/// An error of reading the file comes through the decoder as it is; any other is the frame's.
fn malformed(error: io::Error, offset: u64) -> ReadError {
    match error.downcast::<ReadError>() {
        Ok(error) => error,
        Err(error) => {
            // The library has no stable code for this one.
            if error.to_string().contains("too much memory") {
                let why = format!(
                    "the zstd frame at byte {offset} needs a window over the limit of {} MiB; save with level 19 or \
                     lower, and without long-distance matching",
                    (1u64 << limits::ZSTD_WINDOW_LOG) >> 20
                );
                return ReadError::new(Class::LimitExceeded, why);
            }
            let why = format!("the zstd frame at byte {offset} cannot be unpacked: {error}");
            ReadError::new(Class::ZstdMalformed, why)
        }
    }
}

/// A panic elsewhere leaves what these guard whole: each is changed by one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;

    /// A file with `frame` in it at byte 3, and that frame unpacked.
    fn unpack(frame: &[u8], most: u64, scratch: Option<&Path>) -> Result<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), [b"abc", frame, b"behind"].concat()).unwrap();
        let file = Source::open(folder.path()).unwrap().file("f").unwrap();
        let item = Unpacker::new(scratch, 0).get(&file, 3, frame.len() as u64, most)?;
        let readable = Readable::Unpacked(item);
        readable.read_vec_at(0, readable.len())
    }

    fn packed(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 3).unwrap()
    }

    fn noise(length: usize) -> Vec<u8> {
        (0..length as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
    }

    #[test]
    fn small_items_stay_in_memory_and_large_ones_go_to_the_scratch_folder() {
        let scratch = tempfile::tempdir().unwrap();
        for length in [0, 1, SMALL_BYTES, SMALL_BYTES + 1, 5 * SMALL_BYTES] {
            let bytes = noise(length);
            let most = length as u64;
            assert_eq!(unpack(&packed(&bytes), most, Some(scratch.path())).unwrap(), bytes, "{length}");
            let without = unpack(&packed(&bytes), most, None);
            assert_eq!(without.is_ok(), length <= SMALL_BYTES, "{length}");
        }
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left over");
    }

    #[test]
    fn a_bomb_is_cut_off_where_the_metadata_ends() {
        let bomb = packed(&vec![0; 64 << 20]);
        assert!(bomb.len() < 10_000);
        let error = unpack(&bomb, 1000, None).unwrap_err();
        assert_eq!((error.class(), error.file()), (Class::LimitExceeded, Some("f")));
    }

    #[test]
    fn broken_frames_are_refused() {
        let whole = packed(&noise(5000));
        for cut in [0, 1, 4, whole.len() / 2, whole.len() - 1] {
            let class = unpack(&whole[..cut], 5000, None).map(|bytes| bytes.len()).map_err(|e| e.class());
            assert_eq!(class, Err(Class::ZstdMalformed), "{cut}");
        }
        for frame in [[&whole[..], b"x"].concat(), [&whole[..], &whole].concat(), b"PK\x03\x04".to_vec()] {
            assert_eq!(unpack(&frame, 50_000, None).unwrap_err().class(), Class::ZstdMalformed);
        }
    }

    #[test]
    fn a_window_that_takes_much_memory_is_refused() {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
        encoder.window_log(27).unwrap();
        encoder.write_all(&noise(1000)).unwrap();
        let frame = encoder.finish().unwrap();
        let error = unpack(&frame, 1000, None).unwrap_err();
        assert_eq!(error.class(), Class::LimitExceeded);
        assert!(error.to_string().contains("8 MiB") && error.to_string().contains("level 19"), "{error}");
    }

    #[test]
    fn a_scratch_folder_that_takes_nothing_is_told() {
        let frame = packed(&noise(2 * SMALL_BYTES));
        let error = unpack(&frame, u64::MAX, Some(Path::new("/nonexistent/scratch"))).unwrap_err();
        assert_eq!(error.class(), Class::Scratch);
        assert!(error.to_string().contains("/nonexistent/scratch"), "{error}");
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let folder = tempfile::tempdir().unwrap();
        let frame = packed(b"bytes");
        std::fs::write(folder.path().join("f"), frame.repeat(400)).unwrap();
        let file = Source::open(folder.path()).unwrap().file("f").unwrap();
        let unpacker = Unpacker::new(None, 0);
        let get = |index: u64, most| {
            let length = frame.len() as u64;
            unpacker.get(&file, index * length, length, most).unwrap()
        };
        let first = get(0, 5);
        assert!(Arc::ptr_eq(&first, &get(0, 5)), "it is unpacked once");
        for index in 1..400 {
            get(index, 5);
        }
        assert!(!Arc::ptr_eq(&first, &get(0, 5)), "by number");
        let last = get(399, 5);
        get(1, KEPT_BYTES);
        assert!(!Arc::ptr_eq(&last, &get(399, 5)), "by size");
    }
}
