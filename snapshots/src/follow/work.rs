//! One attempt after the other to serve what is wanted.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::host::Target;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_schemas::time::Timestamp;

use super::board::{Board, Part, now, target};
use super::hook::{self, About, Phase};
use super::note::{Note, Pending, Served, Step};
use super::orders::{Came, Orders, Wanted};
use super::refusals::Refusals;
use super::{Event, Following, pause, versions};
use crate::error::{Class, Result, StoreError};
use crate::fetch::{self, FOLLOW, Folder, Lock, Seen, Staged};
use crate::reference::{Followed, pointed_at};
use crate::root::{Root, apart};

/// How often it is looked whether `current` still points where it has to.
const LOOK: Duration = Duration::from_secs(2);

/// Serves what is wanted out of a folder.
pub(super) struct Work {
    folder: Folder,
    following: Following,
    note: Note,
    board: Arc<Board>,
    /// What an attempt that failed left in the staging folder.
    staged: Staged,
    /// Where `current` may point though the note does not say so: where it did when this began, since somebody may have
    /// fetched that while nobody followed, and where a swap that could not be noted led.
    found: Option<SnapshotId>,
    refusals: Refusals,
    /// That nobody else follows into the folder.
    alone: Lock,
}

impl Work {
    pub(super) fn new(
        (folder, alone): (Folder, Lock),
        following: Following,
        note: Note,
        board: Arc<Board>,
    ) -> Self {
        let found = folder.points_at();
        Self {
            folder,
            following,
            note,
            board,
            staged: Staged::default(),
            found,
            refusals: Refusals::default(),
            alone,
        }
    }

    /// Works until it is time to stop.
    ///
    /// # Errors
    /// [`Class::Refused`] where the folder is gone, or another one is in its place: what was found out about it before
    /// is not so any more, and it may be somebody else's.
    pub(super) async fn run(&mut self, mut orders: Orders) -> Result<()> {
        let mut failures = 0;
        while !orders.is_to_stop() {
            if !self.is_at_home() {
                let why = "the folder was removed, or another one is in its place; begin to follow anew";
                return Err(StoreError::new(Class::Refused, self.folder.path().display(), why));
            }
            let wanted = orders.wanted();
            match self.attempt(wanted.as_ref(), &mut orders).await {
                Ok(Came::Served) => {
                    failures = 0;
                    self.board.well();
                    let id = wanted.as_ref().map(|wanted| wanted.entry.snapshot);
                    tokio::select! {
                        () = orders.news(wanted.as_ref()) => {}
                        () = self.strays(id) => {}
                    }
                }
                Ok(Came::Overruled) => {}
                Ok(Came::Refused(left)) => self.bide(wanted.as_ref(), &mut orders, left).await,
                Err(error) => {
                    failures += 1;
                    let refused = wanted.as_ref().and_then(|wanted| self.refused(wanted));
                    let pause = refused.unwrap_or_else(|| pause(failures));
                    self.board.failed(Part::Work, &error, pause);
                    self.bide(wanted.as_ref(), &mut orders, pause).await;
                }
            }
        }
        Ok(())
    }

    /// Whether the folder is the one that this began with.
    fn is_at_home(&self) -> bool {
        self.alone.is_at(&self.folder.path().join(FOLLOW))
    }

    /// Waits, unless something else is to be done, or to be put right.
    async fn bide(&self, wanted: Option<&Wanted>, orders: &mut Orders, pause: Duration) {
        tokio::select! {
            () = orders.news(wanted) => {}
            () = self.strays(None) => {}
            () = sleep(pause) => {}
        }
    }

    /// For how long what is wanted is not tried again, where the command said no to it.
    fn refused(&self, wanted: &Wanted) -> Option<Duration> {
        self.refusals.left(&wanted.entry, Instant::now())
    }

