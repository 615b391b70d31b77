//! Gates: what fails one is stored but on no channel, and the error says which tensor, which rows, what figure.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::binary::Store;
use crate::fixtures::torchrec;

/// A safetensors file with one F32 table of `width` columns.
fn table(folder: &Path, name: &str, width: usize, values: &[f32]) -> PathBuf {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let shape = [values.len() / width, width];
    let header =
        json!({ name: { "dtype": "F32", "shape": shape, "data_offsets": [0, bytes.len()] } }).to_string();
    let path = folder.join(format!("{}.safetensors", values.len()));
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&path, [&length[..], header.as_bytes(), &bytes].concat()).unwrap();
    path
}

const TABLE: &str = "ebc.embedding_bags.t.weight";

#[test]
fn non_finite_values_quarantine_the_snapshot_unless_they_are_allowed() {
    let store = Store::new();
    let good = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let mut values = vec![0.5f32; 400];
    (values[83], values[160]) = (f32::NAN, f32::INFINITY);
    let bad = table(store.folder.path(), TABLE, 4, &values);

    let run = store.publish(&bad, &["--step", "2"]);
    assert_eq!(run.failed(3), "rejected_by_gate");
    let document = run.json();
    assert_eq!(document["outcome"], "quarantined");
    for word in [TABLE, "non_finite", "20, 40", "2 of 400"] {
        assert!(run.stderr.contains(word), "{word}: {run:?}");
    }
    let id = document["snapshot"].as_str().unwrap();
    let latest = store.fetch("m").succeeded();
    assert_eq!(latest["snapshot"], good["snapshot"], "the channel stays where it was");
    store.fetch(&format!("m@{id}")).succeeded();
    let report = store.run(["report", id]).succeeded();
    assert_eq!(report["outcome"], "rejected");
    assert_eq!(report["gates"][0]["findings"][0]["rows"], json!([20, 40]));
    let listed = store.run(["snapshots", "m"]).succeeded();
    assert_eq!(listed["snapshots"][1]["gates"], "rejected");
    assert_eq!(store.run(["promote", &format!("m@{id}")]).failed(3), "rejected_by_gate");

    let policy = store.policy(
        "[[rule]]\nmatch = '**.embedding_bags.*.weight'\nencode = 'int8'\n[gates]\nnon_finite = 'allow'",
    );
    let allowed = store.publish(&bad, &["--step", "2", "--policy", policy.to_str().unwrap()]).succeeded();
    assert_eq!(allowed["outcome"], "published");
    let report = store.run(["report", "m@prod"]).succeeded();
    assert_eq!(report["outcome"], "allowed");
}

#[test]
fn the_same_snapshot_may_be_judged_again_under_other_gates() {
    let store = Store::new();
    let bad = table(store.folder.path(), "dense", 4, &[1.0, f32::NAN, 2.0, 3.0]);
    let strict = store.policy("");
    let lenient = store.policy("[gates]\nnon_finite = 'allow'");
    let run = store.publish(&bad, &["--policy", strict.to_str().unwrap()]);
    assert_eq!(run.failed(3), "rejected_by_gate");
    let allowed = store.publish(&bad, &["--policy", lenient.to_str().unwrap()]).succeeded();
    assert_eq!(allowed["snapshot"], run.json()["snapshot"], "gates are no part of a snapshot's id");
    assert_eq!(allowed["outcome"], "published");
    store.run(["verify"]).succeeded();
}

#[test]
fn values_that_overflow_when_encoded_are_rejected() {
    let store = Store::new();
    let mut values = vec![1.0f32; 64];
    values[17] = 1e6;
    let bad = table(store.folder.path(), "over.weight", 8, &values);
    let policy = store.policy("[[rule]]\nmatch = '**'\nencode = 'f16'");
    let run = store.publish(&bad, &["--policy", policy.to_str().unwrap()]);
    assert_eq!(run.failed(3), "rejected_by_gate");
    assert!(run.stderr.contains("overflow") && run.stderr.contains("first: 2"), "{run:?}");
}

#[test]
fn rows_of_one_element_are_rows_and_parts_of_a_row_are_none() {
    let store = Store::new();
    let publish = |file: &Path, encoding: &str| {
        let policy = store.policy(&format!("[[rule]]\nmatch = '**'\nencode = '{encoding}'"));
        let run = store.publish(file, &["--policy", policy.to_str().unwrap()]);
        assert_eq!(run.failed(3), "rejected_by_gate");
        store.run(["report", run.json()["snapshot"].as_str().unwrap()]).succeeded()
    };
    let mut values = vec![0.5f32; 10_000];
    (values[5000], values[5001], values[7000]) = (f32::NAN, f32::INFINITY, 1e6);
    let narrow = table(store.folder.path(), "t", 1, &values);
    for (encoding, rows, overflowing) in
        [("keep", json!([5000, 5001]), 0), ("f16", json!([5000, 5001, 7000]), 1)]
    {
        let report = publish(&narrow, encoding);
        assert_eq!(report["gates"][0]["findings"][0]["rows"], rows);
        assert_eq!(report["tensors"][0]["non_finite_rows"], 2);
        assert_eq!(report["tensors"][0]["overflow_rows"], overflowing);
    }
    let width = (1 << 20) + 1;
    let mut values = vec![0.5f32; 2 * width];
    (values[width], values[width + 9000]) = (f32::NAN, 1e6);
    let wide = table(store.folder.path(), "t", width, &values);
    for encoding in ["keep", "f16"] {
        let finding = &publish(&wide, encoding)["gates"][0]["findings"][0];
        assert_eq!(finding["rows"], json!([]));
        assert!(!finding["message"].as_str().unwrap().contains("row"), "{finding}");
    }
}

#[test]
fn a_bound_on_the_reconstruction_error_is_kept() {
    let store = Store::new();
    for (gate, figure) in [("max_rms_error", "relative RMS"), ("max_abs_error", "largest error")] {
        let tight = store
            .policy(&format!("rule = [{{ match = '**.weight', encode = 'int8' }}]\n[gates]\n{gate} = 1e-9"));
        let run = store.publish(&torchrec(), &["--policy", tight.to_str().unwrap()]);
        assert_eq!(run.failed(3), "rejected_by_gate");
        assert!(run.stderr.contains(gate) && run.stderr.contains(figure), "{run:?}");
        let loose = store
            .policy(&format!("rule = [{{ match = '**.weight', encode = 'int8' }}]\n[gates]\n{gate} = 0.1"));
        store.publish(&torchrec(), &["--policy", loose.to_str().unwrap()]).succeeded();
    }
}

#[test]
fn tables_of_one_row_of_no_rows_and_of_one_column_are_published() {
    let store = Store::new();
    for values in [&[1.0f32, 2.0, 3.0, 4.0][..], &[], &[7.0; 4]] {
        let width = if values.is_empty() || values[0] < 2.0 { 4 } else { 1 };
        let file = table(store.folder.path(), TABLE, width, values);
        let published = store.publish(&file, &[]).succeeded();
        assert_eq!(published["outcome"], "published");
        store.fetch("m").succeeded();
        let fetched = crate::tensors::tensors(&store.served().join("current"));
        let rows = (values.len() / width) as u64;
        assert_eq!(fetched[TABLE].shape, [rows, width as u64 + 8]);
    }
}
