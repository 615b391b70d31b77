//! Files of torch.save, and distributed checkpoints that have to be unpacked: what only they can go wrong by.

use std::path::{Path, PathBuf};

use crate::binary::{Store, ended};
use crate::fixtures::{data, read_json, sha256};
use crate::tensors::tensors;

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

/// A stored zip archive without checksums.
fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    let four = |size: usize| u32::try_from(size).unwrap().to_le_bytes();
    for (name, data) in entries {
        let (header, name_length, length) = (four(bytes.len()), four(name.len()), four(data.len()));
        bytes.extend(
            [&b"PK\x03\x04\0\0\x08\x08\0\0"[..], &[0; 16], &name_length, name.as_bytes(), data].concat(),
        );
        directory
            .extend([&b"PK\x01\x02\0\0\0\0\x08\x08"[..], &[0; 10], &length, &length, &name_length].concat());
        directory.extend([&[0; 10][..], &header, name.as_bytes()].concat());
    }
    let ends = [four(directory.len()), four(bytes.len())].concat();
    let count = &four(entries.len())[..2];
    [bytes, directory, [&b"PK\x05\x06\0\0\0\0"[..], count, count, &ends, &[0; 2]].concat()].concat()
}

/// A dict of 1000 names for one tensor, 490 times under names of 200 bytes: a few kilobytes that mean half a million
/// tensors. Neither command makes the names.
#[test]
fn names_that_take_more_memory_than_the_budget_are_refused() {
    let number = |index: u16| [b"M".as_slice(), &index.to_le_bytes()].concat();
    let dict = |count: u16, value: &[u8]| {
        let pairs: Vec<_> = (0..count).map(|index| [&number(index)[..], value].concat()).collect();
        [b"}(", &pairs.concat()[..], b"u"].concat()
    };
    let tensor =
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000\
                   X\x03\0\0\0cpuK\x01tQK\0K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR";
    let long = [b"X\xc8\0\0\0", "x".repeat(200).as_bytes()].concat();
    let inner = [&dict(1000, b"h\0")[..], b"q\x01"].concat();
    let outer = dict(490, b"h\x01");
    let object =
        [b"\x80\x02}(X\x01\0\0\0t", &tensor[..], b"q\0X\x01\0\0\0d", &inner, &long, &outer, b"u."].concat();
    let store = Store::new();
    let path = store.folder.path().join("shared.pt");
    std::fs::write(&path, archive(&[("m/data.pkl", &object), ("m/data/0", &[0; 4])])).unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() < 16 << 10);
    let inspect = ["inspect".as_ref(), path.as_os_str(), "--memory".as_ref(), "256MiB".as_ref()];
    for run in [store.run(inspect), store.publish(&path, &["--memory", "256MiB"])] {
        assert_eq!(run.failed(4), "limit_exceeded");
        for word in ["shared.pt", "listing", "KiB", "--memory"] {
            assert!(run.stderr.contains(word), "{word}: {run:?}");
        }
    }
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