    /// Shows what is served and held.
    pub(super) fn show(&self) {
        let noted = self.note.serving.as_ref().map(|noted| (noted.target.clone(), noted.since));
        let serving = self.folder.points_at().and_then(|id| match noted {
            // What is on trial does not count yet.
            noted if self.note.pending.is_some() => noted,
            Some(noted) if noted.0.snapshot == id => Some(noted),
            _ => versions::target_of(&self.folder, id).map(|target| (target.clone(), target.when)),
        });
        self.board.serves(serving, versions::held(&self.folder, &self.note), self.note.is_over());
    }

    /// Comes back when `current` does not point any more where it has to: at `wanted`, or, where that is not served
    /// yet, at what is.
    async fn strays(&self, wanted: Option<SnapshotId>) {
        loop {
            sleep(LOOK).await;
            if !self.is_at_home() {
                return;
            }
            let strays = match wanted {
                Some(wanted) => self.folder.points_at() != Some(wanted),
                None => self.strayed_from().is_some(),
            };
            if strays {
                tracing::warn!("somebody else changed what is served; it is put right");
                return;
            }
        }
    }

    /// What is served for all that is known here, where somebody else has `current` point elsewhere.
    fn strayed_from(&self) -> Option<SnapshotId> {
        let served = self.note.serving.as_ref()?.target.snapshot;
        let points_at = self.folder.points_at();
        let strays = points_at != Some(served) && (points_at.is_none() || points_at != self.found);
        (strays && self.note.pending.is_none() && self.folder.version(&served).is_dir()).then_some(served)
    }

    async fn attempt(&mut self, wanted: Option<&Wanted>, orders: &mut Orders) -> Result<Came> {
        let lock = tokio::select! {
            lock = self.folder.lock() => lock?,
            () = orders.stopped() => return Ok(Came::Overruled),
        };
        self.settle(&lock).await?;
        let Some(wanted) = wanted else {
            self.mend(&lock).await?;
            return Ok(Came::Served);
        };
        if let Some(left) = self.refused(wanted) {
            self.mend(&lock).await?;
            return Ok(Came::Refused(left));
        }
        // What is about to be swapped to, or is there already, needs no way back.
        let id = Some(wanted.entry.snapshot);
        if self.strayed_from() != id && self.folder.points_at() != id {
            self.put_back(&lock).await?;
        }
        match self.approach(wanted, orders, &lock).await {
            Ok(Some(came)) => return Ok(came),
            Ok(None) => {}
            Err(error) => {
                if self.staged.is_in_the_way() {
                    self.make_room(&lock).await?;
                }
                return Err(match self.mend(&lock).await {
                    Ok(()) => error,
                    Err(beside) => error.and(&beside),
                });
            }
        }
        self.swap(&wanted.entry, &lock).await?;
        Ok(Came::Served)
    }

    /// Whatever has to be done before `current` may be flipped to what is wanted; what the attempt came to, where it is
    /// over with that.
    async fn approach(&mut self, wanted: &Wanted, orders: &mut Orders, lock: &Lock) -> Result<Option<Came>> {
        let entry = &wanted.entry;
        self.believe(entry, lock).await?;
        let is_there = self.is_there(wanted, lock).await?;
        let is_served = self.note.serves(entry.snapshot) && self.folder.points_at() == Some(entry.snapshot);
        if is_there && is_served {
            self.rename(entry, lock).await?;
            return Ok(Some(Came::Served));
        }
        // Those that a command said no to may not pile up.
        self.clear_up(Some(entry.snapshot), lock).await?;
        tokio::select! {
            ready = Box::pin(self.make_ready(wanted, is_there, lock)) => ready?,
            () = orders.overruled(wanted) => return Ok(Some(Came::Overruled)),
        }
        Ok(None)
    }

