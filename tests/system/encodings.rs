//! Encodings from end to end: what is published is read back by its own description alone, and compared with what
//! went in. The cases are mistakes that other quantizers have made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::Layout;

use crate::binary::{Run, Store};
use crate::tensors::{Fetched, tensors};

/// A safetensors file with one table a name, of F32 or of F64.
fn checkpoint(folder: &Path, tables: &[(&str, usize, Vec<f64>)], dtype: &str) -> PathBuf {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, width, values) in tables {
        let begin = data.len();
        for &value in values {
            match dtype {
                "F64" => data.extend(value.to_le_bytes()),
                _ => data.extend(narrow(value).to_le_bytes()),
            }
        }
        let shape = [values.len() / width, *width];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] });
        header.insert((*name).to_owned(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let path = folder.join("tables.safetensors");
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
    path
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to binary32 is the point")]
fn narrow(value: f64) -> f32 {
    value as f32
}

/// Numbers from -1 to 1, the same in every run.
fn numbers(count: usize) -> Vec<f64> {
    (0..count).map(|n| (n as f64 * 0.737).sin()).collect()
}

/// Publishes under one rule for everything.
fn publish(store: &Store, checkpoint: &Path, rule: &str) -> Run {
    let policy = store.policy(&format!("[[rule]]\nmatch = '**'\n{rule}\n"));
    store.publish(checkpoint, &["--policy", policy.to_str().unwrap()])
}

/// Publishes, fetches and reads back.
fn published(store: &Store, checkpoint: &Path, rule: &str) -> BTreeMap<String, Fetched> {
    publish(store, checkpoint, rule).succeeded();
    store.fetch("m").succeeded();
    tensors(&store.served().join("current"))
}

/// A table's rows, decoded by what the published file says about it.
fn decoded(table: &Fetched) -> Vec<Vec<f32>> {
    let metadata = &table.metadata;
    let [rows, width] = metadata.shape[..] else { panic!("{:?} is a table", metadata.shape) };
    let form = metadata.form();
    let size = form.row_bytes(width, metadata.source_dtype).unwrap();
    assert_eq!(table.bytes.len() as u64, rows * size);
    let rows = table.bytes.chunks(usize::try_from(size).unwrap()).map(|row| {
        let mut values = vec![0.0; usize::try_from(width).unwrap()];
        assert!(form.decode_row(metadata.source_dtype, row, &mut values));
        values
    });
    rows.collect()
}

/// No element of a row is further off than half a step of that row, and what binary16 makes of scale and bias.
fn check_steps(rows: &[Vec<f32>], values: &[f64], steps: f64) {
    for (row, values) in rows.iter().zip(values.chunks(rows[0].len())) {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min).min(0.0);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(0.0);
        let step = (max - min) / steps;
        for (decoded, value) in row.iter().zip(values) {
            let error = (f64::from(*decoded) - value).abs();
            assert!(error <= step * 0.5 + 2e-3, "{decoded} for {value}, with steps of {step}");
        }
    }
}

#[test]
fn b21_tables_of_int8_keep_rows_and_width_and_are_off_by_half_a_step_at_most() {
    let store = Store::new();
    let tables = [("a", 5, numbers(35)), ("b", 64, numbers(64_000))];
    let file = checkpoint(store.folder.path(), &tables, "F32");
    let fetched = published(&store, &file, "encode = 'int8'");
    for (name, width, values) in &tables {
        let rows = decoded(&fetched[*name]);
        assert_eq!((rows.len(), rows[0].len()), (values.len() / width, *width));
        for (row, values) in rows.iter().zip(values.chunks(*width)) {
            let min = values.iter().copied().fold(f64::INFINITY, f64::min);
            let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            for (decoded, value) in row.iter().zip(values) {
                assert!((f64::from(*decoded) - value).abs() <= (max - min) / 255.0 * 0.5001 + 1e-7);
            }
        }
    }
}

#[test]
fn b56_tiny_ranges_and_equal_rows_decode_and_a_range_that_overflows_is_refused() {
    let store = Store::new();
    let tiny = f64::from(f32::from_bits(713));
    let calm = [vec![0.0, tiny, 0.0, tiny], vec![0.3; 4], vec![-0.1; 4], vec![-0.0; 4]].concat();
    let file = checkpoint(store.folder.path(), &[("t", 4, calm.clone())], "F32");
    for encoding in ["int8_sbf32", "int8_sbf16", "int4", "int2"] {
        let fetched = published(&store, &file, &format!("encode = '{encoding}'"));
        let rows = decoded(&fetched["t"]).concat();
        for (decoded, value) in rows.iter().zip(&calm) {
            let exact = encoding == "int8_sbf32" && value.abs() > 0.05;
            // The value itself was rounded to F32 when it was written.
            let bound = if exact { 2e-8 } else { 1e-4 };
            assert!((f64::from(*decoded) - value).abs() <= bound, "{encoding} {decoded} {value}");
        }
    }
    let wild = [vec![1.0, 2.0, 3.0, 4.0], vec![3e38, -3e38, 0.0, 1.0]].concat();
    let file = checkpoint(store.folder.path(), &[("t", 4, wild)], "F32");
    for encoding in ["int8_sbf32", "int8_sbf16", "int4", "int2"] {
        let run = publish(&store, &file, &format!("encode = '{encoding}'"));
        assert_eq!(run.failed(3), "rejected_by_gate");
        assert!(run.stderr.contains("overflow when encoded in 1 rows (first: 1)"), "{run:?}");
    }
}

#[test]
fn b58_a_layout_is_one_everywhere_and_stands_in_the_metadata_and_its_padding_is_zero() {
    let widths = [3usize, 6, 10, 16, 33];
    let names = ["d03", "d06", "d10", "d16", "d33"];
    let tables: Vec<_> =
        names.iter().zip(widths).map(|(&name, width)| (name, width, numbers(width * 9))).collect();
    for encoding in ["int8_sbf32", "int8_sbf16", "int4", "int2"] {
        let odd = if encoding.len() == 4 { ", odd_width = 'write'" } else { "" };
        let store = Store::new();
        let file = checkpoint(store.folder.path(), &tables, "F32");
        let trailing = published(&store, &file, &format!("encode = {{ encoding = '{encoding}'{odd} }}"));
        for alignment in [1usize, 4, 16, 64] {
            let rule = format!(
                "encode = {{ encoding = '{encoding}', layout = 'leading', row_alignment = {alignment}{odd} }}"
            );
            let leading = published(&store, &file, &rule);
            for (name, ..) in &tables {
                let (plain, table) = (&trailing[*name], &leading[*name]);
                assert_eq!(table.metadata.layout, Layout::Leading);
                assert_eq!(table.metadata.row_alignment, alignment as u64);
                let parameters = if encoding == "int8_sbf32" { 8 } else { 4 };
                let size = usize::try_from(plain.shape[1]).unwrap();
                let aligned = size.next_multiple_of(alignment);
                assert_eq!(table.shape, [9, aligned as u64], "{encoding} {name}");
                let rows = plain.bytes.chunks(size).zip(table.bytes.chunks(aligned));
                for (plain, row) in rows {
                    let (codes, behind) = plain.split_at(size - parameters);
                    let padding = vec![0; aligned - size];
                    assert_eq!(row, [behind, codes, &padding].concat());
                }
                assert_eq!(decoded(plain), decoded(table));
            }
        }
    }
}

#[test]
fn b59_odd_widths_are_refused_before_any_work_with_table_width_and_rule() {
    let store = Store::new();
    for (encoding, width) in [("int4", 1), ("int4", 3), ("int4", 7), ("int2", 5)] {
        let file = checkpoint(store.folder.path(), &[("some.table", width, numbers(width * 4))], "F32");
        let run = publish(&store, &file, &format!("encode = '{encoding}'"));
        assert_eq!(run.failed(2), "policy_mismatch");
        for word in ["some.table", &format!("width of {width} "), "rule 1", "\"pad\"", "\"write\""] {
            assert!(run.stderr.contains(word), "{word}: {run:?}");
        }
        let chunks = store.root().join("models");
        assert!(!chunks.exists(), "nothing was stored");
    }
}

#[test]
fn b59_odd_widths_are_padded_or_written_as_told_and_decode_right() {
    for (encoding, width, padded, steps) in
        [("int4", 1, 2, 15.0), ("int4", 3, 4, 15.0), ("int4", 7, 8, 15.0), ("int2", 5, 8, 3.0)]
    {
        let store = Store::new();
        let values = numbers(width * 4);
        let file = checkpoint(store.folder.path(), &[("t", width, values.clone())], "F32");
        for (odd, stored) in [("pad", Some(padded)), ("write", None)] {
            let rule = format!("encode = {{ encoding = '{encoding}', odd_width = '{odd}' }}");
            let fetched = &published(&store, &file, &rule)["t"];
            assert_eq!(fetched.metadata.shape, [4, width as u64]);
            assert_eq!(fetched.metadata.stored_width, stored);
            let packed = stored.unwrap_or(width as u64).div_ceil(if encoding == "int4" { 2 } else { 4 });
            assert_eq!(fetched.shape, [4, packed + 4]);
            check_steps(&decoded(fetched), &values, steps);
            let inspected = store.run(["inspect", "m@prod"]).succeeded();
            assert_eq!(inspected["tensors"][0]["stored_width"], json!(stored));
            assert_eq!(inspected["tensors"][0]["shape"], json!(fetched.shape));
            assert_eq!(inspected["tensors"][0]["logical_shape"], json!([4, width]));
        }
    }
    let store = Store::new();
    let file = checkpoint(store.folder.path(), &[("t", 6, numbers(24))], "F32");
    assert_eq!(published(&store, &file, "encode = 'int8'")["t"].shape, [4, 14]);
}

#[test]
fn padding_a_table_gives_what_padding_the_checkpoint_gives() {
    let store = Store::new();
    let values = numbers(7 * 20);
    let file = checkpoint(store.folder.path(), &[("t", 7, values.clone())], "F32");
    let padded = published(&store, &file, "encode = { encoding = 'int4', odd_width = 'pad' }");
    let wide: Vec<f64> = values.chunks(7).flat_map(|row| row.iter().copied().chain([0.0])).collect();
    let file = checkpoint(store.folder.path(), &[("t", 8, wide)], "F32");
    let plain = published(&store, &file, "encode = 'int4'");
    assert_eq!(padded["t"].bytes, plain["t"].bytes);
}

#[test]
fn doubles_are_encoded_from_binary32_and_the_report_says_so() {
    let store = Store::new();
    let values = numbers(32);
    let doubles = checkpoint(store.folder.path(), &[("t", 8, values.clone())], "F64");
    for rule in ["encode = 'int8'", "encode = 'int4'", "dtype = 'f32'", "dtype = 'bf16'"] {
        let fetched = published(&store, &doubles, rule);
        assert_eq!(fetched["t"].metadata.source_dtype, Dtype::F64);
        let report = store.run(["report", "m"]).succeeded();
        let note = report["notes"][0].as_str().unwrap();
        assert!(note.starts_with("t: F64 is rounded to F32 before encoding"), "{note}");
        let other = Store::new();
        let singles = checkpoint(other.folder.path(), &[("t", 8, values.clone())], "F32");
        assert_eq!(fetched["t"].bytes, published(&other, &singles, rule)["t"].bytes, "{rule}");
    }
    let large = checkpoint(store.folder.path(), &[("t", 2, vec![1.0, 1e39])], "F64");
    assert_eq!(publish(&store, &large, "dtype = 'f32'").failed(3), "rejected_by_gate");
}

#[test]
fn what_saturates_is_counted_and_noted_and_published() {
    let store = Store::new();
    let file = checkpoint(store.folder.path(), &[("t", 2, vec![1.0, 500.0, 3.0, -1e6, 0.5, 2.0])], "F32");
    let fetched = published(&store, &file, "dtype = 'f8_e4m3fn'");
    assert_eq!(decoded(&fetched["t"]).concat(), [1.0, 448.0, 3.0, -448.0, 0.5, 2.0]);
    let report = store.run(["report", "m"]).succeeded();
    assert_eq!(report["outcome"], "passed");
    assert_eq!(report["tensors"][0]["saturated_elements"], 2);
    assert_eq!(report["tensors"][0]["saturated_rows"], 2);
    assert!(report["notes"][0].as_str().unwrap().contains("2 of 6 values, in 2 rows"), "{report}");
    let run = publish(&store, &file, "dtype = 'f8_e5m2'");
    assert_eq!(run.failed(3), "rejected_by_gate");
}
