//! Takes messages off the queue, has them handled, and keeps them while that goes on.
//!
//! A worker holds no more messages than it handles, so that nobody waits behind one that is idle. A lease is short, and
//! is extended while its message is worked on: so a worker that dies costs what it was doing, and little time. Asked to
//! stop, it takes nothing more, ends what it has or gives it back, and is gone.

mod health;
pub mod watcher;

pub use health::{Health, Pulse};

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use weighbridge_queue::error::Error as QueueError;
use weighbridge_queue::{Lease, Taker};
use weighbridge_schemas::error::Kind;

use crate::steps::{Steps, Verdict};

/// How often a loop shows life while a step is done.
const BEAT: Duration = Duration::from_secs(1);
/// How much longer than a lease a loop may show no life. The queue's answers are what it waits for in between.
const SILENCE: Duration = Duration::from_secs(60);

/// How many leases have to fit into the time that a queue lets somebody hold a message: it is put back before the last
/// ones, and one that is not extended in time must do no harm.
const LEASES: u32 = 6;
/// How much later a broker's queue has to be empty again: what goes from one of its queues to another is in neither for
/// a moment.
const STILL_EMPTY: Duration = Duration::from_millis(500);

/// How long a worker that is told to stop waits for the queue's answer.
const LEAVE: Duration = Duration::from_secs(1);
/// The pauses between the first attempts to tell the queue what became of a message, in milliseconds.
const SETTLING: [u64; 3] = [50, 200, 1000];
/// The pause between those that follow.
const HELD: Duration = Duration::from_secs(2);
/// The longest pause before a queue that fails is asked again.
const LONGEST_OUTAGE: Duration = Duration::from_secs(5);

/// How a worker goes about it.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Who asks for messages.
    pub taker: Taker,
    /// How long a message is taken for at a time.
    pub lease: Duration,
    /// How long to wait before the queue is asked again, when it had nothing: at first, and at most.
    pub idle: (Duration, Duration),
    /// How long messages at hand may take to end when the worker is asked to stop.
    pub stop: Duration,
    /// Whether to stop when the queue is empty: nothing ready, delayed or taken.
    pub until_empty: bool,
}

