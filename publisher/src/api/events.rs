//! What a stream that follows a channel tells, over gRPC and over HTTP alike.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::answers::Refusal;
use super::guard::{Connection, Gate};
use super::hub::{Entry, Fresh, State};
use super::tokens::{Caller, Role};
use crate::metrics::api::Going;
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::error::StoreError;

/// How often a sign of life is given.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long the first look at a channel is waited for before the first sign of life.
const FIRST: Duration = Duration::from_secs(2);

/// What is told.
#[derive(Debug, Clone)]
pub enum Event {
    /// The channel's newest entry.
    Entry(Arc<Entry>),
    /// A sign of life, and why what was told last may be out of date.
    Heartbeat(Option<Arc<StoreError>>),
}

/// A stream that follows a channel.
pub struct Follower {
    state: watch::Receiver<State>,
    model: ModelName,
    caller: Caller,
    gate: Arc<Gate>,
    closing: watch::Receiver<bool>,
    /// The number of the entry that was told last.
    told: u64,
    due: Instant,
    /// Waited for before anything is told.
    fresh: Option<Fresh>,
    ended: bool,
    _going: Going,
}

impl Follower {
    /// A stream for `caller`, who knows entry number `after`.
    pub(super) fn new(
        (state, fresh): (watch::Receiver<State>, Fresh),
        model: ModelName,
        (caller, gate): (Caller, Arc<Gate>),
        connection: Option<&Connection>,
        after: u64,
        going: Going,
    ) -> Self {
        let closing = connection.map_or_else(|| watch::channel(false).1, |known| known.closing.clone());
        let due = Instant::now() + FIRST;
        Self {
            state,
            model,
            caller,
            gate,
            closing,
            told: after,
            due,
            fresh: Some(fresh),
            ended: false,
            _going: going,
        }
    }

    /// Its events. It ends when its connection is to close, and when its caller may not follow any more.
    pub(super) fn events(self) -> impl Stream<Item = Result<Event, Refusal>> + Send {
        unfold(self, |mut follower| async move {
            if follower.ended {
                return None;
            }
            let event = follower.next().await?;
            follower.ended = event.is_err();
            Some((event, follower))
        })
    }

    async fn next(&mut self) -> Option<Result<Event, Refusal>> {
        if let Some(fresh) = self.fresh.take() {
            // Where the store is slow, what is known is told.
            let _ = timeout_at(self.due, fresh.looked()).await;
        }
        loop {
            if *self.closing.borrow() {
                return None;
            }
            let state = self.state.borrow_and_update().clone();
            if let Some(entry) = state.entry.filter(|entry| entry.entry.sequence != self.told) {
                if !self.may() {
                    return Some(Err(Refusal::unknown_caller()));
                }
                self.told = entry.entry.sequence;
                self.due = Instant::now() + HEARTBEAT;
                return Some(Ok(Event::Entry(entry)));
            }
            tokio::select! {
                changed = self.state.changed() => {
                    // The hub went: the server ends.
                    changed.ok()?;
                    // That there is nothing new is news the first time.
                    if self.state.borrow().entry.is_none() {
                        return Some(Ok(self.heartbeat()));
                    }
                }
                () = sleep_until(self.due) => {
                    let may = self.may();
                    return Some(if may { Ok(self.heartbeat()) } else { Err(Refusal::unknown_caller()) });
                }
                () = closed(&mut self.closing) => return None,
            }
        }
    }

    /// Whether the caller still may follow.
    fn may(&self) -> bool {
        self.gate.again(&self.caller).is_some_and(|caller| caller.may(Role::Fetch, &self.model))
    }

    fn heartbeat(&mut self) -> Event {
        self.due = Instant::now() + HEARTBEAT;
        Event::Heartbeat(self.state.borrow().stale.clone())
    }
}

/// Waits until the connection is to close; for ever, where nobody can say so any more.
async fn closed(closing: &mut watch::Receiver<bool>) {
    if closing.wait_for(|closes| *closes).await.is_err() {
        std::future::pending::<()>().await;
    }
}
