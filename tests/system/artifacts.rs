//! Files beside a checkpoint: picked by patterns, published as they are, stored once, fetched with their folders.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::binary::{Run, Store, spawn};
use crate::fixtures::{copy_folder, data, torchrec};

/// A checkpoint with files of many kinds beside it. The graph is longer than a chunk.
fn prepare(folder: &Path) -> PathBuf {
    let checkpoint = folder.join("checkpoint");
    copy_folder(&torchrec(), &checkpoint);
    std::fs::create_dir_all(checkpoint.join("tokenizer/merges")).unwrap();
    for (name, content) in files() {
        std::fs::write(checkpoint.join(name), content).unwrap();
    }
    checkpoint
}

fn files() -> [(&'static str, Vec<u8>); 5] {
    let graph = (0..9_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    [
        ("config.json", b"{}".to_vec()),
        ("graph.pb", graph),
        ("tokenizer/.hidden", b"h".to_vec()),
        ("tokenizer/empty", Vec::new()),
        ("tokenizer/merges/1.txt", b"a b".to_vec()),
    ]
}

const ALL: &str = "[artifacts]\ninclude = ['**']\nexclude = ['expected.json']";

fn publish(store: &Store, checkpoint: &Path, policy: &str) -> Run {
    let policy = store.policy(policy);
    store.publish(checkpoint, &["--policy", policy.to_str().unwrap()])
}

/// The artifacts that a snapshot's listing names.
fn listed(store: &Store) -> Vec<String> {
    let listed = store.run(["inspect", "m"]).succeeded();
    let files = listed["files"].as_array().unwrap().iter().filter(|file| file["artifact"] == true);
    files.map(|file| file["name"].as_str().unwrap().to_owned()).collect()
}

fn check_fetched(store: &Store) {
    let version = store.served().join("current");
    for (name, content) in files() {
        assert!(std::fs::read(version.join(name)).unwrap() == content, "{name}");
    }
}

#[test]
fn artifacts_are_published_once_and_fetched_with_their_folders() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let store = Store::new();
    let first = publish(&store, &checkpoint, ALL).succeeded();
    assert_eq!(first["outcome"], "published");
    assert_eq!(first["artifacts"], serde_json::json!({ "count": 5, "bytes": 9_000_006 }));
    assert_eq!(listed(&store), files().map(|(name, _)| name));
    assert_eq!(store.run(["report", "m"]).succeeded()["artifacts"], first["artifacts"]);
    store.fetch("m").succeeded();
    check_fetched(&store);
    let mut names: Vec<_> = std::fs::read_dir(store.served().join("current"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "graph.pb", "model.safetensors", "snapshot.json", "tokenizer"]);
    let again = publish(&store, &checkpoint, ALL).succeeded();
    assert_eq!(again["snapshot"], first["snapshot"]);
    assert_eq!(again["bytes_stored"], 0);
    let without = publish(&store, &checkpoint, "").succeeded();
    assert_ne!(without["snapshot"], first["snapshot"]);
    assert_eq!(without["artifacts"]["count"], 0);
    store.run(["verify"]).succeeded();
}

#[test]
fn patterns_pick_files_and_exclude_wins() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let store = Store::new();
    let policy =
        "[artifacts]\ninclude = ['*.json', 'tokenizer/*', '*.vocab']\nexclude = ['**/.*', 'expected.*']";
    let document = publish(&store, &checkpoint, policy).succeeded();
    assert_eq!(listed(&store), ["config.json", "tokenizer/empty"]);
    let notes = document["notes"].to_string();
    assert!(notes.contains("\\\"*.vocab\\\" matches no file"), "{notes}");
}

#[test]
fn the_files_beside_a_checkpoint_of_one_file_are_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    std::fs::copy(data().join("checkpoints/safetensors_single/model.safetensors"), &file).unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let store = Store::new();
    let policy = "[artifacts]\ninclude = ['**']\n[gates]\nnon_finite = 'allow'";
    publish(&store, &file, policy).succeeded();
    assert_eq!(listed(&store), ["config.json"], "the checkpoint's own file is none");
}

#[test]
fn a_store_beside_the_checkpoint_is_not_published() {
    let store = Store::new();
    let file = store.folder.path().join("weights.safetensors");
    std::fs::copy(data().join("checkpoints/safetensors_single/model.safetensors"), &file).unwrap();
    std::fs::write(store.folder.path().join("config.json"), "{}").unwrap();
    let policy = "[artifacts]\ninclude = ['**']\nexclude = ['*.toml']\n[gates]\nnon_finite = 'allow'";
    let first = publish(&store, &file, policy).succeeded();
    assert!(first["notes"].to_string().contains("store/: left out of the artifacts"), "{first}");
    let again = publish(&store, &file, policy).succeeded();
    assert_eq!(again["snapshot"], first["snapshot"]);
    assert_eq!(listed(&store), ["config.json"]);
}

