//! The records of the zip archives that `torch.save` writes, whole files or items of a distributed checkpoint.
//!
//! An archive ends with an end-of-central-directory record, before which stand (always, in torch's files) a ZIP64 end
//! record and its locator; they point to the central directory, which lists every entry's name, size and local
//! header. The format is PKWARE's APPNOTE 6.3, sections 4.3 and 4.5. Entries are stored, never compressed. Sizes hold
//! in the central directory only (local headers leave them zero and a descriptor follows the data); where an entry's
//! data starts follows from the *local* header alone, whose padding the central directory does not know.
//!
//! This parser is stricter than zip readers need to be: torch writes no comments, no gaps between directory and end
//! records, one disk. What differs has been altered or cut, and is refused. All offsets are relative to the archive.

use std::collections::HashMap;
use std::ops::Range;

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};

/// The end-of-central-directory record without a comment.
const END: usize = 22;
/// The locator of the ZIP64 end record.
const LOCATOR: usize = 20;
/// The ZIP64 end record without extensible data.
const END64: usize = 56;
/// The fixed part of a central directory entry.
const ENTRY: usize = 46;
/// The fixed part of a local header.
pub(super) const LOCAL: usize = 30;
/// How much of an archive's end [`find_directory`] needs, at most.
pub(super) const TAIL: u64 = (END + LOCATOR + END64) as u64;

/// A value that says: see the ZIP64 record.
const SEE_ZIP64: u64 = 0xffff_ffff;

/// A stored entry, as the central directory has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry<'d> {
    /// The full name.
    pub(super) name: &'d str,
    /// Where the local header starts.
    pub(super) header: u64,
    /// The data's length in bytes.
    pub(super) length: u64,
    /// The data's CRC-32.
    pub(super) crc32: u32,
    /// Where the next entry, or the central directory, starts: the data ends there at the latest.
    pub(super) limit: u64,
}

/// Where a central directory lies, by the archive's end records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The bytes it takes.
    pub(super) bytes: Range<u64>,
    entries: u64,
}

/// Finds the central directory, of at most `most` entries, of an archive of `length` bytes by its last bytes, `tail`
/// (at most [`TAIL`]).
pub(super) fn find_directory(tail: &[u8], length: u64, most: u64) -> Result<Place> {
    let (before, end) = tail.split_last_chunk::<END>().ok_or_else(no_end)?;
    if !end.starts_with(b"PK\x05\x06") || u16_at(end, 20)? != 0 {
        return Err(no_end());
    }
    let mut directory = [u16_at(end, 10)?.into(), u32_at(end, 12)?.into(), u32_at(end, 16)?.into()];
    let mut end_at = length.saturating_sub(END as u64);
    let disks = (u16_at(end, 4)?, u16_at(end, 6)?, u16_at(end, 8)? == u16_at(end, 10)?);
    if disks != (0, 0, true) {
        return Err(malformed("the archive spans several disks"));
    }
    if let Some((before, locator)) = before.split_last_chunk::<LOCATOR>()
        && locator.starts_with(b"PK\x06\x07")
    {
        let end64_at = end_at.checked_sub((LOCATOR + END64) as u64);
        let end64_at = end64_at.filter(|&at| u64_at(locator, 8).is_ok_and(|said| said == at));
        end_at = end64_at.ok_or_else(|| malformed("the ZIP64 end record is not right before its locator"))?;
        let wide = end64(before)?;
        agree(directory, wide)?;
        directory = wide;
    }
    let [entries, size, start] = directory;
    if start.checked_add(size) != Some(end_at) {
        let why =
            format!("its directory of {size} bytes at {start} does not end at the end records, at {end_at}");
        return Err(malformed(why));
    }
    let most_bytes = most.saturating_mul(limits::ZIP_DIRECTORY_ENTRY_BYTES);
    if entries > most || size > most_bytes {
        let why = format!(
            "an archive of {entries} entries with a directory of {size} bytes; the most are {most} and {most_bytes}"
        );
        return Err(ReadError::new(Class::LimitExceeded, why));
    }
    Ok(Place { bytes: start..end_at, entries })
}

