//! What trainers call: hand over a checkpoint's manifest, and go on training.
//!
//! A thread of its own carries manifests from memory to the spool and from the spool to the queue. It is started when
//! there is something to do, with a runtime of its own. It does not live on in a forked child: there, open another
//! dropper (the old one says so).

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use weighbridge_schemas::checkpoint::CheckpointManifest;

use crate::Queue;
use crate::clock::{Clock, SystemClock};
use crate::error::Error;
use crate::spool::{Sent, Spool, SpoolLimits, check};
use crate::url;

/// For how long a call to the queue waits for another process that writes.
const PATIENCE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause before a spool that failed is written to again.
const SPOOL_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause before a queue that failed is opened again.
const QUEUE_PAUSE: Duration = Duration::from_secs(10);
/// How often a flush looks whether all is sent.
const GLANCE: Duration = Duration::from_millis(2);
/// For how long a dropper that goes waits for its thread, beyond its flush.
const PARTING: Duration = Duration::from_millis(100);
/// How long the thread drains at a time.
const SHIFT: Duration = Duration::from_secs(600);

/// What holds when [`Dropper::hand_over`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The manifest is on the disk: it survives the process, and the machine's power. Costs two syncs.
    Durable,
    /// The manifest is in memory: the caller waits for no disk. **When the process is killed, what is in memory is
    /// lost**: as a rule what was handed over in the last few milliseconds; while the spool cannot be written,
    /// everything since, at most [`Options::backlog_items`] and [`Options::backlog_bytes`].
    Background,
}

/// How a dropper works.
#[derive(Debug, Clone)]
pub struct Options {
    /// The spool's folder: on a disk of this machine.
    pub spool: PathBuf,
    /// How much the spool may hold.
    pub limits: SpoolLimits,
    /// The queue's URL.
    pub queue: String,
    /// What holds when a manifest is handed over.
    pub durability: Durability,
    /// For how long a dropper that goes tries to send what is left.
    pub flush: Duration,
    /// Most manifests in memory.
    pub backlog_items: usize,
    /// Most bytes of them.
    pub backlog_bytes: usize,
    /// Tells time.
    pub clock: Arc<dyn Clock>,
}

impl Options {
    /// The defaults: durable, 2 s to flush, 256 manifests and 16 MiB in memory.
    #[must_use]
    pub fn new(spool: impl Into<PathBuf>, queue: impl Into<String>) -> Self {
        Self {
            spool: spool.into(),
            limits: SpoolLimits::default(),
            queue: queue.into(),
            durability: Durability::Durable,
            flush: Duration::from_secs(2),
            backlog_items: 256,
            backlog_bytes: 16 << 20,
            clock: Arc::new(SystemClock::new()),
        }
    }
}

/// How a dropper comes to its queue. It may be called again and again, while the queue cannot be opened.
pub type Opener = Arc<dyn Fn() -> Result<Arc<dyn Queue>, Error> + Send + Sync>;

/// What is not on the queue yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// In memory: lost when the process ends now.
    pub in_memory: usize,
    /// In the spool, other processes' manifests among them: sent by whoever drains it next.
    pub in_spool: u64,
}

impl Left {
    /// Whether nothing is left.
    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        self.in_memory == 0 && self.in_spool == 0
    }
}

/// Hands manifests over. Whatever the state of the queue, no call waits for it: [`Dropper::hand_over`] waits for the
/// disk at most, and [`Dropper::flush`], [`Dropper::send_now`] and the end of a dropper for as long as they were told.
pub struct Dropper {
    shared: Arc<Shared>,
    /// The process that opened it.
    process: u32,
    /// The thread, where it was started: disconnected when it has ended.
    thread: Mutex<Option<Receiver<()>>>,
}

struct Shared {
    spool: Spool,
    opener: Opener,
    options: Options,
    backlog: Mutex<Backlog>,
    /// Something is in memory.
    handed_over: Notify,
    /// Something is in the spool.
    spooled: Notify,
    /// The dropper goes.
    stop: Notify,
}

/// What is in memory.
#[derive(Default)]
struct Backlog {
    waiting: VecDeque<Arc<Waiting>>,
    bytes: usize,
}

struct Waiting {
    id: String,
    manifest: Vec<u8>,
}

