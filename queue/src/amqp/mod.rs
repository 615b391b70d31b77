//! The queue on a RabbitMQ broker, 3.10 or newer.
//!
//! | room | holds |
//! |---|---|
//! | `address` | the URL |
//! | `link` | a connection that is made anew when it is lost |
//! | `topology` | exchanges and queues |
//! | `wire` | a message as the broker carries it |
//! | `hand` | the leases of this process |
//!
//! Messages are fetched one at a time, and only by who is free for it: nothing is prefetched, so nothing waits behind
//! somebody who is busy, and a process that dies has counted against no message but those it worked on.
//!
//! A lease is the broker's delivery, and the right to it ends with the channel; how long it lasts is watched here, since
//! the broker only knows one time for all (`consumer_timeout`). Nearly that long before it is over the message is put
//! back, to come again much later without being counted against anybody, and whoever has it goes on; the copy finds the
//! work done. Where the broker takes a message back by itself, whoever has it is told ([`Error::TakenBack`]).
//!
//! I/O has a thread of its own, and a runtime for its timers: whatever the callers' runtime does, heartbeats go on.

mod address;
mod hand;
mod link;
mod topology;
mod wire;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, BasicQosOptions, BasicRejectOptions,
};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

use crate::clock::Clock;
use crate::error::Error;
use crate::message::{Device, Message, Priority};
use crate::{Depth, Lease, Queue, Taker};
pub(crate) use address::Address;
use hand::{Hand, InHand, State};
use link::{LEADERLESS, Link, Purpose};
use topology::Topology;
use wire::History;

/// How much longer than its limit a call may take, so that what waits for one answer alone says which.
const SLACK: Duration = Duration::from_millis(500);
/// How often leases are looked at that may have ended.
const LOOK: Duration = Duration::from_millis(250);
/// For how long a message is put back that somebody in this process is at, or that only newer versions know.
const LATER: Duration = Duration::from_secs(16);
/// The longest delay, in milliseconds: the longest timer that the broker has.
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
        let link = |purpose| Link::new(Arc::clone(&address), topology.clone(), purpose, patience);
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
        self.block_on(|inner| async move {
            let channel = inner.publishing.channel().await?;
            inner.publishing.give_back(channel).await;
            Ok(())
        })
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

    /// Runs `work` on the queue's own runtime, and waits for it as long as a call may take. When the caller goes away, it
    /// is done all the same.
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
                runtime.block_on(async { tokio::join!(inner.taking.close(), inner.publishing.close()) });
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

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        let inner = Arc::clone(&self.inner);
        self.run(async move { inner.depth().await }).await
    }

    fn longest_hold(&self) -> Option<Duration> {
        Some(self.inner.longest_hold())
    }
}

/// How publishing ended.
enum Published {
    Yes,
    /// No queue is bound for it.
    Nowhere(String),
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

    async fn send(&self, message: &Message) -> Result<(), Error> {
        let history = History { sent: self.clock.now().wall, ..History::default() };
        self.route(message, &history, Duration::ZERO).await
    }

    /// Sends a message to where it can be taken in `delay`.
    async fn route(&self, message: &Message, history: &History, delay: Duration) -> Result<(), Error> {
        let (exchange, key, expiration) = self.way(message, history, delay);
        let properties = wire::properties(message, history, expiration);
        let publish = async || self.publish(exchange.clone(), &key, properties.clone(), &message.body).await;
        let Published::Nowhere(why) = publish().await? else { return Ok(()) };
        // Somebody deleted a queue, or nobody has made it yet.
        tracing::warn!(message = %message.id, why, "it was not routed; the queues are looked for");
        self.taking.looks_again().await;
        let unrouted = |why: String| {
            let way_out =
                "start a worker once, which makes the queues, or import the definitions of deploy/rabbitmq";
            self.publishing.unreachable(format!("the message was not routed to any queue ({why}): {way_out}"))
        };
        let channel = self.taking.channel().await.map_err(|error| unrouted(error.to_string()))?;
        self.taking.give_back(channel).await;
        match publish().await? {
            Published::Yes => Ok(()),
            Published::Nowhere(why) => Err(unrouted(why)),
        }
    }

