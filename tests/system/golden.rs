//! Publish, then fetch, every fixture: tensors come out as the libraries that wrote them read them back, and tables
//! as FBGEMM quantizes them.

use serde_json::Value;

use crate::binary::Store;
use crate::fixtures::{checkpoints, data, expected, read_json, roots, sha256, torchrec};
use crate::tensors::tensors;

/// Names of torch's dtypes, as safetensors calls them.
fn safetensors_name(torch: &str) -> &str {
    match torch {
        "float64" => "F64",
        "float32" => "F32",
        "float16" => "F16",
        "bfloat16" => "BF16",
        "float8_e4m3fn" => "F8_E4M3",
        "float8_e5m2" => "F8_E5M2",
        "int64" => "I64",
        "int32" => "I32",
        "int16" => "I16",
        "int8" => "I8",
        "uint64" => "U64",
        "uint32" => "U32",
        "uint16" => "U16",
        "uint8" => "U8",
        "bool" => "BOOL",
        other => panic!("{other}"),
    }
}

fn same_shape(found: &[u64], expected: &Value) -> bool {
    expected.as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).eq(found.iter().copied())
}

#[test]
fn every_checkpoint_is_listed_as_the_library_that_wrote_it_reads_it() {
    let store = Store::new();
    for checkpoint in checkpoints() {
        let (expected, refusable) = expected(&checkpoint);
        let listed = store.run(["inspect".as_ref(), checkpoint.as_os_str()]).succeeded();
        let unreadable = listed["unreadable"].as_array().unwrap();
        assert_eq!(unreadable.len(), refusable.len(), "{checkpoint:?}");
        assert!(unreadable.iter().all(|one| refusable.iter().any(|name| one["name"] == **name)));
        let listed = listed["tensors"].as_array().unwrap();
        assert_eq!(listed.len(), expected.len(), "{checkpoint:?}");
        for tensor in listed {
            let expected = &expected[tensor["name"].as_str().unwrap()];
            assert_eq!(tensor["dtype"], safetensors_name(expected["dtype"].as_str().unwrap()));
            assert_eq!(tensor["shape"], expected["shape"]);
            assert_eq!(tensor["bytes"], expected["nbytes"]);
        }
    }
}

#[test]
fn every_checkpoint_comes_out_byte_for_byte_when_everything_is_kept() {
    for checkpoint in checkpoints() {
        let store = Store::new();
        let (expected, refusable) = expected(&checkpoint);
        let drop = |name: &String| format!("[[rule]]\nmatch = '{name}'\ndrop = true\n");
        let rules: String = refusable.iter().map(drop).collect();
        let policy = store.policy(&format!("{rules}[gates]\nnon_finite = 'allow'"));
        let published = store.publish(&checkpoint, &["--policy", policy.to_str().unwrap()]).succeeded();
        assert_eq!(published["outcome"], "published");
        store.fetch("m").succeeded();
        let fetched = tensors(&store.served().join("current"));
        assert_eq!(fetched.len(), expected.len(), "{checkpoint:?}");
        for (name, expected) in &expected {
            let tensor = &fetched[name];
            assert_eq!(sha256(&tensor.bytes), expected["sha256"].as_str().unwrap(), "{checkpoint:?} {name}");
            assert_eq!(tensor.dtype, format!("{:?}", dtype(expected)));
            assert!(same_shape(&tensor.shape, &expected["shape"]), "{name}");
        }
    }
}

/// The official library's dtype of an expected tensor.
fn dtype(expected: &Value) -> safetensors::Dtype {
    let name = safetensors_name(expected["dtype"].as_str().unwrap());
    serde_json::from_value(name.into()).unwrap()
}

