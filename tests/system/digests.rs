//! Bytes are what was declared of them: sizes and BLAKE3 hashes by a checkpoint manifest, CRC-32s by the archives
//! themselves. What is not is refused, by name, before anything is sealed or any channel moves.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::binary::{Run, Store, wait};
use crate::fixtures::{copy_folder, data, torchrec};
use crate::tensors::tensors;

/// A folder's files as a manifest declares them.
fn declare(folder: &Path) -> Vec<Value> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        let digest = blake3::hash(&bytes).to_hex().to_string();
        files.push(json!({ "path": entry.file_name().to_str(), "size": bytes.len(), "blake3": digest }));
    }
    files
}

/// Writes a manifest of `location`, with what else `more` says, into the store's folder.
fn manifest(store: &Store, location: &str, step: u64, more: Value) -> PathBuf {
    let mut document = json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": "0f8fad5b-d9cb-469f-a165-70867728950e",
        "model": "m", "run": "r7", "step": step,
        "created_at": "2026-01-02T03:04:05Z",
        "location": location,
    });
    document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let path = store.folder.path().join(format!("manifest-{step}.json"));
    std::fs::write(&path, document.to_string()).unwrap();
    path
}

fn publish(store: &Store, manifest: &Path, more: &[&str]) -> Run {
    let arguments = ["publish", "--manifest", manifest.to_str().unwrap()];
    store.run(arguments.iter().chain(more).copied())
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
}

/// A safetensors file of tables of 512 x 64 F32, each filled with a value of its own; its header is padded, and
/// carries a note. Gives where the tables' bytes begin.
fn shard(path: &Path, tables: &[(&str, f32)]) -> usize {
    let size = 512 * 64 * 4;
    let mut header = json!({ "__metadata__": { "note": "from the trainer" } });
    for (index, (name, _)) in tables.iter().enumerate() {
        header[*name] = json!({
            "dtype": "F32", "shape": [512, 64], "data_offsets": [index * size, (index + 1) * size],
        });
    }
    let mut header = header.to_string();
    let padded = header.len().next_multiple_of(8) + 64;
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let start = bytes.len();
    for (_, value) in tables {
        bytes.extend((0..512 * 64u16).flat_map(|n| (value + f32::from(n)).to_le_bytes()));
    }
    std::fs::write(path, bytes).unwrap();
    start
}

const TABLE: usize = 512 * 64 * 4;
const TABLES: [(&str, f32); 3] = [("kept.weight", 1.0), ("optim.state", 2.0), ("other.weight", 3.0)];

/// The channel's snapshot and step.
fn ruling(store: &Store) -> (Value, Value) {
    let listed = store.run(["channels", "m"]).succeeded();
    (listed["channels"][0]["snapshot"].clone(), listed["channels"][0]["step"].clone())
}

/// What a refusal has to leave as it was.
fn check_nothing_moved(store: &Store, before: &(Value, Value)) {
    assert_eq!(&ruling(store), before);
    assert_eq!(store.objects("models/m/snapshots").len(), 2, "one manifest and its report");
    assert_eq!(store.fetch("m").succeeded()["snapshot"], before.0);
}

#[test]
fn a_manifest_says_all_that_publish_needs() {
    let store = Store::new();
    let folder = store.folder.path().join("step 42");
    copy_folder(&torchrec(), &folder);
    let plain = store.publish(&folder, &["--run", "r7", "--step", "42", "--channel", "plain"]).succeeded();
    let declared = json!({ "files": declare(&folder), "channel": "canary", "format": "dcp" });
    for location in ["step 42".to_owned(), url(&folder), folder.to_str().unwrap().to_owned()] {
        let manifest = manifest(&store, &location, 42, declared.clone());
        let published = publish(&store, &manifest, &["--threads", "4"]).succeeded();
        assert_eq!(published["snapshot"], plain["snapshot"], "{location}");
        assert_eq!((&published["channel"], &published["step"]), (&json!("canary"), &json!(42)));
    }
    let log = store.run(["channels", "log", "m", "--channel", "canary"]).succeeded();
    assert_eq!(log["entries"].as_array().unwrap().len(), 1);
    assert_eq!(log["entries"][0]["created_at"], "2026-01-02T03:04:05Z");
    store.run(["verify"]).succeeded();
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.to_str().unwrap().replace(' ', "%20"))
}