    /// Has `current` point at what was served last, where somebody else changed it.
    async fn put_back(&mut self, lock: &Lock) -> Result<()> {
        let Some(id) = self.strayed_from() else { return Ok(()) };
        if self.following.hooks.after.is_some() {
            self.remember(lock, |note| note.is_doubtful = true).await?;
        }
        self.little(&id, lock, Folder::point_at).await?;
        self.show();
        Ok(())
    }

    /// Serves what was served. Where somebody else changed that, or the command failed for it too, it is run once more.
    async fn mend(&mut self, lock: &Lock) -> Result<()> {
        self.put_back(lock).await?;
        let Some(id) = self.folder.points_at().filter(|_| self.note.is_doubtful) else { return Ok(()) };
        self.run_again(id, None).await?;
        self.remember(lock, |note| note.is_doubtful = false).await?;
        self.show();
        Ok(())
    }

    /// Removes versions that are too many, but for the `wanted` one.
    async fn clear_up(&mut self, wanted: Option<SnapshotId>, lock: &Lock) -> Result<()> {
        let (mut note, keep) = (self.note.clone(), self.following.keep);
        let (folder, lock) = (self.folder.clone(), lock.clone());
        let kept = apart("clearing up", move || {
            let _lock = lock;
            let kept = versions::keep(&folder, &mut note, keep, wanted);
            Ok((note, kept))
        });
        let (note, kept) = kept.await?;
        self.note = note;
        if let Err(error) = kept {
            tracing::warn!(%error, "an old version is not removed");
        }
        self.show();
        Ok(())
    }

    /// Goes on with a swap that is not over.
    async fn settle(&mut self, lock: &Lock) -> Result<()> {
        let Some(pending) = self.note.pending.clone() else { return Ok(()) };
        match pending.step {
            Step::After if self.folder.points_at() == Some(pending.target.snapshot) => {
                self.finish(pending.target, pending.previous, lock).await
            }
            // It had not begun.
            Step::After => self.remember(lock, |note| note.pending = None).await,
            Step::Restore => self.restore(pending, lock).await,
        }
    }

    /// Sees to it that the channel has not gone back behind what was seen of it, and notes where it stands.
    async fn believe(&mut self, entry: &Arc<ChannelEntry>, lock: &Lock) -> Result<()> {
        let (model, forget) = (self.following.model.clone(), self.following.forget);
        let followed = self.followed(entry);
        let note = move |folder: &Folder, _: &SnapshotId| {
            let seen = Seen::read(folder);
            let seen = if forget { seen.unwrap_or_default() } else { seen? };
            if !forget {
                seen.check(&model, &followed)?;
            }
            seen.note(folder, &model, &followed)
        };
        self.little(&entry.snapshot, lock, note).await?;
        self.following.forget = false;
        self.board.wants(entry);
        Ok(())
    }

    fn followed(&self, entry: &ChannelEntry) -> Followed {
        Followed { channel: self.following.channel.clone(), entry: entry.clone() }
    }

    /// Another entry points at what is served.
    async fn rename(&mut self, entry: &ChannelEntry, lock: &Lock) -> Result<()> {
        let target = target(entry);
        if self.note.serving.as_ref().is_some_and(|served| served.target != target) {
            let change = |note: &mut Note| {
                if let Some(served) = &mut note.serving {
                    served.target = target;
                }
            };
            self.remember(lock, change).await?;
        }
        self.show();
        Ok(())
    }

    /// Whether the version is in the folder, verified before, and as it was then.
    async fn is_there(&self, wanted: &Wanted, lock: &Lock) -> Result<bool> {
        let (note, trust, entry) =
            (self.note.clone(), wanted.root.trust().cloned(), Arc::clone(&wanted.entry));
        fetch::apart(&wanted.entry.snapshot, (&self.folder, lock), move |folder, _| {
            Ok(versions::is_verified(folder, &note, &entry, trust.as_ref()))
        })
        .await
    }

