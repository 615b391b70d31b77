//! What the command that is run after a swap said no to. To try it again is to serve it for as long as the command
//! takes to say no again: so that is done ever more rarely, while what was served before is.

use std::time::Duration;

use tokio::time::Instant;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::host::Target;
use weighbridge_schemas::ids::SnapshotId;

/// The shortest and the longest pause: up to twice as long by chance.
const PAUSES: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// The entry that was refused last.
#[derive(Debug, Default)]
pub(super) struct Refusals(Option<Refused>);

#[derive(Debug)]
struct Refused {
    snapshot: SnapshotId,
    sequence: u64,
    times: u32,
    again: Instant,
}

impl Refusals {
    /// Notes one more.
    pub(super) fn note(&mut self, target: &Target, now: Instant) {
        let Target { snapshot, sequence, .. } = *target;
        let known = self.0.as_ref().filter(|known| (known.snapshot, known.sequence) == (snapshot, sequence));
        let times = known.map_or(0, |known| known.times).saturating_add(1);
        let (least, most) = PAUSES;
        let pause = least.saturating_mul(1 << (times - 1).min(16)).min(most);
        self.0 =
            Some(Refused { snapshot, sequence, times, again: now + pause.mul_f64(1.0 + fastrand::f64()) });
    }

    /// How long the entry is not tried again; `None` where it may be.
    pub(super) fn left(&self, entry: &ChannelEntry, now: Instant) -> Option<Duration> {
        let refused = self.0.as_ref()?;
        let is_it = (refused.snapshot, refused.sequence) == (entry.snapshot, entry.sequence);
        (is_it && refused.again > now).then(|| refused.again - now)
    }

    /// Forgets it: something is served.
    pub(super) fn clear(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::channel::{ChannelSchema, Reason};
    use weighbridge_schemas::ids::EntryId;
    use weighbridge_schemas::time::Timestamp;

    use super::super::board::target;
    use super::*;

    fn entry(sequence: u64) -> ChannelEntry {
        let time = Timestamp::from_nanoseconds(0);
        ChannelEntry {
            schema: ChannelSchema::V1,
            sequence,
            id: EntryId::of(b"o"),
            snapshot: SnapshotId::of(b"s"),
            previous: None,
            run: "r".parse().unwrap(),
            step: 1,
            created_at: time,
            reason: Reason::Publish,
            who: "test".into(),
            when: time,
            signatures: Vec::new(),
        }
    }

    #[test]
    fn what_is_refused_again_and_again_is_tried_ever_more_rarely_and_another_at_once() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.left(&entry(1), now), None);
        let mut longest = Duration::ZERO;
        for times in 0..40 {
            refusals.note(&target(&entry(1)), now);
            let left = refusals.left(&entry(1), now).unwrap();
            let base = PAUSES.0.saturating_mul(1 << times.min(10)).min(PAUSES.1);
            assert!(left >= base && left <= base * 2, "{times}: {left:?}");
            assert_eq!(refusals.left(&entry(1), now + left), None);
            longest = longest.max(left);
        }
        assert!(longest > PAUSES.1);
        assert_eq!(refusals.left(&entry(2), now), None, "an operator's answer is heard at once");
        refusals.note(&target(&entry(2)), now);
        assert!(refusals.left(&entry(2), now).unwrap() <= 2 * PAUSES.0, "each entry begins anew");
        refusals.clear();
        assert_eq!(refusals.left(&entry(2), now), None);
    }
}
