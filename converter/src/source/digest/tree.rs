//! The BLAKE3 of a whole file, from reads in any order and from any thread.
//!
//! BLAKE3 is a tree over chunks of 1 KiB: every aligned power of two of them is a subtree with a chaining value of its
//! own, and the value of two neighbours together follows from both (the BLAKE3 paper, section 2.1). Here the leaves are
//! pages of 64 KiB. A page's hasher only goes forward; what comes out of order is left out, and read again at the
//! end. A page that is whole becomes a subtree, and neighbours are merged at once, so a file that is read in order
//! takes a subtree for each bit of its length and one open page for each thread. What is kept beyond that is bounded
//! by the budget that all files of a checkpoint share: over it, a page is forgotten and read again at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use weighbridge_schemas::digests::{self, PAGE_BYTES as PAGE};
use weighbridge_schemas::ids::{self, FileDigest};

use super::Budget;
use crate::source::lock;

/// What a page that is not whole takes: its hasher, and its place in the map.
const OPEN_BYTES: i64 = 2 << 10;
/// What a subtree takes: its value, and its place in the map.
const SUBTREE_BYTES: i64 = 96;

/// The digest of a file in the making.
#[derive(Debug)]
pub(super) struct Tree {
    length: u64,
    budget: Arc<Budget>,
    pages: Mutex<Pages>,
}

/// What is known of a file's pages.
#[derive(Debug, Default)]
struct Pages {
    /// Those that are not whole, by number.
    open: BTreeMap<u64, Open>,
    /// The largest whole subtrees, by the number of their first page.
    subtrees: BTreeMap<u64, Subtree>,
    /// How many pages the subtrees hold.
    whole: u64,
    /// Whether what has to be kept is kept, whatever the budget.
    finishing: bool,
    root: Option<blake3::Hash>,
}

/// A page of which the first bytes have been hashed.
#[derive(Debug)]
struct Open {
    /// `None` while somebody hashes.
    hasher: Option<Box<Hasher>>,
    /// Whether the budget was charged for it.
    charged: bool,
}

/// `1 << level` whole pages; the last may be the file's last, and short.
#[derive(Debug)]
struct Subtree {
    level: u32,
    value: ChainingValue,
}

impl Subtree {
    const fn pages(&self) -> u64 {
        1 << self.level
    }
}

impl Tree {
    /// A file of `length` bytes, of which nothing has been seen.
    pub(super) fn new(length: u64, budget: Arc<Budget>) -> Self {
        let root = (length == 0).then(|| Hasher::new().finalize());
        Self { length, budget, pages: Mutex::new(Pages { root, ..Pages::default() }) }
    }

    /// The digest, once every byte has been hashed.
    pub(super) fn root(&self) -> Option<blake3::Hash> {
        lock(&self.pages).root
    }

    /// From now on nothing is left out for want of memory. Reading what [`Tree::missing`] names, in order and on a few
    /// threads, keeps no more than there is, and a subtree a bit of the length.
    pub(super) fn finish(&self) {
        lock(&self.pages).finishing = true;
    }

    /// Takes what a read of `bytes` at `offset` gave. Bytes that were hashed before are passed over.
    pub(super) fn update(&self, offset: u64, bytes: &[u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let end = self.page_end(at / PAGE);
            let length = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(rest.len());
            let (piece, behind) = rest.split_at(length);
            if piece.is_empty() {
                return;
            }
            self.update_page(at, piece);
            at = end;
            rest = behind;
        }
    }

    /// Takes bytes of one page.
    fn update_page(&self, at: u64, piece: &[u8]) {
        let page = at / PAGE;
        let Some(mut hasher) = self.claim(page, at, piece.len() as u64) else { return };
        let skipped = (page * PAGE).saturating_add(hasher.count()).saturating_sub(at);
        let fresh = usize::try_from(skipped).ok().and_then(|skipped| piece.get(skipped..));
        hasher.update(fresh.unwrap_or_default());
        self.put_back(page, hasher);
    }

