//! Watching a channel: its newest entry, told soon after it was written.
//!
//! | room | holds |
//! |---|---|
//! | `store` | watching it in the store itself |
//! | `api` | having an API watch it |
//!
//! A watch keeps no promise but that of telling the newest entry: of several that came at once the others are passed
//! over. It never waits by itself for what fails: whoever watches is told, and calls again when it likes.

mod api;
mod store;

use bytes::Bytes;

use weighbridge_schemas::channel::{ChannelEntry, Reason};
use weighbridge_schemas::names::{ChannelName, ModelName};

use crate::channel::Channel;
use crate::error::Result;
use crate::root::Root;

pub use api::ApiWatch;
pub use store::StoreWatch;

/// Where a channel is watched.
#[derive(Debug)]
pub enum Watch {
    /// In the store.
    Store(StoreWatch),
    /// By an API.
    Api(ApiWatch),
}

/// What is heard of a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// Its newest entry, which was not told before.
    Entry {
        /// The entry, checked as whoever reads a channel does.
        entry: Box<ChannelEntry>,
        /// Its stored bytes: what its signatures are over.
        bytes: Bytes,
        /// The number of an entry behind which all are publishes, up to this one; what came before may be anything.
        publishes_after: u64,
    },
    /// There is nothing new; but the source answers.
    Quiet,
}

impl Watch {
    /// Waits until it is time to look, and tells what is seen. Where this is given up half way, nothing is lost: the
    /// next call goes on.
    ///
    /// # Errors
    /// Where the source does not answer, or what it says cannot be believed. The next call looks again.
    pub async fn next(&mut self) -> Result<Told> {
        match self {
            Self::Store(store) => store.next().await,
            Self::Api(api) => api.next().await,
        }
    }

    /// Whether it goes on with something that answered: a stream that has not ended.
    pub(crate) fn is_connected(&self) -> bool {
        match self {
            Self::Store(_) => false,
            Self::Api(api) => api.is_connected(),
        }
    }
}

/// The newest entry of a channel behind number `last`, which is one that it has, with its stored bytes; `None` where
/// there is none. It takes one small request, and no listing.
///
/// # Errors
/// As the store fails, or where the entry cannot be believed.
pub async fn newest(
    root: &Root,
    model: &ModelName,
    channel: &ChannelName,
    last: u64,
) -> Result<Option<(ChannelEntry, Bytes)>> {
    let newest = store::newest(&Channel::new(root, model, channel), last).await?;
    Ok(newest.map(|newest| (newest.entry, newest.bytes)))
}

/// What is known of the entries before `entry` where nothing but it was read: nothing.
fn publishes_after(entry: &ChannelEntry) -> u64 {
    match entry.reason {
        Reason::Publish => entry.sequence.saturating_sub(1),
        _ => entry.sequence,
    }
}
