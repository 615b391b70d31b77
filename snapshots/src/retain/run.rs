//! A run of gc: its notes in the store, its list, and who carries it out.
//!
//! Runs are numbered densely, and a run begins only when the one before has ended: put-if-absent makes one winner. Who
//! carries a run out notes so, by the next number in `held`, before [`HOLD`] has passed. Who finds that the one who did
//! is gone, or the last such note older than twice as long, puts the next one and ends the run. One that was only slow
//! finds its next number taken, and stops; and it deletes nothing once [`HOLD`] has passed since its last note.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as Key;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::job::Document;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::retention::{Condemned, GcEnded, GcNote, GcSchema};
use weighbridge_schemas::snapshot::Chunk;

use super::keep::age;
use super::{Collected, Options, past};
use crate::error::{Class, Result, StoreError};
use crate::jobs;
use crate::layout::{self, GcNote as Note};
use crate::root::{Moment, Put, Root};

/// For how long a process carries a run out without saying so again, unless told otherwise. No request takes so long.
pub const HOLD: Duration = Duration::from_secs(600);
/// Runs that have ended whose notes are kept.
const KEPT: u64 = 10;
/// How long a bucket may take to do what a process asked for that is gone.
const SETTLED: Duration = Duration::from_secs(60);

/// A run that this process carries out.
#[derive(Debug)]
pub(super) struct Run<'a> {
    root: &'a Root,
    model: &'a ModelName,
    options: &'a Options,
    number: u64,
    /// The number of this process's newest note of holding the run, and since when.
    held: u64,
    since: Moment,
    pages: u64,
}

fn note(options: &Options, root: &Root) -> GcNote {
    GcNote {
        schema: GcSchema::V1,
        holder: options.holder.clone(),
        process: options.process.clone(),
        keep_history: None,
        who: options.who.clone(),
        when: root.now(),
    }
}

/// Begins a run. Those that somebody left are ended first, and counted.
///
/// # Errors
/// [`Class::Conflict`] where another process carries one out.
pub(super) async fn begin<'a>(
    root: &'a Root,
    model: &'a ModelName,
    options: &'a Options,
    left: &mut u64,
) -> Result<Run<'a>> {
    loop {
        let last = runs(root, model).await?.last().copied().unwrap_or(0);
        let since = root.moment();
        let run = |number, held| Run { root, model, options, number, held, since, pages: 0 };
        if last > 0 && !has(root, model, last, Note::Ended).await? {
            let held = take_over(root, model, options, last).await?;
            tracing::info!(%model, run = last, "a run of gc that was left is ended");
            run(last, held).end(None).await?;
            *left += 1;
            continue;
        }
        let number = last.saturating_add(1);
        let key = layout::gc_note(model, number, Note::Begun);
        let before = past::newest(root, model).await?.and_then(|past| past.begun?.keep_history);
        let history = options.retention.keep_history;
        let kept = before.map_or(history, |before| before.min(history));
        let begun = GcNote { keep_history: Some(kept), ..note(options, root) };
        if let Some(other) = put_own(root, &key, &begun).await? {
            return Err(busy(model, number, Some(&other), None));
        }
        let run = run(number, 0);
        if runs(root, model).await?.last().is_some_and(|&last| last > number) {
            // So slow that others have begun, and ended, and forgotten a run of this number meanwhile.
            run.end(None).await?;
            return Err(busy(model, number, None, None));
        }
        run.forget_old().await?;
        return Ok(run);
    }
}

/// Puts a note; gives what stands there where it is not this process's own.
async fn put_note(root: &Root, options: &Options, key: &Key) -> Result<Option<GcNote>> {
    put_own(root, key, &note(options, root)).await
}

