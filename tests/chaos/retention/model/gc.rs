//! The steps of gc.

use super::{GC, Gc, OLD, Run, Step, World, Wrong, lowest, names};

impl World {
    pub(super) fn gc_goes_on(&self, at: usize, wrong: Wrong) -> Option<World> {
        let mut then = *self;
        let step = self.gcs[at].step;
        let holder = u8::try_from(at).unwrap();
        let is_over = step != Step::Begin && self.runs[usize::from(self.gcs[at].run)].holder != holder;
        then.gcs[at].step = match step {
            _ if is_over && wrong != Wrong::OldOneGoesOnAfterTakeOver => Step::Done,
            Step::Begin => then.begin(at, holder)?,
            _ => then.look_and_list(at, wrong).unwrap_or_else(|| then.carry_out(at, wrong)),
        };
        Some(then)
    }

    /// A new run, or that of another one which is gone or stands still.
    fn begin(&mut self, at: usize, holder: u8) -> Option<Step> {
        let last = self.runs.iter().rposition(|run| run.begun);
        match last.filter(|&last| !self.runs[last].ended) {
            Some(last) => {
                let other = self.gcs[usize::from(self.runs[last].holder)];
                if other.step != Step::Crashed && !other.stands_still {
                    return None;
                }
                (self.gcs[at].run, self.runs[last].holder) = (u8::try_from(last).unwrap(), holder);
                Some(Step::EndOther)
            }
            None => {
                let next = last.map_or(0, |last| last + 1);
                self.runs[next] = Run { begun: true, holder, ..Run::default() };
                self.gcs[at] = Gc { run: u8::try_from(next).unwrap(), ..GC };
                Some(Step::Snapshots)
            }
        }
    }

    /// Up to where its list is whole and the roots are read again; `None` for what comes then.
    fn look_and_list(&mut self, at: usize, wrong: Wrong) -> Option<Step> {
        let claims = if wrong == Wrong::ClaimsAreNoRoots { (0, 0) } else { self.claims() };
        let me = &mut self.gcs[at];
        let run = usize::from(me.run);
        let early = wrong == Wrong::RootsBeforeListIsWhole;
        // Claims come first: what is claimed no more when they are read is on a channel, or pinned, by then.
        let last = wrong == Wrong::ClaimsReadLast;
        let roots = if last { Step::Pins } else { Step::Claims };
        let read = if me.whole { Step::SnapshotsAgain } else { Step::CondemnSnapshots };
        Some(match me.step {
            Step::EndOther => {
                self.runs[run].ended = true;
                Step::Begin
            }
            Step::Snapshots => {
                me.listed = self.manifests;
                roots
            }
            Step::Claims => {
                (me.roots, me.sealing) = (me.roots | claims.0, me.sealing | claims.1);
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
                self.runs[run].snapshots = (doomed != 0).then_some(doomed);
                Step::CondemnChunks
            }
            Step::CondemnChunks => {
                let doomed = self.chunks & !names(me.listed & me.roots) & !me.sealing;
                self.runs[run].chunks = (doomed != 0).then_some(doomed);
                (me.roots, me.sealing, me.whole) = (0, 0, early);
                if early { roots } else { Step::Whole }
            }
            Step::Whole => {
                self.runs[run].whole = true;
                me.whole = true;
                if early { Step::Manifests } else { roots }
            }
            _ => return None,
        })
    }

    /// Deletes what no root names.
    fn carry_out(&mut self, at: usize, wrong: Wrong) -> Step {
        let me = &mut self.gcs[at];
        let run = usize::from(me.run);
        match me.step {
            Step::SnapshotsAgain => {
                let listed = self.runs[run];
                me.gone = listed.snapshots.unwrap_or(0) & !me.roots;
                me.doomed = listed.chunks.unwrap_or(0) & !names(self.manifests & !me.gone) & !me.sealing;
                match wrong {
                    Wrong::RootsBeforeListIsWhole => Step::Whole,
                    Wrong::PageDroppedBeforeTheDelete => {
                        (self.runs[run].snapshots, self.runs[run].chunks) = (None, None);
                        Step::Manifests
                    }
                    Wrong::ChunksBeforeTheirManifest => Step::Chunks,
                    _ => Step::Manifests,
                }
            }
            Step::Manifests if me.gone != 0 => {
                self.manifests &= !lowest(me.gone);
                me.gone &= !lowest(me.gone);
                Step::Manifests
            }
            Step::Manifests => Step::Page,
            Step::Page => {
                self.runs[run].snapshots = None;
                Step::Chunks
            }
            Step::Chunks if me.doomed != 0 => {
                self.chunks &= !lowest(me.doomed);
                me.doomed &= !lowest(me.doomed);
                Step::Chunks
            }
            Step::Chunks if wrong == Wrong::ChunksBeforeTheirManifest && me.gone != 0 => Step::Manifests,
            Step::Chunks => Step::LastPage,
            Step::LastPage => {
                self.runs[run].chunks = None;
                Step::End
            }
            Step::End => {
                self.runs[run].ended = true;
                Step::Done
            }
            step => unreachable!("{step:?}"),
        }
    }
}
