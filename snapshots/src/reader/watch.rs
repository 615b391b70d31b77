//! Looks whether `current` was flipped, again and again, on a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::place::Place;
use super::serving::{Serving, Swap};
use crate::error::{Result, StoreError};

/// The least time between two looks.
const LEAST_INTERVAL: Duration = Duration::from_millis(1);
/// The longest pause before a version that could not be opened is tried again, unless the interval is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What happened on a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Another version is served.
    Swapped(Swap),
    /// What `current` points at cannot be served; the old version serves on. The same version is tried again after
    /// longer and longer pauses, another one at the next look.
    Failed(StoreError),
}

/// A thread that looks; it ends when this is dropped, and a version that it is about to verify is given up.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    /// Looks every `interval` whether `current` was flipped, and swaps; `tell` is called with what happened, on the
    /// thread that looks. A look that finds nothing new costs reading the link and asking for its folder's number.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub fn watch(
        self: &Arc<Self>,
        interval: Duration,
        tell: impl FnMut(Event) + Send + 'static,
    ) -> Result<Watch> {
        let stop = Arc::new(AtomicBool::new(false));
        let (serving, stopped) = (Arc::clone(self), Arc::clone(&stop));
        let watch = move || look(&serving, &stopped, interval.max(LEAST_INTERVAL), tell);
        let thread = thread::Builder::new().name("watch".to_owned()).spawn(watch);
        let thread =
            thread.map_err(|error| StoreError::own("a thread that looks for new versions", &error))?;
        Ok(Watch { stop, thread: Some(thread) })
    }
}

impl Watch {
    /// Whether it looks still: a `tell` that panicked has ended it.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        // Whoever drops it from within `tell` cannot wait for itself.
        if thread.thread().id() != thread::current().id() {
            // A `tell` that panicked has been told of already.
            drop(thread.join());
        }
    }
}

/// What could not be opened, since when, and for how long it is left alone.
struct Failing {
    place: Option<Place>,
    since: Instant,
    pause: Duration,
}

fn look(serving: &Serving, stop: &AtomicBool, interval: Duration, mut tell: impl FnMut(Event)) {
    let mut failing: Option<Failing> = None;
    loop {
        thread::park_timeout(interval);
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let pointed = serving.pointed_at();
        let place = pointed.as_ref().ok().cloned();
        let before =
            failing.take_if(|before| before.place != place || before.since.elapsed() >= before.pause);
        if failing.is_some() {
            continue;
        }
        match pointed.and_then(|_| serving.swap(stop)) {
            Ok(None) => {}
            Ok(Some(swap)) => tell(Event::Swapped(swap)),
            Err(_) if stop.load(Ordering::Relaxed) => return,
            Err(error) => {
                let same = before.filter(|before| before.place == place);
                let pause = same.map_or(interval, |before| before.pause.saturating_mul(2));
                let pause = pause.min(LONGEST_PAUSE.max(interval));
                failing = Some(Failing { place, since: Instant::now(), pause });
                tell(Event::Failed(error));
            }
        }
    }
}
