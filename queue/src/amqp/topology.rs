//! The exchanges and queues of one queue: their names, and how they are made or looked for.
//!
//! | what | is | holds |
//! |---|---|---|
//! | exchange `NAME` | direct | routes by class and device: `high`, `high.cpu`, `high.gpu`, ...; `dead` |
//! | queues `NAME.CLASS`, `.cpu`, `.gpu` | quorum | what can be taken |
//! | exchanges `NAME.delay.BOUND` | topic | route what was given back, by class |
//! | queues `NAME.CLASS.delay.BOUND` | quorum | what was given back for at most BOUND; nobody takes from these |
//! | queue `NAME.dead` | quorum | what the broker would not deliver any more |
//!
//! A quorum queue has no priorities before RabbitMQ 4.0 and two since, so a class is a queue. A message waits in a
//! delay queue until it expires there, and is then dead-lettered to where its routing key says. Only the message at the
//! head of a queue expires: so what waits for about the same time waits together, and none waits for more than four
//! times its delay. Messages for GPUs expire likewise, and are anybody's then.

use futures::future::try_join_all;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::{Channel, ExchangeKind};

use crate::Taker;
use crate::message::{Device, Priority};

/// The longest delays that queues of their own are for, in seconds.
pub(super) const BOUNDS: [u64; 7] = [1, 4, 16, 64, 256, 1024, 4096];
/// The longest delay, in milliseconds.
pub(super) const LONGEST_DELAY: u64 = 4096 * 1000;
/// The longest that a message waits for a GPU, in milliseconds: a day. What somebody else put at the head of such a
/// queue without an expiration must not hold up what is behind it for ever; so with delays.
const LONGEST_GPU_WAIT: i64 = 86_400_000;
/// The classes, the highest first.
pub(super) const CLASSES: [Priority; 3] = [Priority::High, Priority::Normal, Priority::Low];
/// How often the broker hands a message out again before it puts it aside. Workers give up long before.
pub(super) const DELIVERY_LIMIT: u32 = 20;
/// The same for what was put aside: newer brokers would drop it after 20.
const DEAD_DELIVERY_LIMIT: i64 = 1_000_000;

/// Names, made from the queue's.
#[derive(Debug, Clone)]
pub(super) struct Topology {
    name: String,
}

/// A queue, with what it is declared with.
struct Declared {
    name: ShortString,
    exchange: ShortString,
    key: String,
    arguments: FieldTable,
}

pub(super) const fn class_name(class: Priority) -> &'static str {
    match class {
        Priority::High => "high",
        Priority::Normal => "normal",
        Priority::Low => "low",
    }
}

/// A name that fits: what names are made from is short, so that none is ever cut.
pub(super) fn short(text: &str) -> ShortString {
    ShortString::try_new(text).unwrap_or_default()
}

/// The routing key of messages of this class for this device.
pub(super) fn key(class: Priority, device: Device) -> String {
    let class = class_name(class);
    match device {
        Device::Any => class.to_owned(),
        Device::Cpu => format!("{class}.cpu"),
        Device::Gpu { .. } => format!("{class}.gpu"),
    }
}

impl Topology {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// The exchange that messages are sent to.
    pub(super) fn exchange(&self) -> ShortString {
        short(&self.name)
    }

    /// The exchange for what is given back for so many milliseconds.
    pub(super) fn delay_exchange(&self, milliseconds: u64) -> ShortString {
        let [.., last] = BOUNDS;
        let bound = BOUNDS.into_iter().find(|bound| milliseconds <= bound * 1000).unwrap_or(last);
        short(&format!("{}.delay.{bound}s", self.name))
    }

