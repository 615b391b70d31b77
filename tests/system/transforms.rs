//! What rules make of tensors: dropped, renamed, pruned to the rows of a list with the remapping beside them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use weighbridge_tests::{peak_memory, synthetic};

use crate::binary::{Run, Store};
use crate::fixtures::{copy_folder, read_json, torchrec};
use crate::tensors::{Fetched, tensors};

/// A tensor to write: name, dtype, shape, bytes.
type Written<'t> = (&'t str, Dtype, &'t [usize], Vec<u8>);

/// A folder with one safetensors file.
fn checkpoint(folder: &Path, written: &[Written<'_>]) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let views = written
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    folder.to_owned()
}

/// A table of F32: row times 100, plus the column.
fn table(rows: u16, width: u16) -> Vec<u8> {
    let value = |row: u16, column: u16| f32::from(row) * 100.0 + f32::from(column);
    (0..rows).flat_map(|row| (0..width).flat_map(move |column| value(row, column).to_le_bytes())).collect()
}

fn publish(store: &Store, checkpoint: &Path, policy: &str) -> Run {
    let policy = store.policy(policy);
    store.publish(checkpoint, &["--policy", policy.to_str().unwrap()])
}

fn published(store: &Store, checkpoint: &Path, policy: &str) -> (Value, BTreeMap<String, Fetched>) {
    let document = publish(store, checkpoint, policy).succeeded();
    assert_eq!(document["outcome"], "published", "{document}");
    store.fetch("m").succeeded();
    (document, tensors(&store.served().join("current")))
}

fn integers(tensor: &Fetched) -> Vec<i32> {
    assert_eq!(tensor.dtype, "I32");
    tensor.bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect()
}

/// That `pruned` holds the rows `kept` (ascending) of `whole`, bit for bit, and that `remapping` says so.
fn check_pruned(whole: &Fetched, pruned: &Fetched, remapping: &Fetched, kept: &[usize]) {
    let row_bytes = whole.bytes.len() / usize::try_from(whole.shape[0]).unwrap();
    let rows: Vec<_> = whole.bytes.chunks(row_bytes).collect();
    let expected: Vec<u8> = kept.iter().flat_map(|&row| rows[row].to_vec()).collect();
    assert!(pruned.bytes == expected, "the rows that are kept, in order");
    assert_eq!(pruned.shape, [kept.len() as u64, whole.shape[1]]);
    let described = pruned.metadata.pruned.as_ref().unwrap();
    assert_eq!(described.source_rows, whole.shape[0]);
    assert_eq!(pruned.metadata.shape, [kept.len() as u64, whole.metadata.shape[1]]);
    assert!(whole.metadata.pruned.is_none() && remapping.metadata.pruned.is_none());
    let mut expected = vec![-1; rows.len()];
    kept.iter().zip(0..).for_each(|(&row, new)| expected[row] = new);
    assert_eq!(integers(remapping), expected);
}

#[test]
fn tables_of_all_shardings_are_pruned_to_the_rows_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    copy_folder(&torchrec(), &checkpoint);
    std::fs::create_dir(checkpoint.join("pruned")).unwrap();
    let lists: [(&str, Vec<usize>); 4] = [
        ("t1", (0..2000).step_by(3).collect()),
        ("t2", vec![0, 499, 500, 501, 999]),
        ("t3", (0..501).collect()),
        ("t4", vec![17]),
    ];
    for (name, kept) in &lists {
        // In any order, one of them twice.
        let lines: Vec<_> = kept.iter().rev().chain(&kept[..1]).map(ToString::to_string).collect();
        std::fs::write(checkpoint.join(format!("pruned/{name}.ids")), lines.join(" \r\n\n")).unwrap();
    }
    let others = "[[rule]]\nmatch = 'optim.**'\ndrop = true";
    for encoding in ["keep", "int8", "bf16"] {
        let rule = format!(
            "[[rule]]\nmatch = 'model.ebc.embedding_bags.*.weight'\nencode = '{encoding}'\nrename = 'ebc.$1'"
        );
        let (_, whole) = published(&Store::new(), &checkpoint, &format!("{rule}\n{others}"));
        let store = Store::new();
        let pruning = format!("{rule}\nkeep_rows = 'pruned/$1.ids'\n{others}");
        let (document, pruned) = published(&store, &checkpoint, &pruning);
        let notes = document["notes"].to_string();
        for (name, kept) in &lists {
            let name = format!("ebc.{name}");
            let remapping = &pruned[&format!("{name}.index_remapping")];
            check_pruned(&whole[&name], &pruned[&name], remapping, kept);
            assert!(notes.contains("names 1 rows more than once"), "{notes}");
        }
        assert_eq!(pruned.len(), whole.len() + lists.len());
        let listed = store.run(["inspect", "m"]).succeeded();
        let listed = listed["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == "ebc.t2");
        let described = &listed.unwrap()["pruned"];
        assert_eq!(described["source_rows"], 1000);
        assert_eq!(described["index_remapping"], "ebc.t2.index_remapping");
        store.run(["verify"]).succeeded();
        let again = publish(&store, &checkpoint, &pruning).succeeded();
        assert_eq!(again["snapshot"], document["snapshot"]);
        assert_eq!(again["bytes_stored"], 0);
    }
}

#[test]
fn a_list_may_be_a_tensor_of_any_integer_type_with_rules_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let of_i64 = |rows: &[i64]| rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>();
    let checkpoint = checkpoint(
        folder.path(),
        &[
            ("bags.a.weight", Dtype::F32, &[300, 4], table(300, 4)),
            ("bags.b.weight", Dtype::F32, &[5, 4], table(5, 4)),
            ("bags.c.weight", Dtype::F32, &[0, 4], Vec::new()),
            ("kept.a", Dtype::I64, &[3], of_i64(&[299, 0, 7])),
            ("kept.b", Dtype::U8, &[2], vec![1, 4]),
            ("kept.c", Dtype::I32, &[0], Vec::new()),
        ],
    );
    let rule = |prune: &str| {
        format!(
            "rule = [\n{{ match = 'bags.*.weight', encode = 'int8'{prune} }},\n\
             {{ match = 'kept.a', drop = true }} ]"
        )
    };
    let (_, whole) = published(&Store::new(), &checkpoint, &rule(""));
    let (document, pruned) =
        published(&Store::new(), &checkpoint, &rule(", keep_rows = { tensor = 'kept.$1' }"));
    assert_eq!(document["notes"].as_array().unwrap().len(), 0);
    for (name, kept) in [("a", &[0, 7, 299][..]), ("b", &[1, 4])] {
        let name = format!("bags.{name}.weight");
        check_pruned(&whole[&name], &pruned[&name], &pruned[&format!("{name}.index_remapping")], kept);
    }
    assert_eq!(pruned["bags.c.weight"].shape, [0, 12]);
    assert_eq!(pruned["bags.c.weight.index_remapping"].shape, [0]);
    assert!(!pruned.contains_key("kept.a") && pruned.contains_key("kept.b"));
}

