//! A run of gc: its notes in the store, its list, and who carries it out.
//!
//! Runs are numbered densely, and a run begins only when the one before has ended: put-if-absent makes one winner. Who
//! carries a run out notes so, by the next number in `held`, before [`HOLD`] has passed; who finds the last such note
//! older than twice as long puts the next one, and carries the run out from there. One that was only slow finds its
//! next number taken, and stops.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::job::Document;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::retention::{Condemned, GcEnded, GcNote, GcSchema};
use weighbridge_schemas::snapshot::Chunk;

use super::Options;
use super::keep::age;
use crate::error::{Class, Result, StoreError};
use crate::jobs;
use crate::layout::{self, GcNote as Note};
use crate::root::{Put, Root};

/// For how long a process carries a run out without saying so again, unless told otherwise. No request takes so long.
pub const HOLD: Duration = Duration::from_secs(600);
/// Runs that have ended whose notes are kept.
const KEPT: u64 = 10;

/// A run that this process carries out.
#[derive(Debug)]
pub(super) struct Run<'a> {
    root: &'a Root,
    model: &'a ModelName,
    options: &'a Options,
    number: u64,
    /// The number of this process's newest note of holding the run, and since when.
    held: u64,
    since: Instant,
    pages: u64,
}

/// What is found before a run is begun.
pub(super) enum Found<'a> {
    /// A new run.
    New(Run<'a>),
    /// One that somebody left, and whether its list is whole.
    Left(Run<'a>, bool),
}

fn note(options: &Options, root: &Root) -> GcNote {
    GcNote {
        schema: GcSchema::V1,
        holder: options.holder.clone(),
        who: options.who.clone(),
        when: root.now(),
    }
}

/// Begins a run, or takes one over that somebody left.
///
/// # Errors
/// [`Class::Conflict`] where another process carries one out.
pub(super) async fn begin<'a>(
    root: &'a Root,
    model: &'a ModelName,
    options: &'a Options,
) -> Result<Found<'a>> {
    let last = runs(root, model).await?.last().copied().unwrap_or(0);
    let since = Instant::now();
    let run = |number, held| Run { root, model, options, number, held, since, pages: 0 };
    if last > 0 && !has(root, model, last, Note::Ended).await? {
        let held = take_over(root, model, options, last).await?;
        let listed = has(root, model, last, Note::Listed).await?;
        return Ok(Found::Left(run(last, held), listed));
    }
    let number = last.saturating_add(1);
    if !put_note(root, model, options, &layout::gc_note(model, number, Note::Begun)).await? {
        return Err(busy(model, number, None));
    }
    let run = run(number, 0);
    run.forget_old().await?;
    Ok(Found::New(run))
}

/// Puts a note; whether it is this process's own that stands.
async fn put_note(root: &Root, model: &ModelName, options: &Options, key: &Key) -> Result<bool> {
    let own = note(options, root);
    if root.put_if_absent(key, Bytes::from(own.to_bytes())).await? == Put::Written {
        return Ok(true);
    }
    // It may have been put by a try whose answer was lost.
    let ruling: Option<GcNote> = jobs::get(root, key).await?;
    let ours = ruling.is_some_and(|ruling| ruling.holder == own.holder);
    tracing::debug!(%model, %key, ours, "a note of gc was there");
    Ok(ours)
}

async fn take_over(root: &Root, model: &ModelName, options: &Options, number: u64) -> Result<u64> {
    let keys = root.keys(&layout::gc_holders(model, number), None).await?;
    let last = keys.iter().filter_map(layout::number).max().unwrap_or(0);
    let key = if last == 0 {
        layout::gc_note(model, number, Note::Begun)
    } else {
        layout::gc_holder(model, number, last)
    };
    let held: Option<GcNote> = jobs::get(root, &key).await.or_else(|error| match error.class() {
        // Who cannot be told is nobody.
        Class::Integrity => Ok(None),
        _ => Err(error),
    })?;
    let own = held.as_ref().is_some_and(|held| held.holder == options.holder);
    let looked = root.look(&key).await?;
    let idle = looked.map_or(Duration::MAX, |found| age(found.modified, root.now()));
    if !own && idle < options.hold * 2 {
        return Err(busy(model, number, held.map(|held| (held.who, idle))));
    }
    let next = last.saturating_add(1);
    if !put_note(root, model, options, &layout::gc_holder(model, number, next)).await? {
        return Err(busy(model, number, None));
    }
    Ok(next)
}

fn busy(model: &ModelName, number: u64, held: Option<(String, Duration)>) -> StoreError {
    let by = held.map_or(String::new(), |(who, idle)| {
        format!(
            ": {who}, who last said so {} s ago; if it died, it is taken over after a while",
            idle.as_secs()
        )
    });
    let why = format!("another process carries out run {number} of gc{by}");
    StoreError::new(Class::Conflict, model, why)
}

async fn has(root: &Root, model: &ModelName, number: u64, note: Note) -> Result<bool> {
    Ok(root.size(&layout::gc_note(model, number, note)).await?.is_some())
}

/// The numbers of a model's runs, ascending.
async fn runs(root: &Root, model: &ModelName) -> Result<Vec<u64>> {
    let folders = root.entries(&layout::gc(model)).await?.common_prefixes;
    let mut runs: Vec<_> = folders.iter().filter_map(layout::number).collect();
    runs.sort_unstable();
    Ok(runs)
}

