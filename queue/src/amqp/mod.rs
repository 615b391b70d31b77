//! The queue on a RabbitMQ broker, 3.10 or newer.
//!
//! | room | holds |
//! |---|---|
//! | `address` | the URL |
//! | `certificates` | whom to trust |
//! | `link` | a connection that is made anew when it is lost |
//! | `topology` | exchanges and queues |
//! | `wire` | a message as the broker carries it |
//! | `hand` | the leases of this process |
//! | `sending`, `taking` | what the calls do |
//!
//! Messages are fetched one at a time, and only by who is free for it: nothing is prefetched, so nothing waits behind
//! somebody who is busy, and a process that dies has counted against no message but those it worked on.
//!
//! A lease is the broker's delivery, and the right to it ends with the channel; how long it lasts is watched here,
//! since the broker only knows one time for all (`consumer_timeout`). When that is nearly over the message is put
//! back, to come again much later without being counted against anybody, and whoever has it goes on; the copy finds the
//! work done, where it is by then. Where the broker takes a message back by itself, whoever has it is told
//! ([`Error::TakenBack`]).
//!
//! I/O has a thread of its own, and a runtime for its timers: whatever the callers' runtime does, heartbeats go on.

mod address;
mod certificates;
mod hand;
mod link;
mod sending;
mod taking;
mod topology;
mod wire;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use crate::clock::Clock;
use crate::error::Error;
use crate::message::Message;
use crate::{Depth, Lease, Queue, Taker};
pub(crate) use address::Address;
use hand::Hand;
use link::{Link, Purpose};
use topology::Topology;

/// How much longer than its limit a call may take, so that what waits for one answer alone says which.
const SLACK: Duration = Duration::from_millis(500);
/// How long saying goodbye may take.
const LEAVING: Duration = Duration::from_millis(700);
/// How often leases are looked at that may have ended.
const LOOK: Duration = Duration::from_millis(250);
/// For how long a message is put back that somebody in this process is at, or that only newer versions know.
const LATER: Duration = Duration::from_secs(16);
/// The longest time that is given to the broker, in milliseconds: its longest timer.
const LONGEST: u64 = u32::MAX as u64;

/// A queue on a broker.
#[derive(Debug)]
pub struct Amqp {
    inner: Arc<Inner>,
    /// Gone only while it is being dropped.
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct Inner {
    clock: Arc<dyn Clock>,
    topology: Topology,
    publishing: Link,
    taking: Link,
    hand: Hand,
    /// Whether messages for all go first the next time.
    turn: AtomicBool,
    /// For how long the broker lets somebody hold a message, in milliseconds, as far as is known.
    delivery: AtomicU64,
}

impl Amqp {
    /// The queue at `address`; no call waits longer than `patience` for the broker's answer. Nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the machine gives no thread.
    pub(crate) fn new(address: Address, clock: Arc<dyn Clock>, patience: Duration) -> Result<Self, Error> {
        let safe = address.uri.scheme == lapin::uri::AMQPScheme::AMQPS;
        let tls = safe.then(|| address.files.connector()).transpose()?.map(Arc::new);
        let what = format!("queue {}", address.shown);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("amqp")
            .enable_all()
            .build()
            .map_err(|error| Error::Unreachable { what, why: error.to_string() })?;
        let topology = Topology::new(&address.queue);
        let delivery = AtomicU64::new(milliseconds(address.delivery));
        let address = Arc::new(Address { connecting: address.connecting.min(patience), ..address });
        let link = |purpose| Link::new(Arc::clone(&address), tls.clone(), purpose, patience);
        let (publishing, taking) = (link(Purpose::Publish), link(Purpose::Take));
        let turn = AtomicBool::new(false);
        let inner =
            Arc::new(Inner { clock, topology, publishing, taking, hand: Hand::default(), turn, delivery });
        runtime.spawn(watch(Arc::downgrade(&inner)));
        Ok(Self { inner, runtime: Some(runtime) })
    }

