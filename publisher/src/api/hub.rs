//! Channels that somebody follows: each is watched in the store once, however many follow it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::watch::{StoreWatch, Told};

use super::answers::Refusal;

/// Most channels that are watched at once.
const MOST_CHANNELS: usize = 10_000;
/// The longest pause after the store failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How long a look may take before those who follow are told that it does.
const LOOK: Duration = Duration::from_secs(5);
/// For how long a channel is watched that nobody follows any more; one without entries is forgotten at once.
const KEPT: Duration = Duration::from_secs(60);

/// An entry, and its stored bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The entry.
    pub entry: ChannelEntry,
    /// Its stored bytes.
    pub bytes: Bytes,
}

/// What is known of a channel.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// Its newest entry; `None` where it has none, or was not looked at yet.
    pub entry: Option<Arc<Entry>>,
    /// Whether it was looked at.
    pub looked: bool,
    /// Why what is known may be out of date.
    pub stale: Option<Arc<StoreError>>,
}

type Name = (ModelName, ChannelName);
type Topics = Mutex<HashMap<Name, watch::Receiver<State>>>;

/// The channels that somebody follows.
#[derive(Debug)]
pub struct Hub {
    root: Root,
    interval: Duration,
    topics: Arc<Topics>,
}

impl Hub {
    /// Looks at each channel every `interval`.
    #[must_use]
    pub fn new(root: Root, interval: Duration) -> Self {
        Self { root, interval, topics: Arc::default() }
    }

    /// What is known of a channel, now and from now on.
    ///
    /// # Errors
    /// Where too many channels are followed already.
    pub fn follow(
        &self,
        model: &ModelName,
        channel: &ChannelName,
    ) -> Result<watch::Receiver<State>, Refusal> {
        let name = (model.clone(), channel.clone());
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(topic) = topics.get(&name) {
            return Ok(topic.clone());
        }
        if topics.len() >= MOST_CHANNELS {
            let why = format!("{MOST_CHANNELS} channels are followed already, which is the most");
            return Err(Refusal::over_limit(why, KEPT));
        }
        let (sender, receiver) = watch::channel(State::default());
        topics.insert(name.clone(), receiver.clone());
        let (root, interval) = (self.root.clone(), self.interval);
        tokio::spawn(run((root, name), sender, Arc::clone(&self.topics), interval));
        Ok(receiver)
    }
}

fn begun(root: &Root, (model, channel): &Name, interval: Duration) -> StoreWatch {
    StoreWatch::new(root, model.clone(), channel.clone(), None, interval)
}

/// Watches a channel until nobody has followed it for a while.
async fn run(
    (root, name): (Root, Name),
    sender: watch::Sender<State>,
    topics: Arc<Topics>,
    interval: Duration,
) {
    let mut watched = begun(&root, &name, interval);
    let mut pause = interval;
    let mut alone = Duration::ZERO;
    loop {
        match looked(&mut watched, &name, &sender, interval).await {
            Ok(told) => {
                pause = interval;
                sender.send_if_modified(|state| heard(state, told));
            }
            Err(error) => {
                let (model, channel) = &name;
                tracing::warn!(%model, %channel, %error, "a channel that is followed cannot be read");
                if error.class() == Class::Integrity {
                    // A log that went back, as one of a backup does: what stands there now is told, as it is.
                    watched = begun(&root, &name, interval);
                }
                sender.send_modify(|state| state.stale = Some(Arc::new(error)));
                pause = (pause * 2).min(LONGEST_PAUSE);
                sleep(pause).await;
            }
        }
        // One receiver is the hub's own.
        if sender.receiver_count() > 1 {
            alone = Duration::ZERO;
            continue;
        }
        alone += pause;
        if alone >= KEPT || sender.borrow().entry.is_none() {
            let mut topics = topics.lock().unwrap_or_else(PoisonError::into_inner);
            if sender.receiver_count() <= 1 {
                topics.remove(&name);
                return;
            }
        }
    }
}

/// One look; where it takes long, those who follow are told.
async fn looked(
    channel: &mut StoreWatch,
    (model, name): &Name,
    sender: &watch::Sender<State>,
    interval: Duration,
) -> weighbridge_snapshots::error::Result<Told> {
    let next = channel.next();
    tokio::pin!(next);
    if let Ok(told) = timeout(interval * 2 + LOOK, next.as_mut()).await {
        return told;
    }
    let why = "the store has not answered for some seconds";
    let error = StoreError::new(Class::Unreachable, format!("{model}@{name}"), why);
    sender.send_modify(|state| state.stale = Some(Arc::new(error)));
    next.await
}

/// Notes what was heard, and tells whether it is news.
fn heard(state: &mut State, told: Told) -> bool {
    let news = !state.looked || state.stale.is_some();
    (state.looked, state.stale) = (true, None);
    match told {
        Told::Quiet => news,
        Told::Entry { entry, bytes, .. } => {
            state.entry = Some(Arc::new(Entry { entry: *entry, bytes }));
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use weighbridge_schemas::channel::Reason;
    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_schemas::time::Timestamp;
    use weighbridge_snapshots::channel::{Channel, Move, Operation};
    use weighbridge_snapshots::layout;
    use weighbridge_snapshots::root::Absent;

    use super::*;

    async fn append(root: &Root, (model, channel): &Name, step: u64) {
        let when = Timestamp::from_nanoseconds(0);
        let operation = Operation { id: format!("{step}"), who: "test".into(), when };
        let to = Move {
            snapshot: SnapshotId::of(&step.to_le_bytes()),
            run: "r".parse().unwrap(),
            step,
            created_at: when,
            reason: Reason::Publish,
        };
        let channel = Channel::new(root, model, channel);
        channel.append(&operation, |_| Ok::<_, Infallible>(to.clone())).await.unwrap();
    }

    #[tokio::test]
    async fn a_log_that_went_back_is_followed_as_it_is_then() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let name: Name = ("m".parse().unwrap(), "prod".parse().unwrap());
        for step in 1..=3 {
            append(&root, &name, step).await;
        }
        let hub = Hub::new(root.clone(), Duration::from_millis(1));
        let mut followed = hub.follow(&name.0, &name.1).unwrap();
        let mut until = async |step: u64| {
            let is_so = |state: &State| state.entry.as_ref().is_some_and(|entry| entry.entry.step == step);
            let told = followed.wait_for(is_so).await.unwrap().entry.clone().unwrap();
            told.entry.sequence
        };
        assert_eq!(until(3).await, 3);
        // As a store does that was brought back from a backup.
        let key = |sequence| layout::channel_entry(&name.0, &name.1, sequence);
        let entry = |sequence| folder.path().join(key(sequence).as_ref());
        std::fs::remove_file(entry(2)).unwrap();
        std::fs::remove_file(entry(3)).unwrap();
        assert_eq!(until(1).await, 1);
        append(&root, &name, 7).await;
        assert_eq!(until(7).await, 2);
    }
}