    /// Exchange, routing key and expiration of a message that is to be taken in `delay`.
    fn way(
        &self,
        message: &Message,
        history: &History,
        delay: Duration,
    ) -> (ShortString, String, Option<u64>) {
        let class = message.priority;
        // What has waited for a GPU for long enough needs none any more.
        let (key, expiration) = match message.device {
            Device::Gpu { wait } if wait > history.waited + delay => {
                (topology::key(class, message.device), Some(milliseconds(wait - history.waited - delay)))
            }
            Device::Gpu { .. } => (topology::key(class, Device::Any), None),
            device => (topology::key(class, device), None),
        };
        if delay.is_zero() {
            return (self.topology.exchange(), key, expiration);
        }
        // An expiration is of one queue: after a delay, a message for a GPU waits for one for ever. So after the first
        // delay it is anybody's.
        let key = if expiration.is_some() { topology::key(class, Device::Any) } else { key };
        let delay = milliseconds(delay);
        (self.topology.delay_exchange(delay), key, Some(delay))
    }

    async fn publish(
        &self,
        exchange: ShortString,
        key: &str,
        properties: lapin::BasicProperties,
        body: &[u8],
    ) -> Result<Published, Error> {
        let link = &self.publishing;
        let channel = link.channel().await.map_err(later)?;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let publishing = channel.clone();
        let confirmed = async move {
            publishing.basic_publish(exchange, topology::short(key), options, body, properties).await?.await
        };
        let deadline = Instant::now() + link.limit();
        let mut confirmed = std::pin::pin!(confirmed);
        let confirmation = loop {
            tokio::select! {
                confirmation = &mut confirmed => break confirmation,
                () = sleep(LOOK) => {}
            }
            // A broker that is out of memory or disk reads nothing from here until it has some again.
            if let Some(why) = link.blocked() {
                return Err(link.unknown(why));
            }
            if Instant::now() >= deadline {
                link.give_up("it does not confirm").await;
                return Err(link.unknown(format!(
                    "it has not confirmed a message for {:?}; {LEADERLESS}",
                    link.limit()
                )));
            }
        };
        match confirmation {
            Ok(Confirmation::Ack(None)) => {
                link.give_back(channel).await;
                Ok(Published::Yes)
            }
            Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => {
                link.give_back(channel).await;
                let why = returned.reply_text.to_string();
                Ok(Published::Nowhere(why))
            }
            Ok(Confirmation::Nack(None) | Confirmation::NotRequested) => {
                // A channel that was told that a queue is full may go on saying so for ever when its limit was
                // raised: the next message gets another one.
                let why = "it does not take the message: a queue is full, has no leader or too few nodes; \
                           `rabbitmqctl list_queues name messages policy leader online` shows which";
                Err(link.unreachable(why.to_owned()))
            }
            // There is not even the exchange.
            Err(error) if link::code(&error) == Some(404) => Ok(Published::Nowhere(error.to_string())),
            Err(error) => match later(link.error(&error)) {
                Error::Unreachable { why, .. } => Err(link.unknown(why)),
                error => Err(error),
            },
        }
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.end_leases().await;
        let channel = self.taking.channel().await?;
        let turn = self.turn.fetch_xor(true, Ordering::Relaxed);
        let mut queues = self.topology.to_take(taker, turn);
        queues.push((Priority::Low, self.topology.dead()));
        let names: Vec<_> = queues.iter().map(|(_, name)| name.clone()).collect();
        // Asking for a count costs the broker little, taking from an empty queue an entry in a log on disk. But counts
        // may lag behind what this process gave back.
        let counts = if self.hand.has_returned() {
            vec![1; names.len()]
        } else {
            self.taking.answer(topology::counts(&channel, &names)).await?
        };
        for ((class, name), _) in queues.into_iter().zip(counts).filter(|(_, count)| *count > 0) {
            while let Some(taken) = self.take(&channel, class, name.clone()).await? {
                let Some((message, history, tag)) = taken else { continue };
                return Ok(Some(self.in_hand(channel, tag, message, history, time)));
            }
        }
        self.taking.give_back(channel).await;
        Ok(None)
    }

