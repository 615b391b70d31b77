//! Buffers for chunks, used again and again: to have the system give 8 MiB anew, page by page, costs as much as to hash
//! them.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

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
        let bytes = free.unwrap_or_else(|| Vec::with_capacity(self.capacity));
        Lent { bytes, pool: self.clone() }
    }
}

/// A buffer on loan.
#[derive(Debug)]
pub(super) struct Lent {
    bytes: Vec<u8>,
    pool: Pool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        // One that had to grow is of another size.
        if bytes.capacity() == self.pool.capacity {
            bytes.clear();
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for Lent {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_empty_and_are_lent_again() {
        let pool = Pool::new(64);
        let mut first = pool.lend();
        first.extend([1; 64]);
        let place = first.as_ptr();
        let second = pool.lend();
        drop(first);
        let again = pool.lend();
        assert!(again.is_empty() && again.as_ptr() == place && second.as_ptr() != place);
        let mut grown = pool.lend();
        grown.extend([2; 65]);
        drop((again, second, grown));
        assert_eq!(pool.free.lock().unwrap().len(), 2, "one that grew is given up");
    }
}
