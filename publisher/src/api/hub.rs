//! Channels that somebody follows: each is watched in the store once, however many follow it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use weighbridge_schemas::channel::{ChannelEntry, Reason};
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
    /// The number of an entry behind which all are publishes, up to this one.
    pub publishes_after: u64,
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
type Topics = Mutex<HashMap<Name, Topic>>;

/// A channel that is watched.
#[derive(Debug, Clone)]
struct Topic {
    state: watch::Receiver<State>,
    looks: watch::Receiver<Looks>,
    /// It is to be looked at now.
    nudge: Arc<Notify>,
}

/// How many looks there were at a channel.
#[derive(Debug, Clone, Copy, Default)]
struct Looks {
    begun: u64,
    ended: u64,
}

/// That a channel has been looked at since this was asked for.
#[derive(Debug)]
pub struct Fresh {
    looks: watch::Receiver<Looks>,
    wanted: u64,
}

impl Fresh {
    /// Comes back when it has.
    pub async fn looked(mut self) {
        // Nobody looks any more where the server ends.
        let _ = self.looks.wait_for(|looks| looks.ended >= self.wanted).await;
    }
}

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
        Ok(self.topic(model, channel)?.state)
    }

    /// As [`Hub::follow`]; and it is looked at once more now, whoever follows it already: what is known may be an
    /// interval old.
    ///
    /// # Errors
    /// As [`Hub::follow`].
    pub fn follow_anew(
        &self,
        model: &ModelName,
        channel: &ChannelName,
    ) -> Result<(watch::Receiver<State>, Fresh), Refusal> {
        let Topic { state, looks, nudge } = self.topic(model, channel)?;
        let wanted = looks.borrow().begun.saturating_add(1);
        nudge.notify_one();
        Ok((state, Fresh { looks, wanted }))
    }

    /// Has those who follow a channel hear of what was just written.
    pub fn nudge(&self, model: &ModelName, channel: &ChannelName) {
        let topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(topic) = topics.get(&(model.clone(), channel.clone())) {
            topic.nudge.notify_one();
        }
    }

    fn topic(&self, model: &ModelName, channel: &ChannelName) -> Result<Topic, Refusal> {
        let name = (model.clone(), channel.clone());
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(topic) = topics.get(&name) {
            return Ok(topic.clone());
        }
        if topics.len() >= MOST_CHANNELS {
            let why = format!("{MOST_CHANNELS} channels are followed already, which is the most");
            return Err(Refusal::over_limit(why, KEPT));
        }
        let (sender, state) = watch::channel(State::default());
        let (looking, looks) = watch::channel(Looks::default());
        let topic = Topic { state, looks, nudge: Arc::default() };
        topics.insert(name.clone(), topic.clone());
        let (root, interval, nudge) = (self.root.clone(), self.interval, Arc::clone(&topic.nudge));
        tokio::spawn(run((root, name), (sender, looking, nudge), Arc::clone(&self.topics), interval));
        Ok(topic)
    }
}

fn begun(root: &Root, (model, channel): &Name, interval: Duration) -> StoreWatch {
    StoreWatch::new(root, model.clone(), channel.clone(), None, interval)
}

/// Watches a channel until nobody has followed it for a while.
async fn run(
    (root, name): (Root, Name),
    (sender, looking, nudge): (watch::Sender<State>, watch::Sender<Looks>, Arc<Notify>),
    topics: Arc<Topics>,
    interval: Duration,
) {
    let mut watched = begun(&root, &name, interval);
    let mut pause = interval;
    let mut alone = Duration::ZERO;
    loop {
        tokio::select! {
            () = watched.due() => {}
            () = nudge.notified() => {}
        }
        looking.send_modify(|looks| looks.begun += 1);
        let told = looked(&mut watched, &name, &sender, interval).await;
        let failed = told.map(|told| sender.send_if_modified(|state| heard(state, told))).err();
        match failed {
            None => {
                pause = interval;
                looking.send_modify(|looks| looks.ended = looks.begun);
            }
            Some(error) => {
                let (model, channel) = &name;
                tracing::warn!(%model, %channel, %error, "a channel that is followed cannot be read");
                if error.class() == Class::Integrity {
                    // A log that went back, as one of a backup does: what stands there now is told, as it is.
                    watched = begun(&root, &name, interval);
                }
                sender.send_modify(|state| state.stale = Some(Arc::new(error)));
                looking.send_modify(|looks| looks.ended = looks.begun);
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
    let look = channel.look();
    tokio::pin!(look);
    if let Ok(told) = timeout(interval + LOOK, look.as_mut()).await {
        return told;
    }
    let why = "the store has not answered for some seconds";
    let error = StoreError::new(Class::Unreachable, format!("{model}@{name}"), why);
    sender.send_modify(|state| state.stale = Some(Arc::new(error)));
    look.await
}

/// Notes what was heard, and tells whether it is news.
fn heard(state: &mut State, told: Told) -> bool {
    let news = !state.looked || state.stale.is_some();
    (state.looked, state.stale) = (true, None);
    match told {
        Told::Quiet => news,
        Told::Entry { entry, bytes, publishes_after } => {
            // What was told before may have been a publish too, and those before it.
            let before = state.entry.as_ref().filter(|known| {
                known.entry.sequence == publishes_after && known.entry.reason == Reason::Publish
            });
            let publishes_after = before.map_or(publishes_after, |known| known.publishes_after);
            state.entry = Some(Arc::new(Entry { entry: *entry, bytes, publishes_after }));
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

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

    #[tokio::test]
    async fn whoever_begins_to_follow_is_told_what_stands_and_not_what_did() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let name: Name = ("m".parse().unwrap(), "prod".parse().unwrap());
        // It is looked at because of who asks alone.
        let hub = Hub::new(root.clone(), Duration::from_secs(3600));
        let mut known = hub.follow(&name.0, &name.1).unwrap();
        known.wait_for(|state| state.looked).await.unwrap();
        for step in 1..20 {
            append(&root, &name, step).await;
            let (state, fresh) = hub.follow_anew(&name.0, &name.1).unwrap();
            fresh.looked().await;
            assert_eq!(state.borrow().entry.as_ref().unwrap().entry.step, step);
        }
        append(&root, &name, 99).await;
        hub.nudge(&name.0, &name.1);
        let is_new = |state: &State| state.entry.as_ref().is_some_and(|entry| entry.entry.step == 99);
        known.wait_for(is_new).await.unwrap();
    }
}