#[test]
fn links_that_lead_out_and_paths_that_collide_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let outside = folder.path().join("secret");
    std::fs::write(&outside, "secret").unwrap();
    symlink(&outside, checkpoint.join("out.json")).unwrap();
    symlink("config.json", checkpoint.join("same.json")).unwrap();
    symlink(folder.path(), checkpoint.join("around")).unwrap();
    let store = Store::new();
    let run = publish(&store, &checkpoint, "[artifacts]\ninclude = ['*.json']");
    assert_eq!(run.failed(4), "index_path_escape");
    let message = run.json()["error"]["message"].to_string();
    assert!(message.contains("out.json") && message.contains("exclude it"), "{message}");
    let document =
        publish(&store, &checkpoint, "[artifacts]\ninclude = ['**']\nexclude = ['out.json']").succeeded();
    assert!(listed(&store).contains(&"same.json".to_owned()), "a link within the folder is followed");
    assert!(!listed(&store).iter().any(|name| name.starts_with("around")));
    assert!(document["notes"].to_string().contains("around"), "{document}");

    for name in ["model.safetensors", "snapshot.json"] {
        let path = checkpoint.join(name);
        std::fs::write(&path, "not ours").unwrap();
        let policy = format!("[artifacts]\ninclude = ['{name}']");
        // The format is given: a safetensors file there would be taken for the checkpoint.
        let policy = store.policy(&policy);
        let run = store.publish(&checkpoint, &["--format", "dcp", "--policy", policy.to_str().unwrap()]);
        assert_eq!(run.failed(2), "policy_mismatch");
        assert!(run.json()["error"]["message"].to_string().contains(name));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_damaged_artifact_is_noticed_and_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let store = Store::new();
    publish(&store, &checkpoint, ALL).succeeded();
    let fetched = store.fetch("m").succeeded();
    let version = store.served().join("versions").join(fetched["snapshot"].as_str().unwrap());

    // On the serving host: a flipped byte, a missing folder, a link in a folder's place.
    let graph = version.join("graph.pb");
    let mut bytes = std::fs::read(&graph).unwrap();
    bytes[8_500_000] ^= 1;
    std::fs::write(&graph, bytes).unwrap();
    store.fetch("m");
    check_fetched(&store);
    std::fs::remove_dir_all(version.join("tokenizer/merges")).unwrap();
    store.fetch("m");
    check_fetched(&store);
    let elsewhere = folder.path().join("elsewhere");
    copy_folder(&version.join("tokenizer"), &elsewhere);
    std::fs::remove_dir_all(version.join("tokenizer")).unwrap();
    symlink(&elsewhere, version.join("tokenizer")).unwrap();
    store.fetch("m");
    check_fetched(&store);
    assert!(std::fs::symlink_metadata(version.join("tokenizer")).unwrap().is_dir());

    // In the store.
    let config = files()[0].1.clone();
    let chunk =
        store.objects("models/m/chunks").into_iter().find(|path| std::fs::read(path).unwrap() == config);
    std::fs::write(chunk.unwrap(), "[]").unwrap();
    assert_eq!(store.run(["verify"]).failed(7), "integrity");
    std::fs::remove_dir_all(store.served()).unwrap();
    assert_eq!(store.fetch("m").failed(7), "integrity");
}

#[test]
fn links_in_the_staging_folder_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let store = Store::new();
    let published: Value = publish(&store, &checkpoint, ALL).succeeded();
    let staging = store.served().join(".staging").join(published["snapshot"].as_str().unwrap());
    std::fs::create_dir_all(staging.join("config.json/a folder")).unwrap();
    std::fs::write(staging.join("stray"), "x").unwrap();
    let elsewhere = folder.path().join("elsewhere");
    std::fs::create_dir_all(elsewhere.join("merges")).unwrap();
    std::fs::write(elsewhere.join("merges/1.txt"), "a b").unwrap();
    std::fs::write(elsewhere.join("empty"), "theirs").unwrap();
    symlink(&elsewhere, staging.join("tokenizer")).unwrap();
    store.fetch("m").succeeded();
    check_fetched(&store);
    assert_eq!(std::fs::read(elsewhere.join("empty")).unwrap(), b"theirs");
    assert!(!store.served().join("current/stray").try_exists().unwrap());
}

#[test]
fn a_publish_or_fetch_that_was_killed_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = prepare(folder.path());
    let expected = publish(&Store::new(), &checkpoint, ALL).succeeded();
    let store = Store::new();
    let policy = store.policy(ALL);
    for milliseconds in [5, 20, 60] {
        let mut child = spawn(store.publish_command(&checkpoint, &["--policy", policy.to_str().unwrap()]));
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(publish(&store, &checkpoint, ALL).succeeded()["snapshot"], expected["snapshot"]);
    for milliseconds in [5, 15, 40] {
        let mut child = spawn(store.fetch_command("m"));
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    store.fetch("m").succeeded();
    check_fetched(&store);
}
