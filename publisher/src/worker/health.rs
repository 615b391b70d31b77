//! Whether a worker is well: for those who watch it.

use std::sync::{Mutex, PoisonError};

use weighbridge_queue::error::Error;

/// What a worker knows of its queue.
#[derive(Debug, Default)]
pub struct Health {
    queue: Mutex<Option<Result<(), String>>>,
}

impl Health {
    /// The queue answered.
    pub fn queue_answers(&self) {
        self.set(Ok(()));
    }

    /// The queue failed.
    pub fn queue_fails(&self, error: &Error) {
        self.set(Err(error.to_string()));
    }

    fn set(&self, state: Result<(), String>) {
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
    }

    /// Whether messages are being taken; if not, why.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn ready(&self) -> Result<(), String> {
        let state = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().unwrap_or_else(|| Err("the queue has not been asked yet".to_owned()))
    }
}
