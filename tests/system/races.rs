//! Two at once: publishers of one model, fetches into one folder, operators on one channel.

use crate::binary::{Store, spawn, wait};
use crate::fixtures::torchrec;
use crate::tensors::tensors;
use weighbridge_tests::synthetic;

#[test]
fn many_publishers_of_one_checkpoint_make_one_snapshot_and_one_entry() {
    let store = Store::new();
    let children: Vec<_> = (0..6).map(|_| spawn(store.publish_command(&torchrec(), &[]))).collect();
    let runs: Vec<_> = children.into_iter().map(|child| wait(child).succeeded()).collect();
    assert!(runs.iter().all(|run| run["snapshot"] == runs[0]["snapshot"]));
    let published = runs.iter().filter(|run| run["outcome"] == "published").count();
    assert_eq!(published, 1, "{runs:?}");
    assert_eq!(store.run(["channels", "log", "m"]).succeeded()["entries"].as_array().unwrap().len(), 1);
    store.run(["verify"]).succeeded();
}

#[test]
fn publishers_of_different_steps_leave_the_newest_on_the_channel() {
    let store = Store::new();
    let publish = |step: u32| spawn(store.publish_command(&torchrec(), &["--step", &step.to_string()]));
    let children: Vec<_> = (1..=6).map(publish).collect();
    for child in children {
        wait(child).succeeded();
    }
    let channels = store.run(["channels", "m"]).succeeded();
    assert_eq!(channels["channels"][0]["step"], 6);
    let log = store.run(["channels", "log", "m"]).succeeded();
    let steps: Vec<_> =
        log["entries"].as_array().unwrap().iter().map(|entry| entry["step"].as_u64()).collect();
    assert!(steps.is_sorted_by(|newer, older| newer > older), "{steps:?}");
    store.run(["verify"]).succeeded();
}

#[test]
fn many_fetches_into_one_folder_leave_one_whole_version() {
    let store = Store::new();
    let file = store.folder.path().join("model.safetensors");
    synthetic(&file, 2, 100_000, 32);
    let published = store.publish(&file, &[]).succeeded();
    let children: Vec<_> = (0..5).map(|_| spawn(store.fetch_command("m"))).collect();
    let mut read = 0;
    for child in children {
        let fetched = wait(child).succeeded();
        assert_eq!(fetched["snapshot"], published["snapshot"]);
        read += fetched["bytes_read"].as_u64().unwrap();
    }
    let whole = store.fetch("m").succeeded();
    assert_eq!(read, whole["bytes"].as_u64().unwrap(), "one of them fetched, the others waited");
    assert_eq!(tensors(&store.served().join("current")).len(), 2);
}

#[test]
fn operators_at_once_leave_a_dense_log() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let children: Vec<_> = (0..8)
        .map(|n| {
            let command = if n % 2 == 0 { "hold" } else { "release" };
            spawn(store.command([command, "m"]))
        })
        .collect();
    for child in children {
        wait(child).succeeded();
    }
    let log = store.run(["channels", "log", "m"]).succeeded();
    let reasons: Vec<_> = log["entries"].as_array().unwrap().iter().map(|entry| &entry["reason"]).collect();
    assert!(
        reasons.windows(2).all(|pair| pair[0] != pair[1]),
        "what is so already gets no entry: {reasons:?}"
    );
    store.run(["verify"]).succeeded();
}
