//! Files of torch.save, and distributed checkpoints that have to be unpacked: what only they can go wrong by.

use std::path::{Path, PathBuf};

use crate::binary::{Store, ended};
use crate::fixtures::{data, read_json, sha256};
use crate::golden::tensors;

fn checkpoint(name: &str) -> PathBuf {
    data().join("checkpoints").join(name)
}

/// A copy of the pickle in a stored zip archive, altered in place, with its checksum put right in the directory.
fn altered(path: &Path, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    // Checksums that are 0 in every entry are not recorded.
    let entries = bytes.windows(4).enumerate().filter(|(_, window)| window == b"PK\x01\x02");
    let entries: Vec<_> = entries.map(|(at, _)| at).collect();
    for entry in entries {
        bytes[entry + 16..entry + 20].fill(0);
    }
    bytes
}

/// Tensors beside one object of a class that is not known: the class is named, and how to save the weights alone.
#[test]
fn an_unknown_class_beside_tensors_is_refused_with_a_way_out() {
    let store = Store::new();
    let path = store.folder.path().join("mixed.pt");
    let real = checkpoint("pt_complex_sparse_refuse/mixed.pt");
    std::fs::write(
        &path,
        altered(&real, b"torch._utils\n_rebuild_qtensor", b"my.train_conf\nHyperParameters"),
    )
    .unwrap();
    let run = store.publish(&path, &[]);
    assert_eq!(run.failed(4), "forbidden_global");
    for word in ["mixed.pt", "my.train_conf.HyperParameters", "state_dict()", "nothing of it was run"] {
        assert!(run.stderr.contains(word), "{word}: {run:?}");
    }
    assert!(!store.root().join("models").exists());
}

/// Views with offsets and strides come out dense and right, and what they leave of their storage is not stored.
#[test]
fn views_are_published_dense_without_the_rest_of_their_storage() {
    let store = Store::new();
    let file = checkpoint("pt_views_dtypes/views.pt");
    let policy = store.policy("[gates]\nnon_finite = 'allow'");
    let published = store.publish(&file, &["--policy", policy.to_str().unwrap()]).succeeded();
    let expected = read_json(&checkpoint("pt_views_dtypes/expected.json"));
    let expected = expected["tensors"].as_object().unwrap();
    let dense: u64 = expected.values().map(|tensor| tensor["nbytes"].as_u64().unwrap()).sum();
    assert_eq!(published["bytes_read"], dense);
    store.fetch("m").succeeded();
    let fetched = tensors(&store.served().join("current"));
    for (name, expected) in expected {
        assert_eq!(sha256(&fetched[name].bytes), expected["sha256"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn tensors_that_cannot_be_read_are_refused_unless_they_are_dropped() {
    let store = Store::new();
    let folder = checkpoint("pt_complex_sparse_refuse");
    let publish = |rules: &str| {
        store.publish(&folder.join("mixed.pt"), &["--policy", store.policy(rules).to_str().unwrap()])
    };
    for (kept, class, word) in [
        ("complex", "bad_dtype", "view_as_real"),
        ("quant", "unsupported_object", "dequantize"),
        ("sparse", "unsupported_object", "to_dense"),
    ] {
        let others = ["complex", "quant", "sparse"].into_iter().filter(|&name| name != kept);
        let rules: String = others.map(|name| format!("[[rule]]\nmatch = '{name}'\ndrop = true\n")).collect();
        let run = publish(&rules);
        assert_eq!(run.failed(4), class);
        assert!(run.stderr.contains(word) && run.stderr.contains(&format!("{kept:?}")), "{run:?}");
    }
}

#[test]
fn what_is_no_tensor_is_listed_and_noted() {
    let store = Store::new();
    let file = checkpoint("pt_pickle_protocol4/model.pt");
    let listed = store.run(["inspect".as_ref(), file.as_os_str()]).succeeded();
    assert_eq!(listed["format"], "torch_save");
    let expected = read_json(&checkpoint("pt_pickle_protocol4/expected.json"));
    let expected = expected["non_tensors"].as_object().unwrap();
    let others = listed["others"].as_array().unwrap();
    assert_eq!(others.len(), expected.len());
    for other in others {
        assert_eq!(other["kind"], expected[other["name"].as_str().unwrap()]["type"]);
    }
    let published = store.publish(&file, &[]).succeeded();
    let notes = published["notes"].to_string();
    assert!(
        expected.keys().all(|name| notes.contains(&format!("{name}: not a tensor, passed over"))),
        "{notes}"
    );
    let text = store.command(["inspect".as_ref(), file.as_os_str()]);
    let arguments: Vec<_> = text.get_args().filter(|argument| *argument != "--json").collect();
    let text = ended(std::process::Command::new(text.get_program()).args(arguments).output().unwrap());
    assert!(text.stdout.contains("not a tensor: step (int)"), "{text:?}");
}

#[test]
fn a_folder_with_one_file_of_torch_is_that_file_and_several_have_to_be_named() {
    let store = Store::new();
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let file = checkpoint("pt_pickle_protocol4/model.pt");
    std::fs::copy(&file, folder.join("pytorch_model.bin")).unwrap();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    let first = store.publish(&folder, &[]).succeeded();
    assert_eq!(store.publish(&file, &["--format", "torch-save"]).succeeded()["snapshot"], first["snapshot"]);
    std::fs::copy(&file, folder.join("optimizer.pt")).unwrap();
    let run = store.publish(&folder, &[]);
    assert_eq!(run.failed(4), "unsupported_format");
    assert!(run.stderr.contains("optimizer.pt, pytorch_model.bin"), "{run:?}");
}

#[test]
fn other_layouts_are_refused_with_a_way_out() {
    let store = Store::new();
    let run = store.publish(&checkpoint("pt_legacy/legacy.pt"), &[]);
    assert_eq!(run.failed(4), "unsupported_format");
    assert!(run.stderr.contains("before PyTorch 1.6") && run.stderr.contains("weights_only=True"), "{run:?}");
}

/// Items of zstd are unpacked into the system's folder for temporary files, and nothing of them stays there.
#[test]
fn items_are_unpacked_beside_and_nothing_stays() {
    let store = Store::new();
    let scratch = store.folder.path().join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    let mut publish = store.publish_command(&checkpoint("dcp_zstd_2rank"), &[]);
    ended(publish.env("TMPDIR", &scratch).output().unwrap()).succeeded();
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0);
}
