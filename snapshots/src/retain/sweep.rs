//! What is condemned, and what of that is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;

use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::snapshot::Chunk;
use weighbridge_schemas::time::Timestamp;

use super::keep::{self, Aged, age};
use super::members::{Members, first};
use super::roots::{self, Roots};
use super::run::Run;
use super::{Collected, Options, Told};
use crate::error::Result;
use crate::fetch::Progress;
use crate::layout;
use crate::manifest;
use crate::root::{Listed, Root};

/// Folders of chunks that are listed at once.
const LISTINGS: usize = 8;

/// What lies where snapshots lie.
#[derive(Debug, Default)]
struct Snapshots {
    /// Those that have a manifest.
    whole: BTreeMap<SnapshotId, Listed>,
    /// What lies beside each manifest, or is left of one.
    beside: BTreeMap<SnapshotId, Vec<Listed>>,
}

async fn list_snapshots(root: &Root, model: &ModelName) -> Result<Snapshots> {
    let mut snapshots = Snapshots::default();
    root.walk(&layout::snapshots(model), None, |listed| {
        match layout::snapshot_of(&listed.key) {
            Some(id) if layout::snapshot(model, &id) == listed.key => {
                snapshots.whole.insert(id, listed);
            }
            Some(id) => snapshots.beside.entry(id).or_default().push(listed),
            None => {}
        }
        Ok(())
    })
    .await?;
    Ok(snapshots)
}

impl Snapshots {
    /// What the policy keeps, and how much of it for nothing but being young.
    async fn kept(
        &self,
        root: &Root,
        model: &ModelName,
        options: &Options,
    ) -> Result<(BTreeSet<SnapshotId>, u64)> {
        let mut aged = Vec::with_capacity(self.whole.len());
        for (id, listed) in &self.whole {
            let step = match options.retention.keep_each {
                // One that cannot be read may be of a step that is kept: the failure ends the collection.
                Some(_) => manifest::get(root, model, id).await?.step,
                None => 0,
            };
            aged.push(Aged { id: *id, step, stored: listed.modified });
        }
        let now = root.now();
        let kept = keep::kept(&aged, &options.retention, options.grace, now);
        let by_rule = keep::kept(&aged, &options.retention, Duration::ZERO, now);
        let young = kept.difference(&by_rule).count();
        Ok((kept, young as u64))
    }

    /// The snapshots that are left of `live`, and those that may go: whole ones, and what is left of others.
    fn part(
        &self,
        live: &BTreeSet<SnapshotId>,
        options: &Options,
        root: &Root,
    ) -> (Vec<SnapshotId>, Vec<SnapshotId>) {
        let (kept, mut doomed): (Vec<_>, Vec<_>) = self.whole.keys().partition(|id| live.contains(id));
        let old = |listed: &Listed| age(listed.modified, root.now()) >= options.grace;
        let left = self.beside.iter().filter(|(id, beside)| {
            !self.whole.contains_key(id) && !live.contains(id) && beside.iter().all(old)
        });
        doomed.extend(left.map(|(id, _)| *id));
        (kept, doomed)
    }

    /// The keys of a snapshot, its manifest first: with it the snapshot is gone.
    fn keys(&self, id: &SnapshotId) -> impl Iterator<Item = &Key> {
        let beside = self.beside.get(id).into_iter().flatten();
        self.whole.get(id).into_iter().chain(beside).map(|listed| &listed.key)
    }
}

/// Condemns what nothing keeps, and deletes what is still kept by nothing then.
pub(super) async fn sweep(
    root: &Root,
    model: &ModelName,
    options: &Options,
    mut run: Run<'_>,
    collected: &mut Collected,
    told: Told<'_>,
    progress: &dyn Progress,
) -> Result<()> {
    let swept = async {
        let mut pages = Pages { run: Some(&mut run), chunks: Vec::new(), bytes: 0, told: None };
        condemn(root, model, options, &mut pages, collected).await?;
        pages.flush().await?;
        progress.start(pages.bytes);
        run.list_is_whole().await?;
        carry_out(root, model, options, &mut run, collected, told, progress).await
    };
    match swept.await {
        Ok(()) => run.end(Some(collected)).await,
        Err(error) => {
            run.give_up().await;
            Err(error)
        }
    }
}

