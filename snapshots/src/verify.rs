//! The whole store, one model, or one snapshot: every byte read and checked.
//!
//! A flipped byte in a chunk or a manifest shows as a hash that is not the object's name; a missing chunk shows as
//! one that a manifest names in vain. Problems are collected, not only the first: an operator wants the extent. What gc
//! deletes meanwhile, or has deleted, is no problem.

use std::collections::{BTreeMap, BTreeSet};

use futures::StreamExt;
use object_store::path::Path as Key;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_schemas::policy::Retention;
use weighbridge_schemas::snapshot::Chunk;

use crate::catalog;
use crate::channel::Channel;
use crate::chunk;
use crate::error::{Class, Result, StoreError};
use crate::fetch::{Limits, Progress};
use crate::layout;
use crate::manifest;
use crate::policies;
use crate::retain::{past, pins};
use crate::root::{Listed, Root};

/// Chunks of a folder that are read at once: more would only move a disk's heads about.
pub const OF_A_FOLDER: usize = 4;
/// Chunks of a bucket that are read at once.
pub const OF_A_BUCKET: usize = 16;

/// What was checked, and what is wrong.
#[derive(Debug, Default)]
pub struct Verified {
    /// Snapshot manifests checked.
    pub snapshots: u64,
    /// Channel entries checked.
    pub entries: u64,
    /// Entries so old that gc need not have kept their snapshots, and has not.
    pub collected: u64,
    /// Chunks read and hashed.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Everything that is not as it must be.
    pub problems: Vec<StoreError>,
}