/// The entries, size and start of the directory by the ZIP64 end record at the end of `before`.
fn end64(before: &[u8]) -> Result<[u64; 3]> {
    let record = before.last_chunk::<END64>().filter(|record| record.starts_with(b"PK\x06\x06"));
    let record = record.ok_or_else(|| malformed("the ZIP64 end record is missing"))?;
    let whole = u64_at(record, 4)? == (END64 - 12) as u64;
    let one_disk = u32_at(record, 16)? == 0 && u32_at(record, 20)? == 0;
    if !whole || !one_disk || u64_at(record, 24)? != u64_at(record, 32)? {
        return Err(malformed("the ZIP64 end record makes no sense"));
    }
    Ok([u64_at(record, 32)?, u64_at(record, 40)?, u64_at(record, 48)?])
}

/// Checks that the end record says what the ZIP64 one says, or leaves it to it.
fn agree(narrow: [u64; 3], wide: [u64; 3]) -> Result<()> {
    let most = [0xffff, SEE_ZIP64, SEE_ZIP64];
    let agree =
        narrow.iter().zip(wide).zip(most).all(|((&narrow, wide), most)| narrow == wide || narrow == most);
    if agree { Ok(()) } else { Err(malformed("the two end records disagree")) }
}

/// An archive's entries, by name.
#[derive(Debug)]
pub(super) struct Directory<'d> {
    pub(super) by_name: HashMap<&'d str, Entry<'d>>,
    /// Whether the archive records checksums. `torch.serialization.set_crc32_options(False)` leaves all of them 0.
    pub(super) has_checksums: bool,
}

impl<'d> Directory<'d> {
    /// Reads the central directory that `bytes` is.
    pub(super) fn parse(bytes: &'d [u8], place: &Place) -> Result<Self> {
        let mut entries = Vec::new();
        let mut rest = bytes;
        for _ in 0..place.entries {
            let (entry, after) = Self::entry(rest)?;
            entries.push(entry);
            rest = after;
        }
        if !rest.is_empty() {
            return Err(malformed(format!("{} bytes follow the directory's last entry", rest.len())));
        }
        bound(&mut entries, place.bytes.start)?;
        let has_checksums = entries.iter().any(|entry| entry.crc32 != 0);
        let mut by_name = HashMap::with_capacity(entries.len());
        for entry in entries {
            if by_name.insert(entry.name, entry).is_some() {
                let why = format!("the archive has two entries {:?}", shorten(entry.name));
                return Err(ReadError::new(Class::ZipDuplicateEntry, why));
            }
        }
        Ok(Self { by_name, has_checksums })
    }

    /// The first entry of `bytes`, and what follows it.
    fn entry(bytes: &'d [u8]) -> Result<(Entry<'d>, &'d [u8])> {
        let (fixed, rest) = bytes.split_first_chunk::<ENTRY>().ok_or_else(cut)?;
        if !fixed.starts_with(b"PK\x01\x02") {
            return Err(malformed("an entry of the directory does not begin with its signature"));
        }
        let (name, rest) = rest.split_at_checked(u16_at(fixed, 28)?.into()).ok_or_else(cut)?;
        let (extra, rest) = rest.split_at_checked(u16_at(fixed, 30)?.into()).ok_or_else(cut)?;
        let (_, rest) = rest.split_at_checked(u16_at(fixed, 32)?.into()).ok_or_else(cut)?;
        let name = std::str::from_utf8(name).map_err(|_| malformed("an entry's name is not UTF-8"))?;
        if u16_at(fixed, 34)? != 0 {
            return Err(malformed(format!("{:?} is said to lie on another disk", shorten(name))));
        }
        check_stored(name, u16_at(fixed, 8)?, u16_at(fixed, 10)?)?;
        let narrow = [u32_at(fixed, 24)?.into(), u32_at(fixed, 20)?.into(), u32_at(fixed, 42)?.into()];
        let [length, stored, header] = widen(narrow, extra)?;
        if length != stored {
            let name = shorten(name);
            return Err(malformed(format!("{name:?} is stored, but has sizes {length} and {stored}")));
        }
        Ok((Entry { name, header, length, crc32: u32_at(fixed, 16)?, limit: 0 }, rest))
    }

