//! The steps of those who rely on what gc may delete.

use super::{Claimant, OLD, Step, Wants, World, Wrong, lowest};

impl World {
    pub(super) fn claimant_goes_on(&self, at: usize, wrong: Wrong) -> Option<World> {
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
            Step::Lists(run, known) => self.read_list(me, run, known),
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
            Step::Look(0, 0) if me.found_at(self.manifests, wrong) => Step::Point,
            Step::Look(0, 0) => Step::Done,
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

    /// Looks at a run: whether it has ended, whether its list is whole, what is on it.
    fn read_list(&self, me: &mut Claimant, run: u8, known: u8) -> Step {
        let wants = me.wants;
        match self.runs.get(usize::from(run)) {
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
        }
    }

    /// What claims name: snapshots, and chunks of those about to be sealed.
    pub(super) fn claims(&self) -> (u8, u8) {
        let claims = self.claimants.iter().zip(self.claimed).filter(|(_, claimed)| *claimed);
        claims.fold((0, 0), |(ids, chunks), (claimant, _)| {
            (ids | claimant.wants.snapshot(), chunks | claimant.wants.chunks())
        })
    }
}

impl Claimant {
    /// Whether the manifest that it wants to rely on is there.
    fn found_at(&self, manifests: u8, wrong: Wrong) -> bool {
        if wrong == Wrong::ManifestLookedForBeforeTheClaim { self.found } else { manifests & OLD != 0 }
    }
}