    /// Has the version in the folder, complete and verified, and the command that is run before a swap succeed.
    async fn make_ready(&mut self, wanted: &Wanted, is_there: bool, lock: &Lock) -> Result<()> {
        let Wanted { root, limits, entry, .. } = wanted;
        if !is_there {
            let manifest = pointed_at(root, &self.following.model, &self.followed(entry)).await?;
            let (place, staged) = ((&self.folder, lock), &mut self.staged);
            let found = Arc::clone(&manifest);
            let fetched = fetch::bring(root, &entry.snapshot, found, place, staged, limits, &()).await?;
            self.staged = Staged::default();
            self.verified(entry.snapshot, manifest, root, lock).await?;
            self.board.tell(&Event::Fetched(fetched));
        }
        let Some(command) = &self.following.hooks.before else { return Ok(()) };
        let target = target(entry);
        let about = self.about(Phase::Before, &target, self.folder.points_at());
        hook::run(command, &about, self.following.hooks.limit).await?;
        if self.is_there(wanted, lock).await? {
            return Ok(());
        }
        let why = "it was changed while the command before the swap ran; commands may read a version, and not write it";
        Err(StoreError::new(Class::Integrity, self.folder.version(&entry.snapshot).display(), why))
    }

    /// Notes that a version was verified.
    async fn verified(
        &mut self,
        id: SnapshotId,
        manifest: Arc<SnapshotManifest>,
        root: &Root,
        lock: &Lock,
    ) -> Result<()> {
        let trust = root.trust().cloned();
        let stamp = fetch::apart(&id, (&self.folder, lock), move |folder, id| {
            let stamp = versions::stamp(folder, *id, &manifest, trust.as_ref());
            stamp.map_err(|error| StoreError::own(folder.version(id).display(), &error))
        });
        let stamp = stamp.await?;
        let is_served = self.folder.points_at() == Some(id);
        let change = |note: &mut Note| {
            note.verified.insert(id, stamp);
            // Its files are others than those that the command was run for.
            note.is_doubtful |= is_served;
        };
        self.remember(lock, change).await
    }

    /// Flips `current`, and has the command that is run after it succeed.
    async fn swap(&mut self, entry: &ChannelEntry, lock: &Lock) -> Result<()> {
        let (target, previous) = (target(entry), self.folder.points_at());
        if self.following.hooks.after.is_some() {
            let pending = Pending { step: Step::After, target: target.clone(), previous };
            self.remember(lock, |note| note.pending = Some(pending)).await?;
        }
        self.little(&entry.snapshot, lock, Folder::flip).await?;
        self.found = Some(entry.snapshot);
        let held = versions::held(&self.folder, &self.note);
        match self.following.hooks.after {
            Some(_) => self.board.tries(held),
            // It is over once it is noted.
            None => self.board.serves(Some((target.clone(), now())), held, false),
        }
        self.finish(target, previous, lock).await
    }

    /// The end of a swap.
    async fn finish(&mut self, target: Target, previous: Option<SnapshotId>, lock: &Lock) -> Result<()> {
        if let Some(command) = &self.following.hooks.after {
            let about = self.about(Phase::After, &target, previous);
            if let Err(error) = hook::run(command, &about, self.following.hooks.limit).await {
                if previous.is_some_and(|id| id != target.snapshot) {
                    self.refusals.note(&target, Instant::now());
                }
                let pending = Pending { step: Step::Restore, target, previous };
                return Err(match self.restore(pending, lock).await {
                    Ok(()) => error,
                    Err(beside) => error.and(&beside),
                });
            }
        }
        let (step, sequence, snapshot) = (target.step, target.sequence, target.snapshot);
        let served = Served { target, since: self.since(snapshot, previous) };
        self.remember(lock, |note| note.served(served, previous)).await?;
        self.found = None;
        self.refusals.clear();
        tracing::info!(sequence, %snapshot, step, "it is served");
        if previous != Some(snapshot) {
            self.board.tell(&Event::Swapped);
        }
        self.clear_up(None, lock).await
    }

