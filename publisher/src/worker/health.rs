//! Whether a worker is well: for those who watch it.
//!
//! *Alive* means that the worker's loops turn. *Ready* means that the queue and the store answer, as far as the last
//! who asked them found. Nothing is asked here: whoever works with queue or store says what came of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use weighbridge_queue::error::Error;
use weighbridge_schemas::time::Timestamp;

use crate::clock;
use crate::error::Failure;

/// Failures of the store that say something about the store as a whole.
const OF_THE_STORE: [&str; 6] =
    ["store_unreachable", "not_found", "disk_full", "read_only", "store_access_denied", "store_unfit"];
/// For how long a failure to write counts when nobody has tried to write since: more than the longest pause before
/// something is tried again. After that, a store that can be read is taken to be well.
const WRITE_FAILURE_COUNTS: Duration = Duration::from_secs(120);

/// What a worker knows of its queue, its store and itself.
#[derive(Debug)]
pub struct Health {
    started: Instant,
    since: Timestamp,
    queue: Mutex<State>,
    store: Mutex<State>,
    pulses: Mutex<Vec<(Weak<AtomicU64>, Duration)>>,
    stopping: AtomicBool,
}

/// What is known of the queue or the store.
#[derive(Debug, Default)]
enum State {
    #[default]
    Unasked,
    Answers,
    Fails {
        why: String,
        /// Since when it fails, for people.
        since: Timestamp,
        /// When it failed last.
        last: Instant,
        /// Whether reading it says nothing about what failed.
        writing: bool,
    },
}

/// The sign of life of one loop.
#[derive(Debug)]
pub struct Pulse {
    started: Instant,
    /// Milliseconds since `started`.
    last: Arc<AtomicU64>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            since: clock::now(),
            queue: Mutex::default(),
            store: Mutex::default(),
            pulses: Mutex::default(),
            stopping: AtomicBool::new(false),
        }
    }
}

impl Health {
    /// The queue answered.
    pub fn queue_answers(&self) {
        lock(&self.queue).was_read(Instant::now());
    }

    /// The queue failed.
    pub fn queue_fails(&self, error: &Error) {
        lock(&self.queue).fail(error.to_string(), false);
    }

    /// The queue did not take a message: that it answers otherwise says nothing about that.
    pub fn queue_takes_nothing(&self, why: &str) {
        lock(&self.queue).fail(why.to_owned(), true);
    }

    /// A step came to an end in which the queue did not fail.
    pub fn queue_worked(&self) {
        *lock(&self.queue) = State::Answers;
    }

    /// A step came to an end in which the store did not fail.
    pub fn store_worked(&self) {
        *lock(&self.store) = State::Answers;
    }

    /// Something was read from the store.
    pub fn store_was_read(&self) {
        lock(&self.store).was_read(Instant::now());
    }

    /// Something failed; it counts where it is the store's failure.
    pub fn failed(&self, failure: &Failure) {
        if OF_THE_STORE.contains(&failure.class) {
            let writing = matches!(failure.class, "disk_full" | "read_only");
            lock(&self.store).fail(failure.message.clone(), writing);
        }
    }

    /// The worker was told to stop.
    pub fn stops(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether messages are being taken; if not, why and since when, in one line.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn ready(&self) -> Result<(), String> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err("the worker was told to stop".to_owned());
        }
        lock(&self.queue).check("queue", self.since)?;
        lock(&self.store).check("store", self.since)
    }

    /// A sign of life for a loop that shows none for at most `silence` while all is well.
    pub fn pulse(&self, silence: Duration) -> Pulse {
        let pulse = Pulse { started: self.started, last: Arc::default() };
        pulse.beat();
        let mut pulses = lock(&self.pulses);
        pulses.retain(|(last, _)| last.strong_count() > 0);
        pulses.push((Arc::downgrade(&pulse.last), silence));
        pulse
    }

    /// Whether every loop turns; if not, for how long one has stood still.
    ///
    /// # Errors
    /// What stands still, for people.
    pub fn alive(&self) -> Result<(), String> {
        self.alive_at(Instant::now())
    }

    fn alive_at(&self, now: Instant) -> Result<(), String> {
        let now = now.saturating_duration_since(self.started);
        for (last, silence) in lock(&self.pulses).iter() {
            // A loop that has ended does not stand still.
            let Some(last) = last.upgrade() else { continue };
            let silent = now.saturating_sub(Duration::from_millis(last.load(Ordering::Relaxed)));
            if silent > *silence {
                return Err(format!("a loop of the worker has stood still for {} s", silent.as_secs()));
            }
        }
        Ok(())
    }
}

