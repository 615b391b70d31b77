//! Looks at the queue and at channels from time to time, so that their figures are at hand when somebody asks, and that
//! it shows when queue or store are gone though nothing is to be done. One small request at a time: it is never in the
//! way of the work, and nothing waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::error::Result;
use weighbridge_snapshots::root::Root;

use super::Health;
use crate::metrics::{MOST_CHANNELS, Metrics, Served, Watched};
use crate::steps::Steps;

/// How often the queue is looked at.
const QUEUE: Duration = Duration::from_secs(5);
/// How often channels are looked at.
const CHANNELS: Duration = Duration::from_secs(30);

/// Looks at queue and channels, again and again.
pub async fn run(steps: Arc<Steps>, health: Arc<Health>) {
    tokio::join!(watch_queue(&steps, &health), watch_channels(&steps, &health));
}

async fn watch_queue(steps: &Steps, health: &Health) {
    let mut ticks = every(QUEUE);
    loop {
        ticks.tick().await;
        match steps.queue().depth().await {
            Ok(depth) => {
                health.queue_answers();
                steps.metrics().set_depth(depth);
            }
            Err(error) => {
                tracing::debug!(%error, "the queue cannot be looked at");
                health.queue_fails(&error);
                steps.metrics().watch_failed(Watched::Queue);
            }
        }
    }
}

async fn watch_channels(steps: &Steps, health: &Health) {
    let mut ticks = every(CHANNELS);
    let mut known = Known::new();
    loop {
        ticks.tick().await;
        match look(steps.root(), steps.metrics(), &mut known).await {
            Ok(()) => health.store_was_read(),
            Err(error) => {
                tracing::debug!(%error, "channels cannot be looked at");
                health.failed(&error.into());
                steps.metrics().watch_failed(Watched::Channels);
            }
        }
    }
}

fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The newest entry that was seen of each channel.
type Known = BTreeMap<(ModelName, ChannelName), ChannelEntry>;

/// Looks up what every channel serves. One channel's failure hides that channel alone.
async fn look(root: &Root, metrics: &Metrics, known: &mut Known) -> Result<()> {
    let (mut found, mut beside) = (Known::new(), 0);
    for model in catalog::models(root).await? {
        for name in catalog::channels(root, &model).await? {
            if found.len() == MOST_CHANNELS {
                beside += 1;
                continue;
            }
            let key = (model.clone(), name);
            match newest(root, &key.0, &key.1, known.remove(&key)).await {
                Ok(Some(entry)) => {
                    found.insert(key, entry);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%error, model = %key.0, channel = %key.1, "a channel cannot be looked at");
                    beside += 1;
                }
            }
        }
    }
    let served = found.iter().map(|((model, channel), entry)| Served {
        model: model.clone(),
        channel: channel.clone(),
        created_at: entry.created_at,
    });
    metrics.set_channels(served.collect(), beside);
    *known = found;
    Ok(())
}

/// The entry of a channel that rules. A log is listed as a whole the first time only; after that, the entries behind
/// the newest known one are asked for, so that long logs cost no more than short ones.
async fn newest(
    root: &Root,
    model: &ModelName,
    name: &ChannelName,
    known: Option<ChannelEntry>,
) -> Result<Option<ChannelEntry>> {
    let channel = Channel::new(root, model, name);
    let Some(mut newest) = known else { return channel.latest().await };
    while let Some(next) = newest.sequence.checked_add(1) {
        match channel.entry(next).await {
            Ok(entry) => newest = entry,
            Err(_) => break,
        }
    }
    Ok(Some(newest))
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::channel::Reason;
    use weighbridge_schemas::ids::SnapshotId;
    use weighbridge_schemas::time::Timestamp;
    use weighbridge_snapshots::channel::{Move, Operation};
    use weighbridge_snapshots::root::Absent;

    use super::*;

    async fn append(root: &Root, model: &str, channel: &str, step: u64) {
        let (model, channel) = (model.parse().unwrap(), channel.parse().unwrap());
        let operation =
            Operation { id: step.to_string(), who: "t".to_owned(), when: Timestamp::from_nanoseconds(0) };
        let to = Move {
            snapshot: SnapshotId::of(&step.to_le_bytes()),
            run: "r".parse().unwrap(),
            step,
            created_at: Timestamp::from_nanoseconds(step.into()),
            reason: Reason::Publish,
        };
        let channel = Channel::new(root, &model, &channel);
        channel.append(&operation, |_| Ok::<_, ()>(to.clone())).await.unwrap();
    }

    #[test]
    fn channels_are_followed_and_a_damaged_one_hides_itself_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path().to_str().unwrap(), Absent::Create).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (metrics, mut known) = (Metrics::default(), Known::new());
            look(&root, &metrics, &mut known).await.unwrap();
            assert!(known.is_empty());
            append(&root, "a", "prod", 1).await;
            append(&root, "b", "canary", 1).await;
            look(&root, &metrics, &mut known).await.unwrap();
            append(&root, "a", "prod", 2).await;
            append(&root, "a", "prod", 3).await;
            append(&root, "b", "prod", 1).await;
            look(&root, &metrics, &mut known).await.unwrap();
            let steps: Vec<_> = known.values().map(|entry| entry.step).collect();
            assert_eq!(steps, [3, 1, 1]);

            std::fs::write(folder.path().join("models/b/channels/canary/000000000001"), "{}").unwrap();
            look(&root, &metrics, &mut Known::new()).await.unwrap();
            let text = metrics.text();
            assert!(text.contains("weighbridge_channel_age_seconds{model=\"b\",channel=\"prod\"}"), "{text}");
            assert!(!text.contains("canary") && text.contains("weighbridge_channels_beside 1\n"), "{text}");
        });
    }
}
