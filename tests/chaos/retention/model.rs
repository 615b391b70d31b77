//! The protocol of `gc` and of those who rely on what it may delete, as a machine of small steps: one request to the
//! store a step. Every interleaving is gone through: of a claimant and two processes of gc, one after the other, of
//! which one crashes or stands still, is taken over, and wakes up; and of gc and two claimants, one of which may crash.
//!
//! Two chunks, X and Y; the snapshot Old names X, New names both. At first Old and X are there, and nothing keeps them:
//! the policy keeps nothing, and the grace period is zero.

use std::collections::HashSet;

mod claimant;
mod gc;

const X: u8 = 1;
const Y: u8 = 2;
const OLD: u8 = 1;
const NEW: u8 = 2;

/// The chunks that snapshots name.
fn names(snapshots: u8) -> u8 {
    [(OLD, X), (NEW, X | Y)]
        .iter()
        .filter(|(id, _)| snapshots & id != 0)
        .fold(0, |all, (_, chunks)| all | chunks)
}

fn lowest(mask: u8) -> u8 {
    mask & mask.wrapping_neg()
}

/// A step that is out of order, or left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    ClaimAfterReadingLists,
    RootsBeforeListIsWhole,
    ChunksNotLookedFor,
    ManifestLookedForBeforeTheClaim,
    PageDroppedBeforeTheDelete,
    ChunksBeforeTheirManifest,
    OldOneGoesOnAfterTakeOver,
    ClaimsAreNoRoots,
    ClaimsReadLast,
}

/// What somebody is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wants {
    /// Writes chunks, seals the snapshot, moves the channel to it.
    Publish(u8),
    /// Moves the channel to Old: `promote`, and `rollback`.
    Promote,
    /// Pins Old.
    Pin,
}

impl Wants {
    fn snapshot(self) -> u8 {
        match self {
            Self::Publish(id) => id,
            Self::Promote | Self::Pin => OLD,
        }
    }

    fn chunks(self) -> u8 {
        if let Self::Publish(id) = self { names(id) } else { 0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    // Of a claimant.
    Write(u8),
    LookBefore,
    Claim,
    /// A run, and whether it is known not to have ended, and that its list is whole.
    Lists(u8, u8),
    Wait,
    Look(u8, u8),
    Make(u8),
    Seal,
    Point,
    // Of gc.
    Begin,
    /// The run before is ended.
    EndOther,
    Snapshots,
    Pins,
    Channel,
    Claims,
    CondemnSnapshots,
    CondemnChunks,
    Whole,
    SnapshotsAgain,
    Manifests,
    Page,
    Chunks,
    LastPage,
    End,
    // Of both.
    Done,
    Crashed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Claimant {
    wants: Wants,
    step: Step,
    /// Pages that have what it wants, two bits a run.
    hits: u8,
    found: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gc {
    step: Step,
    stands_still: bool,
    run: u8,
    /// Whether its list is whole: what it reads are the second roots.
    whole: bool,
    roots: u8,
    sealing: u8,
    listed: u8,
    gone: u8,
    doomed: u8,
}

/// A run of gc in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Run {
    begun: bool,
    whole: bool,
    ended: bool,
    holder: u8,
    snapshots: Option<u8>,
    chunks: Option<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    chunks: u8,
    manifests: u8,
    channel: u8,
    pinned: bool,
    claimed: [bool; 2],
    runs: [Run; 3],
    claimants: [Claimant; 2],
    gcs: [Gc; 2],
    /// Whether somebody may still crash, or stand still.
    mishap: bool,
}

const GC: Gc = Gc {
    step: Step::Begin,
    stands_still: false,
    run: 0,
    whole: false,
    roots: 0,
    sealing: 0,
    listed: 0,
    gone: 0,
    doomed: 0,
};

impl World {
    fn new(wants: [Option<Wants>; 2], wrong: Wrong) -> Self {
        let two = wants[1].is_some();
        let claimant = |wants: Option<Wants>| {
            let first = match wants.unwrap_or(Wants::Pin) {
                _ if wants.is_none() => Step::Done,
                Wants::Publish(id) => Step::Write(names(id)),
                _ if wrong == Wrong::ManifestLookedForBeforeTheClaim => Step::LookBefore,
                _ if wrong == Wrong::ClaimAfterReadingLists => Step::Lists(0, 0),
                _ => Step::Claim,
            };
            Claimant { wants: wants.unwrap_or(Wants::Pin), step: first, hits: 0, found: false }
        };
        Self {
            chunks: X,
            manifests: OLD,
            channel: 0,
            pinned: false,
            claimed: [false; 2],
            runs: [Run::default(); 3],
            claimants: wants.map(claimant),
            gcs: [GC, if two { Gc { step: Step::Done, ..GC } } else { GC }],
            mishap: true,
        }
    }

    /// What is wrong here: a snapshot without a chunk, or a channel or pin without its snapshot.
    fn broken(&self) -> Option<&'static str> {
        let kept = self.channel | if self.pinned { OLD } else { 0 };
        if kept & !self.manifests != 0 {
            return Some("a channel or a pin has lost its snapshot");
        }
        if names(self.manifests) & !self.chunks != 0 {
            return Some("a snapshot has lost a chunk");
        }
        None
    }

    /// The same world without what nobody will look at any more.
    fn plain(mut self) -> Self {
        for claimant in &mut self.claimants {
            if matches!(claimant.step, Step::Done | Step::Crashed) {
                (claimant.hits, claimant.found) = (0, false);
            }
        }
        for gc in &mut self.gcs {
            match gc.step {
                Step::Done | Step::Crashed | Step::Begin => *gc = Gc { step: gc.step, run: gc.run, ..GC },
                Step::Manifests | Step::Page | Step::Chunks | Step::LastPage | Step::End => {
                    (gc.roots, gc.sealing, gc.listed) = (0, 0, 0);
                }
                _ => {}
            }
        }
        for run in &mut self.runs {
            if run.ended {
                // What it lists is void, and nobody waits for it.
                *run = Run { begun: true, ended: true, whole: true, holder: run.holder, ..Run::default() };
            }
        }
        self
    }

    /// Every world that is one step of one process away.
    fn next(&self, wrong: Wrong, all: &mut Vec<World>) {
        for at in 0..2 {
            let step = self.claimants[at].step;
            let over = matches!(step, Step::Done | Step::Crashed);
            if over && self.claimed[at] {
                // It was heeded long enough.
                let mut then = *self;
                then.claimed[at] = false;
                all.push(then);
            }
            if over {
                continue;
            }
            all.extend(self.claimant_goes_on(at, wrong));
            if self.mishap {
                let mut then = World { mishap: false, ..*self };
                then.claimants[at].step = Step::Crashed;
                all.push(then);
            }
        }
        for at in 0..2 {
            let gc = self.gcs[at];
            if matches!(gc.step, Step::Done | Step::Crashed) {
                continue;
            }
            let mut then = *self;
            then.gcs[at].stands_still = !gc.stands_still;
            if gc.stands_still {
                all.push(then);
                continue;
            }
            all.extend(self.gc_goes_on(at, wrong));
            // The other one is still to come, and takes over.
            if self.mishap && gc.step != Step::Begin && self.gcs[1 - at].step == Step::Begin {
                then.mishap = false;
                all.push(then);
                then.gcs[at] = Gc { step: Step::Crashed, ..gc };
                all.push(then);
            }
        }
    }

    /// After the last step of all: nobody is stuck, who was refused had reason to be, and a run of gc alone leaves what
    /// is reachable, and nothing else.
    fn judge_end(&self) -> Option<&'static str> {
        let over = |step| matches!(step, Step::Done | Step::Crashed);
        if !self.claimants.iter().all(|claimant| over(claimant.step))
            || !self.gcs.iter().all(|gc| over(gc.step))
        {
            return Some("somebody waits for ever");
        }
        let mut alone =
            World { runs: [Run::default(); 3], gcs: [GC, Gc { step: Step::Done, ..GC }], ..*self };
        while alone.gcs[0].step != Step::Done {
            alone = alone.gc_goes_on(0, Wrong::Nothing)?;
        }
        let kept = self.channel | if self.pinned { OLD } else { 0 };
        if (alone.manifests, alone.chunks) != (kept, names(kept)) {
            return Some("a run of gc alone leaves more or less than what is reachable");
        }
        None
    }
}

/// Goes through all that can happen; gives how many worlds there are, or what is wrong with one.
fn explore(wants: [Option<Wants>; 2], wrong: Wrong) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let first = World::new(wants, wrong);
    seen.insert(first);
    let mut frontier = vec![first];
    let mut next = Vec::new();
    while let Some(world) = frontier.pop() {
        if let Some(why) = world.broken() {
            return Err(format!("{why}: {world:?}"));
        }
        next.clear();
        world.next(wrong, &mut next);
        if next.is_empty()
            && let Some(why) = world.judge_end()
        {
            return Err(format!("{why}: {world:?}"));
        }
        for then in next.drain(..) {
            let then = then.plain();
            if seen.insert(then) {
                frontier.push(then);
            }
        }
    }
    Ok(seen.len())
}

