//! Watching a channel in its store. Its log is listed once; from then on one small object is asked for at a time, the
//! one that would be the next entry: so watching costs a request an interval, and no listing.
//!
//! Every [`LOOK_BACK`]th time the entry that was told last is read again: one that has gone, or is another one now, is
//! an alarm, and no reason to serve something else.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep_until};

use weighbridge_schemas::channel::{ChannelEntry, Reason};
use weighbridge_schemas::names::{ChannelName, ModelName};

use super::{Told, publishes_after};
use crate::channel::Channel;
use crate::error::{Class, Result, StoreError};
use crate::root::Root;

/// How many times the next entry is asked for before the last one is looked at again.
const LOOK_BACK: u32 = 30;
/// By how much intervals differ, so that many who began together do not go on together.
const JITTER: f64 = 0.2;

/// A channel that is watched in its store.
#[derive(Debug)]
pub struct StoreWatch {
    root: Root,
    model: ModelName,
    channel: ChannelName,
    interval: Duration,
    /// What whoever watches knows already.
    after: Option<u64>,
    /// What stood last; none before the log was looked at.
    at: Option<At>,
    /// Looks since the entry that was told last was read again, and was right.
    looks: u32,
    /// When it is time to look.
    due: Instant,
}

/// Where the log is known to end.
#[derive(Debug)]
enum At {
    /// It has no entry.
    Empty,
    /// At this entry.
    Entry(Box<ChannelEntry>),
}

impl At {
    fn sequence(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Entry(entry) => entry.sequence,
        }
    }
}

impl StoreWatch {
    /// Watches `channel` of `model`: what stands there is told first, unless its number is `after`, and then what
    /// comes, looked for every `interval`. A channel without entries is waited for.
    #[must_use]
    pub fn new(
        root: &Root,
        model: ModelName,
        channel: ChannelName,
        after: Option<u64>,
        interval: Duration,
    ) -> Self {
        Self { root: root.clone(), model, channel, interval, after, at: None, looks: 0, due: Instant::now() }
    }

    /// As [`super::Watch::next`].
    ///
    /// # Errors
    /// As [`super::Watch::next`].
    pub async fn next(&mut self) -> Result<Told> {
        self.due().await;
        self.look().await
    }

    /// Comes back when it is time to look.
    pub async fn due(&self) {
        sleep_until(self.due).await;
    }

    /// Looks at once.
    ///
    /// # Errors
    /// As [`super::Watch::next`].
    pub async fn look(&mut self) -> Result<Told> {
        self.due = Instant::now() + self.interval.mul_f64(1.0 + JITTER * (fastrand::f64() * 2.0 - 1.0));
        let channel = Channel::new(&self.root, &self.model, &self.channel);
        let Some(at) = &self.at else {
            let latest = channel.latest_stored().await?;
            return Ok(self.begin(latest));
        };
        if self.looks >= LOOK_BACK {
            stands(&channel, at).await?;
            self.looks = 0;
        }
        self.looks += 1;
        match newest(&channel, at.sequence()).await? {
            Some(Newest { entry, bytes, publishes_after }) => {
                self.at = Some(At::Entry(Box::new(entry.clone())));
                Ok(Told::Entry { entry: Box::new(entry), bytes, publishes_after })
            }
            None => Ok(Told::Quiet),
        }
    }

    /// Notes what stood when the log was looked at first.
    fn begin(&mut self, latest: Option<(ChannelEntry, Bytes)>) -> Told {
        let Some((entry, bytes)) = latest else {
            self.at = Some(At::Empty);
            return Told::Quiet;
        };
        self.at = Some(At::Entry(Box::new(entry.clone())));
        if self.after == Some(entry.sequence) {
            Told::Quiet
        } else {
            let publishes_after = publishes_after(&entry);
            Told::Entry { entry: Box::new(entry), bytes, publishes_after }
        }
    }
}

/// The newest entry of a log.
pub(super) struct Newest {
    pub(super) entry: ChannelEntry,
    pub(super) bytes: Bytes,
    /// The number of an entry behind which all are publishes.
    publishes_after: u64,
}

