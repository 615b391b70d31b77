//! What is kept of remote objects, in bounded memory.
//!
//! Tensors are read in small steps, in order, at several places at once. So an object is read in blocks of up to
//! 4 MiB, and whoever reads one block after another finds the next ones on their way already. Metadata is read in small
//! pieces here and there (a header's length, the records of a zip archive): such reads take a window of 64 KiB, unless
//! they come one behind another.
//!
//! Blocks that were read to their end make room first. Read-ahead takes no other room; a reader that waits for a block
//! takes the one that was not used for longest.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::lock;
use super::{Object, given_up};
use crate::error::{ReadError, Result};

/// Smaller reads are taken for metadata; also the size of a window, in bytes.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// Most windows that are kept.
const WINDOWS: usize = 64;
/// The share of the memory budget that blocks take, as a divisor, and its bounds in bytes.
const MEMORY_SHARE: u64 = 16;
const LEAST_BYTES: u64 = 8 << 20;
const MOST_BYTES: u64 = 128 << 20;
/// Blocks in small budgets; in larger ones there are more of the largest size.
const LEAST_BLOCKS: u64 = 16;
const LARGEST_BLOCK: u64 = 4 << 20;
/// Blocks that are read ahead of a reader.
const AHEAD: u64 = 4;

/// The bytes that are kept for all objects of a source.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    state: Mutex<State>,
    arrived: Condvar,
}

/// An object's number, and a block's place in it.
type Key = (u64, u64);

#[derive(Debug, Default)]
struct State {
    block_bytes: u64,
    capacity: usize,
    /// Counts uses.
    uses: u64,
    blocks: BTreeMap<Key, Block>,
    windows: VecDeque<Window>,
}

#[derive(Debug)]
struct Block {
    content: Content,
    /// The count of uses when it was used last.
    used: u64,
    /// Whether a reader has asked for it.
    wanted: bool,
    /// Whether it was read ahead.
    ahead: bool,
    /// Whether it was read to its end.
    spent: bool,
}

#[derive(Debug)]
enum Content {
    Loading,
    Here(Arc<Vec<u8>>),
    Failed(ReadError),
}

#[derive(Debug)]
struct Window {
    object: u64,
    start: u64,
    bytes: Arc<Vec<u8>>,
}

impl Window {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes.len() as u64)
    }

    fn get(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let from = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(from..from.checked_add(length)?)
    }
}

impl Blocks {
    /// Sets the bound by a memory budget in bytes.
    pub(super) fn set_memory(&self, memory: u64) {
        let bytes = (memory / MEMORY_SHARE).clamp(LEAST_BYTES, MOST_BYTES);
        let mut state = lock(&self.state);
        state.block_bytes = (bytes / LEAST_BLOCKS).min(LARGEST_BLOCK);
        state.capacity = usize::try_from(bytes / state.block_bytes).unwrap_or(1);
        state.blocks.clear();
    }

    /// The bound, in bytes, with the blocks that `readers` still copy from when these have made room for others.
    pub(super) fn bytes(&self, readers: usize) -> u64 {
        let state = lock(&self.state);
        let blocks = state.capacity.saturating_add(readers) as u64;
        state.block_bytes.saturating_mul(blocks).saturating_add((WINDOWS * SMALL_BYTES) as u64)
    }

    /// Keeps `bytes` of an object as a window.
    pub(super) fn keep_window(&self, object: u64, start: u64, bytes: Vec<u8>) {
        let mut state = lock(&self.state);
        if state.windows.len() >= WINDOWS {
            state.windows.pop_front();
        }
        state.windows.push_back(Window { object, start, bytes: Arc::new(bytes) });
    }

    /// Fills `buffer` from `offset` on; all of it lies within the object.
    pub(super) fn read(&self, object: &Object, buffer: &mut [u8], offset: u64) -> Result<()> {
        if buffer.is_empty() || (buffer.len() < SMALL_BYTES && self.read_small(object, buffer, offset)?) {
            return Ok(());
        }
        let block_bytes = lock(&self.state).block_bytes.max(1);
        let (mut rest, mut at) = (buffer, offset);
        while !rest.is_empty() {
            let index = at / block_bytes;
            let block = self.block(object, index)?;
            let from = usize::try_from(at % block_bytes).unwrap_or(usize::MAX);
            let found = block.get(from..).unwrap_or_default();
            let count = found.len().min(rest.len());
            let (filled, left) = std::mem::take(&mut rest).split_at_mut(count);
            filled.copy_from_slice(found.get(..count).ok_or_else(given_up)?);
            if count == 0 {
                return Err(given_up());
            }
            if count == found.len() {
                self.spend((object.id, index));
            }
            at = at.saturating_add(count as u64);
            rest = left;
        }
        Ok(())
    }

