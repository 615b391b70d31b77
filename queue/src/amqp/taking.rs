//! Taking: leases, how they are kept, and how they end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicQosOptions, BasicRejectOptions};
use lapin::types::ShortString;
use tokio::time::sleep;

use super::hand::{InHand, State};
use super::sending::{Published, later};
use super::wire::{self, History};
use super::{Inner, LATER, milliseconds, topology};
use crate::error::Error;
use crate::message::{Message, Priority};
use crate::{Depth, Lease, Taker};

/// How many messages of a queue are put off before others are asked.
const PUT_OFF: usize = 4;
/// How often, and for how long each time, what the broker says of a closed channel is waited for.
const MOMENTS: u32 = 10;
const MOMENT: Duration = Duration::from_millis(10);

impl Inner {
    pub(super) async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.end_leases().await;
        if let Some(why) = self.publishing.blocked_now().await {
            // No step could ask for the next one, nor give its message back.
            return Err(self.publishing.unreachable(why));
        }
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
            for _ in 0..PUT_OFF {
                match self.take(&channel, class, &name).await? {
                    None => break,
                    Some(None) => {}
                    Some(Some((message, history, tag))) => {
                        return Ok(Some(self.in_hand(channel, tag, message, history, time)));
                    }
                }
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
        name: &ShortString,
    ) -> Result<Option<Option<(Message, History, u64)>>, Error> {
        let taken = self.taking.answer(channel.basic_get(name.clone(), BasicGetOptions::default())).await?;
        let Some(taken) = taken else { return Ok(None) };
        let (tag, properties) = (taken.delivery.delivery_tag, taken.delivery.properties.clone());
        let body = taken.delivery.data;
        // What was put aside is of the class that it was of before.
        let first = wire::first_queue(&properties).filter(|_| *name == self.topology.dead());
        let class = first.and_then(|queue| self.topology.class_of(&queue)).unwrap_or(class);
        if !wire::is_known(&properties) {
            let kind = properties.kind().as_ref().map_or("", ShortString::as_str);
            tracing::warn!(kind, ?class, "only newer versions know what this is; it is put off");
            let delay = milliseconds(LATER);
            let properties = wire::put_off(&properties, delay);
            let key = topology::class_name(class);
            let put_off = self.publish(self.topology.delay_exchange(delay), key, properties, &body).await?;
            if let Published::Nowhere(why) = put_off {
                self.taking.looks_again().await;
                return Err(self.taking.unreachable(format!("a message is not put off: {why}")));
            }
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
    pub(super) async fn end_leases(&self) {
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

    pub(super) async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
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
            hand.state = State::TakenBack { why: self.why_closed().await };
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
    async fn why_closed(&self) -> String {
        // A channel is closed a moment before it is known why.
        for _ in 0..MOMENTS {
            if self.taking.last_error().is_none() {
                sleep(MOMENT).await;
            }
        }
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

    pub(super) async fn done(&self, lease: &Lease) -> Result<(), Error> {
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

    pub(super) async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.end_leases().await;
        let lost = Error::LeaseLost { id: lease.message.id.clone() };
        let Some(hand) = self.hand.release(lease.fence) else { return Err(lost) };
        let (channel, tag) = match &hand.state {
            State::Delivered { channel, tag } if channel.status().connected() => (channel.clone(), *tag),
            State::Delivered { .. } => {
                return Err(Error::TakenBack { id: lease.message.id.clone(), why: self.why_closed().await });
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

    pub(super) async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.end_leases().await;
        let channel = self.taking.bare_channel().await?;
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

/// The limit that the broker names when it closes a channel whose delivery was held for too long.
fn delivery_limit(text: &str) -> Option<Duration> {
    let (_, rest) = text.split_once("Timeout value used: ")?;
    let digits = rest.split(|character: char| !character.is_ascii_digit()).next()?;
    digits.parse().ok().map(Duration::from_millis)
}