/// What [`sweep`] would delete now.
pub(super) async fn preview(
    root: &Root,
    model: &ModelName,
    options: &Options,
    collected: &mut Collected,
    told: Told<'_>,
) -> Result<()> {
    let mut pages = Pages { run: None, chunks: Vec::new(), bytes: 0, told: Some((told, model)) };
    let snapshots = condemn(root, model, options, &mut pages, collected).await?;
    collected.bytes = pages.bytes;
    for id in std::mem::take(&mut collected.snapshots) {
        let pins = root.keys(&layout::pin(model, &id), None).await?;
        pins.iter().chain(snapshots.keys(&id)).for_each(|key| told(key.as_ref()));
        if snapshots.whole.contains_key(&id) {
            collected.snapshots.push(id);
        }
    }
    Ok(())
}

/// Where condemned chunks go: onto pages of a run; or they are told of, and that is all.
struct Pages<'p, 'r> {
    run: Option<&'p mut Run<'r>>,
    chunks: Vec<Chunk>,
    bytes: u64,
    told: Option<(Told<'p>, &'p ModelName)>,
}

impl Pages<'_, '_> {
    async fn chunk(&mut self, chunk: Chunk) -> Result<()> {
        self.bytes = self.bytes.saturating_add(chunk.size);
        if let Some((told, model)) = self.told {
            told(layout::chunk(model, &chunk.id).as_ref());
            return Ok(());
        }
        self.chunks.push(chunk);
        if self.chunks.len() >= limits::CONDEMNED_A_PAGE { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<()> {
        let chunks = std::mem::take(&mut self.chunks);
        match &mut self.run {
            Some(run) if !chunks.is_empty() => run.condemn(Vec::new(), chunks).await,
            _ => Ok(()),
        }
    }
}

/// Finds what nothing keeps, and writes the list.
async fn condemn(
    root: &Root,
    model: &ModelName,
    options: &Options,
    pages: &mut Pages<'_, '_>,
    collected: &mut Collected,
) -> Result<Snapshots> {
    let snapshots = list_snapshots(root, model).await?;
    let roots = roots::read(root, model, options).await?;
    let (mut live, young) = snapshots.kept(root, model, options).await?;
    let by_policy = live.len() as u64;
    collected.kept_young = young;
    live.extend(&roots.snapshots);
    let (kept, doomed) = snapshots.part(&live, options, root);
    collected.kept = kept.len() as u64;
    collected.kept_rooted = collected.kept.saturating_sub(by_policy);
    collected.running = roots.running.len() as u64;
    match &mut pages.run {
        Some(run) => {
            for page in doomed.chunks(limits::CONDEMNED_A_PAGE) {
                run.condemn(page.to_vec(), Vec::new()).await?;
            }
        }
        None => collected.snapshots = doomed,
    }
    let mut from = 0;
    while from < 256 {
        let members =
            named(root, model, &kept, &roots, (from, options.memory), pages.run.as_deref_mut()).await?;
        let range = members.range();
        let folders = range.clone().filter_map(|byte| u8::try_from(byte).ok());
        let mut listings =
            futures::stream::iter(folders).map(|byte| chunks_of(root, model, byte)).buffered(LISTINGS);
        while let Some(listed) = listings.try_next().await? {
            if let Some(run) = &mut pages.run {
                run.hold().await?;
            }
            for (chunk, since) in listed {
                if members.contains(&chunk.id) {
                    continue;
                }
                if age(since, root.now()) < options.grace {
                    collected.young += 1;
                    continue;
                }
                if pages.run.is_none() {
                    collected.chunks += 1;
                }
                pages.chunk(chunk).await?;
            }
        }
        from = range.end;
    }
    Ok(snapshots)
}

/// The chunks whose ids begin with a byte, ascending, and when they were put.
async fn chunks_of(root: &Root, model: &ModelName, first: u8) -> Result<Vec<(Chunk, Timestamp)>> {
    let mut chunks = Vec::new();
    root.walk(&layout::chunks_of(model, first), None, |listed| {
        let id = listed.key.filename().and_then(|name| name.parse::<ChunkId>().ok());
        if let Some(id) = id.filter(|id| layout::chunk(model, id) == listed.key) {
            chunks.push((Chunk { id, size: listed.size }, listed.modified));
        }
        Ok(())
    })
    .await?;
    chunks.sort_unstable_by_key(|(chunk, _)| chunk.id);
    Ok(chunks)
}

/// The chunks that snapshots, claims and running jobs name, of ids that begin with the byte `from` or a later one.
async fn named(
    root: &Root,
    model: &ModelName,
    snapshots: &[SnapshotId],
    roots: &Roots,
    (from, memory): (u16, u64),
    mut run: Option<&mut Run<'_>>,
) -> Result<Members> {
    let mut members = Members::new(from, memory);
    for id in snapshots {
        if let Some(run) = &mut run {
            run.hold().await?;
        }
        // One that cannot be read keeps everything: the failure ends the collection.
        manifest::get(root, model, id).await?.chunks().keys().for_each(|chunk| members.add(chunk));
    }
    roots.chunks(root, model, &mut |chunk| members.add(chunk)).await?;
    members.settle();
    Ok(members)
}

/// Deletes what is on the list and what no root names now.
async fn carry_out(
    root: &Root,
    model: &ModelName,
    options: &Options,
    run: &mut Run<'_>,
    collected: &mut Collected,
    told: Told<'_>,
    progress: &dyn Progress,
) -> Result<()> {
    let roots = roots::read(root, model, options).await?;
    let snapshots = list_snapshots(root, model).await?;
    let mut gone: BTreeSet<SnapshotId> = BTreeSet::new();
    let mut pages = Vec::new();
    for key in run.pages().await? {
        let Some(page) = run.page(&key).await? else { continue };
        gone.extend(page.snapshots.iter().filter(|id| !roots.snapshots.contains(id)));
        pages.push((key, page.chunks.first().map(|chunk| chunk.id)));
    }
    // Every chunk of what stays is looked up before anything is deleted.
    let staying: Vec<_> = snapshots.whole.keys().filter(|id| !gone.contains(id)).copied().collect();
    let start = pages.iter().find_map(|(_, chunk)| chunk.as_ref()).map_or(0, first);
    let memory = options.memory;
    let mut members = named(root, model, &staying, &roots, (start, memory), Some(&mut *run)).await?;
    delete_snapshots(root, model, run, &snapshots, &gone, collected, told).await?;
    for (key, _) in pages {
        let Some(page) = run.page(&key).await? else { continue };
        let mut doomed = Vec::new();
        for chunk in &page.chunks {
            while !members.range().contains(&first(&chunk.id)) {
                let range = (first(&chunk.id), memory);
                members = named(root, model, &staying, &roots, range, Some(&mut *run)).await?;
            }
            if !members.contains(&chunk.id) {
                doomed.push(*chunk);
            }
        }
        let keys: Vec<_> = doomed.iter().map(|chunk| layout::chunk(model, &chunk.id)).collect();
        run.delete(&keys).await?;
        keys.iter().for_each(|key| told(key.as_ref()));
        collected.chunks += doomed.len() as u64;
        let bytes = doomed.iter().fold(0u64, |sum, chunk| sum.saturating_add(chunk.size));
        collected.bytes = collected.bytes.saturating_add(bytes);
        progress.advance(page.chunks.iter().map(|chunk| chunk.size).sum());
        run.drop_page(&key).await?;
    }
    Ok(())
}

/// Deletes snapshots: what was said of pins, then all manifests, and only when those are gone what lies beside them.
async fn delete_snapshots(
    root: &Root,
    model: &ModelName,
    run: &mut Run<'_>,
    snapshots: &Snapshots,
    gone: &BTreeSet<SnapshotId>,
    collected: &mut Collected,
    told: Told<'_>,
) -> Result<()> {
    let mut pins = Vec::new();
    for id in gone {
        pins.extend(root.keys(&layout::pin(model, id), None).await?);
    }
    let manifests: Vec<_> =
        gone.iter().filter_map(|id| snapshots.whole.get(id)).map(|listed| listed.key.clone()).collect();
    let beside = gone.iter().filter_map(|id| snapshots.beside.get(id)).flatten();
    let beside: Vec<_> = beside.map(|listed| listed.key.clone()).collect();
    for keys in [pins, manifests, beside] {
        run.delete(&keys).await?;
        keys.iter().for_each(|key| told(key.as_ref()));
    }
    collected.snapshots.extend(gone.iter().filter(|id| snapshots.whole.contains_key(id)));
    Ok(())
}
