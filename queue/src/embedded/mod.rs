//! The queue in a folder of this machine: an SQLite database in WAL mode, for several processes at once.
//!
//! | room | holds |
//! |---|---|
//! | `place` | the folder: made, and refused on file systems of a network |
//! | `file` | the database: opened, checked, its tables made |
//! | `rows` | what is done with messages, as SQL |
//!
//! Every call that changes something is one transaction that begins by taking the write lock, and is synced before it
//! returns. A connection must not be used on both sides of a fork: open another queue in the child.
//!
//! A lease ends for good when another taker gets the message, not by the clock alone: who is late, but still the last
//! who had it, may finish.

mod file;
mod place;
mod rows;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, Transaction};

use crate::clock::{Clock, Moment};
use crate::error::Error;
use crate::message::Message;
use crate::{Depth, Lease, Queue, Taker};
use file::{Fault, Opened};
use place::Place;

pub(crate) use place::make_durably;

/// An embedded queue.
#[derive(Debug)]
pub struct Embedded {
    place: Place,
    clock: Arc<dyn Clock>,
    /// Held by one call at a time; empty after a failure of the disk, until the next call opens it anew.
    opened: Arc<tokio::sync::Mutex<Option<Opened>>>,
}

impl Embedded {
    /// Opens the queue in `folder`, which is made where it is absent. No call waits longer than `patience` for another
    /// process that writes.
    ///
    /// # Errors
    /// [`Error::Refused`] where the folder is on a network's file system, or what lies there is damaged, of a newer
    /// version, or no queue; [`Error::Unreachable`] where it cannot be opened now.
    pub fn open(folder: &Path, clock: Arc<dyn Clock>, patience: Duration) -> Result<Self, Error> {
        let place = Place::make(folder, patience)?;
        let opened = file::open(&place, clock.now()).map_err(|fault| place.error(&fault, false))?;
        Ok(Self { place, clock, opened: Arc::new(tokio::sync::Mutex::new(Some(opened))) })
    }

    /// Whether there is a queue in `folder`; none is made.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where that cannot be told.
    pub fn is_there(folder: &Path) -> Result<bool, Error> {
        place::is_there(folder)
    }

    /// Runs `work` on a thread that may block. When the caller goes away, it is done all the same.
    async fn run<T: Send + 'static>(
        &self,
        writes: bool,
        work: impl FnOnce(&mut Connection, &dyn Clock) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Error> {
        let mut held = Arc::clone(&self.opened).lock_owned().await;
        let (place, clock) = (self.place.clone(), Arc::clone(&self.clock));
        let running = tokio::task::spawn_blocking(move || {
            let mut opened = file::ready(held.take(), &place, clock.now())?;
            let result = work(&mut opened.connection, clock.as_ref());
            if result.as_ref().err().is_none_or(|fault| !fault.spoils_the_connection()) {
                *held = Some(opened);
            }
            result.map_err(|fault| place.error(&fault, writes))
        });
        running.await.unwrap_or_else(|failed| {
            let why = format!("the call was broken off ({failed})");
            Err(Error::UnknownOutcome { what: self.place.to_string(), why })
        })
    }

    /// Runs `work` as one transaction.
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, Moment) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Error> {
        self.run(true, move |connection, clock| transact(connection, clock, work)).await
    }

    /// As [`Self::write`], of something that the holder of `lease` does; `work` tells whether it still is the holder.
    async fn write_as_holder(
        &self,
        lease: &Lease,
        work: impl FnOnce(&Transaction<'_>, Moment, &str, u64) -> Result<bool, Fault> + Send + 'static,
    ) -> Result<(), Error> {
        let (id, fence) = (lease.message.id.clone(), lease.fence);
        let held = self.write(move |rows, now| work(rows, now, &id, fence)).await?;
        held.then_some(()).ok_or_else(|| Error::LeaseLost { id: lease.message.id.clone() })
    }
}

/// Runs `work` as one transaction, in the time of the present boot.
fn transact<T>(
    connection: &mut Connection,
    clock: &dyn Clock,
    work: impl FnOnce(&Transaction<'_>, Moment) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let transaction = file::begin(connection)?;
    // The lock may have taken seconds.
    let now = clock.now();
    rows::settle(&transaction, now)?;
    let result = work(&transaction, now)?;
    transaction.commit()?;
    Ok(result)
}

#[async_trait]
impl Queue for Embedded {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        message.check()?;
        let (message, id) = (message.clone(), message.id.clone());
        if self.write(move |rows, now| rows::send(rows, now, &message)).await? {
            return Ok(());
        }
        let why = "another manifest with this id waits on the queue; give each its own, for each model too"
            .to_owned();
        Err(Error::Refused { what: format!("message {id}"), why })
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.run(true, move |connection, clock| {
            // Those who poll an idle queue must not keep senders from the write lock.
            let now = clock.now();
            if rows::is_settled(connection, now)? && rows::next(connection, now, taker)?.is_none() {
                return Ok(None);
            }
            transact(connection, clock, |rows, now| rows::lease(rows, now, taker, time))
        })
        .await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.write_as_holder(lease, move |rows, now, id, fence| rows::extend(rows, now, id, fence, time))
            .await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.write_as_holder(lease, |rows, _, id, fence| rows::done(rows, id, fence)).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.write_as_holder(lease, move |rows, now, id, fence| rows::retry(rows, now, id, fence, delay))
            .await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.run(false, |connection, clock| {
            let now = clock.now();
            if rows::is_settled(connection, now)? {
                return rows::depth(connection, now);
            }
            transact(connection, clock, |rows, now| rows::depth(rows, now))
        })
        .await
    }
}

#[cfg(test)]
mod tests;
