//! A flipped byte in anything that is stored: `fetch` and `verify` fail with 7 and name it, and what was fetched before
//! stays.

use std::path::Path;

use crate::binary::Store;
use crate::fixtures::torchrec;
use crate::tensors::tensors;

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = at % bytes.len();
    bytes[at] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_flipped_byte_in_any_chunk_or_manifest_is_found_and_named() {
    let store = Store::new();
    let old = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    store.fetch("m").succeeded();
    let policy = store.policy("[[rule]]\nmatch = '**'\nencode = 'bf16'");
    let new = store.publish(&torchrec(), &["--step", "2", "--policy", policy.to_str().unwrap()]).succeeded();
    let snapshot = new["snapshot"].as_str().unwrap();
    let manifest = store.root().join("models/m/snapshots").join(snapshot);
    let chunks: Vec<String> = serde_json::from_slice::<serde_json::Value>(&std::fs::read(&manifest).unwrap())
        .unwrap()["files"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|file| file["chunks"].as_array().unwrap().clone())
        .map(|chunk| chunk["id"].as_str().unwrap().to_owned())
        .collect();
    let objects: Vec<_> = store
        .objects("models/m")
        .into_iter()
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            chunks.iter().any(|chunk| chunk == name) || *path == manifest
        })
        .collect();
    assert!(objects.len() > 2);
    for (index, object) in objects.iter().enumerate() {
        let name = object.file_name().unwrap().to_str().unwrap();
        let right = std::fs::read(object).unwrap();
        flip(object, index * 7919);
        let fetched = store.fetch("m");
        assert_eq!(fetched.failed(7), "integrity");
        assert!(fetched.stderr.contains(name), "{fetched:?}");
        for run in [store.run(["verify"]), store.run(["verify", "m"]), store.run(["verify", "m@prod"])] {
            assert_eq!(run.failed(7), "integrity");
            assert!(run.stderr.contains(name), "{run:?}");
        }
        let current = std::fs::read_link(store.served().join("current")).unwrap();
        assert_eq!(current, Path::new("versions").join(old["snapshot"].as_str().unwrap()));
        tensors(&store.served().join("current"));
        std::fs::write(object, right).unwrap();
    }
    store.run(["verify"]).succeeded();
    store.fetch("m").succeeded();
}

#[test]
fn a_missing_or_short_chunk_is_found() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    for chunk in store.objects("models/m/chunks") {
        let right = std::fs::read(&chunk).unwrap();
        std::fs::remove_file(&chunk).unwrap();
        assert_eq!(store.fetch("m").failed(7), "integrity");
        assert_eq!(store.run(["verify"]).failed(7), "integrity");
        std::fs::write(&chunk, &right[..right.len() - 1]).unwrap();
        assert_eq!(store.fetch("m").failed(7), "integrity");
        assert_eq!(store.publish(&torchrec(), &[]).failed(7), "integrity");
        std::fs::write(&chunk, right).unwrap();
    }
    store.fetch("m").succeeded();
}

#[test]
fn a_damaged_channel_entry_is_found() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    let entry = store.root().join("models/m/channels/prod/000000000001");
    let right = std::fs::read(&entry).unwrap();
    for damaged in [&b"{}"[..], b"", &right[..right.len() / 2]] {
        std::fs::write(&entry, damaged).unwrap();
        assert_eq!(store.fetch("m").failed(7), "integrity");
        assert_eq!(store.run(["verify"]).failed(7), "integrity");
    }
    std::fs::write(&entry, right).unwrap();
    store.run(["verify"]).succeeded();
}

#[test]
fn a_fetched_version_that_was_damaged_is_fetched_again() {
    let store = Store::new();
    store.publish(&torchrec(), &[]).succeeded();
    store.fetch("m").succeeded();
    flip(&store.served().join("current/model.safetensors"), 5000);
    let again = store.fetch("m");
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.json()["bytes_read"].as_u64().unwrap() > 0);
    assert!(again.stderr.contains("damaged"), "{again:?}");
    let last = store.fetch("m").succeeded();
    assert_eq!(last["bytes_read"], 0);
    assert_eq!(last["bytes_reused"], last["bytes"]);
}

#[test]
fn verifying_a_channel_checks_its_log_too() {
    let store = Store::new();
    for step in ["1", "2", "3"] {
        store.publish(&torchrec(), &["--step", step]).succeeded();
    }
    assert_eq!(store.run(["verify", "m@prod"]).succeeded()["entries"], 3);
    let newest = store.run(["inspect", "m"]).succeeded()["snapshot"].as_str().unwrap().to_owned();
    std::fs::write(store.root().join("models/m/channels/prod/000000000001"), "{}").unwrap();
    let run = store.run(["verify", "m@prod"]);
    assert_eq!(run.failed(7), "integrity");
    assert!(run.stderr.contains("prod/000000000001"), "{run:?}");
    store.run(["verify", &format!("m@{newest}")]).succeeded();
}
