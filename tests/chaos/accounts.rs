//! What became of jobs, by the store alone.

use std::collections::BTreeMap;

use weighbridge_queue::Queue;
use weighbridge_schemas::channel::entry_id;
use weighbridge_schemas::job::{Ended, JobId, Outcome};
use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::channel::Channel;
use weighbridge_snapshots::fetch::Limits;
use weighbridge_snapshots::jobs::{self, Job};
use weighbridge_snapshots::pace::Pace;
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::{catalog, dead, manifest, verify};

/// How a job ended.
pub(crate) async fn outcome(root: &Root, model: &str, id: &str) -> Option<Outcome> {
    let (model, id) = (model.parse::<ModelName>().unwrap(), id.parse::<JobId>().unwrap());
    Job::new(root, &model, &id).outcome().await.unwrap()
}

/// Checks that one job was published once, as `snapshot`, and that nothing else happened.
pub(crate) async fn published_once(root: &Root, queue: &dyn Queue, model: &str, id: &str, snapshot: &str) {
    let outcome = outcome(root, model, id).await.expect("the job has an outcome");
    assert_eq!(outcome.outcome, Ended::Published, "{outcome:?}");
    assert_eq!(outcome.snapshot.unwrap().to_string(), snapshot);
    assert_eq!(outcome.sequence, Some(1));
    let model = model.parse::<ModelName>().unwrap();
    let snapshots = catalog::snapshots(root, &model).await.unwrap();
    assert_eq!(snapshots.len(), 1);
    let prod = "prod".parse().unwrap();
    let log = Channel::new(root, &model, &prod).log(100).await.unwrap();
    assert_eq!(log.len(), 1, "{log:?}");
    assert_eq!(log[0].snapshot.to_string(), snapshot);
    assert!(dead::list(root).await.unwrap().is_empty());
    sound(root).await;
    empty(queue).await;
}

/// Checks that every byte of the store is what its name says.
pub(crate) async fn sound(root: &Root) {
    let limits = Limits::new(root, 64 << 20, 4, Pace::default());
    for model in catalog::models(root).await.unwrap() {
        let verified = verify::model(root, &model, &limits, &()).await.unwrap();
        assert!(verified.problems.is_empty(), "{:?}", verified.problems);
    }
}

/// Checks, by the store alone, that every job has an outcome that fits what is there: the published ones and the
/// entries of channels are the same, and no channel went backwards. Gives how many jobs ended in each way.
pub(crate) async fn balance(root: &Root) -> BTreeMap<Ended, u64> {
    let mut ends = BTreeMap::new();
    let letters: BTreeMap<_, _> = letters(root).await.into_iter().collect();
    for model in catalog::models(root).await.unwrap() {
        let mut published = BTreeMap::new();
        for id in jobs::list(root, &model).await.unwrap() {
            let job = Job::new(root, &model, &id);
            let record = job.record().await.unwrap().unwrap_or_else(|| panic!("{id} has no record"));
            let outcome =
                job.outcome().await.unwrap().unwrap_or_else(|| panic!("{id} of {model} has no outcome"));
            *ends.entry(outcome.outcome).or_default() += 1;
            assert_eq!(
                outcome.outcome == Ended::Dead,
                letters.contains_key(id.as_str()),
                "{id}: {outcome:?}"
            );
            match outcome.outcome {
                Ended::Published => {
                    let entry = entry_id(id.as_str(), &record.channel);
                    assert!(
                        published
                            .insert((record.channel.clone(), outcome.sequence.unwrap()), entry)
                            .is_none()
                    );
                }
                Ended::Coalesced => assert_ne!(outcome.by.unwrap(), id),
                Ended::Unchanged | Ended::Superseded | Ended::Held | Ended::Quarantined => {
                    let snapshot = outcome.snapshot.expect("it has a snapshot");
                    manifest::get(root, &model, &snapshot).await.unwrap();
                }
                Ended::Dead | Ended::Cancelled => assert!(outcome.snapshot.is_none()),
            }
        }
        for name in catalog::channels(root, &model).await.unwrap() {
            let mut log = Channel::new(root, &model, &name).log(10_000).await.unwrap();
            log.reverse();
            for entry in &log {
                let job = published.remove(&(name.clone(), entry.sequence));
                assert_eq!(job, Some(entry.id), "entry {} of {model}@{name} is no job's", entry.sequence);
            }
            let backwards =
                log.windows(2).find(|pair| pair[0].run == pair[1].run && pair[0].step > pair[1].step);
            assert!(backwards.is_none(), "{backwards:?}");
        }
        assert!(published.is_empty(), "published, but on no channel: {published:?}");
    }
    ends
}

/// Checks that nothing is left on the queue.
pub(crate) async fn empty(queue: &dyn Queue) {
    let depth = queue.depth().await.unwrap();
    assert!(depth.iter().all(|class| class.ready + class.delayed + class.leased == 0), "{depth:?}");
}

/// How a job ended, which has to have ended.
pub(crate) async fn ended(root: &Root, id: &str) -> Ended {
    let outcome = outcome(root, crate::house::MODEL, id).await;
    outcome.unwrap_or_else(|| panic!("{id} has no outcome")).outcome
}

/// The steps that the channel `prod` got, the oldest first.
pub(crate) async fn steps(root: &Root) -> Vec<u64> {
    let (model, prod) = (crate::house::MODEL.parse().unwrap(), "prod".parse().unwrap());
    let mut log = Channel::new(root, &model, &prod).log(1000).await.unwrap();
    log.reverse();
    log.iter().map(|entry| entry.step).collect()
}

/// The ids of dead letters, and their classes.
pub(crate) async fn letters(root: &Root) -> Vec<(String, String)> {
    let mut letters = Vec::new();
    for (id, _) in dead::list(root).await.unwrap() {
        let class = dead::get(root, &id).await.unwrap().error.class;
        letters.push((id, class));
    }
    letters
}