    /// Takes the next message from a queue, where there is one; `Some(None)` where it is not for now, and was put back.
    async fn take(
        &self,
        channel: &Channel,
        class: Priority,
        name: ShortString,
    ) -> Result<Option<Option<(Message, History, u64)>>, Error> {
        let taken = self.taking.answer(channel.basic_get(name, BasicGetOptions::default())).await?;
        let Some(taken) = taken else { return Ok(None) };
        let (tag, properties) = (taken.delivery.delivery_tag, taken.delivery.properties.clone());
        let body = taken.delivery.data;
        if !wire::is_known(&properties) {
            let delay = milliseconds(LATER);
            let expires = properties.with_expiration(topology::short(&delay.to_string()));
            let key = topology::class_name(class);
            self.publish(self.topology.delay_exchange(delay), key, expires, &body).await?;
            self.acknowledge(channel, tag).await?;
            return Ok(Some(None));
        }
        let (message, history) = wire::message(&properties, body, class);
        self.hand.saw(class, history.sent);
        if self.hand.has(&message.id) {
            // It came back while somebody in this process goes on with it: nobody abandoned it.
            let history = History { abandoned: history.abandoned.saturating_sub(1), ..history };
            tracing::debug!(message = %message.id, "it came back while it is worked on here; it comes again later");
            self.route(&message, &history, LATER).await?;
            self.acknowledge(channel, tag).await?;
            return Ok(Some(None));
        }
        Ok(Some(Some((message, history, tag))))
    }

    fn in_hand(
        &self,
        channel: Channel,
        tag: u64,
        message: Message,
        history: History,
        time: Duration,
    ) -> Lease {
        let now = self.clock.now().since_boot;
        let fence = self.hand.take(InHand {
            id: message.id.clone(),
            class: message.priority,
            history,
            state: State::Delivered { channel, tag },
            taken: now,
            until: now.saturating_add(time),
        });
        let History { abandoned, retries, waited, .. } = history;
        Lease { message, abandoned, retries, waited, fence }
    }

    /// Acknowledges a delivery. The broker says nothing to that; but it answers the next question after it.
    async fn acknowledge(&self, channel: &Channel, tag: u64) -> Result<(), Error> {
        let acknowledged = async {
            channel.basic_ack(tag, BasicAckOptions::default()).await?;
            channel.basic_qos(1, BasicQosOptions::default()).await
        };
        self.taking.answer(acknowledged).await.map_err(later)
    }

    /// Gives back what was held for too long; that counts as abandoned.
    async fn end_leases(&self) {
        for ended in self.hand.ended(self.clock.now().since_boot) {
            let State::Delivered { channel, tag } = ended.state else { continue };
            let rejected = async {
                channel.basic_reject(tag, BasicRejectOptions { requeue: true }).await?;
                channel.basic_qos(1, BasicQosOptions::default()).await
            };
            match self.taking.answer(rejected).await {
                Ok(()) => self.taking.give_back(channel).await,
                Err(error) => tracing::debug!(%error, message = %ended.id, "the broker has it back already"),
            }
            self.hand.returns();
        }
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.end_leases().await;
        let id = &lease.message.id;
        let Some(mut hand) = self.hand.release(lease.fence) else {
            return Err(Error::LeaseLost { id: id.clone() });
        };
        let now = self.clock.now().since_boot;
        hand.until = now.saturating_add(time);
        if let State::Delivered { channel, .. } = &hand.state
            && !channel.status().connected()
        {
            hand.state = State::TakenBack { why: self.why_closed() };
        }
        // Three more times like this one have to fit in, so that one that fails does no harm.
        let late = now.saturating_sub(hand.taken) + time * 3 >= self.longest_hold();
        let result = match &hand.state {
            State::Delivered { channel, tag } if late => {
                let put_back = self.put_back(lease, &hand.history, channel.clone(), *tag).await;
                if put_back.is_ok() {
                    hand.state = State::PutBack;
                }
                put_back
            }
            State::Delivered { .. } | State::PutBack => Ok(()),
            State::TakenBack { why } => Err(Error::TakenBack { id: id.clone(), why: why.clone() }),
        };
        self.hand.resume(lease.fence, hand);
        result
    }

    /// Puts a message back that nobody may hold for much longer; it comes again when as much time has passed again.
    async fn put_back(
        &self,
        lease: &Lease,
        history: &History,
        channel: Channel,
        tag: u64,
    ) -> Result<(), Error> {
        tracing::info!(message = %lease.message.id, "held for nearly as long as the broker allows; it is put back");
        self.route(&lease.message, history, self.longest_hold()).await?;
        self.acknowledge(&channel, tag).await?;
        self.taking.give_back(channel).await;
        Ok(())
    }