    /// Connects, without asking for anything. Blocks for as long as that takes, which is bounded.
    ///
    /// # Errors
    /// [`Error::Refused`] where the broker refuses user or virtual host; [`Error::Unreachable`] where it cannot be
    /// reached now.
    pub(crate) fn connect(&self) -> Result<(), Error> {
        self.block_on(|inner| async move { inner.publishing.check().await })
    }

    /// Whether the queue is there; none is made.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub(crate) fn is_there(&self) -> Result<bool, Error> {
        self.block_on(|inner| async move {
            let channel = inner.publishing.channel().await?;
            let name = inner.topology.dead();
            inner.publishing.exists(topology::counts(&channel, &[name])).await
        })
    }

    /// Runs `work` on the queue's own runtime, and waits for it without a runtime, for as long as a call may take.
    fn block_on<T: Send + 'static, W>(&self, work: impl FnOnce(Arc<Inner>) -> W) -> Result<T, Error>
    where
        W: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let (sender, receiver) = std::sync::mpsc::channel();
        let work = work(Arc::clone(&self.inner));
        if let Some(runtime) = &self.runtime {
            runtime.spawn(async move {
                let _ = sender.send(work.await);
            });
        }
        match receiver.recv_timeout(self.inner.most()) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(self.inner.late()),
            Err(RecvTimeoutError::Disconnected) => Err(broken_off()),
        }
    }

    /// Runs `work` on the queue's own runtime, and waits for it as long as a call may take. When the caller goes away,
    /// it is done all the same.
    async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let Some(runtime) = &self.runtime else { return Err(broken_off()) };
        let inner = Arc::clone(&self.inner);
        let waited = runtime.spawn(async move {
            match timeout(inner.most(), tokio::spawn(work)).await {
                Ok(result) => result.unwrap_or_else(|_| Err(broken_off())),
                Err(_) => Err(inner.late()),
            }
        });
        waited.await.unwrap_or_else(|_| Err(broken_off()))
    }
}

fn broken_off() -> Error {
    let why = "the call was broken off: the queue was closed".to_owned();
    Error::UnknownOutcome { what: "queue".to_owned(), why }
}

impl Drop for Amqp {
    fn drop(&mut self) {
        let (inner, runtime) = (Arc::clone(&self.inner), self.runtime.take());
        // A runtime may not be waited for, nor dropped, where others run.
        let leaving = std::thread::spawn(move || {
            if let Some(runtime) = runtime {
                // One that is being made at the moment is not waited for.
                let goodbye = async { tokio::join!(inner.taking.close(), inner.publishing.close()) };
                let _ = runtime.block_on(async { timeout(LEAVING, goodbye).await });
                runtime.shutdown_background();
            }
        });
        // Brokers log those who leave without a word.
        let _ = leaving.join();
    }
}

/// Gives back what was held for too long, until the queue is gone.
async fn watch(inner: Weak<Inner>) {
    loop {
        sleep(LOOK).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.end_leases().await;
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(LONGEST).min(LONGEST)
}

#[async_trait]
impl Queue for Amqp {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        message.check()?;
        let (inner, message) = (Arc::clone(&self.inner), message.clone());
        self.run(async move { inner.send(&message).await }).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        let inner = Arc::clone(&self.inner);
        self.run(async move { inner.lease(taker, time).await }).await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        self.run(async move { inner.extend(&lease, time).await }).await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        self.run(async move { inner.done(&lease).await }).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        self.run(async move { inner.retry(&lease, delay).await }).await
    }

    async fn prepare(&self) -> Result<(), Error> {
        let inner = Arc::clone(&self.inner);
        self.run(async move { inner.taking.check().await }).await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        let inner = Arc::clone(&self.inner);
        self.run(async move { inner.depth().await }).await
    }

    fn longest_hold(&self) -> Option<Duration> {
        Some(self.inner.longest_hold())
    }
}

impl Inner {
    /// How long a call takes at most: most wait for the broker more than once.
    fn most(&self) -> Duration {
        self.publishing.limit() + SLACK
    }

    fn late(&self) -> Error {
        self.publishing.unknown(format!("the broker has not done it within {:?}", self.publishing.limit()))
    }

    fn longest_hold(&self) -> Duration {
        Duration::from_millis(self.delivery.load(Ordering::Relaxed))
    }
}
