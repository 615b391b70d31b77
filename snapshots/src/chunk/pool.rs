//! Buffers for chunks, used again and again: to have the system give 8 MiB anew, page by page, costs as much as to hash
//! them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::disk::BLOCK;

/// Buffers of one size. It holds as many as were ever lent at the same time; how many that are is the borrower's to
/// bound.
#[derive(Debug, Clone)]
pub struct Pool {
    capacity: usize,
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Pool {
    /// A pool of buffers with room for `capacity` bytes each.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, free: Arc::default() }
    }

    /// An empty buffer. It comes back when it is dropped.
    pub(super) fn lend(&self) -> Lent {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let bytes = free.unwrap_or_else(|| vec![0; self.capacity.saturating_add(BLOCK)]);
        let start = bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
        Lent { bytes, start, end: start, pool: self.clone() }
    }
}

/// A buffer on loan.
#[derive(Debug)]
pub(super) struct Lent {
    /// What is behind `end` was left there by others, or is 0: to clear it would cost a pass.
    bytes: Vec<u8>,
    /// Where the chunk begins: on a [`BLOCK`], as [`crate::disk::write_past_cache`] wants it.
    start: usize,
    end: usize,
    pool: Pool,
}

impl Lent {
    /// Room for `length` more bytes at the end, which hold anything yet.
    pub(super) fn room(&mut self, length: usize) -> &mut [u8] {
        let (start, end) = (self.end, self.end.saturating_add(length));
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.end = end;
        self.bytes.get_mut(start..end).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        // One that had to grow is of another size.
        if bytes.len() == self.pool.capacity.saturating_add(BLOCK) {
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_empty_and_are_lent_again() {
        let pool = Pool::new(64);
        let mut first = pool.lend();
        first.room(64).fill(1);
        let place = first.as_ref().as_ptr();
        let second = pool.lend();
        drop(first);
        let mut again = pool.lend();
        assert!(again.as_ref().is_empty());
        again.room(2).copy_from_slice(b"ab");
        again.room(1).copy_from_slice(b"c");
        assert_eq!((again.as_ref(), again.as_ref().as_ptr()), (&b"abc"[..], place));
        assert!(place.addr().is_multiple_of(BLOCK));
        let mut grown = pool.lend();
        grown.room(64 + 2 * BLOCK).fill(2);
        assert_eq!(grown.as_ref(), [2; 64 + 2 * BLOCK]);
        drop((again, second, grown));
        assert_eq!(pool.free.lock().unwrap().len(), 2, "one that grew is given up");
    }
}