impl fmt::Debug for Dropper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dropper").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dropper {
    /// Opens a dropper. The queue need not be there yet.
    ///
    /// # Errors
    /// [`Error::Refused`] where the queue's URL is none; [`Error::Unreachable`] where the spool cannot be opened.
    pub fn open(options: Options) -> Result<Self, Error> {
        url::check(&options.queue)?;
        let (queue, clock) = (options.queue.clone(), Arc::clone(&options.clock));
        Self::with_queue(options, Arc::new(move || url::open_with(&queue, Arc::clone(&clock), PATIENCE)))
    }

    /// As [`Self::open`], with a queue that `opener` opens.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_queue(options: Options, opener: Opener) -> Result<Self, Error> {
        let spool = Spool::open(&options.spool, options.limits, Arc::clone(&options.clock))?;
        let [handed_over, spooled, stop] = [Notify::new(), Notify::new(), Notify::new()];
        let backlog = Mutex::default();
        let shared = Arc::new(Shared { spool, opener, options, backlog, handed_over, spooled, stop });
        Ok(Self { shared, process: std::process::id(), thread: Mutex::new(None) })
    }

    /// Hands a manifest over; [`Durability`] says what holds then.
    ///
    /// # Errors
    /// The manifest is not handed over. [`Error::Refused`]: it is too large. [`Error::Unreachable`]: the spool, or the
    /// memory for what is not in it yet, is full, or the spool cannot be written.
    pub fn hand_over(&self, manifest: &CheckpointManifest) -> Result<(), Error> {
        self.check_process()?;
        let refused =
            |error: serde_json::Error| Error::Refused { what: "manifest".to_owned(), why: error.to_string() };
        let bytes = serde_json::to_vec(manifest).map_err(refused)?;
        match self.shared.options.durability {
            Durability::Durable => {
                self.shared.spool.put(&manifest.id, &bytes)?;
                self.shared.spooled.notify_one();
                // It is in the spool: whoever drains that sends it.
                self.start().unwrap_or_else(|error| tracing::warn!(%error, "manifests wait in the spool"));
                Ok(())
            }
            Durability::Background => {
                check(&manifest.id, &bytes)?;
                self.start()?;
                self.shared.remember(Waiting { id: manifest.id.clone(), manifest: bytes })
            }
        }
    }

    /// Waits until everything is on the queue, for at most `limit`, and tells what is left.
    #[must_use]
    pub fn flush(&self, limit: Duration) -> Left {
        let deadline = Instant::now() + limit;
        if self.shared.left() != (Left { in_memory: 0, in_spool: 0 }) {
            self.start().unwrap_or_else(|error| tracing::warn!(%error, "nothing can be sent"));
        }
        loop {
            let left = self.shared.left();
            let rest = deadline.saturating_duration_since(Instant::now());
            if left.is_nothing() || rest.is_zero() || self.check_process().is_err() {
                return left;
            }
            std::thread::sleep(GLANCE.min(rest));
        }
    }

    /// Tries to send the manifest `id`, which was handed over, for at most `limit`, without waiting for whoever drains
    /// the spool.
    #[must_use]
    pub fn send_now(&self, id: &str, limit: Duration) -> Sent {
        if held(&self.shared.backlog).waiting.iter().any(|waiting| waiting.id == id) {
            return Sent::Waits("it is not in the spool yet".to_owned());
        }
        let (shared, id, (sender, receiver)) = (Arc::clone(&self.shared), id.to_owned(), channel());
        let sending = spawn("weighbridge-send", move |runtime| {
            let result = (shared.opener)()
                .and_then(|queue| runtime.block_on(shared.spool.send_one(queue.as_ref(), &id, limit)));
            // Nobody listens any more when the limit is over.
            let _ = sender.send(result.unwrap_or_else(|error| Sent::Waits(error.to_string())));
        });
        if let Err(error) = sending {
            return Sent::Waits(error.to_string());
        }
        let late = || Sent::Waits(format!("the queue did not take it within {limit:?}"));
        receiver.recv_timeout(limit).unwrap_or_else(|_| late())
    }

    /// The spool.
    #[must_use]
    pub fn spool(&self) -> &Spool {
        &self.shared.spool
    }

    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let why = "it was opened before this process was forked; open another in the child".to_owned();
        Err(Error::Refused { what: "dropper".to_owned(), why })
    }

    /// Starts the thread, where it has not been.
    fn start(&self) -> Result<(), Error> {
        self.check_process()?;
        let mut thread = held(&self.thread);
        if thread.is_none() {
            let (shared, (sender, receiver)) = (Arc::clone(&self.shared), channel());
            spawn("weighbridge-drop", move |runtime| {
                runtime.block_on(shared.work());
                drop(sender);
            })?;
            *thread = Some(receiver);
        }
        Ok(())
    }
}

