//! The channel log: `channels/NAME/000000000001`, dense, written by put-if-absent alone; the highest number rules.
//!
//! Two writers race for the next number; one wins, the other reads the winner's entry and decides anew. A write whose
//! outcome is unknown is recognised by its entry's id, a hash of the operation and the channel. A log with a hole is
//! damaged, and is neither read past nor written to. The object `hint` repeats the newest number: it is only advice,
//! and may be absent, old or wrong; where it is ahead of the log, entries have gone, and that is said.

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::channel::{ChannelEntry, ChannelSchema, Reason, entry_id};
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName, RunName};
use weighbridge_schemas::time::Timestamp;

use crate::error::{Class, Result, StoreError};
use crate::layout;
use crate::root::{Put, Root};
use crate::sign;

/// Longest name of whoever writes an entry, in bytes.
pub const WHO_BYTES: usize = 256;
/// How far behind the hinted entry the log is looked at: with the hint and newer entries, a page of a listing.
const LOOKED_BACK: u64 = 900;
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

/// What an append came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Appended<E> {
    /// The operation's entry stands in the log.
    Stands(ChannelEntry),
    /// There is nothing to append.
    Declined {
        /// Why not.
        why: E,
        /// The entry that rules; `None` for a channel without entries.
        latest: Option<ChannelEntry>,
    },
}

/// A part of a channel's log, the newest entry first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPart {
    /// The entries, and their stored bytes.
    pub entries: Vec<(ChannelEntry, Bytes)>,
    /// The number before which the rest of the log stands; `None` where nothing does.
    pub rest: Option<u64>,
}

impl<'a> Channel<'a> {
    /// The channel `name` of `model`.
    #[must_use]
    pub fn new(root: &'a Root, model: &'a ModelName, name: &'a ChannelName) -> Self {
        Self { root, model, name }
    }

    /// The entry that rules; `None` for a channel without entries. Of a long log the end is looked at, from somewhat
    /// before the entry that the hint names; all of it, where there is no such entry.
    ///
    /// # Errors
    /// [`Class::Integrity`] where an entry is missing or cannot be read; else as the store fails.
    pub async fn latest(&self) -> Result<Option<ChannelEntry>> {
        Ok(self.latest_stored().await?.map(|(entry, _)| entry))
    }

    /// As [`Self::latest`], with the entry's stored bytes.
    pub(crate) async fn latest_stored(&self) -> Result<Option<(ChannelEntry, Bytes)>> {
        if let Some(api) = self.root.api() {
            let resolved = match api.resolve(self.model, self.name.as_str()).await {
                Err(error) if error.class() == Class::NotFound => return Ok(None),
                resolved => resolved?,
            };
            let Some((_, bytes)) = resolved.entry.filter(|(name, _)| name == self.name) else {
                return Ok(None);
            };
            return Ok(Some((self.believed(&bytes)?, bytes)));
        }
        // The hint first: the entry that it names stood before it was left, and so is in the listing.
        let hint = self.hint().await;
        let (before, sequences) = self.newest(hint).await?;
        let highest = sequences.last().copied().unwrap_or(0);
        if let Some(ahead) = hint.filter(|&hint| hint > highest) {
            tracing::warn!(
                channel = %self.name, hint = ahead, log = highest,
                "the channel's hint is ahead of its log: the newest entries may have been deleted"
            );
        }
        if highest == 0 && hint.is_some_and(|hint| hint > 0) {
            // A hint is left behind an entry: without any, the whole log has gone, and perhaps a hold with it.
            return Err(self.missing(1));
        }
        if let Some(missing) = (before + 1..=highest).zip(&sequences).find(|(due, found)| due != *found) {
            return Err(self.missing(missing.0));
        }
        if highest == 0 {
            return Ok(None);
        }
        let stored = self.stored(highest).await?;
        stored.map_or_else(|| Err(self.missing(highest)), |stored| Ok(Some(stored)))
    }