impl Run<'_> {
    /// This run's number.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Makes sure that this process still carries the run out, and does for a while.
    ///
    /// # Errors
    /// [`Class::Conflict`] where it does not.
    pub(super) async fn hold(&mut self) -> Result<()> {
        if self.since.elapsed() < self.options.hold / 2 {
            return Ok(());
        }
        let (since, next) = (Instant::now(), self.held.saturating_add(1));
        let key = layout::gc_holder(self.model, self.number, next);
        if !put_note(self.root, self.model, self.options, &key).await? {
            return Err(busy(self.model, self.number, None));
        }
        (self.held, self.since) = (next, since);
        Ok(())
    }

    /// Adds a page to the list.
    pub(super) async fn condemn(&mut self, snapshots: Vec<SnapshotId>, chunks: Vec<Chunk>) -> Result<()> {
        self.hold().await?;
        self.pages += 1;
        let page = Condemned { schema: GcSchema::V1, snapshots, chunks };
        let key = layout::condemned_page(self.model, self.number, self.pages);
        // A page of the same number could only be this process's own, put by a try whose answer was lost.
        self.root.put_if_absent(&key, Bytes::from(page.to_bytes())).await.map(drop)
    }

    /// The list is whole: roots that are written from now on are preceded by a look at it.
    pub(super) async fn list_is_whole(&mut self) -> Result<()> {
        self.hold().await?;
        let key = layout::gc_note(self.model, self.number, Note::Listed);
        if put_note(self.root, self.model, self.options, &key).await? {
            return Ok(());
        }
        Err(busy(self.model, self.number, None))
    }

    /// The pages of the list that are still to be carried out, in order.
    pub(super) async fn pages(&self) -> Result<Vec<Key>> {
        self.root.keys(&layout::condemned(self.model, self.number), None).await
    }

    /// A page; `None` where it has been carried out.
    pub(super) async fn page(&self, key: &Key) -> Result<Option<Condemned>> {
        jobs::get(self.root, key).await
    }

    /// Deletes objects, in batches that a process can be taken to hold the run for.
    pub(super) async fn delete(&mut self, keys: &[Key]) -> Result<()> {
        for batch in keys.chunks(BATCH) {
            self.hold().await?;
            self.root.delete(batch).await?;
        }
        Ok(())
    }

    /// Drops a page that has been carried out.
    pub(super) async fn drop_page(&mut self, key: &Key) -> Result<()> {
        self.delete(std::slice::from_ref(key)).await
    }

    /// Ends the run: its list is void.
    pub(super) async fn end(mut self, carried_out: bool) -> Result<()> {
        self.hold().await?;
        let ended = GcEnded {
            schema: GcSchema::V1,
            carried_out,
            who: self.options.who.clone(),
            when: self.root.now(),
        };
        let key = layout::gc_note(self.model, self.number, Note::Ended);
        self.root.put_if_absent(&key, Bytes::from(ended.to_bytes())).await?;
        for page in self.pages().await? {
            self.root.delete(&[page]).await?;
        }
        Ok(())
    }

    /// Removes the notes of runs that ended long ago, and pages that were left of others.
    async fn forget_old(&self) -> Result<()> {
        for run in runs(self.root, self.model).await? {
            if run >= self.number {
                continue;
            }
            let folder = if run + KEPT < self.number {
                layout::gc_run(self.model, run)
            } else {
                layout::condemned(self.model, run)
            };
            let mut keys = self.root.keys(&folder, None).await?;
            // Its end goes last: without one it would count as unfinished.
            let ended = layout::gc_note(self.model, run, Note::Ended);
            keys.sort_by_key(|key| *key == ended);
            for batch in keys.chunks(1) {
                self.root.delete(batch).await?;
            }
        }
        Ok(())
    }
}

/// Objects that are deleted in one request.
const BATCH: usize = 1000;

/// The pages of lists that are whole which have the snapshot or one of the chunks.
pub(super) async fn pages_that_condemn(
    root: &Root,
    model: &ModelName,
    id: &SnapshotId,
    chunks: &BTreeSet<ChunkId>,
) -> Result<Vec<Key>> {
    let mut hits = Vec::new();
    for run in runs(root, model).await? {
        if has(root, model, run, Note::Ended).await? || !has(root, model, run, Note::Listed).await? {
            continue;
        }
        for key in root.keys(&layout::condemned(model, run), None).await? {
            let Some(page) = jobs::get::<Condemned>(root, &key).await? else { continue };
            if page.snapshots.contains(id) || page.chunks.iter().any(|chunk| chunks.contains(&chunk.id)) {
                hits.push(key);
            }
        }
    }
    Ok(hits)
}

/// Whether a page is still to be carried out.
pub(super) async fn is_in_force(root: &Root, model: &ModelName, page: &Key) -> Result<bool> {
    if root.size(page).await?.is_none() {
        return Ok(false);
    }
    let run = page.parts().nth_back(2).and_then(|run| layout::number(&Key::from(run.as_ref())));
    match run {
        Some(run) => Ok(!has(root, model, run, Note::Ended).await?),
        None => Ok(false),
    }
}