    /// The entry of this name.
    pub(super) fn get(&self, name: &str) -> Result<Entry<'d>> {
        self.find(name).ok_or_else(|| {
            ReadError::new(Class::ZipMissingEntry, format!("the archive has no entry {:?}", shorten(name)))
        })
    }

    /// The entry of this name, if there is one.
    pub(super) fn find(&self, name: &str) -> Option<Entry<'d>> {
        self.by_name.get(name).copied()
    }

    /// What precedes `data.pkl` in its name: the folder that all of torch's entries lie in, with its `/`.
    pub(super) fn prefix(&self) -> Result<&'d str> {
        let mut prefixes = self.by_name.keys().filter_map(|name| {
            let prefix = name.strip_suffix("data.pkl")?;
            prefix.strip_suffix('/').is_some_and(|folder| !folder.contains('/')).then_some(prefix)
        });
        let prefix = prefixes.next().ok_or_else(|| {
            let why = "the archive has no data.pkl; it was not written by torch.save, or not whole";
            ReadError::new(Class::ZipMissingEntry, why)
        })?;
        if prefixes.next().is_some() {
            return Err(ReadError::new(Class::ZipDuplicateEntry, "the archive has two data.pkl"));
        }
        match self.by_name.keys().find(|name| !name.starts_with(prefix)) {
            None => Ok(prefix),
            Some(name) => {
                let name = shorten(name);
                let why = format!(
                    "{name:?} lies outside the folder {prefix:?}, and torch.save puts everything into one: the file \
                     was altered; save it anew"
                );
                Err(malformed(why))
            }
        }
    }
}

/// Where the data of `entry` starts, by its local header: `local` is its [`LOCAL`] bytes and then the name.
pub(super) fn data_start(entry: &Entry<'_>, local: &[u8]) -> Result<u64> {
    let (fixed, rest) = local.split_first_chunk::<LOCAL>().ok_or_else(cut)?;
    let name_length = u16_at(fixed, 26)?;
    let same_name = rest.get(..name_length.into()) == Some(entry.name.as_bytes());
    if !fixed.starts_with(b"PK\x03\x04") || !same_name {
        let name = shorten(entry.name);
        return Err(malformed(format!("there is no local header of {name:?} at byte {}", entry.header)));
    }
    check_stored(entry.name, u16_at(fixed, 6)?, u16_at(fixed, 8)?)?;
    let descriptor_follows = u16_at(fixed, 6)? & 8 != 0;
    let size = u64::from(u32_at(fixed, 22)?);
    if !descriptor_follows && size != entry.length && size != SEE_ZIP64 {
        let why = format!(
            "{:?} has {size} bytes by one header, {} by the other",
            shorten(entry.name),
            entry.length
        );
        return Err(malformed(why));
    }
    let before = LOCAL as u64 + u64::from(name_length) + u64::from(u16_at(fixed, 28)?);
    let start = entry.header.checked_add(before);
    let inside = |&start: &u64| start.checked_add(entry.length).is_some_and(|end| end <= entry.limit);
    start.filter(inside).ok_or_else(|| overlap(entry))
}

/// Sets every entry's limit: entries may neither overlap nor reach the directory.
fn bound(entries: &mut [Entry<'_>], directory: u64) -> Result<()> {
    entries.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.header));
    let mut limit = directory;
    for entry in entries {
        entry.limit = limit;
        let least = LOCAL as u64 + entry.name.len() as u64;
        let end = entry.header.checked_add(least).and_then(|start| start.checked_add(entry.length));
        if end.is_none_or(|end| end > limit) {
            return Err(overlap(entry));
        }
        limit = entry.header;
    }
    Ok(())
}

/// Takes from the ZIP64 extra field what the fixed fields (size, stored size, header) leave to it, in this order.
fn widen(mut narrow: [u64; 3], mut extra: &[u8]) -> Result<[u64; 3]> {
    while let Some(([id0, id1, size0, size1], rest)) = extra.split_first_chunk::<4>() {
        let size = u16::from_le_bytes([*size0, *size1]);
        let (field, after) = rest.split_at_checked(size.into()).ok_or_else(cut)?;
        extra = after;
        if u16::from_le_bytes([*id0, *id1]) != 1 {
            continue;
        }
        let mut wide = field.as_chunks::<8>().0.iter();
        for value in narrow.iter_mut().filter(|value| **value == SEE_ZIP64) {
            *value = u64::from_le_bytes(*wide.next().ok_or_else(|| malformed("a ZIP64 field is too short"))?);
        }
        return Ok(narrow);
    }
    Ok(narrow)
}

fn check_stored(name: &str, flags: u16, method: u16) -> Result<()> {
    let name = shorten(name);
    if flags & 0x2041 != 0 {
        return Err(malformed(format!("{name:?} is encrypted")));
    }
    if method != 0 && name.contains("/code/") {
        return Err(script());
    }
    if method != 0 {
        let why =
            format!("{name:?} is compressed (method {method}); torch.save stores, so save it anew by torch");
        return Err(ReadError::new(Class::ZipCompressed, why));
    }
    Ok(())
}

