//! What is to be done: serve what is wanted, or stop; and when what has begun is not to be gone on with.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::Receiver;

use weighbridge_schemas::channel::{ChannelEntry, Reason};

use crate::fetch::Limits;
use crate::root::Root;

/// What is wanted, and where it comes from.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) root: Root,
    pub(super) limits: Limits,
    pub(super) entry: Arc<ChannelEntry>,
    /// How many orders of operators were heard of until then, or may have been.
    pub(super) orders: u64,
}

/// What is to be done: serve this, or stop.
pub(super) struct Orders {
    wanted: Receiver<Option<Wanted>>,
    stop: Receiver<bool>,
}

/// What an attempt came to.
pub(super) enum Came {
    /// What is wanted is served.
    Served,
    /// Something else is to be done.
    Overruled,
    /// The command said no to it; it is not tried again for so long.
    Refused(Duration),
}

impl Orders {
    pub(super) fn new(wanted: Receiver<Option<Wanted>>, stop: Receiver<bool>) -> Self {
        Self { wanted, stop }
    }

    pub(super) fn is_to_stop(&self) -> bool {
        *self.stop.borrow()
    }

    pub(super) fn wanted(&self) -> Option<Wanted> {
        self.wanted.borrow().clone()
    }

    /// Comes back when it is time to stop.
    pub(super) async fn stopped(&mut self) {
        // Whoever could tell is gone: so is whoever asks.
        let _ = self.stop.wait_for(|stop| *stop).await;
    }

    /// Comes back when something else is to be done than this.
    pub(super) async fn news(&mut self, now: Option<&Wanted>) {
        let now = now.map(|wanted| wanted.entry.id);
        let wanted = self.wanted.wait_for(|wanted| wanted.as_ref().map(|wanted| wanted.entry.id) != now);
        tokio::select! {
            _ = wanted => {}
            _ = self.stop.wait_for(|stop| *stop) => {}
        }
    }

    /// Comes back when what has begun is not to be gone on with: it is time to stop, or an operator moved the channel,
    /// even where a publish came right behind that. A publish alone waits: were each of them to end the one before, a
    /// host whose fetches take longer than the time between two would never serve any.
    pub(super) async fn overruled(&mut self, begun: &Wanted) {
        // One that points at the same snapshot, as a hold does, changes nothing of what is under way.
        let is_order = |wanted: &Option<Wanted>| {
            wanted.as_ref().is_some_and(|wanted| {
                wanted.orders != begun.orders && wanted.entry.snapshot != begun.entry.snapshot
            })
        };
        tokio::select! {
            _ = self.wanted.wait_for(is_order) => {}
            _ = self.stop.wait_for(|stop| *stop) => {}
        }
    }
}

/// How many orders there were when `entry`, behind which all from `publishes_after` on are publishes, took the place of
/// what was wanted before: one more, where it is one, or one may be among those that were passed over.
pub(super) fn orders(before: Option<&Wanted>, entry: &ChannelEntry, publishes_after: u64) -> u64 {
    let Some(Wanted { entry: known, orders, .. }) = before else { return 0 };
    let is_order = entry.reason != Reason::Publish && entry.id != known.id;
    orders + u64::from(is_order || publishes_after > known.sequence)
}