/// Tells workers to stop.
#[derive(Debug, Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A way to tell workers to stop, and what they listen to.
    #[must_use]
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Whether workers were told to stop.
    #[must_use]
    pub fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Comes back when workers are told to stop.
    pub async fn wait(&mut self) {
        // Whoever could tell is gone: nobody will.
        if self.0.wait_for(|stop| *stop).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Works until it is told to stop, or the queue is empty if it is to stop then.
pub async fn run(steps: Arc<Steps>, concurrency: usize, options: Options, health: Arc<Health>, stop: Stop) {
    let silence = options.lease.saturating_add(SILENCE);
    let slots = (0..concurrency.max(1)).map(|_| {
        let slot = Slot {
            steps: Arc::clone(&steps),
            options,
            health: Arc::clone(&health),
            pulse: health.pulse(silence),
            stop: stop.clone(),
        };
        slot.run()
    });
    join_all(slots).await;
}

/// Handles one message at a time.
struct Slot {
    steps: Arc<Steps>,
    options: Options,
    health: Arc<Health>,
    pulse: Pulse,
    stop: Stop,
}

impl Slot {
    async fn run(mut self) {
        let mut pause = self.options.idle.0;
        while !self.stop.is_set() {
            self.pulse.beat();
            let Some(leased) = self.lease().await else { return };
            match leased {
                Ok(Some(lease)) => {
                    self.health.queue_answers();
                    pause = self.options.idle.0;
                    self.steps.metrics().taken();
                    self.work(lease).await;
                    self.steps.metrics().settled();
                    continue;
                }
                Ok(None) => {
                    self.health.queue_answers();
                    if self.options.until_empty && self.is_empty().await {
                        return;
                    }
                    pause = pause.saturating_mul(2).min(self.options.idle.1);
                }
                Err(error) => {
                    self.health.queue_fails(&error);
                    self.steps.metrics().retried("queue_unreachable");
                    let pauses = self.steps.options().pauses;
                    pause = pause.max(pauses.first).saturating_mul(2).min(pauses.longest.min(LONGEST_OUTAGE));
                    tracing::warn!(%error, again_in = ?pause, "the queue cannot be asked");
                }
            }
            tokio::select! {
                () = self.stop.wait() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Asks for a message; `None` where that lasts too long for a worker that is told to stop.
    async fn lease(&self) -> Option<Result<Option<Lease>, QueueError>> {
        let mut stop = self.stop.clone();
        let stopping = async move {
            stop.wait().await;
            sleep(LEAVE).await;
        };
        tokio::select! {
            leased = self.steps.queue().lease(self.options.taker, self.lease_time()) => Some(leased),
            () = stopping => None,
        }
    }

    /// How long a message is taken for at a time.
    fn lease_time(&self) -> Duration {
        let most = self.steps.queue().longest_hold().map(|hold| hold / LEASES);
        most.map_or(self.options.lease, |most| self.options.lease.min(most))
    }

    /// Whether nothing is on the queue that this worker, or another one, could still have to do.
    async fn is_empty(&self) -> bool {
        if !self.looks_empty().await {
            return false;
        }
        if self.steps.queue().longest_hold().is_none() {
            return true;
        }
        sleep(STILL_EMPTY).await;
        self.looks_empty().await
    }

    async fn looks_empty(&self) -> bool {
        let depth = self.steps.queue().depth().await;
        depth.is_ok_and(|depth| depth.iter().all(|class| class.ready + class.delayed + class.leased == 0))
    }

    /// Has a message handled, and keeps it meanwhile; gives it back where stopping does not wait any longer.
    async fn work(&mut self, lease: Lease) {
        let mut stop = self.stop.clone();
        let limit = self.options.stop;
        let stopping = async move {
            stop.wait().await;
            sleep(limit).await;
        };
        let steps = Arc::clone(&self.steps);
        let verdict = tokio::select! {
            verdict = steps.handle(&lease) => Some(verdict),
            () = self.keep(&lease) => None,
            () = self.show_life() => None,
            () = stopping => Some(Verdict::Again(Duration::ZERO)),
        };
        let Some(verdict) = verdict else {
            tracing::warn!(message = %lease.message.id, "the lease was lost; whoever has it now goes on");
            return;
        };
        self.settle(&lease, verdict).await;
    }

    /// Extends the lease again and again; comes back when it is lost. A message that a broker took back comes to
    /// somebody again; but whoever is at it may well be done by then, and goes on.
    async fn keep(&self, lease: &Lease) {
        let time = self.lease_time();
        let mut ticks = interval(time / 3);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let mut taken_back = false;
        loop {
            ticks.tick().await;
            match self.steps.queue().extend(lease, time).await {
                Ok(()) => {}
                Err(QueueError::LeaseLost { .. }) => return,
                Err(QueueError::TakenBack { .. }) if taken_back => {}
                Err(error @ QueueError::TakenBack { .. }) => {
                    taken_back = true;
                    self.steps.taken_back(lease, error).await;
                }
                Err(error) => tracing::warn!(%error, message = %lease.message.id, "a lease is not extended"),
            }
        }
    }

    /// Long work is no standstill: its step is waited for here, and so the loop turns.
    async fn show_life(&self) {
        let mut ticks = interval(BEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.pulse.beat();
        }
    }

    /// Tells the queue what became of a message. Where that it is done cannot be told, the lease runs out, and the
    /// message is met again by somebody who finds that it was done. What is to be given back is held until the queue
    /// takes it, or the worker has to stop: were it let go, it would count as abandoned, and a queue that takes nothing
    /// for a while would be its end.
    async fn settle(&mut self, lease: &Lease, verdict: Verdict) {
        let queue = Arc::clone(self.steps.queue());
        let mut pauses = SETTLING.into_iter().map(Duration::from_millis);
        loop {
            self.pulse.beat();
            let told = async {
                match verdict {
                    Verdict::Done => queue.done(lease).await,
                    Verdict::Again(delay) => queue.retry(lease, delay).await,
                }
            };
            match timeout(self.options.lease, told).await {
                Ok(Ok(())) => return,
                Ok(Err(error @ QueueError::TakenBack { .. })) => {
                    return self.steps.taken_back(lease, error).await;
                }
                Ok(Err(error)) if error.kind() == Kind::Conflict => return,
                Ok(Err(error)) => {
                    tracing::warn!(%error, message = %lease.message.id, "a message is not settled");
                    self.health.queue_takes_nothing(&error.to_string());
                }
                Err(_) => tracing::warn!(message = %lease.message.id, "the queue does not answer"),
            }
            let (pause, is_held) = match pauses.next() {
                Some(pause) => (pause, false),
                None if verdict == Verdict::Done || self.stop.is_set() => return,
                None => (HELD, true),
            };
            // It must not run out meanwhile.
            let pause = pause.min(self.lease_time() / 3);
            tokio::select! {
                () = self.stop.wait(), if is_held => {}
                () = sleep(pause) => {}
            }
            // Should it be lost, the next try says so.
            let _ = timeout(self.options.lease, queue.extend(lease, self.lease_time())).await;
        }
    }
}
