//! The leases of this process, and what it saw of how long messages wait.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::Channel;

use super::wire::History;
use crate::message::Priority;

/// What this process has in hand.
#[derive(Debug, Default)]
pub(super) struct Hand(Mutex<Leases>);

#[derive(Debug, Default)]
struct Leases {
    by_fence: BTreeMap<u64, InHand>,
    last_fence: u64,
    /// Whether something was given to the broker that its counts may not show yet.
    returned: bool,
    /// For each class, when the last message that was taken was sent, or when there was none, since 1970.
    since: BTreeMap<Priority, Duration>,
}

/// A message in hand.
#[derive(Debug)]
pub(super) struct InHand {
    pub(super) id: String,
    pub(super) class: Priority,
    pub(super) history: History,
    pub(super) state: State,
    /// When it was taken, since the machine's boot.
    pub(super) taken: Duration,
    /// When the lease ends, since the machine's boot.
    pub(super) until: Duration,
}

/// Whose a message in hand is.
#[derive(Debug)]
pub(super) enum State {
    /// The broker waits for what becomes of it, on this channel.
    Delivered {
        /// The only channel on which that can be said.
        channel: Channel,
        /// The delivery.
        tag: u64,
    },
    /// It was put back with a delay, since nobody may hold it for longer.
    PutBack,
    /// The broker took it back.
    TakenBack {
        /// Why.
        why: String,
    },
}

impl Hand {
    /// Takes a message in hand; its fence.
    pub(super) fn take(&self, message: InHand) -> u64 {
        let mut leases = self.lock();
        leases.last_fence += 1;
        let fence = leases.last_fence;
        leases.by_fence.insert(fence, message);
        fence
    }

    /// Takes a message out of the hand.
    pub(super) fn release(&self, fence: u64) -> Option<InHand> {
        self.lock().by_fence.remove(&fence)
    }

    /// Takes it in hand again.
    pub(super) fn resume(&self, fence: u64, message: InHand) {
        self.lock().by_fence.insert(fence, message);
    }

    /// The leases that have ended by now.
    pub(super) fn ended(&self, now: Duration) -> Vec<InHand> {
        let mut leases = self.lock();
        let fences: Vec<u64> =
            leases.by_fence.iter().filter(|(_, hand)| hand.until <= now).map(|(fence, _)| *fence).collect();
        fences.into_iter().filter_map(|fence| leases.by_fence.remove(&fence)).collect()
    }

    /// Whether somebody in this process is at this message.
    pub(super) fn has(&self, id: &str) -> bool {
        self.lock().by_fence.values().any(|hand| hand.id == id)
    }

    /// How many of a class are in hand.
    pub(super) fn count(&self, class: Priority) -> u64 {
        self.lock().by_fence.values().filter(|hand| hand.class == class).count() as u64
    }

    /// Remembers that something was given to the broker that its counts may not show yet.
    pub(super) fn returns(&self) {
        self.lock().returned = true;
    }

    /// Whether something was, since this was asked last.
    pub(super) fn has_returned(&self) -> bool {
        std::mem::take(&mut self.lock().returned)
    }

    /// Remembers that what waits in this class was sent after `moment`, since 1970, as far as messages come in order.
    pub(super) fn saw(&self, class: Priority, moment: Duration) {
        self.lock().since.insert(class, moment);
    }

    /// Since when the oldest message of a class has waited, as far as was seen here, since 1970; those in hand count.
    pub(super) fn since(&self, class: Priority) -> Option<Duration> {
        let leases = self.lock();
        let in_hand =
            leases.by_fence.values().filter(|hand| hand.class == class).map(|hand| hand.history.sent);
        in_hand.chain(leases.since.get(&class).copied()).min()
    }

    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