    /// The hasher of a page, if `length` bytes at `at` carry it forward, and nobody else has it.
    fn claim(&self, page: u64, at: u64, length: u64) -> Option<Box<Hasher>> {
        let mut pages = lock(&self.pages);
        if pages.root.is_some() || pages.subtree_of(page).is_some() {
            return None;
        }
        let start = page * PAGE;
        if let Some(open) = pages.open.get_mut(&page) {
            let next = start + open.hasher.as_ref()?.count();
            return open.hasher.take_if(|_| at <= next && next - at < length);
        }
        if at != start {
            return None;
        }
        pages.open.insert(page, Open { hasher: None, charged: false });
        let mut hasher = Box::new(Hasher::new());
        hasher.set_input_offset(start);
        Some(hasher)
    }

    fn put_back(&self, page: u64, hasher: Box<Hasher>) {
        let mut pages = lock(&self.pages);
        let charged = pages.open.remove(&page).is_some_and(|open| open.charged);
        if pages.root.is_some() || pages.subtree_of(page).is_some() {
            // Somebody else's hash of it was adopted meanwhile.
            if charged {
                self.budget.give(OPEN_BYTES);
            }
            return;
        }
        if page * PAGE + hasher.count() < self.page_end(page) {
            if charged || self.budget.take(OPEN_BYTES, pages.finishing) {
                pages.open.insert(page, Open { hasher: Some(hasher), charged: true });
            }
            return;
        }
        if charged {
            self.budget.give(OPEN_BYTES);
        }
        if self.length <= PAGE {
            pages.root = Some(hasher.finalize());
        } else {
            let node = Subtree { level: 0, value: hasher.finalize_non_root() };
            pages.insert(page, node, self.length.div_ceil(PAGE), &self.budget);
        }
    }

    /// What is known: of all the file, or else of its whole subtrees, in order.
    pub(super) fn known(&self) -> (Option<FileDigest>, Vec<digests::Subtree>) {
        let pages = lock(&self.pages);
        let subtrees = pages.subtrees.iter().map(|(&first_page, subtree)| digests::Subtree {
            first_page,
            level: subtree.level,
            value: ids::ChainingValue::from_bytes(subtree.value),
        });
        (pages.root.map(|root| FileDigest::from_bytes(*root.as_bytes())), subtrees.collect())
    }

    /// Whether a file of this length has such a subtree.
    pub(super) fn has(&self, subtree: &digests::Subtree) -> bool {
        let count = self.length.div_ceil(PAGE);
        let pages = 1u64.checked_shl(subtree.level).filter(|&pages| pages < count);
        pages.is_some_and(|pages| {
            subtree.first_page.is_multiple_of(pages) && subtree.first_page <= count - pages
        })
    }

    /// Takes up a subtree that another reader has hashed, of those that the file [has](Tree::has). What is known of a
    /// part of it is let go; it is passed over where it lies in one that is known.
    pub(super) fn adopt(&self, subtree: &digests::Subtree) {
        let node = Subtree { level: subtree.level, value: *subtree.value.as_bytes() };
        lock(&self.pages).insert(subtree.first_page, node, self.length.div_ceil(PAGE), &self.budget);
    }

    /// Takes up the digest of the whole file, as another reader has found it.
    pub(super) fn adopt_root(&self, root: FileDigest) {
        let mut pages = lock(&self.pages);
        if pages.root.is_none() {
            pages.close(blake3::Hash::from_bytes(*root.as_bytes()), &self.budget);
        }
    }

    fn page_end(&self, page: u64) -> u64 {
        page.saturating_add(1).saturating_mul(PAGE).min(self.length)
    }

    /// The first range of bytes from `from` on that has to be read again: up to `most` bytes (a multiple of a page).
    /// Where such a range ends, within a page only at the file's end, the next may be looked for.
    pub(super) fn missing(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let pages = lock(&self.pages);
        let mut page = from.div_ceil(PAGE);
        while pages.root.is_none() && page.saturating_mul(PAGE) < self.length {
            if let Some(behind) = pages.subtree_of(page) {
                page = behind;
                continue;
            }
            let hashed = match pages.open.get(&page) {
                Some(open) => open.hasher.as_ref().map(|hasher| hasher.count()),
                None => Some(0),
            };
            if let Some(hashed) = hashed {
                let start = page * PAGE;
                let next = pages.subtrees.range(page..).next().map(|(&first, _)| first.saturating_mul(PAGE));
                let end = start.saturating_add(most).min(next.unwrap_or(self.length)).min(self.length);
                return Some(start + hashed..end);
            }
            page += 1;
        }
        None
    }

