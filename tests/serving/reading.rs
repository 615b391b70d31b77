//! Real snapshots, read in place: every tensor, and every row of every encoding, is what the field's own libraries make
//! of it.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::snapshot::MANIFEST_FILE;
use weighbridge_snapshots::reader::{Options, Row, Table, Version};

use crate::binary::{Store, ended};
use crate::fixtures::{checkpoints, expected, roots, sha256, torchrec};

/// Publishes under this policy, fetches, and opens what was fetched.
fn published(store: &Store, checkpoint: &Path, policy: &str) -> Version {
    let policy = store.policy(&format!("{policy}\n[gates]\nnon_finite = 'allow'"));
    store.publish(checkpoint, &["--policy", policy.to_str().unwrap()]).succeeded();
    store.fetch("m").succeeded();
    Version::open(&store.served().join("current"), &Options { verify: true, ..Options::default() }).unwrap()
}

/// The bits, all NaN alike.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

#[test]
fn every_tensor_of_every_checkpoint_is_read_byte_for_byte() {
    for checkpoint in checkpoints() {
        let store = Store::new();
        let (expected, refusable) = expected(&checkpoint);
        let drop = |name: &String| format!("[[rule]]\nmatch = '{name}'\ndrop = true\n");
        let version = published(&store, &checkpoint, &refusable.iter().map(drop).collect::<String>());
        assert_eq!(version.tensors().count(), expected.len(), "{checkpoint:?}");
        for (name, expected) in &expected {
            let tensor = version.tensor(name).unwrap();
            assert_eq!(sha256(tensor.bytes()), expected["sha256"].as_str().unwrap(), "{checkpoint:?} {name}");
            assert_eq!(serde_json::json!(tensor.described().shape), expected["shape"], "{name}");
            let is_table = tensor.described().shape.len() == 2;
            assert_eq!(version.table(name).is_ok(), is_table, "{name}");
            if tensor.dtype() == Dtype::F32 {
                let values: &[f32] = tensor.values().unwrap();
                assert_eq!(size_of_val(values), tensor.bytes().len());
                let rows = is_table.then(|| version.table(name).unwrap()).into_iter();
                for table in rows.filter(|table| table.rows() > 0) {
                    let mut decoded = vec![0.0; values.len()];
                    let all: Vec<_> = (0..table.rows()).collect();
                    table.decode_rows(&all, &mut decoded).unwrap();
                    assert_eq!(bits(&decoded), bits(values), "{name}");
                }
            }
        }
    }
}

/// Every row of the golden files, in every encoding: its bytes, what they decode to, and what the libraries' own
/// operators decode them to where that is kept.
#[test]
fn every_golden_row_is_read_and_decoded_bit_for_bit() {
    let (mut rows, mut dequantized) = (0, 0);
    let files = roots().into_iter().flat_map(|root| {
        ["edge.safetensors", "random.safetensors"].map(|file| root.join("quantization").join(file))
    });
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        for &encoding in Encoding::ALL {
            let odd = if encoding.width_multiple() > 1 { ", odd_width = 'write'" } else { "" };
            let encode = format!("{{ encoding = '{}'{odd} }}", encoding.as_str());
            let rules = format!(
                "rule = [\n{{ match = '*/input', encode = {encode} }},\n{{ match = '**', drop = true }} ]"
            );
            let store = Store::new();
            let version = published(&store, &file, &rules);
            for tensor in version.tensors() {
                let name = tensor.described().name.as_str();
                let golden_name = name.replace("input", encoding.as_str());
                let Ok(wanted) = golden.tensor(&golden_name) else { continue };
                let decoded = check_rows(&version.table(name).unwrap(), encoding, wanted.data());
                rows += version.table(name).unwrap().rows();
                if let Ok(wanted) = golden.tensor(&format!("{golden_name}.dequant")) {
                    let values = wanted.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    assert_eq!(bits(&decoded), bits(&values.collect::<Vec<_>>()), "{golden_name}");
                    dequantized += 1;
                }
            }
        }
    }
    assert!(rows > 5000 && dequantized > 2, "{rows} rows, {dequantized} dequantized");
}

/// That the table's rows are `wanted`, and decode to what those bytes decode to; which is returned.
fn check_rows(table: &Table<'_>, encoding: Encoding, wanted: &[u8]) -> Vec<f32> {
    let size = wanted.len() / usize::try_from(table.rows()).unwrap();
    let mut all = Vec::new();
    for (row, bytes) in (0..).zip(wanted.chunks(size)) {
        assert_eq!(table.row(row).unwrap(), Some(bytes), "{encoding:?} {row}");
        let (mut decoded, mut expected) = (vec![0.0; table.width()], vec![1.0; table.width()]);
        assert_eq!(table.decode_row(row, &mut decoded).unwrap(), Row::Kept);
        assert!(Form::plain(encoding).decode_row(Dtype::F32, bytes, &mut expected));
        assert_eq!(bits(&decoded), bits(&expected), "{encoding:?} {row}");
        all.extend(decoded);
    }
    all
}