async fn put_own(root: &Root, key: &Key, own: &GcNote) -> Result<Option<GcNote>> {
    if root.put_if_absent(key, Bytes::from(own.to_bytes())).await? == Put::Written {
        return Ok(None);
    }
    // It may have been put by a try whose answer was lost.
    let ruling: Option<GcNote> = jobs::get(root, key).await?;
    let gone = || StoreError::new(Class::Conflict, key, "another process put it, and it is gone again");
    Ok(Some(ruling.ok_or_else(gone)?).filter(|ruling| ruling.holder != own.holder))
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
    let there = held.as_ref().and_then(|held| held.process.as_ref()).and_then(options.is_there);
    let looked = root.look(&key).await?;
    let idle = looked.map_or(Duration::MAX, |found| age(found.modified, root.now()));
    if !own && there.unwrap_or(idle < options.hold * 2) {
        return Err(busy(model, number, held.as_ref(), Some(idle)));
    }
    let next = last.saturating_add(1);
    if let Some(other) = put_note(root, options, &layout::gc_holder(model, number, next)).await? {
        return Err(busy(model, number, Some(&other), None));
    }
    if root.is_bucket() && idle < options.hold * 2 && has(root, model, number, Note::Listed).await? {
        // What it asked for last may be done yet.
        tokio::time::sleep(SETTLED.min(options.hold)).await;
    }
    Ok(next)
}

fn busy(model: &ModelName, number: u64, held: Option<&GcNote>, idle: Option<Duration>) -> StoreError {
    let process = |held: &GcNote| match &held.process {
        Some(process) => format!(", process {}", process.number),
        None => String::new(),
    };
    let by = held.map_or(String::new(), |held| format!(": {}{}", held.who, process(held)));
    let since = idle.map_or(String::new(), |idle| {
        let idle = idle.as_secs();
        format!(
            ", who last said so {idle} s ago; if it died on another machine, it is waited for for a while"
        )
    });
    let why = format!("another process carries out run {number} of gc{by}{since}; run it again later");
    StoreError::new(Class::Conflict, model, why)
}

async fn has(root: &Root, model: &ModelName, number: u64, note: Note) -> Result<bool> {
    Ok(root.size(&layout::gc_note(model, number, note)).await?.is_some())
}

/// The numbers of a model's runs, ascending.
pub(super) async fn runs(root: &Root, model: &ModelName) -> Result<Vec<u64>> {
    let folders = root.entries(&layout::gc(model)).await?.common_prefixes;
    let mut runs: Vec<_> = folders.iter().filter_map(layout::number).collect();
    runs.sort_unstable();
    Ok(runs)
}

impl Run<'_> {
    /// Makes sure that this process still carries the run out, and does for a while.
    ///
    /// # Errors
    /// [`Class::Conflict`] where it does not.
    pub(super) async fn hold(&mut self) -> Result<()> {
        if self.root.passed(self.since) < self.options.hold / 2 {
            return Ok(());
        }
        let (since, next) = (self.root.moment(), self.held.saturating_add(1));
        let key = layout::gc_holder(self.model, self.number, next);
        if let Some(other) = put_note(self.root, self.options, &key).await? {
            return Err(busy(self.model, self.number, Some(&other), None));
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
        match put_note(self.root, self.options, &key).await? {
            None => Ok(()),
            Some(other) => Err(busy(self.model, self.number, Some(&other), None)),
        }
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
            self.root.delete_within(batch, self.since, self.options.hold).await?;
        }
        Ok(())
    }

    /// Drops a page that has been carried out.
    pub(super) async fn drop_page(&mut self, key: &Key) -> Result<()> {
        self.delete(std::slice::from_ref(key)).await
    }

    /// Ends the run: its list is void. `carried_out` is what it deleted; `None` where it was broken off.
    pub(super) async fn end(mut self, carried_out: Option<&Collected>) -> Result<()> {
        self.hold().await?;
        let ended = GcEnded {
            schema: GcSchema::V1,
            carried_out: carried_out.is_some(),
            snapshots: carried_out.map_or(0, |collected| collected.snapshots.len() as u64),
            chunks: carried_out.map_or(0, |collected| collected.chunks),
            bytes: carried_out.map_or(0, |collected| collected.bytes),
            who: self.options.who.clone(),
            when: self.root.now(),
        };
        let key = layout::gc_note(self.model, self.number, Note::Ended);
        self.root.put_if_absent(&key, Bytes::from(ended.to_bytes())).await?;
        let pages = self.pages().await?;
        self.root.delete(&pages).await
    }

    /// Ends the run after a failure, so that the next one need not wait. In a bucket what was asked for last may be
    /// done yet: there the run is left once its list was whole.
    pub(super) async fn give_up(self) {
        let (model, number) = (self.model, self.number);
        let ended = match has(self.root, model, number, Note::Listed).await {
            Ok(listed) if listed && self.root.is_bucket() => return,
            Ok(_) => self.end(None).await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            tracing::debug!(%error, run = number, "a run of gc is left");
        }
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
