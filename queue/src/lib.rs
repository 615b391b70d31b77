//! What lies between trainers and publishers: a queue, and the spool on the trainer's machine.
//!
//! | room | holds |
//! |---|---|
//! | [`Queue`] | the seam |
//! | [`message`] | what is on a queue |
//! | [`url`] | from a queue's URL to the queue |
//! | [`embedded`] | the queue in a folder of this machine |
//! | [`amqp`] | the queue on a RabbitMQ broker |
//! | [`spool`] | where manifests wait on the trainer's machine |
//! | [`dropper`] | what trainers call |
//! | [`clock`] | the one door to time |
//! | [`contract`] | what every backend has to pass |
//! | [`faulty`] | a queue that fails as told, for tests |
//! | [`error`] | what goes wrong |
//!
//! Delivery is at least once: whoever handles a message may meet it again, and has to recognise what it has done.

pub mod amqp;
pub mod clock;
pub mod contract;
pub mod dropper;
pub mod embedded;
pub mod error;
pub mod faulty;
pub mod message;
pub mod spool;
pub mod url;

use std::time::Duration;

use async_trait::async_trait;

use error::Error;
use message::{Message, Priority};

/// A queue. Every method is durable when it returns, and safe to call again when its outcome is unknown.
#[async_trait]
pub trait Queue: std::fmt::Debug + Send + Sync {
    /// Puts a message on the queue. One with the id of a message that waits or is leased there may be left out.
    async fn send(&self, message: &Message) -> Result<(), Error>;

    /// Takes the next message that `taker` may have, for `time`: of the highest class first, then the one that became
    /// due first. `None` where nothing is due. When the time is over it is given to the next one who asks.
    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error>;

    /// Keeps a lease for `time` from now on.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] where somebody else has, or has had, the message since; some backends say so as soon as the
    /// time is over. What was done already cannot be done again: after an unknown outcome it is no bad sign.
    /// [`Error::TakenBack`], from here and from [`Queue::retry`], where a broker took the message back, and this is the
    /// first that tells it.
    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error>;

    /// Takes the message off the queue, for good.
    ///
    /// # Errors
    /// As [`Queue::extend`].
    async fn done(&self, lease: &Lease) -> Result<(), Error>;

    /// Gives the message back, to be taken again in `delay`.
    ///
    /// # Errors
    /// As [`Queue::extend`].
    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error>;

    /// What is on the queue, a line a class, the highest first.
    async fn depth(&self) -> Result<Vec<Depth>, Error>;

    /// Makes what messages are taken from, where it is not there yet: for those who are about to take, so that what
    /// will never work is told before.
    async fn prepare(&self) -> Result<(), Error> {
        Ok(())
    }

    /// For how long a message can be held at all, however often its lease is extended; `None`: for as long as it takes.
    fn longest_hold(&self) -> Option<Duration> {
        None
    }
}

/// Who asks for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taker {
    /// A worker without a GPU: gets messages for any device and for CPUs, and those for GPUs that have waited enough.
    Cpu,
    /// A worker with a GPU: gets messages for any device and for GPUs, and those for CPUs last.
    Gpu,
}

/// A message, and the right to handle it for a while.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The message.
    pub message: Message,
    /// How often it was taken before by somebody who neither finished it nor gave it back: crashed, or too slow.
    pub abandoned: u32,
    /// How often it was given back.
    pub retries: u32,
    /// For how long it was given back, all delays together. No clock is compared with another for it.
    pub waited: Duration,
    /// Tells this lease from others of the same message.
    pub fence: u64,
}

/// What waits on a queue, of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// The class.
    pub priority: Priority,
    /// Messages that can be taken now.
    pub ready: u64,
    /// Messages that were given back and wait for their delay.
    pub delayed: u64,
    /// Messages that somebody has; of a broker, which does not tell, those that this process has.
    pub leased: u64,
    /// For how long the oldest message has been on the queue. A broker does not tell: there it is the time since the
    /// last message that this process took was sent, or since it found nothing; `None` where it has not looked yet.
    pub oldest: Option<Duration>,
}
