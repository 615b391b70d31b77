//! The protocol of `gc` and of those who rely on what it may delete, as a machine of small steps: one request to the
//! store a step. Every interleaving is gone through: of a claimant and two processes of gc, one after the other, of
//! which one crashes or stands still, is taken over, and wakes up; and of two claimants, one of which may crash, and gc.
//!
//! Two chunks, X and Y; the snapshot Old names X, New names both. At first Old and X are there, and nothing keeps them:
//! the policy keeps nothing, and the grace period is zero.

use std::collections::HashSet;

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

    fn claimant_goes_on(&self, at: usize, wrong: Wrong) -> Option<World> {
        let mut then = *self;
        let me = &mut then.claimants[at];
        let wants = me.wants;
        let lists_first = wrong == Wrong::ClaimAfterReadingLists;
        let claimed = match wants {
            Wants::Publish(_) if wrong == Wrong::ChunksNotLookedFor => Step::Seal,
            _ => Step::Look(wants.chunks(), 0),
        };
        me.step = match me.step {
            Step::Write(chunks) => {
                then.chunks |= lowest(chunks);
                match chunks & !lowest(chunks) {
                    0 if lists_first => Step::Lists(0, 0),
                    0 => Step::Claim,
                    rest => Step::Write(rest),
                }
            }
            Step::LookBefore => {
                me.found = self.manifests & OLD != 0;
                Step::Claim
            }
            Step::Claim => {
                then.claimed[at] = true;
                if lists_first { claimed } else { Step::Lists(0, 0) }
            }
            Step::Lists(run, known) => match self.runs.get(usize::from(run)) {
                Some(found) if found.begun => match known {
                    0 if found.ended => Step::Lists(run + 1, 0),
                    0 => Step::Lists(run, 1),
                    1 if found.whole => Step::Lists(run, 2),
                    1 => Step::Lists(run + 1, 0),
                    _ => {
                        let snapshots = found.snapshots.is_some_and(|page| page & wants.snapshot() != 0);
                        let chunks = found.chunks.is_some_and(|page| page & wants.chunks() != 0);
                        me.hits |= (u8::from(snapshots) | u8::from(chunks) << 1) << (2 * run);
                        Step::Lists(run + 1, 0)
                    }
                },
                _ => Step::Wait,
            },
            Step::Wait => match lowest(me.hits) {
                0 if lists_first => Step::Claim,
                0 => claimed,
                hit => {
                    let run = self.runs[hit.trailing_zeros() as usize / 2];
                    let page = if hit.trailing_zeros() % 2 == 0 { run.snapshots } else { run.chunks };
                    if !run.ended && page.is_some() {
                        return None;
                    }
                    me.hits &= !hit;
                    Step::Wait
                }
            },
            Step::Look(0, 0) if matches!(wants, Wants::Publish(_)) => Step::Seal,
            Step::Look(0, 0) => {
                let there = match wrong {
                    Wrong::ManifestLookedForBeforeTheClaim => me.found,
                    _ => self.manifests & OLD != 0,
                };
                if there { Step::Point } else { Step::Done }
            }
            Step::Look(0, missing) => Step::Make(missing),
            Step::Look(chunks, missing) => {
                let one = lowest(chunks);
                Step::Look(chunks & !one, missing | (one & !self.chunks))
            }
            Step::Make(chunks) => {
                then.chunks |= lowest(chunks);
                match chunks & !lowest(chunks) {
                    0 => Step::Look(wants.chunks(), 0),
                    rest => Step::Make(rest),
                }
            }
            Step::Seal => {
                then.manifests |= wants.snapshot();
                Step::Point
            }
            Step::Point => {
                match wants {
                    Wants::Pin => then.pinned = true,
                    _ => then.channel = wants.snapshot(),
                }
                Step::Done
            }
            step => unreachable!("{step:?}"),
        };
        Some(then)
    }

    /// What claims name: snapshots, and chunks of those about to be sealed.
    fn claims(&self) -> (u8, u8) {
        let claims = self.claimants.iter().zip(self.claimed).filter(|(_, claimed)| *claimed);
        claims.fold((0, 0), |(ids, chunks), (claimant, _)| {
            (ids | claimant.wants.snapshot(), chunks | claimant.wants.chunks())
        })
    }

    fn gc_goes_on(&self, at: usize, wrong: Wrong) -> Option<World> {
        let mut then = *self;
        let me = &mut then.gcs[at];
        let holder = u8::try_from(at).unwrap();
        let run = usize::from(me.run);
        if me.step != Step::Begin
            && self.runs[run].holder != holder
            && wrong != Wrong::OldOneGoesOnAfterTakeOver
        {
            me.step = Step::Done;
            return Some(then);
        }
        let early = wrong == Wrong::RootsBeforeListIsWhole;
        // Claims come first: what is claimed no more when they are read is on a channel, or pinned, by then.
        let last = wrong == Wrong::ClaimsReadLast;
        let roots = if last { Step::Pins } else { Step::Claims };
        let read = if me.whole { Step::SnapshotsAgain } else { Step::CondemnSnapshots };
        me.step = match me.step {
            Step::Begin => {
                let last = self.runs.iter().rposition(|run| run.begun);
                match last.filter(|&last| !self.runs[last].ended) {
                    Some(last) => {
                        let other = self.gcs[usize::from(self.runs[last].holder)];
                        if other.step != Step::Crashed && !other.stands_still {
                            return None;
                        }
                        (me.run, then.runs[last].holder) = (u8::try_from(last).unwrap(), holder);
                        Step::EndOther
                    }
                    None => {
                        let next = last.map_or(0, |last| last + 1);
                        then.runs[next] = Run { begun: true, holder, ..Run::default() };
                        *me = Gc { run: u8::try_from(next).unwrap(), ..GC };
                        Step::Snapshots
                    }
                }
            }
            Step::EndOther => {
                then.runs[run].ended = true;
                Step::Begin
            }
            Step::Snapshots => {
                me.listed = self.manifests;
                roots
            }
            Step::Claims => {
                let (ids, chunks) = if wrong == Wrong::ClaimsAreNoRoots { (0, 0) } else { self.claims() };
                (me.roots, me.sealing) = (me.roots | ids, me.sealing | chunks);
                if last { read } else { Step::Pins }
            }
            Step::Pins => {
                me.roots |= if self.pinned { OLD } else { 0 };
                Step::Channel
            }
            Step::Channel => {
                me.roots |= self.channel;
                if last { Step::Claims } else { read }
            }
            Step::CondemnSnapshots => {
                let doomed = me.listed & !me.roots;
                then.runs[run].snapshots = (doomed != 0).then_some(doomed);
                Step::CondemnChunks
            }
            Step::CondemnChunks => {
                let doomed = self.chunks & !names(me.listed & me.roots) & !me.sealing;
                then.runs[run].chunks = (doomed != 0).then_some(doomed);
                (me.roots, me.sealing, me.whole) = (0, 0, early);
                if early { roots } else { Step::Whole }
            }
            Step::Whole => {
                then.runs[run].whole = true;
                me.whole = true;
                if early { Step::Manifests } else { roots }
            }
            Step::SnapshotsAgain => {
                let listed = self.runs[run];
                me.gone = listed.snapshots.unwrap_or(0) & !me.roots;
                me.doomed = listed.chunks.unwrap_or(0) & !names(self.manifests & !me.gone) & !me.sealing;
                match wrong {
                    Wrong::RootsBeforeListIsWhole => Step::Whole,
                    Wrong::PageDroppedBeforeTheDelete => {
                        (then.runs[run].snapshots, then.runs[run].chunks) = (None, None);
                        Step::Manifests
                    }
                    Wrong::ChunksBeforeTheirManifest => Step::Chunks,
                    _ => Step::Manifests,
                }
            }
            Step::Manifests if me.gone != 0 => {
                then.manifests &= !lowest(me.gone);
                me.gone &= !lowest(me.gone);
                Step::Manifests
            }
            Step::Manifests => Step::Page,
            Step::Page => {
                then.runs[run].snapshots = None;
                Step::Chunks
            }
            Step::Chunks if me.doomed != 0 => {
                then.chunks &= !lowest(me.doomed);
                me.doomed &= !lowest(me.doomed);
                Step::Chunks
            }
            Step::Chunks if wrong == Wrong::ChunksBeforeTheirManifest && me.gone != 0 => Step::Manifests,
            Step::Chunks => Step::LastPage,
            Step::LastPage => {
                then.runs[run].chunks = None;
                Step::End
            }
            Step::End => {
                then.runs[run].ended = true;
                Step::Done
            }
            step => unreachable!("{step:?}"),
        };
        Some(then)
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