#[test]
fn a_manifest_comes_on_standard_input_and_options_come_before_it() {
    let store = Store::new();
    let file = store.folder.path().join("model.safetensors");
    shard(&file, &TABLES);
    let text = "schema = 'weighbridge.policy/v1'\nrule = [{ match = 'other.*', drop = true }]";
    let more = json!({ "policy": { "toml": text }, "channel": "canary" });
    let path = manifest(&store, "model.safetensors", 5, more);
    let mut command = store.command(["publish", "--manifest", "-", "--step", "6", "--channel", "mine"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&std::fs::read(path).unwrap()).unwrap();
    let published = wait(child).succeeded();
    assert_eq!((&published["step"], &published["channel"]), (&json!(6), &json!("mine")));
    assert_eq!((&published["run"], &published["dropped"]), (&json!("r7"), &json!(1)));
}

#[test]
fn what_a_manifest_cannot_say_is_a_usage_error() {
    let store = Store::new();
    shard(&store.folder.path().join("model.safetensors"), &TABLES);
    let refused = |location: &str, more: Value, word: &str| {
        let run = publish(&store, &manifest(&store, location, 1, more), &[]);
        run.failed(2);
        assert!(run.stderr.contains(word), "{run:?}");
    };
    refused(
        "model.safetensors",
        json!({ "policy": { "name": "small" } }),
        "weighbridge policy put m small FILE",
    );
    refused("gopher://bucket/step", json!({}), "gopher://");
    refused("model.safetensors", json!({ "step": "ten" }), "manifest");
    for arguments in [&["publish"][..], &["publish", "x"], &["publish", "--model", "m"]] {
        let run = store.run(arguments);
        assert_eq!(run.failed(2), "usage");
        assert!(run.stderr.contains("--model") || run.stderr.contains("CKPT"), "{run:?}");
    }
    assert_eq!(store.run(["publish", "--manifest", "absent.json"]).failed(2), "usage");
    assert!(!store.root().exists());
}

#[test]
fn one_altered_byte_anywhere_is_refused_and_nothing_moves() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let model = folder.join("model.safetensors");
    let start = shard(&model, &TABLES);
    std::fs::write(folder.join("stale.bin"), vec![7; 200_000]).unwrap();
    let files = declare(&folder);
    let good = manifest(&store, "checkpoint", 1, json!({ "files": files }));
    let published = publish(&store, &good, &[]).succeeded();
    assert_eq!((&published["outcome"], &published["dropped"]), (&json!("published"), &json!(1)));
    let before = ruling(&store);
    let note = std::fs::read(&model).unwrap().windows(7).position(|w| w == b"trainer").unwrap();
    for (name, at) in [
        ("model.safetensors", note),
        ("model.safetensors", start + 3),
        ("model.safetensors", start + TABLE + TABLE / 2),
        ("model.safetensors", start + 3 * TABLE - 1),
        ("stale.bin", 123_456),
    ] {
        flip(&folder.join(name), at);
        let next = manifest(&store, "checkpoint", 2, json!({ "files": files }));
        for threads in ["1", "4"] {
            let run = publish(&store, &next, &["--threads", threads]);
            assert_eq!(run.failed(4), "file_digest_mismatch", "{name} {at}");
            let digests =
                [&std::fs::read(folder.join(name)).unwrap()[..]].map(|now| blake3::hash(now).to_hex());
            let declared = files.iter().find(|file| file["path"] == name).unwrap();
            for told in [name, digests[0].as_str(), declared["blake3"].as_str().unwrap()] {
                assert!(run.stderr.contains(told), "{told}: {run:?}");
            }
        }
        check_nothing_moved(&store, &before);
        flip(&folder.join(name), at);
    }
    // The padding of a header: refused by the reader, if not by its digest.
    flip(&model, start - 1);
    publish(&store, &manifest(&store, "checkpoint", 2, json!({ "files": files })), &[]).failed(4);
    check_nothing_moved(&store, &before);
    flip(&model, start - 1);
    let next = manifest(&store, "checkpoint", 2, json!({ "files": files }));
    assert_eq!(publish(&store, &next, &[]).succeeded()["outcome"], "published");
}

