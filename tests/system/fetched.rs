//! What a fetch takes from where, how fast, and what it refuses to follow.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::binary::{Run, Store, ended};
use crate::fixtures::torchrec;

fn chunks(store: &Store) -> Vec<PathBuf> {
    store.objects("models/m/chunks")
}

fn fetch(store: &Store, more: &[&str]) -> Run {
    let mut command = store.fetch_command("m");
    ended(command.args(more).output().unwrap())
}

#[test]
fn chunks_of_other_versions_are_copied_and_not_read_from_the_store() {
    let store = Store::new();
    let published = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let first = store.fetch("m").succeeded();
    assert_eq!(first["bytes_read"], first["bytes"]);
    // A second snapshot of the same bytes, and all of the store's chunks gone: nothing is asked of it.
    let again = store.publish(&torchrec(), &["--step", "2"]).succeeded();
    assert_ne!(published["snapshot"], again["snapshot"]);
    for chunk in chunks(&store) {
        std::fs::remove_file(chunk).unwrap();
    }
    let second = store.fetch("m").succeeded();
    assert_eq!((second["bytes_read"].as_u64(), &second["bytes_reused"]), (Some(0), &second["bytes"]));
    let current = store.served().join("current");
    assert_eq!(
        std::fs::read_link(&current).unwrap(),
        Path::new("versions").join(again["snapshot"].as_str().unwrap())
    );
}

#[test]
fn what_another_version_has_wrong_comes_from_the_store() {
    let store = Store::new();
    store.publish(&torchrec(), &["--step", "1"]).succeeded();
    store.fetch("m").succeeded();
    store.publish(&torchrec(), &["--step", "2"]).succeeded();
    let versions = store.served().join("versions");
    let old = std::fs::read_dir(&versions).unwrap().next().unwrap().unwrap().path();
    for entry in std::fs::read_dir(&old).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
            // It is read-only.
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, bytes).unwrap();
        }
    }
    let fetched = store.fetch("m").succeeded();
    assert_eq!(fetched["bytes_read"], fetched["bytes"], "nothing of the old version is right");
    // A version whose manifest is damaged, and things that are none, are passed over.
    store.publish(&torchrec(), &["--step", "3"]).succeeded();
    std::fs::remove_file(old.join("snapshot.json")).unwrap();
    std::fs::write(old.join("snapshot.json"), "{").unwrap();
    std::fs::create_dir(versions.join("ab".repeat(32))).unwrap();
    std::fs::write(versions.join("stray"), "x").unwrap();
    std::os::unix::fs::symlink("/", versions.join("cd".repeat(32))).unwrap();
    store.fetch("m").succeeded();
}

#[test]
fn no_more_bytes_come_a_second_than_are_wanted() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let began = Instant::now();
    let fetched = fetch(&store, &["--bandwidth", "64KiB", "--streams", "2"]).succeeded();
    let least = fetched["bytes_read"].as_f64().unwrap() / f64::from(64 << 10);
    assert!(began.elapsed().as_secs_f64() >= 0.9 * least, "{:?} for {least} s", began.elapsed());
    for wrong in [["--bandwidth", "fast"], ["--bandwidth", "1KiB"], ["--streams", "0"], ["--streams", "2000"]]
    {
        assert_eq!(fetch(&store, &wrong).failed(2), "usage", "{wrong:?}");
    }
}

fn log(store: &Store) -> PathBuf {
    store.root().join("models/m/channels/prod")
}

#[test]
fn a_channel_that_goes_back_is_refused_until_the_operator_says_so() {
    let store = Store::new();
    for step in ["1", "2", "3"] {
        store.publish(&torchrec(), &["--step", step]).succeeded();
    }
    store.fetch("m").succeeded();
    let seen = std::fs::read_link(store.served().join("current")).unwrap();
    // Newer entries are followed, also back to an older snapshot.
    store.run(["rollback", "m"]).succeeded();
    store.fetch("m").succeeded();
    store.run(["release", "m"]).succeeded();
    let fetched = store.fetch("m").succeeded();
    let now = std::fs::read_link(store.served().join("current")).unwrap();
    assert_ne!(seen, now);

    // The newest entries go, as from a backup that is older.
    for entry in ["000000000004", "000000000005", "hint"] {
        let _ = std::fs::remove_file(log(&store).join(entry));
    }
    let refused = store.fetch("m");
    assert_eq!(refused.failed(7), "integrity");
    assert!(
        refused.stderr.contains("cut or replaced") && refused.stderr.contains("--forget-sequence"),
        "{refused:?}"
    );
    assert_eq!(std::fs::read_link(store.served().join("current")).unwrap(), now, "it stays where it was");
    // By its id a snapshot is fetched whatever channels say.
    let id = fetched["snapshot"].as_str().unwrap();
    store.fetch(&format!("m@{id}")).succeeded();
    fetch(&store, &["--forget-sequence"]).succeeded();
    store.fetch("m").succeeded();
    assert_eq!(std::fs::read_link(store.served().join("current")).unwrap(), seen);
}

#[test]
fn another_entry_of_the_same_number_is_refused() {
    let store = Store::new();
    store.publish(&torchrec(), &["--step", "1"]).succeeded();
    store.fetch("m").succeeded();
    std::fs::remove_dir_all(store.root()).unwrap();
    store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let refused = store.fetch("m");
    assert_eq!(refused.failed(7), "integrity");
    assert!(refused.stderr.contains("another one"), "{refused:?}");
    fetch(&store, &["--forget-sequence"]).succeeded();
    store.fetch("m").succeeded();
}

#[test]
fn what_was_seen_and_cannot_be_read_is_said() {
    let store = Store::new();
    store.publish(&torchrec(), &["--step", "1"]).succeeded();
    store.fetch("m").succeeded();
    let seen = store.served().join(".seen.json");
    let document: serde_json::Value = serde_json::from_slice(&std::fs::read(&seen).unwrap()).unwrap();
    assert_eq!(document["schema"], "weighbridge.seen/v1");
    assert_eq!(document["channels"]["m@prod"]["sequence"], 1);
    std::fs::write(&seen, "{").unwrap();
    let refused = store.fetch("m");
    assert_eq!(refused.failed(7), "integrity");
    assert!(
        refused.stderr.contains(".seen.json") && refused.stderr.contains("--forget-sequence"),
        "{refused:?}"
    );
    fetch(&store, &["--forget-sequence"]).succeeded();
    store.fetch("m").succeeded();
}

#[test]
fn many_fetches_of_one_folder_follow_a_channel_that_moves_on() {
    let store = Store::new();
    store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let mut fetches = Vec::new();
    for step in 2..6 {
        for _ in 0..3 {
            let mut command = store.fetch_command("m");
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            fetches.push(command.spawn().unwrap());
        }
        store.publish(&torchrec(), &["--step", &step.to_string()]).succeeded();
    }
    for running in fetches {
        ended(running.wait_with_output().unwrap()).succeeded();
    }
    let last = store.fetch("m").succeeded();
    let step = store.run(["inspect", "m"]).succeeded()["step"].clone();
    assert_eq!(step, 5);
    let current = std::fs::read_link(store.served().join("current")).unwrap();
    assert!(current.ends_with(last["snapshot"].as_str().unwrap()));
}