    /// Why a channel was closed; what the broker says of its time limit is remembered.
    fn why_closed(&self) -> String {
        let why = self.taking.last_error().unwrap_or_else(|| "the connection was lost".to_owned());
        if let Some(limit) = delivery_limit(&why)
            && limit < self.longest_hold()
        {
            self.delivery.store(milliseconds(limit), Ordering::Relaxed);
            tracing::warn!(
                ?limit,
                "the broker takes messages back sooner than the queue's URL says: add delivery_timeout={} to it, or \
                 raise the broker's consumer_timeout",
                limit.as_secs()
            );
        }
        why
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.end_leases().await;
        match self.hand.release(lease.fence).map(|hand| hand.state) {
            Some(State::Delivered { channel, tag }) if channel.status().connected() => {
                self.acknowledge(&channel, tag).await?;
                self.taking.give_back(channel).await;
                Ok(())
            }
            Some(State::PutBack) => Ok(()),
            _ => Err(Error::LeaseLost { id: lease.message.id.clone() }),
        }
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.end_leases().await;
        let lost = Error::LeaseLost { id: lease.message.id.clone() };
        let Some(hand) = self.hand.release(lease.fence) else { return Err(lost) };
        let (channel, tag) = match &hand.state {
            State::Delivered { channel, tag } if channel.status().connected() => (channel.clone(), *tag),
            State::Delivered { .. } => {
                return Err(Error::TakenBack { id: lease.message.id.clone(), why: self.why_closed() });
            }
            State::PutBack => return Ok(()),
            State::TakenBack { .. } => return Err(lost),
        };
        let History { retries, waited, .. } = hand.history;
        let history = History {
            retries: retries.saturating_add(1),
            waited: waited.saturating_add(delay),
            ..hand.history
        };
        if let Err(error) = self.route(&lease.message, &history, delay).await {
            // It is still this one's.
            self.hand.resume(lease.fence, hand);
            return Err(error);
        }
        // From here on it is safe; should the broker not hear of this, there are two of it.
        if let Err(error) = self.acknowledge(&channel, tag).await {
            tracing::debug!(%error, message = %lease.message.id, "it was put back, and may come twice");
        }
        self.taking.give_back(channel).await;
        Ok(())
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.end_leases().await;
        let channel = self.taking.channel().await?;
        let (ready, delayed) = (self.topology.ready(), self.topology.delayed());
        let dead = (Priority::Low, self.topology.dead());
        let queues: Vec<_> = ready.iter().chain([&dead]).chain(&delayed).cloned().collect();
        let names: Vec<_> = queues.iter().map(|(_, name)| name.clone()).collect();
        let counts = self.taking.answer(topology::counts(&channel, &names)).await?;
        self.taking.give_back(channel).await;
        let now = self.clock.now().wall;
        let depth = topology::CLASSES.map(|priority| {
            let sum = |from: usize, to: usize| {
                let of = queues.iter().zip(&counts).take(to).skip(from);
                of.filter(|((class, _), _)| *class == priority).map(|(_, count)| *count).sum::<u64>()
            };
            let (ready, delayed) = (sum(0, ready.len() + 1), sum(ready.len() + 1, queues.len()));
            let leased = self.hand.count(priority);
            if ready + delayed == 0 {
                self.hand.saw(priority, now);
            }
            let some = ready + delayed + leased > 0;
            let oldest = self.hand.since(priority).filter(|_| some).map(|sent| now.saturating_sub(sent));
            Depth { priority, ready, delayed, leased, oldest }
        });
        Ok(depth.to_vec())
    }
}

/// An error in the middle of work: what is refused now, where it was not before, may be allowed again.
fn later(error: Error) -> Error {
    match error {
        Error::Refused { what, why } => Error::Unreachable { what, why },
        error => error,
    }
}

/// The limit that the broker names when it closes a channel whose delivery was held for too long.
fn delivery_limit(text: &str) -> Option<Duration> {
    let (_, rest) = text.split_once("Timeout value used: ")?;
    let digits = rest.split(|character: char| !character.is_ascii_digit()).next()?;
    digits.parse().ok().map(Duration::from_millis)
}