#[test]
fn the_default_policy_quantizes_tables_as_fbgemm_does_and_drops_optimizer_state() {
    let store = Store::new();
    let published = store.publish(&torchrec(), &["--step", "3"]).succeeded();
    assert_eq!(published["outcome"], "published");
    store.fetch("m@prod").succeeded();
    let fetched = tensors(&store.served().join("current"));
    let expected = read_json(&torchrec().join("expected.json"));
    let kept =
        expected["tensors"].as_object().unwrap().iter().filter(|(name, _)| !name.starts_with("optim."));
    assert_eq!(fetched.len(), kept.clone().count());
    let golden = &read_json(&data().join("quantization/tables.json"))["dcp_torchrec_2rank"];
    for (name, expected) in kept {
        let tensor = &fetched[name];
        let wanted = golden.get(name).map_or(&expected["sha256"], |golden| &golden["int8_sbf32"]);
        assert_eq!(sha256(&tensor.bytes), wanted.as_str().unwrap(), "{name}");
        if golden.get(name).is_some() {
            let [rows, width] = tensor.metadata.shape[..] else { panic!("{name} is a table") };
            assert_eq!((tensor.dtype.as_str(), &tensor.shape[..]), ("U8", &[rows, width + 8][..]));
            assert_eq!(tensor.metadata.encoding.as_str(), "int8_sbf32");
        }
        assert!(same_shape(&tensor.metadata.shape, &expected["shape"]), "{name}");
    }
}

/// Encodings, and the dtype of what is stored.
const ENCODINGS: [(&str, &str); 9] = [
    ("int8_sbf32", "U8"),
    ("int8_sbf16", "U8"),
    ("int4_sbf16", "U8"),
    ("int2_sbf16", "U8"),
    ("f16", "F16"),
    ("bf16", "BF16"),
    ("f8_e4m3fn", "F8_E4M3"),
    ("f8_e5m2", "F8_E5M2"),
    ("hfp8_e4b7_max240", "U8"),
];

#[test]
fn every_golden_table_is_encoded_bit_for_bit() {
    let golden = read_json(&data().join("quantization/tables.json"));
    let golden = golden.as_object().unwrap();
    let mut seen = 0;
    for root in roots() {
        for (checkpoint, tables) in golden {
            let checkpoint = root.join("checkpoints").join(checkpoint);
            if !checkpoint.is_dir() {
                continue;
            }
            for (encoding, dtype) in ENCODINGS {
                let store = Store::new();
                let narrow = encoding.starts_with("int4") || encoding.starts_with("int2");
                let odd = if narrow { ", odd_width = 'write'" } else { "" };
                let encode = format!("{{ encoding = '{encoding}'{odd} }}");
                let policy = store.policy(&format!("rule = [{{ match = '**', encode = {encode} }}]"));
                store.publish(&checkpoint, &["--policy", policy.to_str().unwrap()]).succeeded();
                store.fetch("m").succeeded();
                let fetched = tensors(&store.served().join("current"));
                for (name, wanted) in tables.as_object().unwrap() {
                    let wanted = wanted[encoding].as_str().unwrap();
                    assert_eq!(sha256(&fetched[name].bytes), wanted, "{checkpoint:?} {name} {encoding}");
                    assert_eq!(fetched[name].dtype, dtype);
                    assert_eq!(fetched[name].metadata.encoding.as_str(), encoding);
                    seen += 1;
                }
            }
        }
    }
    assert!(seen >= 4 * ENCODINGS.len(), "{seen}");
}

#[test]
fn publishing_again_gives_the_same_snapshot_and_stores_nothing_new() {
    let store = Store::new();
    let first = store.publish(&torchrec(), &["--step", "3", "--threads", "1"]).succeeded();
    assert!(first["bytes_stored"].as_u64().unwrap() > 0);
    let before = store.lasting_objects("");
    let elsewhere = store.folder.path().join("copy of it");
    crate::fixtures::copy_folder(&torchrec(), &elsewhere);
    let again = store.publish(&elsewhere, &["--step", "3", "--threads", "7"]).succeeded();
    assert_eq!(again["snapshot"], first["snapshot"]);
    assert_eq!(again["outcome"], "unchanged");
    assert_eq!(again["bytes_stored"], 0);
    assert_eq!(again["bytes_reused"], first["bytes_stored"]);
    assert_eq!(store.lasting_objects(""), before);
}

#[test]
fn a_single_file_may_be_renamed() {
    let store = Store::new();
    let file = data().join("checkpoints/safetensors_single/model.safetensors");
    let policy = store.policy("[gates]\nnon_finite = 'allow'");
    let policy = ["--policy", policy.to_str().unwrap()];
    let first = store.publish(&file, &policy).succeeded();
    let renamed = store.folder.path().join("renamed.bin");
    std::fs::copy(&file, &renamed).unwrap();
    assert_eq!(store.publish(&renamed, &policy).succeeded()["snapshot"], first["snapshot"]);
}