    /// Since when this snapshot is served, which is served now.
    fn since(&self, snapshot: SnapshotId, previous: Option<SnapshotId>) -> Timestamp {
        match &self.note.serving {
            Some(served) if served.target.snapshot == snapshot && previous == Some(snapshot) => served.since,
            _ => now(),
        }
    }

    /// Goes back to what was served before a swap whose command failed.
    async fn restore(&mut self, pending: Pending, lock: &Lock) -> Result<()> {
        let Pending { target, previous, .. } = pending.clone();
        let change = |note: &mut Note| (note.pending, note.is_doubtful) = (Some(pending), true);
        self.remember(lock, change).await?;
        let previous = previous.filter(|id| self.folder.version(id).is_dir());
        let mut restored = Ok(());
        let mut is_doubtful = false;
        if let Some(id) = previous.filter(|id| *id != target.snapshot) {
            self.little(&id, lock, Folder::flip).await?;
            self.show();
            restored = self.run_again(id, Some(target.snapshot)).await;
            is_doubtful = restored.is_err();
        } else if previous.is_none() {
            fetch::apart(&target.snapshot, (&self.folder, lock), |folder, _| folder.unlink_current()).await?;
        } else {
            // It was served before, and there is nothing to go back to.
            is_doubtful = true;
        }
        let change = |note: &mut Note| (note.pending, note.is_doubtful) = (None, is_doubtful);
        self.remember(lock, change).await?;
        self.found = None;
        self.show();
        restored
    }

    /// Runs the command for what is served again.
    async fn run_again(&self, id: SnapshotId, failed: Option<SnapshotId>) -> Result<()> {
        let Some(command) = &self.following.hooks.after else { return Ok(()) };
        let noted = self.note.serving.as_ref().map(|served| &served.target);
        let target = noted.filter(|target| target.snapshot == id).cloned();
        let Some(target) = target.or_else(|| versions::target_of(&self.folder, id)) else { return Ok(()) };
        let about = self.about(Phase::Restore, &target, failed);
        hook::run(command, &about, self.following.hooks.limit).await
    }

    fn about<'a>(&'a self, phase: Phase, target: &'a Target, previous: Option<SnapshotId>) -> About<'a> {
        About {
            phase,
            model: &self.following.model,
            channel: &self.following.channel,
            target,
            previous,
            version: self.folder.version(&target.snapshot),
            current: self.folder.current(),
        }
    }

    /// Changes the note, on the disk first.
    async fn remember(&mut self, lock: &Lock, change: impl FnOnce(&mut Note)) -> Result<()> {
        let mut note = self.note.clone();
        change(&mut note);
        let written = note.clone();
        let any = SnapshotId::from_bytes([0; 32]);
        self.little(&any, lock, move |folder, _| written.write(folder)).await?;
        self.note = note;
        Ok(())
    }

    /// Does what writes little. Where the disk is full a fetch that is not over makes way: what is held can be gone
    /// back to in any case.
    async fn little(
        &mut self,
        id: &SnapshotId,
        lock: &Lock,
        work: impl FnOnce(&Folder, &SnapshotId) -> Result<()> + Clone + Send + 'static,
    ) -> Result<()> {
        match fetch::apart(id, (&self.folder, lock), work.clone()).await {
            Err(error) if error.class() == Class::DiskFull => {
                self.make_room(lock).await?;
                fetch::apart(id, (&self.folder, lock), work).await
            }
            done => done,
        }
    }

    /// Removes what a fetch left that is not over.
    async fn make_room(&mut self, lock: &Lock) -> Result<()> {
        tracing::info!("what was fetched so far makes way: the disk is full");
        self.staged.made_room();
        let any = SnapshotId::from_bytes([0; 32]);
        fetch::apart(&any, (&self.folder, lock), fetch::clear_staging).await
    }
}
