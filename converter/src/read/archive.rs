//! A `torch.save` archive, wherever it lies: a whole file, or an item somewhere in a file of a distributed checkpoint.
//!
//! [`super::zip`] knows what the records mean; this reads them. Small entries (`data.pkl`, `byteorder`) are read whole
//! and checked against their CRC-32; of storages, which may be gigabytes, only the place is found out.

use std::collections::HashMap;

use weighbridge_schemas::error::shorten;

use super::unpack::Readable;
use super::zip;
use crate::checkpoint::Record;
use crate::error::{Class, ReadError, Result};

/// Longest `byteorder` entry, in bytes.
const BYTEORDER_BYTES: u64 = 16;
/// A gap between local headers up to this size is read and thrown away, since another read would cost more.
const READ_THROUGH_BYTES: u64 = 4096;
/// Most that is read at once for local headers, in bytes.
const HEADERS_BYTES: u64 = 1 << 20;

/// An archive in `offset..offset + length` of some bytes.
pub(super) struct Archive<'r, 's> {
    pub(super) bytes: &'r Readable<'s>,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Most entries that it may have.
    pub(super) entries: u64,
    /// Whether its directory and pickle count as the checkpoint's metadata, since they stay in memory while it is
    /// listed.
    pub(super) is_metadata: bool,
}

impl Archive<'_, '_> {
    /// The central directory's bytes, and what the end records say of it.
    pub(super) fn directory(&self) -> Result<(zip::Place, Vec<u8>)> {
        let tail_length = self.length.min(zip::TAIL);
        let tail = self.read(self.length.saturating_sub(tail_length), tail_length)?;
        let place = zip::find_directory(&tail, self.length, self.entries)?;
        let length = place.bytes.end.saturating_sub(place.bytes.start);
        let bytes = self.read_whole(place.bytes.start, length)?;
        Ok((place, bytes))
    }

    /// An entry's data, of at most `most` bytes, its checksum checked.
    pub(super) fn data(
        &self,
        directory: &zip::Directory<'_>,
        entry: &zip::Entry<'_>,
        most: u64,
    ) -> Result<Vec<u8>> {
        if entry.length > most {
            let why = format!("{:?} has {} bytes; {most} are the most", shorten(entry.name), entry.length);
            return Err(ReadError::new(Class::LimitExceeded, why));
        }
        let bytes = self.read_whole(self.data_start(entry)?, entry.length)?;
        let crc32 = crc32fast::hash(&bytes);
        if directory.has_checksums && crc32 != entry.crc32 {
            return Err(wrong_checksum(&shorten(entry.name), entry.crc32, crc32));
        }
        Ok(bytes)
    }

    /// Checks that numbers are stored as this machine has them.
    pub(super) fn check_byteorder(&self, directory: &zip::Directory<'_>, prefix: &str) -> Result<()> {
        let Some(entry) = directory.find(&format!("{prefix}byteorder")) else { return Ok(()) };
        let why = match self.data(directory, &entry, BYTEORDER_BYTES)?.as_slice() {
            b"little" => return Ok(()),
            b"big" => {
                "it was saved on a big-endian machine, whose numbers are not swapped; save it on a \
                 little-endian one"
            }
            _ => "its byte order is neither little nor big",
        };
        Err(ReadError::new(Class::BadByteorder, why))
    }

    /// Where the data of `entry` starts in the archive.
    pub(super) fn data_start(&self, entry: &zip::Entry<'_>) -> Result<u64> {
        zip::data_start(entry, &self.read(entry.header, local_length(entry))?)
    }

    /// The records of `entries`, in any order, by where their headers start; headers that lie near each other are
    /// read together.
    pub(super) fn records(&self, mut entries: Vec<zip::Entry<'_>>) -> Result<HashMap<u64, Record>> {
        entries.sort_unstable_by_key(|entry| entry.header);
        let mut records = HashMap::with_capacity(entries.len());
        let mut rest = entries.as_slice();
        while let Some(first) = rest.first() {
            let mut end = first.header.saturating_add(local_length(first));
            let near = rest.iter().take_while(|entry| {
                let reach = entry.header.saturating_add(local_length(entry));
                let is_near = entry.header <= end.saturating_add(READ_THROUGH_BYTES)
                    && reach.saturating_sub(first.header) <= HEADERS_BYTES;
                end = if is_near { end.max(reach) } else { end };
                is_near
            });
            // The first one, however long its name, is always read.
            let (group, after) = rest.split_at_checked(near.count().max(1)).unwrap_or((rest, &[]));
            let headers = self.read(first.header, end.saturating_sub(first.header))?;
            for entry in group {
                let at = usize::try_from(entry.header.saturating_sub(first.header)).unwrap_or(usize::MAX);
                let start = zip::data_start(entry, headers.get(at..).unwrap_or_default())?;
                records.insert(entry.header, self.record(entry, start)?);
            }
            rest = after;
        }
        Ok(records)
    }

    /// The record of `entry`, whose data start at `start` of the archive.
    pub(super) fn record(&self, entry: &zip::Entry<'_>, start: u64) -> Result<Record> {
        let offset = self.place(start, entry.length)?;
        Ok(Record { offset, length: entry.length, crc32: entry.crc32 })
    }

    /// The `length` bytes from byte `at` of the archive on.
    fn read(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        self.bytes.read_vec_at(self.place(at, length)?, length)
    }

    /// The same, counted as metadata where the archive is.
    fn read_whole(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        match self.bytes {
            Readable::File(file) if self.is_metadata => {
                file.read_metadata_at(self.place(at, length)?, length)
            }
            _ => self.read(at, length),
        }
    }

    /// Where byte `at` of the archive lies, if `length` bytes from there on lie in it.
    fn place(&self, at: u64, length: u64) -> Result<u64> {
        let start = self.offset.checked_add(at);
        let within = at.checked_add(length).is_some_and(|end| end <= self.length);
        start.filter(|_| within).ok_or_else(|| {
            let why = format!("{length} bytes at byte {at} of an archive of {} bytes", self.length);
            ReadError::new(Class::ZipMalformed, why)
        })
    }
}

/// The length of an entry's local header as far as it is looked at.
fn local_length(entry: &zip::Entry<'_>) -> u64 {
    (zip::LOCAL as u64).saturating_add(entry.name.len() as u64)
}

/// Bytes that are not the ones that were saved.
pub(super) fn wrong_checksum(what: &str, recorded: u32, found: u32) -> ReadError {
    let why = format!(
        "{what:?} has the CRC-32 {found:08x}, but {recorded:08x} is recorded: the file was damaged after it was \
         saved; copy it again, or save it anew"
    );
    ReadError::new(Class::ZipCrc, why)
}
