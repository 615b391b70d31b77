//! Sending: to the exchange and key from where a message can be taken at the time that it is for, until the broker has
//! confirmed it.

use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{BasicProperties, Confirmation};
use std::time::Duration;
use tokio::time::{Instant, sleep};

use super::link::{self, LEADERLESS};
use super::wire::{self, History};
use super::{Inner, LOOK, milliseconds, topology};
use crate::error::Error;
use crate::message::{Device, Message};

/// How publishing ended.
pub(super) enum Published {
    Yes,
    /// No queue is bound for it.
    Nowhere(String),
}

impl Inner {
    pub(super) async fn send(&self, message: &Message) -> Result<(), Error> {
        let history = History { sent: self.clock.now().wall, ..History::default() };
        self.route(message, &history, Duration::ZERO).await
    }

    /// Sends a message to where it can be taken in `delay`.
    pub(super) async fn route(
        &self,
        message: &Message,
        history: &History,
        delay: Duration,
    ) -> Result<(), Error> {
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
        self.taking.check().await.map_err(|error| unrouted(error.to_string()))?;
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
        let delay = milliseconds(delay).min(topology::LONGEST_DELAY);
        (self.topology.delay_exchange(delay), key, Some(delay))
    }

    pub(super) async fn publish(
        &self,
        exchange: ShortString,
        key: &str,
        properties: BasicProperties,
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
            // Nor was done what is not allowed.
            Err(error) if link::code(&error) == Some(403) => Err(later(link.error(&error))),
            Err(error) => match later(link.error(&error)) {
                Error::Unreachable { why, .. } => Err(link.unknown(why)),
                error => Err(error),
            },
        }
    }
}

/// An error in the middle of work: what is refused now, where it was not before, may be allowed again.
pub(super) fn later(error: Error) -> Error {
    match error {
        Error::Refused { what, why } => Error::Unreachable { what, why },
        error => error,
    }
}
