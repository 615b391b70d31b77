//! What the digests of one source know, told to another source of the same checkpoint.
//!
//! Several workers read a part of a checkpoint each. What their digests know travels as a document, and whoever
//! finishes takes it up: only what nobody has read is read then. What is told is bounded, the smallest is left out
//! first; so is what is taken up, by the budget of all digests. What is left out is read again.
//!
//! A document comes from outside: it is checked against the files before any of it is taken up. It can say of bytes
//! that they are right which nobody has read; but so can the chunks that come the same way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;
use weighbridge_schemas::digests::{self, PartialDigests, PartialFile};
use weighbridge_schemas::ids::FileDigest;
use weighbridge_schemas::limits;

use super::{Budget, FileDigests, Records};
use crate::checkpoint::{Checkable, Item, Record, SliceRecord};
use crate::error::{Class, ReadError, Result};
use crate::source::{Source, lock};

#[cfg(test)]
mod tests;

/// What a record or item takes that somebody else has checked.
const CHECKED_BYTES: i64 = 48;

impl Source {
    /// What this source's digests know of what is declared, as far as it fits a document.
    #[must_use]
    pub fn partial_digests(&self) -> PartialDigests {
        let files: Vec<_> = lock(&self.files).values().cloned().collect();
        let mut chosen = Chosen::default();
        for (at, file) in files.iter().enumerate() {
            file.digests.tell(file.len(), &mut |bytes, entry| chosen.add(at, file.name(), bytes, entry));
        }
        let mut entries: Vec<_> =
            chosen.entries.into_iter().map(|Reverse((_, at, entry))| (at, entry)).collect();
        entries.sort_unstable();
        let mut told = PartialDigests::default();
        for of_file in entries.chunk_by(|(at, _), (other, _)| at == other) {
            let name = of_file.first().and_then(|&(at, _)| files.get(at)).map_or("", |file| file.name());
            let mut partial = PartialFile { name: name.to_owned(), ..PartialFile::default() };
            of_file.iter().for_each(|(_, entry)| entry.put(&mut partial));
            told.files.push(partial);
        }
        told
    }

    /// Takes up what the digests of another source of this very checkpoint know. In any order, again, or by halves, it
    /// is as if this source had read what the other has read; but what the budget of digests does not hold is
    /// forgotten, and read again.
    ///
    /// # Errors
    /// [`Class::DigestsBad`] where the document cannot be one of this checkpoint; [`Class::FileDigestMismatch`] and
    /// [`Class::ZipCrc`] where what is complete now is not what was declared.
    pub fn adopt(&self, digests: &PartialDigests) -> Result<()> {
        for partial in &digests.files {
            let file = lock(&self.files).get(&partial.name).cloned();
            let file =
                file.ok_or_else(|| bad("a file that the checkpoint does not have").in_file(&partial.name))?;
            check_places(partial, file.len()).map_err(|error| error.in_file(&partial.name))?;
            file.digests.adopt(partial).map_err(|error| file.unless_changed(error))?;
        }
        Ok(())
    }
}

fn bad(what: &str) -> ReadError {
    let detail = format!(
        "another reader of the checkpoint tells digests of {what}: what it left was damaged, or is of another \
         checkpoint; convert its part again"
    );
    ReadError::new(Class::DigestsBad, detail)
}

/// Something that is told of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Entry {
    Whole(FileDigest),
    Subtree(digests::Subtree),
    Item(digests::Item),
    Record(digests::Record),
    Run(digests::Run),
}

impl Entry {
    fn put(&self, file: &mut PartialFile) {
        match *self {
            Self::Whole(digest) => file.blake3 = Some(digest),
            Self::Subtree(subtree) => file.subtrees.push(subtree),
            Self::Item(item) => file.items.push(item),
            Self::Record(record) => file.records.push(record),
            Self::Run(run) => file.runs.push(run),
        }
    }

    /// How long it is in a document.
    fn length(&self) -> usize {
        match self {
            Self::Whole(digest) => json_length(digest),
            Self::Subtree(subtree) => json_length(subtree),
            Self::Item(item) => json_length(item),
            Self::Record(record) => json_length(record),
            Self::Run(run) => json_length(run),
        }
    }
}

/// The length of `value` in a document, with what parts it from its neighbour.
fn json_length(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |json| json.len() + 1)
}

/// What fits a document: of all entries those that stand for most bytes.
#[derive(Debug, Default)]
struct Chosen {
    /// The bytes that an entry stands for, and the number of its file; the smallest is on top.
    entries: BinaryHeap<Reverse<(u64, usize, Entry)>>,
    /// How many entries a file has, and how long its own fields are in the document.
    files: BTreeMap<usize, (usize, usize)>,
    /// How long all of them are.
    length: usize,
}

impl Chosen {
    fn add(&mut self, at: usize, name: &str, bytes: u64, entry: Entry) {
        self.length += entry.length();
        let (count, fields) = self.files.entry(at).or_insert_with(|| (0, json_length(&name) + FIELDS.len()));
        self.length += if *count == 0 { *fields } else { 0 };
        *count += 1;
        self.entries.push(Reverse((bytes, at, entry)));
        while self.length > limits::PARTIAL_DIGESTS_BYTES - AROUND.len() {
            let Some(Reverse((_, at, smallest))) = self.entries.pop() else { break };
            self.length -= smallest.length();
            if let Some((count, fields)) = self.files.get_mut(&at) {
                *count -= 1;
                self.length -= if *count == 0 { *fields } else { 0 };
            }
        }
    }
}

/// What a document holds around its files.
const AROUND: &str = r#"{"schema":"weighbridge.digests/v1","files":[]}"#;
/// What a file holds around its entries and its name, at most.
const FIELDS: &str = r#"{"name":,"blake3":,"subtrees":[],"items":[],"records":[],"runs":[]},"#;

