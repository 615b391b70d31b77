//! The channel log: `channels/NAME/000000000001`, dense, written by put-if-absent alone; the highest number rules.
//!
//! Two writers race for the next number; one wins, the other reads the winner's entry and decides anew. A write whose
//! outcome is unknown is recognised by its entry's id, a hash of the operation and the channel. The object `hint` only
//! says where to start looking, and may be absent, old or wrong.

use bytes::Bytes;
use futures::TryStreamExt;

use weighbridge_schemas::channel::{ChannelEntry, ChannelSchema, Reason, entry_id};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName, RunName};
use weighbridge_schemas::time::Timestamp;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};

/// How often an append starts anew after losing a race.
const ATTEMPTS: usize = 100;

/// One channel of one model.
#[derive(Debug, Clone)]
pub struct Channel<'a> {
    root: &'a Root,
    model: &'a ModelName,
    name: &'a ChannelName,
}

/// What an operation puts on a channel.
#[derive(Debug, Clone)]
pub struct Move {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Its training run.
    pub run: RunName,
    /// Its training step.
    pub step: u64,
    /// When its checkpoint was written.
    pub created_at: Timestamp,
    /// Why.
    pub reason: Reason,
}

/// Who does it, and when: the same for every attempt of one operation.
#[derive(Debug, Clone)]
pub struct Operation {
    /// The operation's own id.
    pub id: String,
    /// Who asked for it.
    pub who: String,
    /// When.
    pub when: Timestamp,
}

impl<'a> Channel<'a> {
    /// The channel `name` of `model`.
    #[must_use]
    pub fn new(root: &'a Root, model: &'a ModelName, name: &'a ChannelName) -> Self {
        Self { root, model, name }
    }

    /// The entry that rules; `None` for a channel without entries.
    ///
    /// # Errors
    /// [`Class::Integrity`] where an entry cannot be read; else as the store fails.
    pub async fn latest(&self) -> Result<Option<ChannelEntry>> {
        let mut latest = match self.hint().await {
            Some(sequence) => self.entry(sequence).await?,
            None => None,
        };
        if latest.is_none() {
            latest = match self.highest().await? {
                Some(sequence) => self.entry(sequence).await?,
                None => return Ok(None),
            };
        }
        while let Some(entry) = &latest {
            match self.entry(entry.sequence + 1).await? {
                Some(next) => latest = Some(next),
                None => break,
            }
        }
        Ok(latest)
    }

    /// Every entry, the newest first, at most `most` of them.
    ///
    /// # Errors
    /// [`Class::Integrity`] where an entry is missing or cannot be read; else as the store fails.
    pub async fn log(&self, most: usize) -> Result<Vec<ChannelEntry>> {
        let highest = self.highest().await?.unwrap_or(0);
        let mut log = Vec::new();
        for sequence in (1..=highest).rev().take(most) {
            let entry = self.entry(sequence).await?;
            log.push(entry.ok_or_else(|| {
                let key = layout::channel_entry(self.model, self.name, sequence);
                StoreError::new(Class::Integrity, key, "the entry is missing from the channel's log")
            })?);
        }
        Ok(log)
    }

