//! What the tests of broker faults share: workers in this process, jobs of which each is published for itself, and
//! waiting with a deadline.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use weighbridge::metrics::Metrics;
use weighbridge::steps::Steps;
use weighbridge::worker::{self, Health, Stop};
use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::error::Error;
use weighbridge_queue::url;
use weighbridge_queue::{Queue, Taker};
use weighbridge_schemas::job::Ended;
use weighbridge_snapshots::error::Result;
use weighbridge_snapshots::root::{Intercept, Request, Root};
use weighbridge_tests::rabbit::Broker;

use crate::accounts;
use crate::house::{House, id, manifest_with, options, until_empty};

/// The heartbeat, in seconds, of queues that are to notice quickly what happens to their broker.
pub(crate) const HEARTBEAT: u64 = 2;
/// Within how long all is well again once the broker is: two heartbeats and 5 s, and as much again for slow machines.
pub(crate) const RECOVERY: Duration = Duration::from_secs(2 * (2 * HEARTBEAT + 5));
/// The longest that a call waits for a broker, unless told otherwise, and what a test grants it beyond.
pub(crate) const CALL: Duration = Duration::from_secs(10 + 2);
/// Until when a test waits for what does not depend on a limit.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The URL with a short heartbeat, and what else `more` says.
pub(crate) fn quick(url: &str, more: &str) -> String {
    format!("{url}&heartbeat={HEARTBEAT}{more}")
}

pub(crate) fn open(url: &str) -> std::result::Result<Arc<dyn Queue>, Error> {
    url::open(url, Arc::new(SystemClock::new()))
}

/// The shared broker, where it takes orders.
pub(crate) async fn shared() -> Option<&'static Broker> {
    tokio::task::spawn_blocking(Broker::shared).await.unwrap()
}

/// Gives an order to the broker, which it has to follow.
pub(crate) fn order(broker: &Broker, arguments: &[&str]) -> String {
    tokio::task::block_in_place(|| {
        let done = broker.ctl(arguments);
        assert!(done.status.success(), "{arguments:?}: {done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    })
}

/// A worker in this process.
pub(crate) struct Working {
    pub(crate) health: Arc<Health>,
    pub(crate) metrics: Arc<Metrics>,
    tell: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Working {
    /// Starts one that works until it is told to stop.
    pub(crate) fn start(root: Root, queue: Arc<dyn Queue>, lease: Duration) -> Self {
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        // Here nobody watches the store.
        health.store_was_read();
        let steps = Steps::new(root, queue, options(), Arc::clone(&metrics)).watched_by(Arc::clone(&health));
        let options = worker::Options { until_empty: false, ..until_empty(lease) };
        let (tell, stop) = Stop::new();
        let task = tokio::spawn(worker::run(Arc::new(steps), 1, options, Arc::clone(&health), stop));
        Self { health, metrics, tell, task }
    }

    pub(crate) async fn is_ready(&self) {
        until("the worker is ready", RECOVERY, async || self.health.ready().is_ok()).await;
    }

    /// Waits until it says that it is not ready because of the queue; the reason.
    pub(crate) async fn is_not_ready(&self, limit: Duration) -> String {
        until("the worker is not ready", limit, async || self.health.ready().is_err()).await;
        let why = self.health.ready().err().unwrap_or_default();
        assert!(why.contains("the queue fails") || why.is_empty(), "{why}");
        why
    }

    /// How often something was tried again because of the queue's failures.
    pub(crate) fn retries(&self) -> u64 {
        let text = self.metrics.text();
        let lines = text.lines().filter(|line| line.contains("class=\"queue_"));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
    }

    pub(crate) async fn stop(self) {
        let _ = self.tell.send(true);
        self.task.await.unwrap();
    }
}

/// Waits until something holds.
pub(crate) async fn until(what: &str, limit: Duration, holds: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until all exchanges and queues are made, which takes a broker that is busy its time.
pub(crate) async fn made(queue: &dyn Queue) {
    until("the queues are made", LONG, async || queue.lease(Taker::Cpu, LONG).await.is_ok()).await;
}

/// What `call` came to, which may not last longer than `limit`.
pub(crate) async fn within<T>(limit: Duration, call: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let came = call.await;
    assert!(started.elapsed() <= limit, "a call took {:?}; at most {limit:?}", started.elapsed());
    came
}

/// The manifest of job `number`, which has a model of its own: so each is published, whatever the order.
pub(crate) fn job(number: u64, checkpoint: &Path) -> Value {
    manifest_with(&id(number), number, checkpoint, &[("model", json!(format!("m{number}")))])
}

/// Waits until these jobs have ended, and checks that each was published, once, and that nothing else happened.
pub(crate) async fn all_are_published(root: &Root, queue: &dyn Queue, numbers: std::ops::Range<u64>) {
    let count = numbers.end - numbers.start;
    for number in numbers {
        let what = format!("job {number} has ended");
        let model = format!("m{number}");
        until(&what, LONG, async || accounts::outcome(root, &model, &id(number)).await.is_some()).await;
    }
    let ends = accounts::balance(root).await;
    assert_eq!(ends.into_iter().collect::<Vec<_>>(), [(Ended::Published, count)]);
    accounts::sound(root).await;
    assert!(accounts::letters(root).await.is_empty());
    let is_empty = async || {
        let depth = queue.depth().await.unwrap();
        depth.iter().all(|class| class.ready + class.delayed + class.leased == 0)
    };
    until("the queue is empty", LONG, is_empty).await;
}

/// A store in which some chunks take their time.
#[derive(Debug)]
pub(crate) struct Slow {
    /// Part of the keys of those that are slow.
    of: &'static str,
    time: Duration,
    begun: AtomicU64,
}

impl Slow {
    pub(crate) fn new(of: &'static str, time: Duration) -> Arc<Self> {
        Arc::new(Self { of, time, begun: AtomicU64::new(0) })
    }

    /// How many chunks were begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }
}

impl Intercept for Slow {
    fn before(&self, request: &Request) -> Result<()> {
        if request.name == "put_ahead" && request.key.as_ref().contains(self.of) {
            self.begun.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(self.time);
        }
        Ok(())
    }

    fn after(&self, _request: &Request) -> Result<()> {
        Ok(())
    }
}

/// A house on the broker, with a short heartbeat.
pub(crate) fn house(broker: &Broker, name: &str, more: &str) -> (tempfile::TempDir, House) {
    let (folder, house) = House::on(broker, name);
    let queue = quick(&house.queue, more);
    (folder, House { queue, ..house })
}