impl Verified {
    /// Notes an integrity failure and goes on; any other failure ends the work.
    fn note<T>(&mut self, outcome: Result<T>) -> Result<Option<T>> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.class() == Class::Integrity => {
                self.problems.push(error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Checks one snapshot: its manifest, and every chunk of it; and of the channel that points at it, where one is given,
/// every entry.
///
/// # Errors
/// [`Class::NotFound`], or as the store fails; integrity failures are in the result.
pub async fn snapshot(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    channel: Option<&ChannelName>,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Verified> {
    let mut verified = Verified::default();
    let found = manifest::get(root, model, id).await;
    verified.snapshots = 1;
    let report = manifest::report(root, model, id).await;
    verified.note(report)?;
    if let Some(name) = channel {
        check_channel(root, model, name, &mut verified).await?;
    }
    if let Some(found) = verified.note(found)? {
        let missing = check_chunks(root, model, found.chunks(), &mut verified, limits, progress).await?;
        verified.problems.extend(missing.into_iter().map(|(_, problem)| problem));
    }
    Ok(verified)
}

/// Checks everything that the store holds of `model`: manifests, reports, channel entries, and every chunk, named by a
/// manifest or not.
///
/// # Errors
/// As the store fails; integrity failures are in the result.
pub async fn model(
    root: &Root,
    model: &ModelName,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut chunks: BTreeMap<ChunkId, u64> = listed_chunks(root, model, &mut verified).await?;
    for id in catalog::snapshots(root, model).await? {
        verified.snapshots += 1;
        let found = manifest::get(root, model, &id).await;
        let report = manifest::report(root, model, &id).await;
        if root.size(&layout::snapshot(model, &id)).await?.is_none() {
            // Its manifest goes first.
            verified.snapshots -= 1;
            continue;
        }
        if let Some(found) = verified.note(found)? {
            chunks.extend(found.chunks());
        }
        verified.note(report)?;
    }
    for name in catalog::channels(root, model).await? {
        check_channel(root, model, &name, &mut verified).await?;
    }
    for name in policies::list(root, model).await? {
        let latest = policies::latest(root, model, &name).await;
        verified.note(latest)?;
    }
    verified.note(pins::list(root, model).await)?;
    let missing = check_chunks(root, model, chunks, &mut verified, limits, progress).await?;
    if !missing.is_empty() {
        let named = named(root, model).await?;
        let vain = missing.into_iter().filter(|(id, _)| named.contains(id));
        verified.problems.extend(vain.map(|(_, problem)| problem));
    }
    Ok(verified)
}

/// The chunks that snapshots name which are there now.
async fn named(root: &Root, model: &ModelName) -> Result<BTreeSet<ChunkId>> {
    let mut named = BTreeSet::new();
    for id in catalog::snapshots(root, model).await? {
        match manifest::get(root, model, &id).await {
            Ok(found) => named.extend(found.chunks().into_keys()),
            Err(error) if matches!(error.class(), Class::Integrity | Class::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(named)
}

/// Every entry of the channel can be read, follows the one before, and names a snapshot that is what the entry says.
async fn check_channel(
    root: &Root,
    model: &ModelName,
    name: &ChannelName,
    verified: &mut Verified,
) -> Result<()> {
    let channel = Channel::new(root, model, name);
    let hint = channel.hint().await;
    let sequences = channel.sequences().await?;
    let highest = sequences.last().copied().unwrap_or(0);
    if let Some((missing, _)) = (1..).zip(&sequences).find(|(due, found)| due != *found) {
        // Once, however large the hole is.
        let key = layout::channel_entry(model, name, missing);
        let why = "the entry is missing from the channel's log";
        verified.problems.push(StoreError::new(Class::Integrity, key, why));
    }
    // As gc was told once, or as it is told if nobody says otherwise.
    let told = past::newest(root, model).await.ok().flatten().and_then(|past| past.begun?.keep_history);
    let usual = Retention::default().keep_history;
    let history = told.map_or(usual, |told| told.clamp(1, usual));
    let mut before: Option<ChannelEntry> = None;
    for sequence in sequences {
        let entry = channel.entry(sequence).await;
        let Some(entry) = verified.note(entry)? else {
            before = None;
            continue;
        };
        verified.entries += 1;
        let key = layout::channel_entry(model, name, sequence);
        let before_it = before.take().filter(|before| before.sequence + 1 == sequence);
        if before_it.is_some_and(|before| entry.previous != Some(before.snapshot)) {
            let why = "its `previous` is not where the entry before points";
            verified.problems.push(StoreError::new(Class::Integrity, &key, why));
        }
        let may_be_gone = highest - sequence >= u64::from(history);
        check_entry(root, model, &key, &entry, may_be_gone, verified).await?;
        before = Some(entry);
    }
    if hint.is_some_and(|hint| hint > highest) {
        let key = layout::channel_hint(model, name);
        let why = format!(
            "it is ahead of the log, which ends at {highest}: the newest entries may have been deleted"
        );
        verified.problems.push(StoreError::new(Class::Integrity, key, why));
    }
    Ok(())
}

async fn check_entry(
    root: &Root,
    model: &ModelName,
    key: &Key,
    entry: &ChannelEntry,
    may_be_gone: bool,
    verified: &mut Verified,
) -> Result<()> {
    let why = match manifest::get(root, model, &entry.snapshot).await {
        Ok(found) if found.run == entry.run && found.step == entry.step => return Ok(()),
        Ok(_) => "the entry's run or step is not its snapshot's".to_owned(),
        // A damaged manifest has been noted with the snapshots.
        Err(error) if error.class() == Class::Integrity => return Ok(()),
        Err(error) if error.class() == Class::NotFound && may_be_gone => {
            verified.collected += 1;
            return Ok(());
        }
        Err(error) if error.class() == Class::NotFound => {
            format!("the entry's snapshot {} is not in the store", entry.snapshot)
        }
        Err(error) => return Err(error),
    };
    verified.problems.push(StoreError::new(Class::Integrity, key, why));
    Ok(())
}

/// The chunks in the store, by name. Objects that are none of ours are passed over; one of ours that is too large to be
/// right is a problem, and not read.
async fn listed_chunks(
    root: &Root,
    model: &ModelName,
    verified: &mut Verified,
) -> Result<BTreeMap<ChunkId, u64>> {
    let mut chunks = BTreeMap::new();
    let problems = &mut verified.problems;
    let take = |listed: Listed| {
        let id = listed.key.filename().and_then(|name| name.parse::<ChunkId>().ok());
        let Some(id) = id.filter(|id| layout::chunk(model, id) == listed.key) else { return Ok(()) };
        if listed.size > limits::LARGEST_CHUNK_BYTES {
            let why = format!("it has {} bytes, more than any chunk", listed.size);
            problems.push(StoreError::new(Class::Integrity, listed.key, why));
        } else {
            chunks.insert(id, listed.size);
        }
        Ok(())
    };
    root.walk(&layout::chunks(model), None, take).await?;
    Ok(chunks)
}

/// Reads chunks; gives those that are not there.
async fn check_chunks(
    root: &Root,
    model: &ModelName,
    chunks: BTreeMap<ChunkId, u64>,
    verified: &mut Verified,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<Vec<(ChunkId, StoreError)>> {
    progress.start(chunks.values().sum());
    let reads = futures::stream::iter(chunks).map(|(id, size)| async move {
        let _memory = limits.memory_for(size).await;
        (id, size, chunk::check(root, model, Chunk { id, size }).await)
    });
    let mut reads = reads.buffer_unordered(limits.chunks.max(1));
    let mut missing = Vec::new();
    while let Some((id, size, read)) = reads.next().await {
        match read {
            Err(error)
                if error.class() == Class::Integrity
                    && root.size(&layout::chunk(model, &id)).await?.is_none() =>
            {
                missing.push((id, error));
            }
            read => drop(verified.note(read)?),
        }
        verified.chunks += 1;
        verified.bytes += size;
        progress.advance(size);
    }
    Ok(missing)
}