/// Checks that all that is told of a file of `length` bytes can lie in it.
fn check_places(file: &PartialFile, length: u64) -> Result<()> {
    let all = digests::Item { offset: 0, length };
    let in_file = |offset: u64, length: u64| is_within(offset, length, all);
    let right = |run: &digests::Run| {
        let record = digests::Item { offset: run.record.offset, length: run.record.length };
        let item = run.item.unwrap_or(all);
        is_within(run.offset, run.length, record)
            && is_within(record.offset, record.length, item)
            && in_file(item.offset, item.length)
    };
    let items = file.items.iter().all(|item| in_file(item.offset, item.length));
    let records = file.records.iter().all(|record| in_file(record.offset, record.length));
    if items && records && file.runs.iter().all(right) {
        return Ok(());
    }
    Err(bad("a record that does not lie in its file"))
}

/// Whether there are bytes, and all of them lie within `outer`.
fn is_within(offset: u64, length: u64, outer: digests::Item) -> bool {
    let end = offset.checked_add(length).filter(|&end| offset >= outer.offset && end > offset);
    end.is_some_and(|end| end - outer.offset <= outer.length)
}

impl FileDigests {
    /// Tells `add` all that is known of a file of `length` bytes, with how many bytes it stands for.
    fn tell(&self, length: u64, add: &mut dyn FnMut(u64, Entry)) {
        if let Some(whole) = &self.whole {
            let (root, subtrees) = whole.tree.known();
            if let Some(root) = root {
                add(length, Entry::Whole(root));
            }
            for subtree in subtrees {
                add(digests::PAGE_BYTES.saturating_mul(1 << subtree.level), Entry::Subtree(subtree));
            }
        }
        let records = lock(&self.records);
        for checked in &records.checked {
            match *checked {
                Checkable::Item(Item { offset, length }) => {
                    add(length, Entry::Item(digests::Item { offset, length }));
                }
                Checkable::Record(record) => add(record.length, Entry::Record(told(record))),
            }
        }
        for (of, runs) in &records.open {
            let item = of.item.map(|Item { offset, length }| digests::Item { offset, length });
            for (run, crc32) in runs.hashed() {
                let (offset, length) = (run.start, run.end.saturating_sub(run.start));
                let record = told(of.record);
                add(length, Entry::Run(digests::Run { record, item, offset, length, crc32 }));
            }
        }
    }

    /// Takes up what is told of the file, which has such places ([`check_places`]).
    fn adopt(&self, file: &PartialFile) -> Result<()> {
        if let Some(whole) = &self.whole {
            if !file.subtrees.iter().all(|subtree| whole.tree.has(subtree)) {
                return Err(bad("a part that the file does not have"));
            }
            file.subtrees.iter().for_each(|subtree| whole.tree.adopt(subtree));
            file.blake3.into_iter().for_each(|root| whole.tree.adopt_root(root));
            if whole.tree.root().is_some() {
                self.check()?;
            }
        }
        file.runs.iter().try_for_each(|run| self.adopt_run(run))?;
        let items = file.items.iter().map(|&digests::Item { offset, length }| Item { offset, length });
        let records = file.records.iter().map(|&record| heard(record));
        let mut checked: Vec<_> = items.map(|item| (item.length, Checkable::Item(item))).collect();
        checked.extend(records.map(|record| (record.length, Checkable::Record(record))));
        // The largest first: they are the last that should be read again.
        checked.sort_unstable_by(|one, other| other.cmp(one));
        let mut records = lock(&self.records);
        checked.into_iter().for_each(|(_, what)| records.adopt(what, &self.budget));
        Ok(())
    }

    fn adopt_run(&self, run: &digests::Run) -> Result<()> {
        let item = run.item.map(|digests::Item { offset, length }| Item { offset, length });
        let of = SliceRecord { record: heard(run.record), item };
        let mut records = lock(&self.records);
        if records.checked.contains(&of.checkable()) || !self.budget.take_of_half(CHECKED_BYTES) {
            return Ok(());
        }
        if let Some(runs) = records.open(of, &self.budget, false) {
            runs.adopt(run.offset..run.offset.saturating_add(run.length), run.crc32, &self.budget);
        }
        let closed = records.close_if_whole(of, &self.budget);
        if !records.checked.contains(&of.checkable()) {
            self.budget.give(CHECKED_BYTES);
        }
        closed
    }
}

impl Records {
    /// Takes it for checked, and lets go of what is known of a part of it.
    fn adopt(&mut self, what: Checkable, budget: &Budget) {
        if self.checked.contains(&what) || !budget.take_of_half(CHECKED_BYTES) {
            return;
        }
        self.checked.insert(what);
        let place = |record: Record, item| SliceRecord { record, item };
        match what {
            Checkable::Record(record) => self.let_go(place(record, None), budget),
            Checkable::Item(item) => {
                let lowest = Record { offset: item.offset, length: 0, crc32: 0 };
                let near = self.open.range(place(lowest, None)..);
                let near =
                    near.take_while(|(of, _)| of.record.offset < item.offset.saturating_add(item.length));
                let within: Vec<_> = near.map(|(&of, _)| of).filter(|of| of.item == Some(item)).collect();
                within.into_iter().for_each(|of| self.let_go(of, budget));
            }
        }
    }
}

fn told(Record { offset, length, crc32 }: Record) -> digests::Record {
    digests::Record { offset, length, crc32 }
}

fn heard(digests::Record { offset, length, crc32 }: digests::Record) -> Record {
    Record { offset, length, crc32 }
}
