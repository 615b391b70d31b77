//! What a maker reads into, used again by the next one.

use std::sync::{Arc, Mutex, PoisonError};

use weighbridge_converter::shape::prune;

/// A page: where a copy's two ends lie within their pages decides how fast it is, and this is a good place.
const ALIGNMENT: usize = 4096;

/// The buffers of one maker.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    room: Vec<u8>,
    /// What gathering needs.
    pub(super) sources: prune::Buffers,
}

impl Buffers {
    /// Room for `length` bytes of rows, which may hold anything; and what gathering needs.
    pub(super) fn rows(&mut self, length: usize) -> (&mut [u8], &mut prune::Buffers) {
        let needed = length.saturating_add(ALIGNMENT);
        if self.room.len() < needed {
            self.room.resize(needed, 0);
        }
        let start = self.room.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        (
            self.room.get_mut(start..).and_then(|room| room.get_mut(..length)).unwrap_or_default(),
            &mut self.sources,
        )
    }
}

/// Buffers that nobody uses at the moment: as many as makers ever worked at the same time.
#[derive(Debug, Clone, Default)]
pub(super) struct Spare(Arc<Mutex<Vec<Buffers>>>);

impl Spare {
    /// Lends buffers to `work`.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Buffers) -> T) -> T {
        let spare = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = spare.unwrap_or_default();
        let done = work(&mut buffers);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_begin_on_a_page_and_buffers_are_used_again() {
        let spare = Spare::default();
        let place = spare.with(|buffers| {
            let (rows, _) = buffers.rows(100_000);
            assert_eq!((rows.len(), rows.as_ptr().addr() % ALIGNMENT), (100_000, 0));
            rows.as_ptr()
        });
        spare
            .with(|buffers| assert_eq!((buffers.rows(10).0.len(), buffers.rows(10).0.as_ptr()), (10, place)));
    }
}
