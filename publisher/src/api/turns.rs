//! Turns: how often each of many may ask. Whoever comes too early waits until it is their turn, where that is soon:
//! when a channel moves all its hosts come at once, and each of them that is sent away has to come again.

use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How many are remembered before those are forgotten who have been quiet.
const REMEMBERED: usize = 10_000;

/// Whose turn it is when.
#[derive(Debug)]
pub(super) struct Turns<K> {
    /// From one turn to the next.
    every: Duration,
    /// How much earlier somebody may come who has been quiet.
    early: Duration,
    /// How long a turn is waited for.
    patience: Duration,
    due: Mutex<Due<K>>,
}

/// When each one's next turn is due, if they take them evenly.
#[derive(Debug)]
struct Due<K> {
    next: HashMap<K, Instant>,
    /// At this size those who have been quiet are forgotten.
    full: usize,
}

impl<K: Eq + Hash> Turns<K> {
    /// So many turns a second, and `at_once` of them after a quiet time; a turn is waited for `patience` long at most.
    pub(super) fn new(a_second: NonZeroU32, at_once: NonZeroU32, patience: Duration) -> Self {
        let every = Duration::from_secs(1) / a_second.get();
        let due = Mutex::new(Due { next: HashMap::new(), full: REMEMBERED });
        Self { every, early: every * (at_once.get() - 1), patience, due }
    }

    /// Takes the next turn of `who`, and tells how long it has to be waited for.
    ///
    /// # Errors
    /// Where that is too long: how long it would be. No turn is taken then.
    pub(super) fn take(&self, who: K, now: Instant) -> Result<Duration, Duration> {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if due.next.len() >= due.full {
            due.next.retain(|_, next| *next > now);
            due.full = REMEMBERED.max(due.next.len() * 2);
        }
        let next = due.next.entry(who).or_insert(now);
        *next = (*next).max(now);
        let wait = next.duration_since(now).saturating_sub(self.early);
        if wait > self.patience {
            return Err(wait);
        }
        *next += self.every;
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(patience: u64) -> Turns<u32> {
        let number = |number| NonZeroU32::new(number).unwrap();
        Turns::new(number(10), number(3), Duration::from_millis(patience))
    }

    #[test]
    fn turns_come_evenly_and_a_few_at_once_after_a_quiet_time() {
        let (turns, now) = (turns(250), Instant::now());
        let taken: Vec<_> = (0..6).map(|_| turns.take(1, now).map(|wait| wait.as_millis())).collect();
        let late = Err(Duration::from_millis(300));
        assert_eq!(taken, [Ok(0), Ok(0), Ok(0), Ok(100), Ok(200), late]);
        assert_eq!(turns.take(2, now), Ok(Duration::ZERO), "others have turns of their own");
        let later = now + Duration::from_millis(300);
        assert_eq!(turns.take(1, later), Ok(Duration::ZERO));
        assert_eq!(turns.take(1, later), Ok(Duration::from_millis(100)));
        let quiet = later + Duration::from_secs(3600);
        assert_eq!((0..3).filter(|_| turns.take(1, quiet) == Ok(Duration::ZERO)).count(), 3);
    }

    #[test]
    fn those_who_have_been_quiet_are_forgotten() {
        let (turns, now) = (turns(0), Instant::now());
        let many = u32::try_from(REMEMBERED).unwrap();
        (0..many).for_each(|who| assert!(turns.take(who, now).is_ok()));
        let _ = turns.take(many, now + Duration::from_secs(1));
        assert_eq!(turns.due.lock().unwrap().next.len(), 1);
    }
}