/// Leading, aligned and padded rows, and those of pruned tables, decode to what plain ones do.
#[test]
fn a_tables_rows_are_the_same_in_every_layout_and_pruned() {
    let checkpoint = tempfile::tempdir().unwrap();
    crate::fixtures::copy_folder(&torchrec(), checkpoint.path());
    let name = "model.ebc.embedding_bags.t1.weight";
    let kept: Vec<u64> = (0..2000).filter(|row| row % 7 == 3).collect();
    let lines: Vec<_> = kept.iter().map(ToString::to_string).collect();
    std::fs::write(checkpoint.path().join("kept.ids"), lines.join("\n")).unwrap();
    let mut by_encoding = BTreeMap::new();
    for encoding in
        ["keep", "f16", "f8_e4m3fn", "hfp8_e4b7_max240", "int8_sbf32", "int8_sbf16", "int4", "int2"]
    {
        let row_wise = encoding.starts_with("int");
        let leading = "layout = 'leading', row_alignment = 32";
        let layouts =
            if row_wise { vec![String::new(), format!(", {leading}")] } else { vec![String::new()] };
        for layout in layouts {
            for prune in ["", ", keep_rows = 'kept.ids'"] {
                let rules = format!(
                    "rule = [\n{{ match = '{name}', encode = {{ encoding = '{encoding}'{layout} }}{prune} }},\n\
                     {{ match = '**', drop = true }} ]"
                );
                let store = Store::new();
                let version = published(&store, checkpoint.path(), &rules);
                let table = version.table(name).unwrap();
                assert_eq!((table.rows(), table.width()), (2000, 16), "{rules}");
                let mut decoded = vec![7.0; 2000 * 16];
                let pruned = table.decode_rows(&(0..2000).collect::<Vec<_>>(), &mut decoded).unwrap();
                assert_eq!(pruned, if prune.is_empty() { 0 } else { 2000 - kept.len() });
                let plain: &Vec<f32> = by_encoding.entry(encoding).or_insert_with(|| decoded.clone());
                for (row, (found, plain)) in (0..).zip(decoded.chunks(16).zip(plain.chunks(16))) {
                    let whole = prune.is_empty() || kept.binary_search(&row).is_ok();
                    let expected = if whole { plain } else { &[0.0; 16] };
                    assert_eq!(bits(found), bits(expected), "row {row}: {rules}");
                    assert_eq!(table.row(row).unwrap().is_some(), whole);
                }
                // A real table: rows are not all zeros, and decode to about what was kept.
                assert!(plain.iter().any(|value| *value != 0.0));
            }
        }
    }
    assert_eq!(by_encoding.len(), 8);
}

#[test]
fn artifacts_are_read_by_their_paths() {
    let checkpoint = tempfile::tempdir().unwrap();
    crate::fixtures::copy_folder(&torchrec(), checkpoint.path());
    std::fs::create_dir_all(checkpoint.path().join("tokenizer/empty")).unwrap();
    std::fs::write(checkpoint.path().join("tokenizer/words.txt"), "a b c").unwrap();
    std::fs::write(checkpoint.path().join("tokenizer/empty/none"), "").unwrap();
    let store = Store::new();
    let rules = "rule = [{ match = 'optim.**', drop = true }]\n[artifacts]\ninclude = ['tokenizer/**']";
    let version = published(&store, checkpoint.path(), rules);
    assert_eq!(version.file("tokenizer/words.txt"), Some(&b"a b c"[..]));
    assert_eq!(version.file("tokenizer/empty/none"), Some(&[][..]));
    assert_eq!((version.file("tokenizer"), version.file("snapshot.json")), (None, None));
    let names: Vec<_> = version.manifest().files.iter().map(|file| file.name.as_str()).collect();
    assert!(names.iter().all(|name| version.file(name).is_some()), "{names:?}");
}

/// A publisher of a later version may say more of a snapshot: what it said stays as it was, to the last byte.
#[test]
fn a_manifest_that_says_more_is_kept_as_it_is() {
    let store = Store::new();
    let published = store.publish(&torchrec(), &[]).succeeded();
    let folder = store.root().join("models/m/snapshots");
    let manifest = std::fs::read(folder.join(published["snapshot"].as_str().unwrap())).unwrap();
    let mut more = b"{\"a_later_field\":{\"n\":1.50},".to_vec();
    more.extend_from_slice(manifest.strip_prefix(b"{").unwrap());
    let id = SnapshotId::of(&more).to_string();
    std::fs::write(folder.join(&id), &more).unwrap();
    let fetch = || {
        let mut command = store.fetch_command(&format!("m@{id}"));
        ended(command.output().unwrap()).succeeded()
    };
    fetch();
    let current = store.served().join("current");
    assert_eq!(std::fs::read(current.join(MANIFEST_FILE)).unwrap(), more);
    let version = Version::open(&current, &Options { verify: true, ..Options::default() }).unwrap();
    assert_eq!(version.id().to_string(), id);
    let again = fetch();
    assert_eq!((again["bytes_read"].as_u64(), &again["bytes_reused"]), (Some(0), &again["bytes"]));
}
