//! Every hostile file comes out as its table says: verdict, class of error, file and tensor named; no panic, no hang,
//! no large allocation, nothing outside its folder touched.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::binary::{self, Store, ended};
use crate::fixtures::{copy_folder, read_json, roots, sha256};
use crate::tensors::tensors;

/// Address space that a run may take, in KiB: `ulimit -v`. The binary with its debug information, thread stacks and
/// arenas take most of it; a hostile size that is believed would take far more.
const ADDRESS_SPACE_KIB: u64 = 3_000_000;

/// `publish` of a hostile checkpoint: at most 10 seconds, in bounded memory.
fn publish(store: &Store, checkpoint: &Path, policy: &Path) -> binary::Run {
    let publish = store.publish_command(checkpoint, &[]);
    let mut bounded = Command::new("sh");
    bounded.arg("-c").arg(format!("ulimit -v {ADDRESS_SPACE_KIB}; exec timeout 10 \"$@\"")).arg("sh");
    bounded.arg(publish.get_program()).args(publish.get_args()).arg("--policy").arg(policy);
    bounded.current_dir(store.folder.path());
    ended(bounded.output().unwrap())
}

/// A private copy of a case's folder, with its links made.
fn prepare(root: &Path, case: &Value, folder: &Path) -> PathBuf {
    let name = case["name"].as_str().unwrap();
    copy_folder(&root.join("nasty/cases").join(name), folder);
    for step in case["setup"].as_array().into_iter().flatten() {
        assert_eq!(step["op"], "symlink");
        let link = folder.join(step["path"].as_str().unwrap());
        std::os::unix::fs::symlink(step["target"].as_str().unwrap(), link).unwrap();
    }
    folder.join(case["entry"].as_str().unwrap())
}

fn check_accepted(store: &Store, case: &Value) {
    store.fetch("m").succeeded();
    let fetched = tensors(&store.served().join("current"));
    let expected = case["expected_tensors"].as_object().unwrap();
    assert_eq!(fetched.len(), expected.len(), "{case}");
    for (name, expected) in expected {
        let tensor = &fetched[name];
        assert_eq!(
            tensor.dtype.replace('_', ""),
            expected["dtype"].as_str().unwrap().replace('_', ""),
            "{case}"
        );
        assert_eq!(tensor.bytes.len() as u64, expected["nbytes"], "{case}");
        assert_eq!(sha256(&tensor.bytes), expected["sha256"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn every_nasty_case_comes_out_as_its_table_says() {
    let mut count = 0;
    for root in roots() {
        let cases = read_json(&root.join("nasty/cases.json"));
        for case in cases["cases"].as_array().unwrap() {
            count += 1;
            let store = Store::new();
            let work = store.folder.path().join("case");
            let entry = prepare(&root, case, &work);
            let policy = store.policy("[gates]\nnon_finite = 'allow'");
            let before = listing(store.folder.path());
            let run = publish(&store, &entry, &policy);
            match (case["expect"].as_str().unwrap(), run.code) {
                ("accept" | "either", 0) => check_accepted(&store, case),
                ("reject" | "either", _) => {
                    let class = run.failed(4);
                    let expected = case["expected_errors"].as_array().unwrap();
                    assert!(expected.iter().any(|expected| *expected == class), "{case}: {run:?}");
                    assert!(!store.root().join("models").exists(), "nothing is stored: {case}");
                    let after = listing(store.folder.path());
                    assert_eq!(before, after, "nothing else is touched: {case}");
                }
                other => panic!("{other:?}: {case}: {run:?}"),
            }
        }
    }
    assert!(count >= 25, "{count}");
}

/// What lies in a folder, the store aside.
fn listing(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.ends_with("store"))
        .collect();
    names.sort();
    names
}

/// What is wrong with each checkpoint under `checkpoints/hostile/`: classes that say so, and a word of the message.
fn hostile(name: &str) -> Option<(&'static [&'static str], &'static str)> {
    Some(match name {
        "dcp_metadata_os_getcwd" => (&["forbidden_global"], "getcwd"),
        "dcp_offset_past_end" => (&["truncated"], "__0_0.distcp"),
        "dcp_chunk_overlap" => (&["dcp_chunk_overlap"], "tensor"),
        "dcp_chunk_gap" => (&["dcp_chunk_gap"], "missing"),
        "dcp_path_escape" => (&["index_path_escape"], "folder"),
        "dcp_truncated_distcp" => (&["truncated"], "__0_0.distcp"),
        "dcp_length_short" => (&["zip_malformed", "truncated"], "__0_0.distcp"),
        "hf_lost_chunk" => (&["dcp_chunk_gap"], "\"t\""),
        "hf_bytes_in_front" => (&["header_too_large"], "model-00001-of-00001.safetensors"),
        "global_argparse_namespace.pt" => (&["forbidden_global"], "argparse.Namespace"),
        "global_os_getcwd.pt" => (&["forbidden_global"], "posix.getcwd"),
        _ => return None,
    })
}

#[test]
fn every_hostile_checkpoint_is_refused_by_name_and_inspect_says_the_same() {
    for root in roots() {
        let folder = root.join("checkpoints/hostile");
        let entries = read_json(&folder.join("expected.json"));
        for name in entries["entries"].as_object().unwrap().keys() {
            let path = folder.join(name);
            let (classes, word) = hostile(name).unwrap_or_else(|| panic!("{name} is not in the table"));
            let store = Store::new();
            let run = publish(&store, &path, &store.policy(""));
            let class = run.failed(4);
            assert!(classes.contains(&class.as_str()), "{name}: {run:?}");
            assert!(run.stderr.contains(word), "{name}: {run:?}");
            assert!(!store.root().join("models").exists(), "nothing is stored: {name}");
            let inspected = store.run(["inspect".as_ref(), path.as_os_str()]);
            assert_eq!(inspected.failed(4), class, "{name}");
        }
    }
}
