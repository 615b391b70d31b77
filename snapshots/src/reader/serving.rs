//! The version that is served, and how the next one takes its place.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

use weighbridge_schemas::ids::SnapshotId;

use super::mapped::Options;
use super::place::Place;
use super::version::Version;
use crate::error::Result;

/// The version that `DIR/current` points at, for any number of readers; swapped when the link is flipped.
#[derive(Debug)]
pub struct Serving {
    /// `DIR/current`.
    link: PathBuf,
    options: Options,
    current: ArcSwap<Version>,
    /// Versions that were swapped out, and are or were read still.
    retired: Mutex<Vec<Arc<Version>>>,
    /// Held by the one that opens and swaps; readers never ask for it.
    refreshing: Mutex<()>,
}

/// A swap that took place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// What was served before; the same snapshot, where a damaged version was replaced by a whole one.
    pub from: SnapshotId,
    /// What is served now.
    pub to: SnapshotId,
}

impl Serving {
    /// Opens the version that `folder` points at: `DIR` as it was given to `fetch --into`.
    ///
    /// # Errors
    /// As [`Version::open`]; [`Class::NotFound`](crate::error::Class::NotFound) where nothing has been fetched yet.
    pub fn open(folder: &Path, options: Options) -> Result<Self> {
        let link = folder.join("current");
        let first = Version::open(&link, &options)?;
        Ok(Self {
            link,
            options,
            current: ArcSwap::from_pointee(first),
            retired: Mutex::default(),
            refreshing: Mutex::default(),
        })
    }

    /// The version that is served now. A batch asks once, and reads all of its rows in what it was given: that stays
    /// mapped, and stays what it is, until it is dropped.
    #[must_use]
    pub fn current(&self) -> Arc<Version> {
        self.current.load_full()
    }

    /// Looks where `current` points; where that is another version, opens it and swaps. It also unmaps what was swapped
    /// out and is read no more. Callers take turns, and readers wait for none of them.
    ///
    /// # Errors
    /// As [`Version::open`]. The old version serves on.
    pub fn refresh(&self) -> Result<Option<Swap>> {
        self.unmap_retired();
        self.swap(&AtomicBool::new(false))
    }

    /// How many versions were swapped out and are still mapped: those that somebody reads, or has read since the last
    /// look.
    #[must_use]
    pub fn retired(&self) -> usize {
        locked(&self.retired).len()
    }

    /// Where `current` points. What is read no more is unmapped.
    pub(super) fn pointed_at(&self) -> Result<Place> {
        self.unmap_retired();
        Place::find(&self.link)
    }

    /// Opens what `current` points at, unless it is served already, and swaps. Opening is given up when `stop` is set.
    pub(super) fn swap(&self, stop: &AtomicBool) -> Result<Option<Swap>> {
        let _turn = locked(&self.refreshing);
        // Read when it is one's turn: what was read before may be older than what another has swapped in meanwhile.
        let place = Place::find(&self.link)?;
        if *self.current.load().place() == place {
            return Ok(None);
        }
        let opened = Arc::new(Version::open_unless(place, &self.options, stop)?);
        let to = opened.id();
        let old = self.current.swap(opened);
        let from = old.id();
        locked(&self.retired).push(old);
        self.unmap_retired();
        Ok(Some(Swap { from, to }))
    }

    /// Has everybody else wait for their turn.
    #[cfg(test)]
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        locked(&self.refreshing)
    }

    fn unmap_retired(&self) {
        // Nobody can get at a version that was swapped out: once this is the only one that has it, it stays so.
        let unread: Vec<_> =
            locked(&self.retired).extract_if(.., |version| Arc::strong_count(version) == 1).collect();
        // The lock is not held while they are unmapped, which takes a while.
        drop(unread);
    }
}

/// What a panic of somebody else left is whole: nothing under these locks is ever half changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
