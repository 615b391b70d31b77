//! Which snapshots a policy keeps: a rule on what is known of each, without a store.

use std::collections::BTreeSet;
use std::time::Duration;

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::policy::Retention;
use weighbridge_schemas::time::Timestamp;

/// A snapshot, as far as a policy looks at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aged {
    /// The snapshot.
    pub id: SnapshotId,
    /// Its training step; only asked for by [`Retention::keep_each`].
    pub step: u64,
    /// When it was stored, by the store's clock.
    pub stored: Timestamp,
}

/// The snapshots that `retention` keeps at the time `now`, beside those that something else keeps; all where it sets no
/// bound. What is younger than `grace` is kept.
#[must_use]
pub fn kept(
    snapshots: &[Aged],
    retention: &Retention,
    grace: Duration,
    now: Timestamp,
) -> BTreeSet<SnapshotId> {
    let Retention { keep_last, keep_days, keep_each, .. } = *retention;
    if keep_last.is_none() && keep_days.is_none() && keep_each.is_none() {
        return snapshots.iter().map(|snapshot| snapshot.id).collect();
    }
    let mut by_age: Vec<_> = snapshots.iter().collect();
    by_age.sort_by_key(|snapshot| (snapshot.stored, snapshot.id));
    let last = keep_last.map_or(0, |last| usize::try_from(last).unwrap_or(usize::MAX));
    let days = keep_days.map(|days| Duration::from_secs(u64::from(days) * 86_400));
    let newest = by_age.iter().rev().take(last).map(|snapshot| snapshot.id);
    let others = by_age.iter().filter(|snapshot| {
        let age = age(snapshot.stored, now);
        age < grace
            || days.is_some_and(|days| age < days)
            || keep_each.is_some_and(|each| each > 0 && snapshot.step.is_multiple_of(each))
    });
    newest.chain(others.map(|snapshot| snapshot.id)).collect()
}

/// How old something is at the time `now`; what is from the future is new.
pub(super) fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::from_nanos(now.nanoseconds().saturating_sub(since.nanoseconds()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i128 = 86_400_000_000_000;

    fn snapshots() -> Vec<Aged> {
        (0..10u64)
            .map(|step| Aged {
                id: SnapshotId::of(&step.to_le_bytes()),
                step,
                stored: Timestamp::from_nanoseconds(i128::from(step) * DAY),
            })
            .collect()
    }

    fn steps(retention: Retention, grace: Duration) -> Vec<u64> {
        let now = Timestamp::from_nanoseconds(9 * DAY + DAY / 2);
        let kept = kept(&snapshots(), &retention, grace, now);
        snapshots()
            .iter()
            .filter(|snapshot| kept.contains(&snapshot.id))
            .map(|snapshot| snapshot.step)
            .collect()
    }

    #[test]
    fn each_rule_keeps_and_none_keeps_all() {
        let none = Retention::default();
        assert_eq!(steps(none, Duration::ZERO).len(), 10);
        let last = Retention { keep_last: Some(2), ..none };
        assert_eq!(steps(last, Duration::ZERO), [8, 9]);
        assert_eq!(steps(Retention { keep_each: Some(4), ..last }, Duration::ZERO), [0, 4, 8, 9]);
        assert_eq!(
            steps(Retention { keep_days: Some(3), keep_last: Some(1), ..none }, Duration::ZERO),
            [7, 8, 9]
        );
        assert_eq!(steps(Retention { keep_last: Some(0), ..none }, Duration::ZERO), [0; 0]);
        assert_eq!(steps(Retention { keep_last: Some(0), ..none }, Duration::from_secs(86_400)), [9]);
        assert_eq!(steps(Retention { keep_last: Some(u32::MAX), ..none }, Duration::ZERO).len(), 10);
    }
}