    /// How many bytes have not been hashed.
    pub(super) fn missing_bytes(&self) -> u64 {
        let pages = lock(&self.pages);
        if pages.root.is_some() {
            return 0;
        }
        let open = pages.open.values().filter_map(|open| open.hasher.as_ref()).map(|hasher| hasher.count());
        self.length.saturating_sub(open.sum::<u64>()).saturating_sub(pages.whole.saturating_mul(PAGE))
    }
}

impl Pages {
    /// The number of the first page behind the subtree that holds `page`.
    fn subtree_of(&self, page: u64) -> Option<u64> {
        let (first, subtree) = self.subtrees.range(..=page).next_back()?;
        let behind = first.saturating_add(1 << subtree.level);
        (behind > page).then_some(behind)
    }

    /// Adds a whole subtree of a file of `count` pages, unless others hold it, and merges neighbours. The two that make
    /// the whole file stay apart: their parent is the root.
    fn insert(&mut self, mut first: u64, mut node: Subtree, count: u64, budget: &Budget) {
        if self.root.is_some() || self.subtree_of(first).is_some_and(|behind| behind >= first + node.pages())
        {
            return;
        }
        let (added, range) = (node.pages(), first..first + node.pages());
        let mut charges = self.let_go_subtrees(range.clone());
        charges += i64::from(budget.take(SUBTREE_BYTES, self.finishing));
        if charges == 0 {
            return;
        }
        self.let_go_open(range, budget);
        while 2 << node.level < count {
            let other = first ^ (1 << node.level);
            if self.subtrees.get(&other).is_none_or(|other| other.level != node.level) {
                break;
            }
            let Some(sibling) = self.subtrees.remove(&other) else { break };
            charges += 1;
            let (left, right) =
                if other < first { (&sibling.value, &node.value) } else { (&node.value, &sibling.value) };
            let value = merge_subtrees_non_root(left, right, Mode::Hash);
            first = first.min(other);
            node = Subtree { level: node.level + 1, value };
        }
        budget.give((charges - 1) * SUBTREE_BYTES);
        self.subtrees.insert(first, node);
        self.whole += added;
        if self.whole == count
            && let Some(root) = self.merge_all()
        {
            self.close(root, budget);
        }
    }

    /// Forgets the subtrees within `range`, which none of them crosses; says how many they were, which is what the
    /// budget was charged for.
    fn let_go_subtrees(&mut self, range: Range<u64>) -> i64 {
        let inner: Vec<_> = self.subtrees.range(range).map(|(&first, _)| first).collect();
        for first in &inner {
            let pages = self.subtrees.remove(first).map_or(0, |subtree| subtree.pages());
            self.whole = self.whole.saturating_sub(pages);
        }
        i64::try_from(inner.len()).unwrap_or(0)
    }

    /// Forgets the open pages within `range`.
    fn let_go_open(&mut self, range: Range<u64>, budget: &Budget) {
        let inner: Vec<_> = self.open.range(range).map(|(&page, _)| page).collect();
        for page in inner {
            if self.open.remove(&page).is_some_and(|open| open.charged) {
                budget.give(OPEN_BYTES);
            }
        }
    }

    /// The root of subtrees that hold the whole file: from the right, since the tree's left half is always the larger
    /// one.
    fn merge_all(&self) -> Option<blake3::Hash> {
        let mut values = self.subtrees.values().map(|subtree| subtree.value);
        let left = values.next()?;
        let right = values.rev().reduce(|right, left| merge_subtrees_non_root(&left, &right, Mode::Hash))?;
        Some(merge_subtrees_root(&left, &right, Mode::Hash))
    }

    /// Takes the root, and lets go of everything else.
    fn close(&mut self, root: blake3::Hash, budget: &Budget) {
        let subtrees = self.let_go_subtrees(0..u64::MAX);
        budget.give(SUBTREE_BYTES.saturating_mul(subtrees));
        self.let_go_open(0..u64::MAX, budget);
        self.root = Some(root);
    }
}
