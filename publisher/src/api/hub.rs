//! Channels that somebody follows: each is watched in the store once, however many follow it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
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
    pub stale: Option<Arc<str>>,
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
        let watch = StoreWatch::new(&self.root, model.clone(), channel.clone(), None, self.interval);
        tokio::spawn(run(watch, sender, Arc::clone(&self.topics), name, self.interval));
        Ok(receiver)
    }
}

/// Watches a channel until nobody has followed it for a while.
async fn run(
    mut channel: StoreWatch,
    sender: watch::Sender<State>,
    topics: Arc<Topics>,
    name: Name,
    interval: Duration,
) {
    let mut pause = interval;
    let mut alone = Duration::ZERO;
    loop {
        match looked(&mut channel, &sender, interval).await {
            Ok(told) => {
                pause = interval;
                sender.send_if_modified(|state| heard(state, told));
            }
            Err(error) => {
                let (model, channel) = &name;
                tracing::warn!(%model, %channel, %error, "a channel that is followed cannot be read");
                let why: Arc<str> = error.to_string().into();
                sender.send_modify(|state| state.stale = Some(why));
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
    sender: &watch::Sender<State>,
    interval: Duration,
) -> weighbridge_snapshots::error::Result<Told> {
    let next = channel.next();
    tokio::pin!(next);
    if let Ok(told) = timeout(interval * 2 + LOOK, next.as_mut()).await {
        return told;
    }
    sender.send_modify(|state| state.stale = Some("the store has not answered for some seconds".into()));
    next.await
}

/// Notes what was heard, and tells whether it is news.
fn heard(state: &mut State, told: Told) -> bool {
    let news = !state.looked || state.stale.is_some();
    (state.looked, state.stale) = (true, None);
    match told {
        Told::Quiet => news,
        Told::Entry { entry, bytes } => {
            state.entry = Some(Arc::new(Entry { entry: *entry, bytes }));
            true
        }
    }
}