    /// Appends what `decide` makes of the latest entry, until it stands or `decide` gives `Err`. Running the same
    /// operation again finds its own entry.
    ///
    /// # Errors
    /// [`Class::Conflict`] where others keep winning; else as the store fails.
    pub async fn append<E>(
        &self,
        operation: &Operation,
        decide: impl Fn(Option<&ChannelEntry>) -> std::result::Result<Move, E>,
    ) -> Result<std::result::Result<ChannelEntry, E>> {
        let id = entry_id(&operation.id, self.name);
        for _ in 0..ATTEMPTS {
            let latest = self.latest().await?;
            if let Some(own) = latest.as_ref().filter(|latest| latest.id == id) {
                return Ok(Ok(own.clone()));
            }
            let wanted = match decide(latest.as_ref()) {
                Ok(wanted) => wanted,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let entry = ChannelEntry {
                schema: ChannelSchema::V1,
                sequence: latest.as_ref().map_or(1, |latest| latest.sequence + 1),
                id,
                snapshot: wanted.snapshot,
                previous: latest.map(|latest| latest.snapshot),
                run: wanted.run,
                step: wanted.step,
                created_at: wanted.created_at,
                reason: wanted.reason,
                who: operation.who.clone(),
                when: operation.when,
            };
            let key = layout::channel_entry(self.model, self.name, entry.sequence);
            if self.root.put_if_absent(&key, Bytes::from(entry.to_bytes())).await? == Put::Written {
                self.leave_hint(entry.sequence).await;
                return Ok(Ok(entry));
            }
        }
        let why = format!("others moved the channel {ATTEMPTS} times meanwhile; run it again");
        Err(StoreError::new(Class::Conflict, self.name, why))
    }

    async fn entry(&self, sequence: u64) -> Result<Option<ChannelEntry>> {
        let key = layout::channel_entry(self.model, self.name, sequence);
        let Some(bytes) = self.root.get(&key, limits::CHANNEL_ENTRY_BYTES).await? else { return Ok(None) };
        let entry = ChannelEntry::parse(&bytes)
            .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
        if entry.sequence == sequence {
            return Ok(Some(entry));
        }
        Err(StoreError::new(Class::Integrity, key, format!("it says that it is number {}", entry.sequence)))
    }

    /// The highest number in the listing.
    async fn highest(&self) -> Result<Option<u64>> {
        let folder = layout::channel(self.model, self.name);
        let listed = self.root.store().list(Some(&folder));
        let highest = listed
            .try_fold(None, |highest, meta| async move { Ok(highest.max(layout::sequence(&meta.location))) });
        highest.await.map_err(|error| StoreError::store(&folder, &error))
    }

    async fn hint(&self) -> Option<u64> {
        let bytes = self.root.get(&layout::channel_hint(self.model, self.name), 32).await.ok()??;
        str::from_utf8(&bytes).ok()?.parse().ok()
    }

    /// The entry stands already: a hint that cannot be left costs the next reader a listing, nothing more.
    async fn leave_hint(&self, sequence: u64) {
        let key = layout::channel_hint(self.model, self.name);
        if let Err(error) = self.root.put_advice(&key, Bytes::from(sequence.to_string())).await {
            tracing::debug!(%error, "no hint left");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::Absent;
    use std::convert::Infallible;

    fn operation(id: &str) -> Operation {
        Operation { id: id.into(), who: "test".into(), when: Timestamp::from_nanoseconds(0) }
    }

    fn to(step: u64) -> Move {
        Move {
            snapshot: SnapshotId::of(&step.to_le_bytes()),
            run: "r".parse().unwrap(),
            step,
            created_at: Timestamp::from_nanoseconds(0),
            reason: Reason::Publish,
        }
    }

    #[tokio::test]
    async fn sixteen_at_once_get_a_dense_log() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let appends = (0..16u64).map(|n| {
            let root = root.clone();
            tokio::spawn(async move {
                let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
                let channel = Channel::new(&root, &model, &name);
                channel
                    .append(&operation(&n.to_string()), |_| Ok::<_, Infallible>(to(n)))
                    .await
                    .unwrap()
                    .unwrap()
            })
        });
        let mut sequences = Vec::new();
        for append in appends.collect::<Vec<_>>() {
            sequences.push(append.await.unwrap().sequence);
        }
        sequences.sort_unstable();
        assert_eq!(sequences, (1..=16).collect::<Vec<_>>());
        let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let channel = Channel::new(&root, &model, &name);
        let log = channel.log(100).await.unwrap();
        assert!(log.windows(2).all(|pair| pair[0].previous == Some(pair[1].snapshot)));
        assert_eq!(channel.latest().await.unwrap(), log.first().cloned());
    }

    #[tokio::test]
    async fn an_operation_run_again_finds_its_own_entry_and_a_wrong_hint_does_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let channel = Channel::new(&root, &model, &name);
        assert_eq!(channel.latest().await.unwrap(), None);
        let decide = |_: Option<&ChannelEntry>| Ok::<_, Infallible>(to(1));
        let first = channel.append(&operation("a"), decide).await.unwrap().unwrap();
        let again = channel.append(&operation("a"), decide).await.unwrap().unwrap();
        assert_eq!(first, again);
        let second = channel.append(&operation("b"), decide).await.unwrap().unwrap();
        for hint in ["1", "2", "99", "x", ""] {
            let key = layout::channel_hint(&model, &name);
            root.put_advice(&key, Bytes::from(hint)).await.unwrap();
            assert_eq!(channel.latest().await.unwrap().as_ref(), Some(&second), "{hint:?}");
        }
    }
}
