//! Shares: how much of something each of many may have at the same time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answers::Refusal;

/// When to ask again.
const AGAIN: Duration = Duration::from_secs(1);

/// Shares by names, of which there are as many as there are tokens.
#[derive(Debug)]
pub(super) struct Shares {
    most: usize,
    all: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Shares {
    /// Everybody may have `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { most, all: Mutex::default() }
    }

    /// What `name` has left.
    pub(super) fn of(&self, name: &str) -> Arc<Semaphore> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get(name) {
            Some(share) => Arc::clone(share),
            None => {
                Arc::clone(all.entry(name.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(self.most))))
            }
        }
    }

    /// One more for `name`, for as long as this is kept.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` where they have all that they may.
    pub(super) fn take(&self, name: &str, what: &str) -> Result<OwnedSemaphorePermit, Refusal> {
        self.of(name).try_acquire_owned().map_err(|_| {
            let why = format!("more than {} {what} at once by this token; end some first", self.most);
            Refusal::over_limit(why, AGAIN)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_share_of_their_own() {
        let shares = Shares::new(2);
        let (one, _two) = (shares.take("a", "x").unwrap(), shares.take("a", "x").unwrap());
        assert!(shares.take("a", "x").is_err() && shares.take("b", "x").is_ok());
        drop(one);
        assert!(shares.take("a", "x").is_ok());
    }
}