    /// The queues that somebody takes from, in the order in which they are asked. Those for one kind of worker go
    /// before those for all, by `turn`, so that neither waits for ever for the other.
    pub(super) fn to_take(&self, taker: Taker, turn: bool) -> Vec<(Priority, ShortString)> {
        let any = |class| (class, self.queue(class, ""));
        let cpu = |class| (class, self.queue(class, ".cpu"));
        let gpu = |class| (class, self.queue(class, ".gpu"));
        match taker {
            Taker::Cpu if turn => CLASSES.into_iter().flat_map(|class| [any(class), cpu(class)]).collect(),
            Taker::Cpu => CLASSES.into_iter().flat_map(|class| [cpu(class), any(class)]).collect(),
            Taker::Gpu => {
                let own = CLASSES.into_iter().flat_map(|class| [gpu(class), any(class)]);
                own.chain(CLASSES.into_iter().map(cpu)).collect()
            }
        }
    }

    /// All queues whose messages can be taken.
    pub(super) fn ready(&self) -> Vec<(Priority, ShortString)> {
        let suffixes = ["", ".cpu", ".gpu"];
        let of = |class| suffixes.map(|suffix| (class, self.queue(class, suffix)));
        CLASSES.into_iter().flat_map(of).collect()
    }

    /// All queues whose messages wait for their delay.
    pub(super) fn delayed(&self) -> Vec<(Priority, ShortString)> {
        let of = |class| BOUNDS.map(|bound| (class, self.queue(class, &format!(".delay.{bound}s"))));
        CLASSES.into_iter().flat_map(of).collect()
    }

    /// The queue of what the broker would not deliver any more.
    pub(super) fn dead(&self) -> ShortString {
        short(&format!("{}.dead", self.name))
    }

    /// The class of a queue of ours.
    pub(super) fn class_of(&self, queue: &str) -> Option<Priority> {
        let rest = queue.strip_prefix(&self.name)?.strip_prefix('.')?;
        let name = rest.split('.').next()?;
        CLASSES.into_iter().find(|class| class_name(*class) == name)
    }

    fn queue(&self, class: Priority, suffix: &str) -> ShortString {
        short(&format!("{}.{}{suffix}", self.name, class_name(class)))
    }

    fn queues(&self) -> Vec<Declared> {
        let mut queues = Vec::new();
        for class in CLASSES {
            let class_key = class_name(class);
            for (suffix, dead_key) in [("", "dead"), (".cpu", "dead"), (".gpu", class_key)] {
                let mut arguments = self.dead_lettered(Some(dead_key));
                arguments.insert(short("x-delivery-limit"), AMQPValue::LongLongInt(DELIVERY_LIMIT.into()));
                if suffix == ".gpu" {
                    arguments.insert(short("x-message-ttl"), AMQPValue::LongLongInt(LONGEST_GPU_WAIT));
                }
                queues.push(Declared {
                    name: self.queue(class, suffix),
                    exchange: self.exchange(),
                    key: format!("{class_key}{suffix}"),
                    arguments,
                });
            }
            for bound in BOUNDS {
                let mut arguments = self.dead_lettered(None);
                let most = i64::try_from(bound * 1000).unwrap_or(i64::MAX);
                arguments.insert(short("x-message-ttl"), AMQPValue::LongLongInt(most));
                queues.push(Declared {
                    name: self.queue(class, &format!(".delay.{bound}s")),
                    exchange: self.delay_exchange(bound * 1000),
                    key: format!("{class_key}.#"),
                    arguments,
                });
            }
        }
        let mut arguments = quorum();
        arguments.insert(short("x-delivery-limit"), AMQPValue::LongLongInt(DEAD_DELIVERY_LIMIT));
        let (name, exchange) = (self.dead(), self.exchange());
        queues.push(Declared { name, exchange, key: "dead".to_owned(), arguments });
        queues
    }

    /// Arguments of a queue from which messages go on to the exchange, and are kept until they have arrived there.
    fn dead_lettered(&self, key: Option<&str>) -> FieldTable {
        let mut arguments = quorum();
        arguments.insert(short("x-dead-letter-exchange"), string(&self.name));
        arguments.insert(short("x-dead-letter-strategy"), string("at-least-once"));
        if let Some(key) = key {
            arguments.insert(short("x-dead-letter-routing-key"), string(key));
        }
        arguments
    }

