//! The CRC-32 of a zip record, from reads in any order and from any thread.
//!
//! The CRC of two neighbouring runs of bytes follows from the CRCs of both and the length of the second, so every run
//! is hashed when it is read, and merged with its neighbours. A record that is read in order is one run. Where reads
//! leave very many gaps, what is over [`RUNS`] or the budget is forgotten, and read again at the end.

use std::collections::BTreeMap;
use std::ops::Range;

use crc32fast::Hasher;

use super::Budget;

/// Most runs of one record that are kept.
const RUNS: usize = 256;
/// What a run takes.
const RUN_BYTES: i64 = 64;

/// A run of bytes from some place of the file on.
#[derive(Debug, Clone, Copy)]
struct Run {
    end: u64,
    /// `None` while somebody hashes.
    crc: Option<u32>,
}

/// The runs of a record that have been read, by where they start in the file.
#[derive(Debug, Default)]
pub(super) struct Runs(BTreeMap<u64, Run>);

impl Runs {
    /// The parts of `range` that nobody has hashed; whoever asks has to hash them, and to say so to [`Runs::add`].
    pub(super) fn claim(&mut self, range: Range<u64>, budget: &Budget, must: bool) -> Vec<Range<u64>> {
        let mut claimed = Vec::new();
        let mut from = range.start;
        while let Some(gap) = self.gap(from..range.end) {
            from = gap.end;
            if (must || self.0.len() < RUNS) && budget.take(RUN_BYTES, must) {
                self.0.insert(gap.start, Run { end: gap.end, crc: None });
                claimed.push(gap);
            }
        }
        claimed
    }

    /// The first part of `range` that nobody has hashed or claimed.
    pub(super) fn gap(&self, range: Range<u64>) -> Option<Range<u64>> {
        let before = self.0.range(..=range.start).next_back().map_or(range.start, |(_, run)| run.end);
        let mut start = before.max(range.start);
        for (&next, run) in self.0.range(range.start..range.end) {
            if next > start {
                return Some(start..next);
            }
            start = start.max(run.end);
        }
        (start < range.end).then_some(start..range.end)
    }

    /// Takes the CRC of a claimed run, and merges it with its neighbours.
    pub(super) fn add(&mut self, run: Range<u64>, crc: u32, budget: &Budget) {
        let mut merged = run.clone();
        let mut hasher = Hasher::new_with_initial_len(crc, run.end.saturating_sub(run.start));
        if let Some((&start, &Run { end, crc: Some(crc) })) = self.0.range(..run.start).next_back()
            && end == run.start
        {
            let mut before = Hasher::new_with_initial_len(crc, end.saturating_sub(start));
            before.combine(&hasher);
            hasher = before;
            merged.start = start;
            self.drop_run(run.start, budget);
        }
        if let Some(&Run { end, crc: Some(crc) }) = self.0.get(&run.end) {
            hasher.combine(&Hasher::new_with_initial_len(crc, end.saturating_sub(run.end)));
            merged.end = end;
            self.drop_run(run.end, budget);
        }
        self.0.insert(merged.start, Run { end: merged.end, crc: Some(hasher.finalize()) });
    }

    fn drop_run(&mut self, start: u64, budget: &Budget) {
        if self.0.remove(&start).is_some() {
            budget.give(RUN_BYTES);
        }
    }

    /// The runs that have been hashed, in order, with their CRCs.
    pub(super) fn hashed(&self) -> impl Iterator<Item = (Range<u64>, u32)> {
        self.0.iter().filter_map(|(&start, run)| Some((start..run.end, run.crc?)))
    }

    /// Takes up a run that another reader has hashed, in place of those that lie in it. It is passed over where it and
    /// another have a part in common that is less than one of them: no CRC comes of that.
    pub(super) fn adopt(&mut self, run: Range<u64>, crc: u32, budget: &Budget) {
        let before = self.0.range(..run.start).next_back();
        if before.is_some_and(|(_, before)| before.end > run.start) {
            return;
        }
        let within = self.0.range(run.clone());
        if within.clone().any(|(_, known)| known.end > run.end || known.crc.is_none()) {
            return;
        }
        for start in within.map(|(&start, _)| start).collect::<Vec<_>>() {
            self.drop_run(start, budget);
        }
        if self.0.len() < RUNS && budget.take(RUN_BYTES, false) {
            self.0.insert(run.start, Run { end: run.end, crc: None });
            self.add(run, crc, budget);
        }
    }

    /// Lets go of all runs.
    pub(super) fn give_back(self, budget: &Budget) {
        budget.give(RUN_BYTES.saturating_mul(i64::try_from(self.0.len()).unwrap_or(0)));
    }

    /// The CRC of `range`, once all of it has been hashed; what was kept is let go then.
    pub(super) fn close(&mut self, range: Range<u64>, budget: &Budget) -> Option<u32> {
        let crc = self.0.get(&range.start).filter(|run| run.end == range.end)?.crc?;
        self.drop_run(range.start, budget);
        Some(crc)
    }
}
