//! Sizes and checksums that somebody declared, checked against the bytes in the pass that reads them anyway.
//!
//! Two kinds: the BLAKE3 of a whole file, which a checkpoint manifest may declare, and the CRC-32 of a zip record,
//! which the archive's directory holds. Reads come in any order, from any thread, overlap, and leave gaps (headers are
//! read twice, dropped tensors never). What a read gives is hashed at once, each byte at most once; what could not be
//! used is read again when the publish has read all that it needs, and then the digests are compared. Until that has
//! been done, nothing may be promoted.
//!
//! All that is kept on the way is bounded by [`limits::DIGEST_BYTES`] for all files and records together.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use weighbridge_schemas::ids::FileDigest;
use weighbridge_schemas::limits;

use crate::checkpoint::{Checkable, Item, Record, SliceRecord};
use crate::error::{Class, ReadError, Result};
use crate::source::lock;

mod crc;
mod partial;
#[cfg(test)]
mod tests;
mod tree;

/// What is read at a time when the rest of a file is hashed, in bytes.
pub(super) const READ_BYTES: u64 = 1 << 20;
/// Most threads that hash the rest; each has a buffer of [`READ_BYTES`].
const MOST_THREADS: usize = 16;
/// What an open record takes beside its runs.
const RECORD_BYTES: i64 = 128;

/// The memory that all digests in the making may still take.
#[derive(Debug)]
pub(super) struct Budget(AtomicI64);

impl Default for Budget {
    fn default() -> Self {
        Self(AtomicI64::new(limits::DIGEST_BYTES))
    }
}