#[test]
fn files_that_are_absent_of_another_size_or_elsewhere_are_refused() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    shard(&folder.join("model.safetensors"), &TABLES);
    std::fs::write(store.folder.path().join("outside"), "x").unwrap();
    std::os::unix::fs::symlink("../outside", folder.join("link")).unwrap();
    let right = std::fs::metadata(folder.join("model.safetensors")).unwrap().len();
    for (path, size, class) in [
        ("model.safetensors", right + 1, "file_size_mismatch"),
        ("gone.safetensors", 1, "file_missing"),
        ("../outside", 1, "index_path_escape"),
        ("/etc/passwd", 1, "index_path_escape"),
        ("link", 1, "index_path_escape"),
    ] {
        let files = json!({ "files": [{ "path": path, "size": size }] });
        let run = publish(&store, &manifest(&store, "checkpoint", 1, files), &[]);
        assert_eq!(run.failed(4), class);
        assert!(run.stderr.contains(path), "{run:?}");
        assert!(!store.root().join("models").exists(), "nothing is stored");
    }
    let twice = json!({ "path": "model.safetensors", "size": right });
    let twice = json!({ "files": [twice, twice] });
    assert_eq!(publish(&store, &manifest(&store, "checkpoint", 1, twice), &[]).failed(4), "duplicate_key");
}

/// B35: a second save into the same folder replaces half of the shards.
#[test]
fn a_mixture_of_two_saves_is_refused_where_digests_are_declared() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let save = |shards: std::ops::Range<u8>, step: f32| {
        for number in shards {
            let name = format!("t{number}.weight");
            shard(&folder.join(format!("s{number}.safetensors")), &[(&name, step + f32::from(number))]);
        }
    };
    save(0..4, 100.0);
    let files = declare(&folder);
    save(0..2, 101.0);
    let mixed = manifest(&store, "checkpoint", 100, json!({ "files": files }));
    let run = publish(&store, &mixed, &[]);
    assert_eq!(run.failed(4), "file_digest_mismatch");
    assert!(run.stderr.contains("s0.safetensors") || run.stderr.contains("s1.safetensors"), "{run:?}");
    assert!(store.objects("models").iter().all(|object| object.to_str().unwrap().contains("/chunks/")));
    save(0..2, 100.0);
    assert_eq!(publish(&store, &mixed, &[]).succeeded()["outcome"], "published");
}

/// Where a run of `bytes` lies in a folder's files.
fn find(folder: &Path, bytes: &[u8]) -> (PathBuf, usize) {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file = std::fs::read(&path).unwrap();
        found.extend(file.windows(bytes.len()).position(|window| window == bytes).map(|at| (path, at)));
    }
    found.pop().unwrap()
}

/// A byte in the middle of a table that is stored whole, of one that is stored by columns, and of one that is stored
/// transposed.
#[test]
fn a_damaged_byte_of_a_stored_slice_is_found_by_its_checksum() {
    for (fixture, names, column) in [
        ("dcp_torchrec_2rank", &["t2.weight", "t3.weight"][..], false),
        ("dcp_strided_dtypes", &["transposed"][..], true),
    ] {
        let store = Store::new();
        let folder = store.folder.path().join("checkpoint");
        copy_folder(&data().join("checkpoints").join(fixture), &folder);
        let policy = store.policy("[gates]\nnon_finite = 'allow'");
        let options = ["--policy", policy.to_str().unwrap(), "--threads", "4"];
        store.publish(&folder, &options).succeeded();
        let before = ruling(&store);
        store.fetch("m").succeeded();
        let fetched = tensors(&store.served().join("current"));
        for wanted in names {
            let (name, tensor) = fetched.iter().find(|(name, _)| name.contains(wanted)).unwrap();
            let width = tensor.bytes.len() / usize::try_from(tensor.shape[0]).unwrap();
            let run = if column {
                let item = width / usize::try_from(tensor.shape[1]).unwrap();
                tensor.bytes.chunks(width).take(4).flat_map(|row| row[..item].to_vec()).collect()
            } else {
                tensor.bytes[width * 100..width * 100 + width / 2].to_vec()
            };
            let (file, at) = find(&folder, &run);
            flip(&file, at);
            let run = store.publish(&folder, &options);
            assert_eq!(run.failed(4), "zip_crc", "{name}");
            let file_name = file.file_name().unwrap().to_str().unwrap();
            // A transposed tensor has aliases with the same bytes.
            let named = if column { "tensor \"" } else { name.as_str() };
            assert!(run.stderr.contains(named) && run.stderr.contains(file_name), "{run:?}");
            check_nothing_moved(&store, &before);
            flip(&file, at);
        }
        assert_eq!(store.publish(&folder, &options).succeeded()["outcome"], "unchanged");
    }
}