/// TorchScript and exported archives have code beside their tensors, compressed or not.
pub(super) fn script() -> ReadError {
    let why = "it is a TorchScript archive (torch.jit.save), a program and not a checkpoint; save its weights: \
               torch.save(module.state_dict(), ...)";
    ReadError::new(Class::UnsupportedFormat, why)
}

fn overlap(entry: &Entry<'_>) -> ReadError {
    malformed(format!(
        "{:?}, of {} bytes at byte {}, reaches over byte {}, where something else starts",
        shorten(entry.name),
        entry.length,
        entry.header,
        entry.limit
    ))
}

fn no_end() -> ReadError {
    malformed(
        "the archive does not end with an end-of-central-directory record: it is cut, or its length is wrong",
    )
}

fn cut() -> ReadError {
    malformed("a record of the archive breaks off")
}

fn malformed(why: impl Into<String>) -> ReadError {
    ReadError::new(Class::ZipMalformed, why)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or_else(cut)
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An archive as torch writes it: padded local headers, sizes in the directory only, ZIP64 end records.
    pub(in crate::read) fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
        archive_with(entries, |_| {}, true)
    }

    /// The same, its directory altered, and with ZIP64 end records or without.
    fn archive_with(entries: &[(&str, &[u8])], alter: impl Fn(&mut Vec<u8>), zip64: bool) -> Vec<u8> {
        let (mut bytes, mut directory) = (Vec::new(), Vec::new());
        for (name, data) in entries {
            let header = u32::try_from(bytes.len()).unwrap();
            let sizes = [name.len(), data.len()].map(|size| u32::try_from(size).unwrap().to_le_bytes());
            bytes.extend(b"PK\x03\x04\0\0\x08\x08\0\0");
            bytes.extend([0; 16]);
            bytes.extend([sizes[0][0], sizes[0][1], 9, 0]);
            bytes.extend(name.as_bytes());
            bytes.extend(b"FB\x05\0ZZZZZ");
            bytes.extend(*data);
            directory.extend(b"PK\x01\x02\0\0\0\0\x08\x08\0\0\0\0\0\0");
            directory.extend(crc32fast::hash(data).to_le_bytes());
            directory.extend([sizes[1], sizes[1], [sizes[0][0], sizes[0][1], 0, 0]].concat());
            directory.extend([0; 10]);
            directory.extend(header.to_le_bytes());
            directory.extend(name.as_bytes());
        }
        alter(&mut directory);
        let (count, start) = (entries.len() as u64, bytes.len() as u64);
        let (size, end64) = (directory.len() as u64, start + directory.len() as u64);
        bytes.extend(directory);
        if zip64 {
            bytes.extend(b"PK\x06\x06\x2c\0\0\0\0\0\0\0\x1e\x03\x2d\0\0\0\0\0\0\0\0\0");
            bytes.extend([count, count, size, start].map(u64::to_le_bytes).concat());
            bytes.extend(b"PK\x06\x07\0\0\0\0");
            bytes.extend(end64.to_le_bytes());
            bytes.extend(b"\x01\0\0\0");
        }
        bytes.extend(b"PK\x05\x06\0\0\0\0");
        bytes.extend([&count.to_le_bytes()[..2], &count.to_le_bytes()[..2]].concat());
        bytes.extend([&size.to_le_bytes()[..4], &start.to_le_bytes()[..4], &[0, 0]].concat());
        bytes
    }

    fn at(place: u64) -> usize {
        usize::try_from(place).unwrap()
    }

    /// The data of the entry `name`, read as a reader of files would.
    fn read(archive: &[u8], name: &str) -> Result<Vec<u8>> {
        let tail = archive.len().saturating_sub(at(TAIL));
        let place = find_directory(&archive[tail..], archive.len() as u64, 100)?;
        let directory = &archive[at(place.bytes.start)..at(place.bytes.end)];
        let directory = Directory::parse(directory, &place)?;
        directory.prefix()?;
        let entry = directory.get(name)?;
        let start = at(data_start(&entry, &archive[at(entry.header)..])?);
        Ok(archive[start..start + at(entry.length)].to_vec())
    }

    fn class(archive: &[u8]) -> Class {
        read(archive, "a/data/0").unwrap_err().class()
    }

    const ENTRIES: &[(&str, &[u8])] =
        &[("a/data.pkl", b"pickle"), ("a/data/0", b"bytes"), ("a/version", b"3\n")];

    #[test]
    fn data_lies_behind_the_local_header() {
        for zip64 in [true, false] {
            let archive = archive_with(ENTRIES, |_| {}, zip64);
            assert_eq!(read(&archive, "a/data/0").unwrap(), b"bytes");
            assert_eq!(read(&archive, "a/data.pkl").unwrap(), b"pickle");
        }
    }

    #[test]
    fn sizes_may_stand_in_the_zip64_field() {
        let widen = |directory: &mut Vec<u8>| {
            directory[20..28].fill(0xff);
            directory[30] = 20;
            let field = [&b"\x01\0\x10\0"[..], &6u64.to_le_bytes(), &6u64.to_le_bytes()].concat();
            directory.splice(56..56, field);
        };
        assert_eq!(read(&archive_with(ENTRIES, widen, true), "a/data.pkl").unwrap(), b"pickle");
        let cut = |directory: &mut Vec<u8>| {
            widen(directory);
            directory[58] = 8;
        };
        assert_eq!(class(&archive_with(ENTRIES, cut, true)), Class::ZipMalformed);
    }

    #[test]
    fn altered_directories_are_refused() {
        type Alter = fn(&mut Vec<u8>);
        let cases: [(Alter, Class); 9] = [
            (|directory| directory[8] |= 1, Class::ZipMalformed),
            (|directory| directory[10] = 8, Class::ZipCompressed),
            (|directory| directory[24] += 1, Class::ZipMalformed),
            (|directory| directory[20..28].fill(0x7f), Class::ZipMalformed),
            // Longer than the room up to the next entry by one byte.
            (|directory| directory[20..28].copy_from_slice(b"\x10\0\0\0\x10\0\0\0"), Class::ZipMalformed),
            (|directory| directory[46] = b'b', Class::ZipMalformed),
            (|directory| directory[42] = 1, Class::ZipMalformed),
            (|directory| directory.push(0), Class::ZipMalformed),
            (|directory| directory[34] = 1, Class::ZipMalformed),
        ];
        for (index, (alter, expected)) in cases.into_iter().enumerate() {
            let archive = archive_with(ENTRIES, alter, true);
            let name = if index == 5 { "b/data.pkl" } else { "a/data.pkl" };
            let error = read(&archive, name).unwrap_err();
            assert_eq!(error.class(), expected, "{index}: {error}");
        }
    }

    #[test]
    fn compressed_code_is_told_as_a_program() {
        let entries = [ENTRIES, &[("a/code/x.py", b"code")]].concat();
        let compressed = |directory: &mut Vec<u8>| {
            let at = directory.len() - "a/code/x.py".len() - ENTRY;
            directory[at + 10] = 8;
        };
        let error = read(&archive_with(&entries, compressed, true), "a/data/0").unwrap_err();
        assert_eq!(error.class(), Class::UnsupportedFormat);
        assert!(error.to_string().contains("TorchScript"), "{error}");
    }

    #[test]
    fn doubled_and_missing_entries_are_refused() {
        let twice = [ENTRIES, &[("a/data/0", b"other")]].concat();
        assert_eq!(class(&archive(&twice)), Class::ZipDuplicateEntry);
        let two_pickles = [ENTRIES, &[("b/data.pkl", b"other")]].concat();
        assert_eq!(class(&archive(&two_pickles)), Class::ZipDuplicateEntry);
        assert_eq!(class(&archive(&ENTRIES[..1])), Class::ZipMissingEntry);
        assert_eq!(class(&archive(&ENTRIES[1..])), Class::ZipMissingEntry);
        let outside = [ENTRIES, &[("b/data/0", b"other")]].concat();
        assert_eq!(class(&archive(&outside)), Class::ZipMalformed);
    }

    #[test]
    fn altered_end_records_are_refused() {
        let whole = archive(ENTRIES);
        for cut in 1..whole.len() {
            assert_eq!(class(&whole[..whole.len() - cut]), Class::ZipMalformed, "{cut}");
        }
        assert_eq!(class(&[&whole[..], b"\0"].concat()), Class::ZipMalformed);
        let ends = whole.len() - at(TAIL)..whole.len();
        let ignored =
            [12..16, 16..24, 60..64, 72..76].map(|range| ends.start + range.start..ends.start + range.end);
        for place in ends {
            let mut altered = whole.clone();
            altered[place] ^= 0x55;
            if !ignored.iter().any(|range| range.contains(&place)) {
                assert_eq!(class(&altered), Class::ZipMalformed, "{place}");
            }
        }
    }
}