    /// The numbers of the newest entries, ascending, and the number behind which they were looked for.
    async fn newest(&self, hint: Option<u64>) -> Result<(u64, Vec<u64>)> {
        if let Some(hint) = hint.filter(|&hint| hint > LOOKED_BACK) {
            let before = hint - LOOKED_BACK;
            let sequences = self.sequences_behind(before).await?;
            if sequences.contains(&hint) {
                return Ok((before, sequences));
            }
        }
        Ok((0, self.sequences().await?))
    }

    /// Every entry, the newest first, at most `most` of them. Where the root trusts somebody, those that they have not
    /// signed are left out: a channel may be older than the trust, and what cannot be verified is nowhere to go back
    /// to.
    ///
    /// # Errors
    /// [`Class::Integrity`] where an entry is missing or cannot be read; else as the store fails.
    pub async fn log(&self, most: usize) -> Result<Vec<ChannelEntry>> {
        Ok(self.log_before(u64::MAX, most).await?.entries.into_iter().map(|(entry, _)| entry).collect())
    }

    /// The part of [`Self::log`] that stands before entry number `before`: of the newest `most` entries there.
    ///
    /// # Errors
    /// As [`Self::log`].
    pub async fn log_before(&self, before: u64, most: usize) -> Result<LogPart> {
        let highest = self.sequences().await?.last().copied().unwrap_or(0).min(before.saturating_sub(1));
        let mut part = LogPart { entries: Vec::new(), rest: None };
        for sequence in (1..=highest).rev().take(most) {
            let Some((entry, bytes)) = self.read(sequence).await? else { return Err(self.missing(sequence)) };
            match self.check(&entry, &bytes) {
                Ok(()) => part.entries.push((entry, bytes)),
                Err(error) => tracing::debug!(%error, "an entry of the log is left out"),
            }
            part.rest = (sequence > 1).then_some(sequence);
        }
        Ok(part)
    }

    /// The entry of `operation` among the newest `most`; `None` where there is none. Whoever goes on with an operation
    /// that may have been done before looks for its entry first, since others may have moved the channel since.
    ///
    /// # Errors
    /// As [`Self::log`].
    pub async fn entry_of(&self, operation: &Operation, most: usize) -> Result<Option<ChannelEntry>> {
        let id = entry_id(&operation.id, self.name);
        Ok(self.log(most).await?.into_iter().find(|entry| entry.id == id))
    }

