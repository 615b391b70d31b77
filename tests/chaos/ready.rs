//! Checkpoints that are not complete when their manifest comes: waited for, and given up with the reason.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use weighbridge_schemas::job::{Came, Ended};
use weighbridge_snapshots::jobs::Job;

use crate::accounts::{self, ended, letters, steps};
use crate::house::{House, MODEL, drop_manifest, id, manifest, manifest_with, options, policy, work};

const LEASE: Duration = Duration::from_secs(10);

/// Works until the queue is empty, while `meanwhile` goes on.
async fn work_while(house: &House, manifest: &serde_json::Value, meanwhile: impl Future<Output = ()>) {
    let queue = house.queue();
    drop_manifest(&*queue, manifest).await;
    let worker = tokio::spawn(work(house.root(), Arc::clone(&queue), options(), LEASE));
    meanwhile.await;
    worker.await.unwrap();
    accounts::empty(&*queue).await;
}

/// Waits until the job has been looked at so often and found not to be ready.
async fn looked_at(house: &House, times: usize) {
    let (root, model, job) = (house.root(), MODEL.parse().unwrap(), id(1).parse().unwrap());
    loop {
        let events = Job::new(&root, &model, &job).events(1000).await.unwrap();
        if events.iter().filter(|event| event.came == Came::NotReady).count() >= times {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A real checkpoint of TorchRec, in the form of PyTorch's distributed checkpoints.
fn torchrec() -> std::path::PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/checkpoints");
    data.read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.join(".metadata").is_file())
        .unwrap()
}

#[tokio::test]
async fn metadata_that_comes_later_is_waited_for() {
    let (_folder, house) = House::new();
    let checkpoint = house.folder.join("dcp");
    copy(&torchrec(), &checkpoint);
    let metadata = checkpoint.join(".metadata");
    let aside = house.folder.join("metadata");
    std::fs::rename(&metadata, &aside).unwrap();
    work_while(&house, &manifest(&id(1), 1, &checkpoint), async {
        looked_at(&house, 2).await;
        std::fs::rename(&aside, &metadata).unwrap();
    })
    .await;
    assert_eq!(ended(&house.root(), &id(1)).await, Ended::Published);
    assert_eq!(steps(&house.root()).await, [1]);
}

#[tokio::test]
async fn a_shard_that_comes_later_and_a_folder_that_comes_later_are_waited_for() {
    for folder in [false, true] {
        let (_folder, house) = House::new();
        let (checkpoint, aside) = (house.folder.join("dcp"), house.folder.join("aside"));
        copy(&torchrec(), &checkpoint);
        let shard = std::fs::read_dir(&checkpoint).unwrap().map(|entry| entry.unwrap().path());
        let shard =
            shard.into_iter().find(|path| path.extension().is_some_and(|end| end == "distcp")).unwrap();
        let missing = if folder { checkpoint.clone() } else { shard };
        std::fs::rename(&missing, &aside).unwrap();
        work_while(&house, &manifest(&id(1), 1, &checkpoint), async {
            looked_at(&house, 2).await;
            std::fs::rename(&aside, &missing).unwrap();
        })
        .await;
        assert_eq!(ended(&house.root(), &id(1)).await, Ended::Published, "folder: {folder}");
    }
}

#[tokio::test]
async fn a_folder_that_is_filled_later_is_waited_for() {
    let (_folder, house) = House::new();
    let checkpoint = house.folder.join("dcp");
    std::fs::create_dir(&checkpoint).unwrap();
    work_while(&house, &manifest(&id(1), 1, &checkpoint), async {
        looked_at(&house, 5).await;
        copy(&torchrec(), &checkpoint);
    })
    .await;
    assert_eq!(ended(&house.root(), &id(1)).await, Ended::Published);
}

#[tokio::test]
async fn a_file_that_grows_is_waited_for() {
    let (_folder, house) = House::new();
    let whole = std::fs::read(house.checkpoint("whole.safetensors", 2)).unwrap();
    let path = house.folder.join("c.safetensors");
    std::fs::write(&path, &whole[..1000]).unwrap();
    work_while(&house, &manifest(&id(1), 1, &path), async {
        for (times, share) in [(1, 3), (2, 2), (3, 1)] {
            looked_at(&house, times).await;
            // In one step, so that no reader meets a file that is neither the one nor the other.
            let next = house.folder.join("next");
            std::fs::write(&next, &whole[..whole.len() / share]).unwrap();
            std::fs::rename(&next, &path).unwrap();
        }
    })
    .await;
    assert_eq!(ended(&house.root(), &id(1)).await, Ended::Published);
}

#[tokio::test]
async fn a_broken_file_that_does_not_grow_is_given_up_after_a_few_looks() {
    let (_folder, house) = House::new();
    let whole = std::fs::read(house.checkpoint("whole.safetensors", 2)).unwrap();
    let path = house.folder.join("c.safetensors");
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    work_while(&house, &manifest(&id(1), 1, &path), async {}).await;
    let outcome = accounts::outcome(&house.root(), MODEL, &id(1)).await.unwrap();
    let error = outcome.error.unwrap();
    assert_eq!((outcome.outcome, error.class.as_str()), (Ended::Dead, "truncated"));
    assert!(error.message.contains("c.safetensors"), "{error:?}");
    let letter = weighbridge_snapshots::dead::get(&house.root(), &id(1)).await.unwrap();
    let not_ready = letter.history.iter().filter(|event| event.came == Came::NotReady).count();
    assert_eq!(not_ready, 3, "{:?}", letter.history);
}

#[tokio::test]
async fn what_never_comes_is_given_up_after_the_grace() {
    let (_folder, house) = House::new();
    let checkpoint = house.folder.join("dcp");
    copy(&torchrec(), &checkpoint);
    std::fs::remove_file(checkpoint.join(".metadata")).unwrap();
    let grace = policy("[job]\ngrace_seconds = 1");
    work_while(&house, &manifest_with(&id(1), 1, &checkpoint, &[("policy", grace)]), async {}).await;
    let outcome = accounts::outcome(&house.root(), MODEL, &id(1)).await.unwrap();
    assert_eq!((outcome.outcome, outcome.error.unwrap().class.as_str()), (Ended::Dead, "dcp_no_metadata"));
    assert_eq!(letters(&house.root()).await, [(id(1), "dcp_no_metadata".to_owned())]);
}

#[tokio::test]
async fn a_checkpoint_that_is_replaced_after_it_was_planned_is_refused() {
    let (_folder, house) = House::new();
    let path = house.checkpoint("c.safetensors", 3);
    let other = house.checkpoint("other.safetensors", 2);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 1, &path)).await;
    let worker = tokio::spawn(work(root.clone(), Arc::clone(&queue), options(), LEASE));
    let (model, job) = (MODEL.parse().unwrap(), id(1).parse().unwrap());
    while Job::new(&root, &model, &job).plan().await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    std::fs::rename(&other, &path).unwrap();
    worker.await.unwrap();
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.unwrap();
    // The worker may have been done with it before the file was replaced.
    if outcome.outcome != Ended::Published {
        assert_eq!(outcome.error.unwrap().class, "checkpoint_changed");
        assert!(steps(&root).await.is_empty());
    }
}