impl Budget {
    /// Takes so many bytes, if there are as many, or if it `must` be.
    fn take(&self, bytes: i64, must: bool) -> bool {
        let enough = |left: i64| (must || left >= bytes).then(|| left.saturating_sub(bytes));
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).is_ok()
    }

    /// Takes so many bytes, if half of all is left then.
    fn take_of_half(&self, bytes: i64) -> bool {
        let enough = |left: i64| left.checked_sub(bytes).filter(|&left| left >= limits::DIGEST_BYTES / 2);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).is_ok()
    }

    fn give(&self, bytes: i64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What is to be checked of one file's bytes.
#[derive(Debug)]
pub(super) struct FileDigests {
    whole: Option<Whole>,
    records: Mutex<Records>,
    budget: Arc<Budget>,
}

/// The digest of a whole file.
#[derive(Debug)]
struct Whole {
    declared: FileDigest,
    tree: tree::Tree,
}

/// The zip records of a file of which anything was read.
#[derive(Debug, Default)]
struct Records {
    open: BTreeMap<SliceRecord, crc::Runs>,
    checked: BTreeSet<Checkable>,
}

impl Records {
    /// The runs of a record; `None` where there is no room for more.
    fn open(&mut self, record: SliceRecord, budget: &Budget, must: bool) -> Option<&mut crc::Runs> {
        match self.open.entry(record) {
            Entry::Occupied(open) => Some(open.into_mut()),
            Entry::Vacant(place) => {
                budget.take(RECORD_BYTES, must).then(|| place.insert(crc::Runs::default()))
            }
        }
    }

    /// Compares a record's CRC once all of it has been hashed.
    fn close_if_whole(&mut self, record: SliceRecord, budget: &Budget) -> Result<()> {
        let SliceRecord { record: Record { offset, .. }, .. } = record;
        let whole =
            self.open.get_mut(&record).and_then(|runs| runs.close(offset..record.record.end(), budget));
        let Some(found) = whole else { return Ok(()) };
        self.let_go(record, budget);
        compare(record.record, found)?;
        self.checked.insert(record.checkable());
        Ok(())
    }

    /// Forgets the runs of a record.
    fn let_go(&mut self, record: SliceRecord, budget: &Budget) {
        if let Some(runs) = self.open.remove(&record) {
            runs.give_back(budget);
            budget.give(RECORD_BYTES);
        }
    }
}

impl FileDigests {
    /// Those of a file of `length` bytes, with the digest that was declared for it.
    pub(super) fn new(declared: Option<FileDigest>, length: u64, budget: &Arc<Budget>) -> Self {
        let whole =
            declared.map(|declared| Whole { declared, tree: tree::Tree::new(length, Arc::clone(budget)) });
        Self { whole, records: Mutex::default(), budget: Arc::clone(budget) }
    }

    /// Takes what a read of `bytes` at `offset` of the file gave.
    pub(super) fn read(&self, offset: u64, bytes: &[u8]) {
        if let Some(whole) = &self.whole {
            whole.tree.update(offset, bytes);
        }
    }

    /// Takes what a read of `bytes` at `offset` of the file gave, which lie in `record`.
    ///
    /// # Errors
    /// [`Class::ZipCrc`] where these were the record's last, and it is not what its checksum says.
    pub(super) fn read_of(&self, record: SliceRecord, offset: u64, bytes: &[u8]) -> Result<()> {
        self.update(record, offset, bytes, false)
    }

    fn update(&self, record: SliceRecord, offset: u64, bytes: &[u8], must: bool) -> Result<()> {
        let (length, place) = (bytes.len() as u64, record.record);
        if (offset, length) == (place.offset, place.length) {
            return self.update_at_once(record, bytes);
        }
        let range = offset.max(place.offset)..offset.saturating_add(length).min(place.end());
        for run in self.claim(record, range, must) {
            let place = |at: u64| usize::try_from(at.saturating_sub(offset)).unwrap_or(usize::MAX);
            let fresh = bytes.get(place(run.start)..place(run.end)).unwrap_or_default();
            self.add(record, run, crc32fast::hash(fresh))?;
        }
        Ok(())
    }

    /// Takes all bytes of a record, most often a small one.
    fn update_at_once(&self, record: SliceRecord, bytes: &[u8]) -> Result<()> {
        if self.has_checked(record.checkable()) {
            return Ok(());
        }
        compare(record.record, crc32fast::hash(bytes))?;
        let mut records = lock(&self.records);
        records.let_go(record, &self.budget);
        records.checked.insert(record.checkable());
        Ok(())
    }

    fn claim(&self, record: SliceRecord, range: Range<u64>, must: bool) -> Vec<Range<u64>> {
        let mut records = lock(&self.records);
        if range.is_empty() || records.checked.contains(&record.checkable()) {
            return Vec::new();
        }
        let runs = records.open(record, &self.budget, must);
        runs.map(|runs| runs.claim(range, &self.budget, must)).unwrap_or_default()
    }

    fn add(&self, record: SliceRecord, run: Range<u64>, crc: u32) -> Result<()> {
        let mut records = lock(&self.records);
        let Some(runs) = records.open.get_mut(&record) else { return Ok(()) };
        runs.add(run, crc, &self.budget);
        records.close_if_whole(record, &self.budget)
    }

    /// Whether the checksum of `what` has been checked.
    pub(super) fn has_checked(&self, what: Checkable) -> bool {
        lock(&self.records).checked.contains(&what)
    }

    /// Notes that an item has no checksum.
    pub(super) fn pass_item(&self, item: Item) {
        lock(&self.records).checked.insert(Checkable::Item(item));
    }

    /// Hashes what is left of a record, which `read` reads into the buffer that it is given.
    ///
    /// # Errors
    /// [`Class::ZipCrc`] where it is not what its checksum says; else as `read` fails.
    pub(super) fn finish_record(
        &self,
        record: SliceRecord,
        buffer: &mut Vec<u8>,
        read: impl Fn(&mut [u8], u64) -> Result<()>,
    ) -> Result<()> {
        let place = record.record;
        let mut from = place.offset;
        while let Some(gap) = self.gap(record, from..place.end()) {
            let length = gap.end.saturating_sub(gap.start).min(READ_BYTES);
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            read(buffer, gap.start)?;
            self.update(record, gap.start, buffer, true)?;
            from = gap.start.saturating_add(length);
        }
        if place.length == 0 {
            return compare(place, crc32fast::hash(b""));
        }
        if self.has_checked(record.checkable()) {
            return Ok(());
        }
        Err(ReadError::new(Class::ZipCrc, "its stored bytes could not be checked; publish again"))
    }

    /// The first part of a record's `range` that has not been hashed.
    fn gap(&self, record: SliceRecord, range: Range<u64>) -> Option<Range<u64>> {
        let records = lock(&self.records);
        if range.is_empty() || records.checked.contains(&record.checkable()) {
            return None;
        }
        match records.open.get(&record) {
            Some(runs) => runs.gap(range),
            None => Some(range),
        }
    }

    /// How many bytes of the file its declared digest still wants.
    pub(super) fn missing_bytes(&self) -> u64 {
        self.whole.as_ref().map_or(0, |whole| whole.tree.missing_bytes())
    }

    /// From now on the declared digest keeps all that it is given.
    pub(super) fn finish(&self) {
        if let Some(whole) = &self.whole {
            whole.tree.finish();
        }
    }

    /// The first bytes from `from` on that the declared digest still wants, [`READ_BYTES`] at most.
    pub(super) fn missing(&self, from: u64) -> Option<Range<u64>> {
        self.whole.as_ref().and_then(|whole| whole.tree.missing(from, READ_BYTES))
    }

    /// Compares the digest of the whole file with the declared one.
    ///
    /// # Errors
    /// [`Class::FileDigestMismatch`], also where bytes are missing.
    pub(super) fn check(&self) -> Result<()> {
        let Some(whole) = &self.whole else { return Ok(()) };
        let found = whole.tree.root().map(|root| FileDigest::from_bytes(*root.as_bytes()));
        if found == Some(whole.declared) {
            return Ok(());
        }
        let found = found.map_or_else(|| "not known".to_owned(), |found| found.to_string());
        let detail = format!(
            "its BLAKE3 is {found}, but the checkpoint manifest declares {}: the file was altered, damaged or \
             replaced after the manifest was written; save or copy the checkpoint again",
            whole.declared
        );
        Err(ReadError::new(Class::FileDigestMismatch, detail))
    }
}

fn compare(record: Record, found: u32) -> Result<()> {
    if found == record.crc32 {
        return Ok(());
    }
    let detail = format!(
        "the CRC-32 of its {} stored bytes at byte {} is {found:08x}, but the archive's directory says {:08x}: the \
         bytes were damaged after they were saved; copy or save the checkpoint again",
        record.length, record.offset, record.crc32
    );
    Err(ReadError::new(Class::ZipCrc, detail))
}

/// Does all work that `next` gives, on up to `threads` threads; `each` is given a buffer of its thread. The first
/// failure ends it.
///
/// # Errors
/// As `each` fails.
pub(crate) fn on_threads<W: Send>(
    threads: usize,
    next: impl FnMut() -> Option<W> + Send,
    each: impl Fn(W, &mut Vec<u8>) -> Result<()> + Sync,
) -> Result<()> {
    let (next, stopped) = (Mutex::new(next), AtomicBool::new(false));
    let worker = || {
        let mut buffer = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let work = lock(&next)();
            let Some(work) = work else { break };
            each(work, &mut buffer).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let more = 1..threads.clamp(1, MOST_THREADS);
        // A machine that gives no more threads is served by fewer.
        let others: Vec<_> =
            more.map_while(|_| std::thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
        let mut done = worker();
        for other in others {
            let ended = other.join().unwrap_or_else(|_| {
                Err(ReadError::new(Class::Unreadable, "a thread that hashed it ended early"))
            });
            done = done.and(ended);
        }
        done
    })
}