    /// The numbers of the entries that are there, ascending.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn sequences(&self) -> Result<Vec<u64>> {
        self.sequences_behind(0).await
    }

    /// Those behind number `before`.
    async fn sequences_behind(&self, before: u64) -> Result<Vec<u64>> {
        let folder = layout::channel(self.model, self.name);
        let after = (before > 0).then(|| layout::channel_entry(self.model, self.name, before));
        let keys = self.root.keys(&folder, after.as_ref()).await?;
        let mut sequences: Vec<_> =
            keys.iter().filter_map(|key| layout::sequence(self.model, self.name, key)).collect();
        sequences.sort_unstable();
        Ok(sequences)
    }

    /// The number that the hint gives, where it can be read.
    pub async fn hint(&self) -> Option<u64> {
        let bytes = self.root.get(&layout::channel_hint(self.model, self.name), 32).await.ok()??;
        str::from_utf8(&bytes).ok()?.parse().ok()
    }

    /// The entry of this number.
    ///
    /// # Errors
    /// [`Class::Integrity`] where it is missing, is not what was written, or is not signed by whom the root trusts;
    /// else as the store fails.
    pub async fn entry(&self, sequence: u64) -> Result<ChannelEntry> {
        let stored = self.stored(sequence).await?;
        stored.map_or_else(|| Err(self.missing(sequence)), |(entry, _)| Ok(entry))
    }

    /// As [`Self::entry`], with the entry's stored bytes; `None` where it is missing.
    pub(crate) async fn stored(&self, sequence: u64) -> Result<Option<(ChannelEntry, Bytes)>> {
        let read = self.read(sequence).await?;
        if let Some((entry, bytes)) = &read {
            self.check(entry, bytes)?;
        }
        Ok(read)
    }

    /// The entry of this number with its stored bytes, whoever signed it; `None` where it is missing.
    async fn read(&self, sequence: u64) -> Result<Option<(ChannelEntry, Bytes)>> {
        let key = self.key(sequence);
        let Some(bytes) = self.root.get(&key, limits::CHANNEL_ENTRY_BYTES).await? else { return Ok(None) };
        let entry = ChannelEntry::parse(&bytes)
            .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
        if entry.sequence == sequence {
            return Ok(Some((entry, bytes)));
        }
        Err(StoreError::new(Class::Integrity, key, format!("it says that it is number {}", entry.sequence)))
    }

    /// The entry that somebody else read: signed by whom the root trusts, where it trusts somebody.
    ///
    /// # Errors
    /// [`Class::Integrity`] where it is no entry, or is not signed so.
    pub(crate) fn believed(&self, bytes: &[u8]) -> Result<ChannelEntry> {
        let object = format!("{}@{}", self.model, self.name);
        let entry = ChannelEntry::parse(bytes)
            .map_err(|error| StoreError::new(Class::Integrity, object, error.to_string()))?;
        self.check(&entry, bytes)?;
        Ok(entry)
    }

    /// The key of the entry of this number.
    pub(crate) fn key(&self, sequence: u64) -> Key {
        layout::channel_entry(self.model, self.name, sequence)
    }

    fn check(&self, entry: &ChannelEntry, bytes: &[u8]) -> Result<()> {
        let Some(trust) = self.root.trust() else { return Ok(()) };
        sign::check_entry(trust, self.model, self.name, entry, bytes)
    }

    fn missing(&self, sequence: u64) -> StoreError {
        StoreError::new(Class::Integrity, self.key(sequence), "the entry is missing from the channel's log")
    }

    /// Appends what `decide` makes of the latest entry, until it stands or `decide` declines. Running the same
    /// operation again finds its own entry.
    ///
    /// # Errors
    /// [`Class::Conflict`] where others keep winning; else as the store fails.
    pub async fn append<E>(
        &self,
        operation: &Operation,
        decide: impl Fn(Option<&ChannelEntry>) -> std::result::Result<Move, E>,
    ) -> Result<Appended<E>> {
        let id = entry_id(&operation.id, self.name);
        for _ in 0..ATTEMPTS {
            let latest = self.latest().await?;
            if let Some(own) = latest.as_ref().filter(|latest| latest.id == id) {
                self.secure(own).await?;
                return Ok(Appended::Stands(own.clone()));
            }
            let wanted = match decide(latest.as_ref()) {
                Ok(wanted) => wanted,
                Err(why) => {
                    if let Some(latest) = &latest {
                        self.secure(latest).await?;
                    }
                    return Ok(Appended::Declined { why, latest });
                }
            };
            let mut entry = ChannelEntry {
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
                signatures: Vec::new(),
            };
            let key = self.key(entry.sequence);
            let refused = |error: DocumentError| StoreError::new(Class::Refused, &key, error.to_string());
            if let Some(signers) = self.root.signers() {
                sign::sign_entry(signers, self.model, self.name, &mut entry).map_err(refused)?;
            }
            let bytes = entry.to_bytes();
            // What could not be read again must not be written: an entry is never deleted.
            ChannelEntry::parse(&bytes).map_err(refused)?;
            if self.root.put_if_absent(&key, Bytes::from(bytes)).await? == Put::Written {
                self.leave_hint(entry.sequence).await;
                return Ok(Appended::Stands(entry));
            }
        }
        let why = format!("others moved the channel {ATTEMPTS} times meanwhile; run it again");
        Err(StoreError::new(Class::Conflict, self.name, why))
    }

    /// An entry that is relied on has to be on the disk; whoever wrote it may have been killed before it was.
    async fn secure(&self, entry: &ChannelEntry) -> Result<()> {
        self.root.secure(&self.key(entry.sequence)).await
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

    async fn append(channel: &Channel<'_>, id: &str, step: u64) -> ChannelEntry {
        let appended = channel.append(&operation(id), |_| Ok::<_, Infallible>(to(step))).await.unwrap();
        match appended {
            Appended::Stands(entry) => entry,
            Appended::Declined { why, .. } => match why {},
        }
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
                append(&channel, &n.to_string(), n).await
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
        let (mut before, mut parts) = (u64::MAX, Vec::new());
        loop {
            let part = channel.log_before(before, 7).await.unwrap();
            parts.extend(part.entries.into_iter().map(|(entry, bytes)| {
                assert_eq!(entry.to_bytes(), bytes);
                entry
            }));
            let Some(rest) = part.rest else { break };
            before = rest;
        }
        assert_eq!(parts, log, "part by part it is the same");
        let nothing = LogPart { entries: Vec::new(), rest: None };
        assert_eq!(channel.log_before(1, 7).await.unwrap(), nothing);
        assert_eq!(channel.log_before(0, 7).await.unwrap(), nothing);
    }

    #[tokio::test]
    async fn an_operation_run_again_finds_its_own_entry_and_a_wrong_hint_does_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let channel = Channel::new(&root, &model, &name);
        assert_eq!(channel.latest().await.unwrap(), None);
        let first = append(&channel, "a", 1).await;
        let again = append(&channel, "a", 1).await;
        assert_eq!(first, again);
        let second = append(&channel, "b", 1).await;
        for hint in ["1", "2", "99", "x", ""] {
            let key = layout::channel_hint(&model, &name);
            root.put_advice(&key, Bytes::from(hint)).await.unwrap();
            assert_eq!(channel.latest().await.unwrap().as_ref(), Some(&second), "{hint:?}");
        }
    }

    /// A log of `count` entries without content but its last ones; the hint names number `hint`.
    async fn long(root: &Root, count: u64, hint: u64) -> (ModelName, ChannelName) {
        let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let channel = Channel::new(root, &model, &name);
        let first = append(&channel, "a", 1).await;
        let folder = root.folder().unwrap().to_path_buf();
        for sequence in 2..=count {
            let entry = ChannelEntry { sequence, ..first.clone() };
            let key = layout::channel_entry(&model, &name, sequence);
            std::fs::write(folder.join(key.as_ref()), entry.to_bytes()).unwrap();
        }
        root.put_advice(&layout::channel_hint(&model, &name), Bytes::from(hint.to_string())).await.unwrap();
        (model, name)
    }

    #[tokio::test]
    async fn of_a_long_log_the_end_is_looked_at_and_holes_in_it_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Refuse).unwrap();
        let (model, name) = long(&root, 2 * LOOKED_BACK + 3, 2 * LOOKED_BACK).await;
        let channel = Channel::new(&root, &model, &name);
        let rules = async || channel.latest().await.map(|latest| latest.unwrap().sequence);
        assert_eq!(rules().await, Ok(2 * LOOKED_BACK + 3), "entries ahead of the hint count");
        let remove = |sequence: u64| {
            let key = layout::channel_entry(&model, &name, sequence);
            std::fs::remove_file(folder.path().join(key.as_ref())).unwrap();
        };
        remove(LOOKED_BACK);
        assert_eq!(rules().await, Ok(2 * LOOKED_BACK + 3), "that is for verify to find");
        remove(2 * LOOKED_BACK + 1);
        assert_eq!(rules().await.unwrap_err().class(), Class::Integrity);
        remove(2 * LOOKED_BACK);
        let all = rules().await.unwrap_err();
        assert!(
            all.object().ends_with(&format!("{LOOKED_BACK}")),
            "without the hinted entry all are looked at: {all}"
        );
    }
}