impl Drop for Dropper {
    fn drop(&mut self) {
        // In a forked child there is no thread, and what is in memory is the parent's.
        if self.check_process().is_err() {
            return;
        }
        let left = self.flush(self.shared.options.flush);
        self.shared.stop.notify_one();
        if let Some(thread) = held(&self.thread).take() {
            // Disconnected: it has ended. Otherwise it hangs in the disk or the queue, and ends by itself.
            let _ = thread.recv_timeout(PARTING);
        }
        for lost in &held(&self.shared.backlog).waiting {
            tracing::error!(
                id = lost.id,
                "a manifest is lost: it could not be spooled before the dropper's end"
            );
        }
        if left.in_spool > 0 {
            tracing::info!(left.in_spool, spool = ?self.shared.options.spool, "manifests wait in the spool");
        }
    }
}

/// Runs `work` on a thread of its own, with a runtime for it.
fn spawn(name: &str, work: impl FnOnce(&tokio::runtime::Runtime) + Send + 'static) -> Result<(), Error> {
    let cannot = |error: std::io::Error| Error::Unreachable {
        what: "dropper".to_owned(),
        why: format!("cannot start a thread: {error}"),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .max_blocking_threads(4)
        .build()
        .map_err(cannot)?;
    let thread = move || {
        work(&runtime);
        // Calls that hang must not keep the thread.
        runtime.shutdown_background();
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(thread).map_err(cannot)?;
    Ok(())
}

impl Shared {
    fn left(&self) -> Left {
        Left { in_memory: held(&self.backlog).waiting.len(), in_spool: self.spool.waiting() }
    }

    fn remember(&self, waiting: Waiting) -> Result<(), Error> {
        let (items, bytes) = (self.options.backlog_items, self.options.backlog_bytes);
        let mut backlog = held(&self.backlog);
        let size = waiting.manifest.len();
        if backlog.waiting.len() >= items || backlog.bytes.saturating_add(size) > bytes {
            let why = format!(
                "the memory for manifests that are not in the spool yet is full ({} manifests, {} bytes; at most \
                 {items} and {bytes}); see whether the spool can be written, or hand over again later",
                backlog.waiting.len(),
                backlog.bytes
            );
            return Err(Error::Unreachable { what: "dropper".to_owned(), why });
        }
        backlog.bytes += size;
        backlog.waiting.push_back(Arc::new(waiting));
        // Where others wait before it, the thread is awake.
        let is_first = backlog.waiting.len() == 1;
        drop(backlog);
        if is_first {
            self.handed_over.notify_one();
        }
        Ok(())
    }

    /// What the thread does: both at once, so that a queue that hangs keeps nothing in memory.
    async fn work(&self) {
        tokio::select! {
            () = self.spool_all() => {}
            () = self.send_all() => {}
            () = self.stop.notified() => {}
        }
    }

    /// Carries manifests from memory to the spool.
    async fn spool_all(&self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let first = held(&self.backlog).waiting.front().cloned();
            let Some(first) = first else {
                self.handed_over.notified().await;
                continue;
            };
            match self.spool.put(&first.id, &first.manifest) {
                Ok(()) => {
                    self.forget_first();
                    self.spooled.notify_one();
                    pause = FIRST_PAUSE;
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    tracing::warn!(id = first.id, %error, ?pause, "a manifest stays in memory");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(SPOOL_PAUSE);
                }
            }
        }
    }

    /// The first in memory is in the spool now.
    fn forget_first(&self) {
        let mut backlog = held(&self.backlog);
        let bytes = backlog.waiting.pop_front().map_or(0, |first| first.manifest.len());
        backlog.bytes = backlog.bytes.saturating_sub(bytes);
    }

    /// Carries manifests from the spool to the queue.
    async fn send_all(&self) {
        let mut pause = FIRST_PAUSE;
        let mut queue = None;
        loop {
            if self.spool.waiting() == 0 {
                self.spooled.notified().await;
                continue;
            }
            match self.send_some(&mut queue).await {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    tracing::warn!(%error, ?pause, "manifests wait in the spool");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(QUEUE_PAUSE);
                }
            }
        }
    }

    async fn send_some(&self, queue: &mut Option<Arc<dyn Queue>>) -> Result<(), Error> {
        let open = match queue {
            Some(open) => Arc::clone(open),
            None => {
                let opener = Arc::clone(&self.opener);
                let opened = tokio::task::spawn_blocking(move || opener()).await;
                let broken = |error: tokio::task::JoinError| Error::Unreachable {
                    what: "queue".to_owned(),
                    why: error.to_string(),
                };
                Arc::clone(queue.insert(opened.map_err(broken)??))
            }
        };
        self.spool.drain(open.as_ref(), tokio::time::Instant::now() + SHIFT).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests;