const NEWER: Option<Wants> = Some(Wants::Publish(NEW));
const AGAIN: Option<Wants> = Some(Wants::Publish(OLD));
const PROMOTE: Option<Wants> = Some(Wants::Promote);
const PIN: Option<Wants> = Some(Wants::Pin);

const CLAIMANTS: [[Option<Wants>; 2]; 10] = [
    [NEWER, None],
    [AGAIN, None],
    [PROMOTE, None],
    [PIN, None],
    [NEWER, AGAIN],
    [NEWER, PROMOTE],
    [NEWER, PIN],
    [AGAIN, PROMOTE],
    [AGAIN, PIN],
    [PROMOTE, PIN],
];

#[test]
fn whatever_comes_in_between_nothing_that_is_needed_is_deleted() {
    for wants in CLAIMANTS {
        let worlds = explore(wants, Wrong::Nothing).unwrap_or_else(|why| panic!("{wants:?}: {why}"));
        println!("{wants:?}: {worlds} worlds");
        assert!(worlds > 1000, "{worlds}");
    }
}

#[test]
fn a_step_out_of_order_is_found_to_be_wrong() {
    for wrong in [
        Wrong::ClaimAfterReadingLists,
        Wrong::RootsBeforeListIsWhole,
        Wrong::ChunksNotLookedFor,
        Wrong::ManifestLookedForBeforeTheClaim,
        Wrong::PageDroppedBeforeTheDelete,
        Wrong::ChunksBeforeTheirManifest,
        Wrong::OldOneGoesOnAfterTakeOver,
        Wrong::ClaimsAreNoRoots,
        Wrong::ClaimsReadLast,
    ] {
        let found = CLAIMANTS.iter().find_map(|wants| explore(*wants, wrong).err());
        let found = found.unwrap_or_else(|| panic!("{wrong:?} does no harm"));
        println!("{wrong:?}: {found}");
        assert!(!found.contains("for ever"), "{found}");
    }
}
