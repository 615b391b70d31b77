//! Which chunks are named, as far as memory goes: by the first 16 bytes of their ids, of one range of first bytes at a
//! time. Two chunks that share 16 bytes (of that there is no hope) would be kept together.

use std::ops::Range;

use weighbridge_schemas::ids::ChunkId;

/// Bytes that one member takes.
const MEMBER_BYTES: u64 = 16;

/// Chunks that are named, whose first byte is in a range.
#[derive(Debug)]
pub(super) struct Members {
    range: Range<u16>,
    ids: Vec<u128>,
    most: usize,
    sorted: bool,
}

impl Members {
    /// None yet, of all first bytes from `from` on, in so many bytes of memory.
    pub(super) fn new(from: u16, memory: u64) -> Self {
        let most = usize::try_from(memory / MEMBER_BYTES / 2).unwrap_or(usize::MAX).max(1024);
        Self { range: from..256, ids: Vec::new(), most, sorted: true }
    }

    /// The first bytes of which this knows all members. It is smaller than was asked for where memory did not do.
    pub(super) fn range(&self) -> Range<u16> {
        self.range.clone()
    }

    /// Adds a chunk that is named.
    pub(super) fn add(&mut self, id: &ChunkId) {
        if !self.range.contains(&first(id)) {
            return;
        }
        self.ids.push(number(id));
        self.sorted = false;
        if self.ids.len() > self.most {
            self.tidy();
        }
    }

    /// Sorts; and where there are many, gives up the upper half of the range: it is for a later pass.
    fn tidy(&mut self) {
        self.settle();
        while self.ids.len() > self.most / 4 * 3 && self.range.len() > 1 {
            let middle = self.range.start + u16::try_from(self.range.len() / 2).unwrap_or(1);
            self.range.end = middle;
            let end = self.ids.partition_point(|id| id >> 120 < u128::from(middle));
            self.ids.truncate(end);
        }
        // A single first byte takes what it takes: a 256th of all.
        if self.ids.len() > self.most / 4 * 3 {
            self.most = self.ids.len().saturating_mul(2);
        }
    }

    /// Has to come between adding and asking.
    pub(super) fn settle(&mut self) {
        if !self.sorted {
            self.ids.sort_unstable();
            self.ids.dedup();
            self.sorted = true;
        }
    }

    /// Whether a chunk in the range is named.
    pub(super) fn contains(&self, id: &ChunkId) -> bool {
        self.ids.binary_search(&number(id)).is_ok()
    }
}

/// A chunk's first byte.
pub(super) fn first(id: &ChunkId) -> u16 {
    let [first, ..] = *id.as_bytes();
    u16::from(first)
}

fn number(id: &ChunkId) -> u128 {
    let mut front = [0; 16];
    front.copy_from_slice(&id.as_bytes()[..16]);
    u128::from_be_bytes(front)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_for_a_later_pass() {
        let all: Vec<_> = (0..20_000u32).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
        let named: Vec<_> = all.iter().step_by(2).collect();
        let mut from = 0;
        let mut passes = 0;
        let mut found = 0;
        while from < 256 {
            let mut members = Members::new(from, 64 << 10);
            for id in named.iter().chain(&named) {
                members.add(id);
            }
            members.settle();
            let range = members.range();
            for (at, id) in all.iter().enumerate().filter(|(_, id)| range.contains(&first(id))) {
                assert_eq!(members.contains(id), at % 2 == 0);
                found += 1;
            }
            assert_eq!(range.start, from);
            from = range.end;
            passes += 1;
        }
        assert_eq!(found, all.len());
        assert!(passes > 2, "{passes}");
    }
}