/// The newest entry behind number `last`, which is all that is known of the log.
pub(super) async fn newest(channel: &Channel<'_>, last: u64) -> Result<Option<Newest>> {
    let (mut newest, mut publishes_after) = (None, last);
    for sequence in last.saturating_add(1).. {
        let found = match channel.stored(sequence).await {
            Ok(Some(found)) => Ok(found),
            Ok(None) => break,
            // One that cannot be read, or believed, rules as long as there is none behind it.
            Err(error) if error.class() == Class::Integrity => Err(error),
            Err(error) => return Err(error),
        };
        if found.as_ref().map_or(true, |(entry, _)| entry.reason != Reason::Publish) {
            publishes_after = sequence;
        }
        newest = Some(found);
    }
    let newest = newest.transpose()?;
    Ok(newest.map(|(entry, bytes)| Newest { entry, bytes, publishes_after }))
}

/// Whether what was told last is still what the log says.
async fn stands(channel: &Channel<'_>, at: &At) -> Result<()> {
    let At::Entry(told) = at else { return Ok(()) };
    let why = match channel.stored(told.sequence).await? {
        Some((found, _)) if found.id == told.id && found.snapshot == told.snapshot => return Ok(()),
        Some(_) => "another entry stands there now than was seen before",
        None => "the entry, which was seen before, is missing from the channel's log",
    };
    Err(StoreError::new(Class::Integrity, channel.key(told.sequence), why))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_schemas::time::Timestamp;

    use super::*;
    use crate::channel::{Move, Operation};
    use crate::root::{Absent, Intercept, Request};

    /// Notes what is asked of a store.
    #[derive(Debug, Default)]
    struct Asked(Mutex<Vec<(&'static str, String)>>);

    impl Intercept for Asked {
        fn before(&self, request: &Request) -> Result<()> {
            self.0.lock().unwrap().push((request.name, request.key.to_string()));
            Ok(())
        }

        fn after(&self, _: &Request) -> Result<()> {
            Ok(())
        }
    }

    /// A channel of a store in a folder.
    struct House {
        folder: tempfile::TempDir,
        root: Root,
        model: ModelName,
        channel: ChannelName,
    }

    impl House {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
            Self { folder, root, model: "m".parse().unwrap(), channel: "prod".parse().unwrap() }
        }

        fn channel(&self) -> Channel<'_> {
            Channel::new(&self.root, &self.model, &self.channel)
        }

        async fn append(&self, step: u64) {
            self.append_as(step, Reason::Publish).await;
        }

        async fn append_as(&self, step: u64, reason: Reason) {
            let time = Timestamp::from_nanoseconds(0);
            let operation = Operation { id: step.to_string(), who: "test".into(), when: time };
            let to = Move {
                snapshot: SnapshotId::of(&step.to_le_bytes()),
                run: "r".parse().unwrap(),
                step,
                created_at: time,
                reason,
            };
            self.channel().append(&operation, |_| Ok::<_, Infallible>(to.clone())).await.unwrap();
        }

        fn path(&self, sequence: u64) -> std::path::PathBuf {
            self.folder.path().join(self.channel().key(sequence).as_ref())
        }

        fn watch(&self, root: &Root, after: Option<u64>) -> StoreWatch {
            let (model, channel) = (self.model.clone(), self.channel.clone());
            StoreWatch::new(root, model, channel, after, Duration::from_micros(100))
        }
    }

    fn sequence(told: &Told) -> Option<u64> {
        match told {
            Told::Entry { entry, bytes, .. } => {
                assert_eq!(ChannelEntry::parse(bytes).unwrap(), **entry);
                Some(entry.sequence)
            }
            Told::Quiet => None,
        }
    }

    #[tokio::test]
    async fn the_newest_is_told_once_and_nothing_is_listed_again() {
        let house = House::new();
        let asked = Arc::new(Asked::default());
        let watched = house.root.clone().behind(asked.clone());
        let mut watch = house.watch(&watched, None);
        assert_eq!(watch.next().await.unwrap(), Told::Quiet, "a channel that is not there yet is waited for");
        house.append(1).await;
        assert_eq!(sequence(&watch.next().await.unwrap()), Some(1));
        house.append(2).await;
        house.append(3).await;
        house.append(4).await;
        assert_eq!(sequence(&watch.next().await.unwrap()), Some(4));
        asked.0.lock().unwrap().clear();
        for _ in 0..10 {
            assert_eq!(watch.next().await.unwrap(), Told::Quiet);
        }
        let next = house.channel().key(5).to_string();
        assert_eq!(*asked.0.lock().unwrap(), vec![("get", next); 10]);
        let mut late = house.watch(&watched, Some(4));
        assert_eq!(late.next().await.unwrap(), Told::Quiet, "it is known");
        let mut later = house.watch(&watched, Some(9));
        assert_eq!(sequence(&later.next().await.unwrap()), Some(4), "a log that was cut is told as it is");
        house.append(5).await;
        for watch in [&mut watch, &mut late, &mut later] {
            assert_eq!(sequence(&watch.next().await.unwrap()), Some(5));
        }
    }

    #[tokio::test]
    async fn what_was_no_publish_among_those_passed_over_is_told_too() {
        let house = House::new();
        let mut watch = house.watch(&house.root, None);
        assert_eq!(watch.next().await.unwrap(), Told::Quiet);
        let mut told = async || match watch.next().await.unwrap() {
            Told::Entry { entry, publishes_after, .. } => (entry.sequence, publishes_after),
            Told::Quiet => (0, 0),
        };
        house.append(1).await;
        house.append(2).await;
        assert_eq!(told().await, (2, 0));
        house.append_as(3, Reason::Rollback).await;
        assert_eq!(told().await, (3, 3));
        for (step, reason) in [(4, Reason::Publish), (5, Reason::Release), (6, Reason::Publish)] {
            house.append_as(step, reason).await;
        }
        assert_eq!(told().await, (6, 5));
        let mut late = house.watch(&house.root, Some(2));
        let told = late.next().await.unwrap();
        assert!(
            matches!(told, Told::Entry { publishes_after: 5, .. }),
            "what came before it was not read: {told:?}"
        );
    }

    #[tokio::test]
    async fn an_entry_that_is_no_entry_is_told_until_another_stands_behind_it() {
        let house = House::new();
        house.append(1).await;
        let mut watch = house.watch(&house.root, None);
        watch.next().await.unwrap();
        let entry = std::fs::read(house.path(1)).unwrap();
        std::fs::write(house.path(2), "{}").unwrap();
        for _ in 0..3 {
            assert_eq!(watch.next().await.unwrap_err().class(), Class::Integrity);
        }
        let third = ChannelEntry { sequence: 3, ..ChannelEntry::parse(&entry).unwrap() };
        std::fs::write(house.path(3), third.to_bytes()).unwrap();
        assert_eq!(sequence(&watch.next().await.unwrap()), Some(3));
    }

    #[tokio::test]
    async fn that_the_told_entry_goes_or_changes_is_noticed_and_passes_when_it_is_put_back() {
        let house = House::new();
        house.append(1).await;
        let mut watch = house.watch(&house.root, None);
        watch.next().await.unwrap();
        let entry = std::fs::read(house.path(1)).unwrap();
        let quiet = async |watch: &mut StoreWatch| {
            for _ in 0..=2 * LOOK_BACK {
                watch.next().await?;
            }
            Ok::<_, StoreError>(())
        };
        quiet(&mut watch).await.unwrap();
        std::fs::remove_file(house.path(1)).unwrap();
        assert!(quiet(&mut watch).await.unwrap_err().to_string().contains("missing"));
        assert!(watch.next().await.is_err());
        let other =
            ChannelEntry { snapshot: SnapshotId::of(b"other"), ..ChannelEntry::parse(&entry).unwrap() };
        std::fs::write(house.path(1), other.to_bytes()).unwrap();
        assert!(watch.next().await.unwrap_err().to_string().contains("another entry"));
        std::fs::write(house.path(1), entry).unwrap();
        quiet(&mut watch).await.unwrap();
    }
}