impl State {
    fn fail(&mut self, why: String, writing: bool) {
        let since = match self {
            Self::Fails { since, .. } => *since,
            Self::Unasked | Self::Answers => clock::now(),
        };
        *self = Self::Fails { why, since, last: Instant::now(), writing };
    }

    fn was_read(&mut self, now: Instant) {
        match self {
            Self::Fails { last, writing: true, .. }
                if now.saturating_duration_since(*last) < WRITE_FAILURE_COUNTS => {}
            _ => *self = Self::Answers,
        }
    }

    fn check(&self, what: &str, started: Timestamp) -> Result<(), String> {
        match self {
            Self::Answers => Ok(()),
            Self::Unasked => Err(format!("since {started}: the {what} has not answered yet")),
            Self::Fails { why, since, .. } => {
                let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
                Err(format!("since {since}: the {what} fails: {why}"))
            }
        }
    }
}

impl Pulse {
    /// Shows life.
    pub fn beat(&self) {
        let since = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(since, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use weighbridge_snapshots::error::{Class, StoreError};

    use super::*;

    fn failure(class: Class) -> Failure {
        StoreError::new(class, "a/b", "two\nlines").into()
    }

    #[test]
    fn it_is_ready_once_both_have_answered() {
        let health = Health::default();
        assert!(health.ready().unwrap_err().contains("the queue has not answered yet"));
        health.queue_answers();
        assert!(health.ready().unwrap_err().contains("the store has not answered yet"));
        health.store_was_read();
        assert_eq!(health.ready(), Ok(()));
        health.stops();
        assert!(health.ready().unwrap_err().contains("told to stop"));
    }

    #[test]
    fn why_and_since_when_it_is_not_ready_stand_in_one_line() {
        let health = Health::default();
        health.store_was_read();
        let why = |what: &str| Error::Unreachable { what: what.to_owned(), why: "gone\nfor\tnow".to_owned() };
        health.queue_fails(&why("first"));
        let first = health.ready().unwrap_err();
        assert!(
            first.starts_with("since 20") && first.ends_with("the queue fails: first: gone for now"),
            "{first}"
        );
        health.queue_fails(&why("again"));
        let again = health.ready().unwrap_err();
        assert_eq!(again.split_once(": "), first.replace("first", "again").split_once(": "));
    }

    #[test]
    fn reading_says_nothing_about_what_cannot_be_written_until_it_is_long_ago() {
        let health = Health::default();
        health.queue_answers();
        health.failed(&failure(Class::Integrity));
        assert!(
            health.ready().unwrap_err().contains("not answered"),
            "one object's failure is not the store's"
        );
        health.failed(&failure(Class::Unreachable));
        assert!(health.ready().is_err());
        health.store_was_read();
        assert_eq!(health.ready(), Ok(()));
        for class in [Class::DiskFull, Class::ReadOnly] {
            health.failed(&failure(class));
            health.store_was_read();
            assert!(health.ready().unwrap_err().contains("a/b: two lines"));
            health.store_worked();
            assert_eq!(health.ready(), Ok(()));
            health.failed(&failure(class));
            lock(&health.store).was_read(Instant::now() + WRITE_FAILURE_COUNTS);
            assert_eq!(health.ready(), Ok(()));
        }
        health.queue_takes_nothing("full");
        health.queue_answers();
        assert!(health.ready().unwrap_err().ends_with("the queue fails: full"));
        health.queue_worked();
        assert_eq!(health.ready(), Ok(()));
    }

    #[test]
    fn it_is_alive_as_long_as_every_loop_turns() {
        let health = Health::default();
        let silence = Duration::from_secs(60);
        let pulses = [health.pulse(silence), health.pulse(silence * 10)];
        let later = Instant::now() + silence * 2;
        assert_eq!(health.alive(), Ok(()));
        assert!(health.alive_at(later).unwrap_err().contains("stood still for 1"));
        let [short, long] = pulses;
        drop(short);
        assert_eq!(health.alive_at(later), Ok(()), "a loop that has ended does not stand still");
        assert!(health.alive_at(later + silence * 10).is_err());
        long.beat();
        assert_eq!(health.alive(), Ok(()));
    }
}