    /// Makes all that is not there; fails where something is there with other arguments, or may not be made.
    pub(super) async fn declare(&self, channel: &Channel) -> lapin::Result<()> {
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let exchange = |name, kind| channel.exchange_declare(name, kind, durable, FieldTable::default());
        exchange(self.exchange(), ExchangeKind::Direct).await?;
        try_join_all(BOUNDS.map(|bound| exchange(self.delay_exchange(bound * 1000), ExchangeKind::Topic)))
            .await?;
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let queues = self.queues();
        let declares = queues
            .iter()
            .map(|queue| channel.queue_declare(queue.name.clone(), durable, queue.arguments.clone()));
        try_join_all(declares).await?;
        let binds = queues.iter().map(|queue| {
            let (name, exchange, key) = (queue.name.clone(), queue.exchange.clone(), short(&queue.key));
            channel.queue_bind(name, exchange, key, QueueBindOptions::default(), FieldTable::default())
        });
        try_join_all(binds).await?;
        Ok(())
    }

    /// Looks whether every queue is there; what they are bound to cannot be asked.
    pub(super) async fn look(&self, channel: &Channel) -> lapin::Result<()> {
        let names: Vec<_> = self.queues().into_iter().map(|queue| queue.name).collect();
        counts(channel, &names).await.map(drop)
    }
}

/// How many messages of each queue can be taken.
pub(super) async fn counts(channel: &Channel, names: &[ShortString]) -> lapin::Result<Vec<u64>> {
    let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let looks = names.iter().map(|name| async {
        let queue = channel.queue_declare(name.clone(), look, FieldTable::default()).await?;
        Ok(u64::from(queue.message_count()))
    });
    try_join_all(looks).await
}

fn string(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text))
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert(short("x-queue-type"), string("quorum"));
    // A queue that is full says so, instead of dropping what it has; at-least-once dead-lettering asks for it too.
    arguments.insert(short("x-overflow"), string("reject-publish"));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_waits_among_those_of_about_its_length() {
        let topology = Topology::new("n");
        for (milliseconds, exchange) in [
            (1, "n.delay.1s"),
            (1000, "n.delay.1s"),
            (1001, "n.delay.4s"),
            (64_000, "n.delay.64s"),
            (u64::MAX, "n.delay.4096s"),
        ] {
            assert_eq!(topology.delay_exchange(milliseconds).as_str(), exchange);
        }
    }

    #[test]
    fn who_takes_from_which_queue_in_which_order() {
        let topology = Topology::new("n");
        let names = |taker, turn| {
            let queues = topology.to_take(taker, turn).into_iter();
            queues.map(|(_, name)| name.to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(Taker::Cpu, true), "n.high n.high.cpu n.normal n.normal.cpu n.low n.low.cpu");
        assert_eq!(names(Taker::Cpu, false), "n.high.cpu n.high n.normal.cpu n.normal n.low.cpu n.low");
        assert_eq!(
            names(Taker::Gpu, true),
            "n.high.gpu n.high n.normal.gpu n.normal n.low.gpu n.low n.high.cpu n.normal.cpu n.low.cpu"
        );
    }

    #[test]
    fn a_queues_class_is_in_its_name() {
        let topology = Topology::new("a.b");
        for (class, queue) in topology.ready().into_iter().chain(topology.delayed()) {
            assert_eq!(topology.class_of(queue.as_str()), Some(class));
        }
        for other in ["a.b.dead", "a.b", "a.high", "x.high", ""] {
            assert_eq!(topology.class_of(other), None);
        }
    }

    #[test]
    fn every_queue_is_declared_once() {
        let topology = Topology::new("n");
        let mut declared: Vec<_> =
            topology.queues().into_iter().map(|queue| queue.name.to_string()).collect();
        let used = topology.ready().into_iter().chain(topology.delayed()).map(|(_, name)| name);
        let mut used: Vec<_> = used.chain([topology.dead()]).map(|name| name.to_string()).collect();
        declared.sort();
        used.sort();
        assert_eq!((declared.len(), declared), (used.len(), used));
    }
}