    /// Fills `buffer` from a window, if that is the way to read it: not where its block is there, or where one small
    /// read comes behind another.
    fn read_small(&self, object: &Object, buffer: &mut [u8], offset: u64) -> Result<bool> {
        {
            let state = lock(&self.state);
            let mut windows = state.windows.iter().filter(|window| window.object == object.id);
            if let Some(found) = windows.clone().find_map(|window| window.get(offset, buffer.len())) {
                buffer.copy_from_slice(found);
                return Ok(true);
            }
            let follows =
                windows.any(|window| window.start < offset && offset <= window.end() && window.start > 0);
            if follows || state.blocks.contains_key(&(object.id, offset / state.block_bytes.max(1))) {
                return Ok(false);
            }
        }
        // The end of an object holds the directory of a zip archive: look back from there.
        let least = offset.saturating_add(buffer.len() as u64);
        let end = offset.saturating_add(SMALL_BYTES as u64).min(object.len()).max(least);
        let start = end.saturating_sub(SMALL_BYTES as u64).min(offset);
        let bytes = object.fetch(start, end.saturating_sub(start))?;
        let from = usize::try_from(offset.saturating_sub(start)).unwrap_or(usize::MAX);
        let found = bytes.get(from..).and_then(|bytes| bytes.get(..buffer.len())).ok_or_else(given_up)?;
        buffer.copy_from_slice(found);
        self.keep_window(object.id, start, bytes);
        Ok(true)
    }

    /// The block at `index`, waited for if need be, with the next ones sent for.
    fn block(&self, object: &Object, index: u64) -> Result<Arc<Vec<u8>>> {
        let key = (object.id, index);
        let mut state = lock(&self.state);
        loop {
            state.uses = state.uses.saturating_add(1);
            let uses = state.uses;
            if !state.blocks.contains_key(&key) {
                if state.make_room(false) {
                    self.send_for(&mut state, object, index, false);
                } else {
                    state = self.wait(state);
                    continue;
                }
            }
            if state.is_new_in_a_row(key) {
                self.read_ahead(&mut state, object, index);
            }
            let Some(block) = state.blocks.get_mut(&key) else { continue };
            block.used = uses;
            match &block.content {
                Content::Here(bytes) => return Ok(Arc::clone(bytes)),
                Content::Failed(error) => {
                    let error = error.clone();
                    state.blocks.remove(&key);
                    return Err(error);
                }
                Content::Loading => state = self.wait(state),
            }
        }
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn read_ahead(&self, state: &mut State, object: &Object, index: u64) {
        for next in index.saturating_add(1)..=index.saturating_add(AHEAD) {
            let inside = next.saturating_mul(state.block_bytes) < object.len();
            if inside && !state.blocks.contains_key(&(object.id, next)) && state.make_room(true) {
                self.send_for(state, object, next, true);
            }
        }
    }

    fn send_for(&self, state: &mut State, object: &Object, index: u64, ahead: bool) {
        let start = index.saturating_mul(state.block_bytes);
        let end = start.saturating_add(state.block_bytes).min(object.len());
        let key = (object.id, index);
        let used = state.uses;
        state
            .blocks
            .insert(key, Block { content: Content::Loading, used, wanted: false, ahead, spent: false });
        let mut delivery = Delivery { blocks: Arc::clone(&object.io.blocks), key, content: None };
        let (fetcher, pin) = (Arc::clone(&object.io.fetcher), Arc::clone(&object.pin));
        object.io.handle.spawn(async move {
            delivery.bring(match fetcher.range(&pin, start..end).await {
                Ok(bytes) => Content::Here(Arc::new(bytes)),
                Err(error) => Content::Failed(error),
            });
        });
    }

    fn spend(&self, key: Key) {
        if let Some(block) = lock(&self.state).blocks.get_mut(&key) {
            block.spent = true;
        }
        // Somebody may wait for room.
        self.arrived.notify_all();
    }
}

impl State {
    /// Whether there is room for another block; for one that is read `ahead` only where nobody else is likely to
    /// need it.
    fn make_room(&mut self, ahead: bool) -> bool {
        if self.blocks.len() < self.capacity {
            return true;
        }
        let rank = |block: &Block| match block.content {
            Content::Loading => None,
            Content::Failed(_) => Some((0, block.used)),
            Content::Here(_) if block.spent => Some((1, block.used)),
            Content::Here(_) if ahead => None,
            Content::Here(_) => Some((if block.wanted { 2 } else { 3 }, block.used)),
        };
        let ranked = self.blocks.iter().filter_map(|(key, block)| Some((rank(block)?, *key)));
        let Some((_, key)) = ranked.min() else { return false };
        self.blocks.remove(&key);
        true
    }

    /// Notes that a reader wants the block: whether that is new, and whether it comes behind others.
    fn is_new_in_a_row(&mut self, key: Key) -> bool {
        let behind = key.1.checked_sub(1).is_some_and(|before| self.blocks.contains_key(&(key.0, before)));
        let Some(block) = self.blocks.get_mut(&key) else { return false };
        let is_new = !std::mem::replace(&mut block.wanted, true);
        is_new && (block.ahead || behind)
    }
}

/// Puts a block's content where it is waited for, also where the request itself was dropped.
struct Delivery {
    blocks: Arc<Blocks>,
    key: Key,
    content: Option<Content>,
}

impl Delivery {
    fn bring(&mut self, content: Content) {
        self.content = Some(content);
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let content = self.content.take().unwrap_or_else(|| Content::Failed(given_up()));
        if let Some(block) = lock(&self.blocks.state).blocks.get_mut(&self.key) {
            block.content = content;
        }
        self.blocks.arrived.notify_all();
    }
}