#[test]
fn lists_that_make_no_sense_are_refused_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let outside = folder.path().join("outside.ids");
    std::fs::write(&outside, "0").unwrap();
    let checkpoint = checkpoint(
        &folder.path().join("checkpoint"),
        &[
            ("floats", Dtype::F32, &[1], vec![0; 4]),
            ("t", Dtype::F32, &[5, 2], table(5, 2)),
            ("v", Dtype::F32, &[5], table(5, 1)),
        ],
    );
    for (name, text) in [("good", "0"), ("beyond", "0\n5"), ("odd", "0\n\nx"), ("empty", "\n")] {
        std::fs::write(checkpoint.join(name), text).unwrap();
    }
    std::os::unix::fs::symlink(&outside, checkpoint.join("link")).unwrap();
    for (tensor, list, code, class, words) in [
        ("t", "'beyond'", 4, "row_list_bad", "beyond: tensor \"t\": line 2: there is no row 5"),
        ("t", "'odd'", 4, "row_list_bad", "odd: tensor \"t\": line 3: 'x'"),
        ("t", "'empty'", 4, "row_list_bad", "drop it"),
        ("t", "'none'", 4, "row_list_missing", "none: tensor \"t\""),
        ("t", "'none'", 4, "row_list_missing", "keep_rows of rule 1 (\"t\") names this list"),
        ("t", "'link'", 4, "index_path_escape", "link: tensor \"t\""),
        ("t", "'../outside.ids'", 4, "index_path_escape", "outside"),
        ("v", "'good'", 2, "policy_mismatch", "tensor \"v\": keep_rows takes tables"),
        ("t", "{ tensor = 'floats' }", 4, "row_list_bad", "\"floats\", which is F32"),
        ("t", "{ tensor = 'none' }", 4, "row_list_missing", "\"none\", which the checkpoint does not hold"),
    ] {
        let store = Store::new();
        let run =
            publish(&store, &checkpoint, &format!("rule = [{{ match = '{tensor}', keep_rows = {list} }}]"));
        assert_eq!(run.failed(code), class, "{run:?}");
        let message = run.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn findings_in_a_pruned_table_name_the_rows_of_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = table(100, 2);
    for row in [20, 70, 90] {
        bytes[row * 8..row * 8 + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let checkpoint = checkpoint(folder.path(), &[("t", Dtype::F32, &[100, 2], bytes)]);
    std::fs::write(checkpoint.join("ids"), "10\n70\n90\n").unwrap();
    for encoding in ["keep", "int8"] {
        let store = Store::new();
        let rule = format!("rule = [{{ match = 't', encode = '{encoding}', keep_rows = 'ids' }}]");
        let run = publish(&store, &checkpoint, &rule);
        assert_eq!(run.failed(3), "rejected_by_gate");
        assert_eq!(run.json()["gates"][0]["findings"][0]["rows"], serde_json::json!([70, 90]));
    }
    // A row of one element is a row as well.
    let mut bytes = table(6000, 1);
    bytes[5000 * 4..5001 * 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let narrow = self::checkpoint(&folder.path().join("narrow"), &[("t", Dtype::F32, &[6000, 1], bytes)]);
    std::fs::write(narrow.join("ids"), "10\n5000\n5999\n").unwrap();
    for encoding in ["keep", "bf16"] {
        let rule = format!("rule = [{{ match = 't', encode = '{encoding}', keep_rows = 'ids' }}]");
        let run = publish(&Store::new(), &narrow, &rule);
        assert_eq!(run.failed(3), "rejected_by_gate");
        assert_eq!(run.json()["gates"][0]["findings"][0]["rows"], serde_json::json!([5000]));
    }
}

#[test]
fn a_large_table_is_pruned_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    synthetic(&file, 1, 800_000, 64);
    let ids: String = (0..800_000).step_by(2).map(|row| format!("{row}\n")).collect();
    std::fs::write(folder.path().join("ids"), ids).unwrap();
    let store = Store::new();
    let policy = store.policy("rule = [{ match = '**', encode = 'int8', keep_rows = 'ids' }]");
    let policy = ["--policy", policy.to_str().unwrap(), "--memory", "128MiB", "--threads", "2"];
    let (ended, peak) = peak_memory(&mut store.publish_command(&file, &policy)).unwrap();
    assert!(ended.success());
    assert!(peak < 128 << 20, "{} MiB", peak >> 20);
    let listed = store.run(["inspect", "m"]).succeeded();
    assert_eq!(listed["tensors"][0]["logical_shape"], serde_json::json!([400_000, 64]));
}

#[test]
fn two_naming_schemes_of_one_model_give_one_serving_name_each() {
    let policy = "
        rule = [
            { match = '**.momentum1', drop = true },
            { match = 'optim.**', drop = true },
            { match = 'optimizer.**', drop = true },
            { match = 'model.sparse.*.weight', encode = 'int8', rename = 'table.$1' },
            { match = 'model.sparse_module.data_parallel.*', encode = 'int8', rename = 'table.$1' },
            { match = 'model.retired.*', drop = true },
        ]";
    let schemes = [
        ["model.sparse.t1.weight", "optim.state.sparse.t1.weight.t1.momentum1"],
        ["model.sparse_module.data_parallel.t1", "optimizer.t1.momentum1"],
    ];
    let published = schemes.map(|[weight, momentum]| {
        let folder = tempfile::tempdir().unwrap();
        let written: [Written<'_>; 3] = [
            (weight, Dtype::F32, &[20, 8], table(20, 8)),
            ("model.unknown", Dtype::F32, &[2], table(2, 1)),
            (momentum, Dtype::F32, &[20], table(20, 1)),
        ];
        let checkpoint = checkpoint(folder.path(), &written);
        let store = Store::new();
        let (document, fetched) = published(&store, &checkpoint, policy);
        assert_eq!(document["dropped"], 1, "{document}");
        let notes = document["notes"].to_string();
        assert!(notes.contains("rule 6 (\\\"model.retired.*\\\") matches no tensor"), "{notes}");
        let report = store.run(["report", "m"]).succeeded();
        assert_eq!(report["dropped"], serde_json::json!([momentum]));
        fetched.into_iter().map(|(name, tensor)| (name, tensor.bytes)).collect::<BTreeMap<_, _>>()
    });
    assert_eq!(published[0].keys().collect::<Vec<_>>(), ["model.unknown", "table.t1"]);
    assert_eq!(published[0], published[1], "whatever the trainer called it");
}

#[test]
fn captures_rename_whole_families() {
    let store = Store::new();
    let policy = "
        rule = [
            { match = 'optim.**', drop = true },
            { match = 'model.**.embedding_bags.*.weight', rename = '$2@$1' },
            { match = 'model.*.*.*', rename = '$1/$3/$2' },
        ]";
    let (_, fetched) = published(&store, &torchrec(), policy);
    let expected = read_json(&torchrec().join("expected.json"));
    for (name, source) in [
        ("t1@ebc", "model.ebc.embedding_bags.t1.weight"),
        ("bottom/bias/0", "model.bottom.0.bias"),
        ("over/weight/2", "model.over.2.weight"),
    ] {
        let wanted = expected["tensors"][source]["sha256"].as_str().unwrap();
        assert_eq!(crate::fixtures::sha256(&fetched[name].bytes), wanted, "{name}");
    }
    assert!(fetched.keys().all(|name| !name.starts_with("model") && !name.starts_with("optim")));
}
