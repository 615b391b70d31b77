//! Faults that people who publish models have reported in public of other systems, as tests that are named by what
//! they show. Those of single parsers and encoders stand beside their code.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::binary::{Run, Store, ended};
use crate::tensors::tensors;

/// A safetensors file: a header of any text, and data.
fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A name, rows and width, what fills it, and where it starts if it is a slice.
type Table<'a> = (&'a str, [usize; 2], f32, Option<[usize; 2]>);

/// A safetensors file of F32 tables, filled with one number each, and where each table's slice starts.
fn tables(tables: &[Table<'_>]) -> Vec<u8> {
    let (mut header, mut data, mut sharding) = (serde_json::Map::new(), Vec::new(), serde_json::Map::new());
    for &(name, [rows, width], fill, offsets) in tables {
        let begin = data.len();
        data.extend(std::iter::repeat_n(fill.to_le_bytes(), rows * width).flatten());
        let entry = json!({ "dtype": "F32", "shape": [rows, width], "data_offsets": [begin, data.len()] });
        header.insert(name.to_owned(), entry);
        if let Some(offsets) = offsets {
            sharding.insert(name.to_owned(), json!({ "saved_offsets": offsets }));
        }
    }
    if !sharding.is_empty() {
        let sharding = Value::Object(sharding).to_string();
        let metadata = json!({ "DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1.0", "format": "pt" });
        header.insert("__metadata__".to_owned(), metadata);
    }
    safetensors(&Value::Object(header).to_string(), &data)
}

fn index(weight_map: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<_, _> =
        weight_map.iter().map(|&(tensor, file)| (tensor.to_owned(), file.into())).collect();
    json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes()
}

/// A store, and a checkpoint's folder beside it.
struct Scene {
    store: Store,
    checkpoint: PathBuf,
}

impl Scene {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let store = Store::new();
        let checkpoint = store.folder.path().join("checkpoint");
        std::fs::create_dir(&checkpoint).unwrap();
        for (name, content) in files {
            std::fs::write(checkpoint.join(name), content).unwrap();
        }
        Self { store, checkpoint }
    }

    fn publish(&self, policy: &str) -> Run {
        let policy = self.store.policy(policy);
        self.store.publish(&self.checkpoint, &["--policy", policy.to_str().unwrap()])
    }

    /// Publishes within 64 MiB of data segment and 2 seconds, as a hostile checkpoint has to end.
    fn publish_bounded(&self) -> Run {
        let publish = self.store.publish_command(&self.checkpoint, &[]);
        let mut bounded = Command::new("sh");
        bounded.arg("-c").arg("ulimit -d 262144; exec timeout 10 \"$@\"").arg("sh");
        bounded.arg(publish.get_program()).args(publish.get_args());
        ended(bounded.current_dir(self.store.folder.path()).output().unwrap())
    }

    fn fetched(&self) -> std::collections::BTreeMap<String, crate::tensors::Fetched> {
        self.store.fetch("m").succeeded();
        tensors(&self.store.served().join("current"))
    }

    #[track_caller]
    fn refused(&self, class: &str, words: &[&str]) {
        let run = self.publish("");
        assert_eq!(run.failed(4), class, "{run:?}");
        for word in words {
            assert!(run.stderr.contains(word), "{word}: {run:?}");
        }
        assert!(!self.store.root().join("models").exists(), "nothing is stored");
    }
}

/// The id of what one set of files publishes as, without what names the checkpoint: its chunks.
fn chunks(files: &[(&str, &[u8])]) -> Vec<std::ffi::OsString> {
    let scene = Scene::new(files);
    scene.publish("rule = [{ match = '**', encode = 'int8' }]").succeeded();
    let mut names: Vec<_> = scene
        .store
        .objects("models/m/chunks")
        .iter()
        .map(|chunk| chunk.file_name().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn b14_a_checkpoint_whose_only_table_has_no_rows_goes_all_the_way() {
    let scene = Scene::new(&[("model.safetensors", &tables(&[("t", [0, 16], 0.0, None)]))]);
    scene.publish("rule = [{ match = '**', encode = 'int8' }]").succeeded();
    let fetched = scene.fetched();
    assert_eq!((fetched["t"].shape.as_slice(), fetched["t"].bytes.len()), ([0, 24].as_slice(), 0));
    assert_eq!(fetched["t"].metadata.shape, [0, 16]);
}

#[test]
fn b20_a_replicated_table_and_a_sharded_one_of_equal_content_give_the_same_chunks() {
    let whole = tables(&[("t", [8, 6], 0.5, Some([0, 0]))]);
    let by_rows = [tables(&[("t", [5, 6], 0.5, Some([0, 0]))]), tables(&[("t", [3, 6], 0.5, Some([5, 0]))])];
    let by_columns =
        [tables(&[("t", [8, 2], 0.5, Some([0, 0]))]), tables(&[("t", [8, 4], 0.5, Some([0, 2]))])];
    let names =
        ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"];
    let sharded = |shards: &[Vec<u8>; 2]| chunks(&[(names[0], &shards[0]), (names[1], &shards[1])]);
    let expected = chunks(&[("model.safetensors", &whole)]);
    assert_eq!(sharded(&by_rows), expected);
    assert_eq!(sharded(&by_columns), expected);
}

#[test]
fn b20_a_rank_that_is_missing_is_told_with_the_range_that_it_held() {
    let rank = tables(&[("t", [3, 4], 1.0, Some([5, 0]))]);
    let other = tables(&[("u", [1, 4], 1.0, Some([0, 0]))]);
    let scene = Scene::new(&[
        ("shard-00001-model-00001-of-00001.safetensors", &other),
        ("shard-00002-model-00001-of-00001.safetensors", &rank),
    ]);
    scene.refused("dcp_chunk_gap", &["\"t\"", "missing"]);
}

#[test]
fn b40_b89_sizes_that_lie_are_refused_naming_the_tensor() {
    for (entry, expected) in [
        (r#"{"dtype":"F32","shape":[1024,1024],"data_offsets":[0,4]}"#, "size_mismatch"),
        (r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#, "shape_overflow"),
        (r#"{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0]}"#, "shape_overflow"),
        (r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, "bad_shape"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, "bad_offsets"),
        (
            r#"{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551615]}"#,
            "size_mismatch",
        ),
    ] {
        let scene =
            Scene::new(&[("model.safetensors", &safetensors(&format!("{{\"t\":{entry}}}"), &[0; 4]))]);
        let run = scene.publish("");
        assert_eq!(run.failed(4), expected, "{entry}: {run:?}");
        assert!(run.stderr.contains("\"t\""), "{run:?}");
    }
}

#[test]
fn b42_a_zero_byte_in_the_headers_padding_is_told_by_its_place() {
    let header = r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let scene = Scene::new(&[("model.safetensors", &safetensors(&format!("{header}\0\0"), &[0; 4]))]);
    scene.refused("header_not_json", &["space"]);
}

#[test]
fn b46_an_index_of_another_sharding_is_refused_naming_both_sides() {
    let one = tables(&[("a", [1, 1], 1.0, None)]);
    let two = tables(&[("b", [1, 1], 1.0, None)]);
    let stale =
        index(&[("a", "model-00001-of-00004.safetensors"), ("b", "model-00003-of-00004.safetensors")]);
    let scene = Scene::new(&[
        ("model-00001-of-00002.safetensors", &one),
        ("model-00002-of-00002.safetensors", &two),
        ("model.safetensors.index.json", &stale),
    ]);
    scene.refused("index_missing_shard", &["model-00001-of-00004", "model-00001-of-00002"]);
}

#[test]
fn b47_links_into_a_hub_cache_are_followed_and_dangling_or_escaping_ones_are_not() {
    let store = Store::new();
    let model = store.folder.path().join("models--org--name");
    let snapshot = model.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir(model.join("blobs")).unwrap();
    std::fs::write(model.join("blobs/abc"), tables(&[("t", [2, 2], 1.0, None)])).unwrap();
    let link = snapshot.join("model.safetensors");
    let publish = || store.publish(&snapshot, &[]);
    symlink("../../blobs/abc", &link).unwrap();
    publish().succeeded();
    for (target, classes) in [
        ("../../blobs/gone", ["index_missing_shard", "not_found"]),
        ("../../../outside", ["index_path_escape", "index_path_escape"]),
    ] {
        std::fs::write(store.folder.path().join("outside"), tables(&[("t", [2, 2], 1.0, None)])).unwrap();
        std::fs::remove_file(&link).unwrap();
        symlink(target, &link).unwrap();
        let run = publish();
        let class: Value = run.json()["error"]["class"].clone();
        assert!(run.code == 4 || run.code == 6, "{run:?}");
        assert!(classes.iter().any(|expected| class == *expected), "{target}: {run:?}");
        assert!(run.stderr.contains("model.safetensors"), "{run:?}");
    }
}

#[test]
fn b49_equal_shards_are_no_replicas() {
    let shard = |row| tables(&[("t", [4, 4], 0.0, Some([row, 0]))]);
    let shards: Vec<_> = (0..8).map(|rank| shard(4 * rank)).collect();
    let names: Vec<_> =
        (1..=8).map(|rank| format!("shard-{rank:05}-model-00001-of-00001.safetensors")).collect();
    let files: Vec<(&str, &[u8])> =
        names.iter().zip(&shards).map(|(name, shard)| (name.as_str(), shard.as_slice())).collect();
    let scene = Scene::new(&files);
    scene.publish("").succeeded();
    assert_eq!(scene.fetched()["t"].shape, [32, 4]);
}

#[test]
fn b50_columns_are_put_in_the_order_of_their_offsets() {
    let first = tables(&[("t", [2, 1], 3.0, Some([0, 3]))]);
    let second = tables(&[("t", [2, 3], 1.0, Some([0, 0]))]);
    let scene = Scene::new(&[
        ("shard-00001-model-00001-of-00001.safetensors", &first),
        ("shard-00002-model-00001-of-00001.safetensors", &second),
    ]);
    scene.publish("").succeeded();
    let expected: Vec<u8> =
        [1.0f32, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(scene.fetched()["t"].bytes, expected);
}

#[test]
fn b52_shards_and_tensors_that_the_index_leaves_out_are_not_left_out_in_silence() {
    let (one, two) = (tables(&[("a", [1, 1], 1.0, None)]), tables(&[("b", [1, 1], 1.0, None)]));
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let scene = Scene::new(&[
        (first, &one),
        (second, &two),
        ("model.safetensors.index.json", &index(&[("a", first)])),
    ]);
    scene.refused("index_extra_tensor", &[second]);
    let both = tables(&[("a", [1, 1], 1.0, None), ("extra", [1, 1], 1.0, None)]);
    let scene = Scene::new(&[
        (first, &both),
        (second, &two),
        ("model.safetensors.index.json", &index(&[("a", first), ("b", second)])),
    ]);
    scene.refused("index_extra_tensor", &["extra"]);
}

#[test]
fn b92_lengths_are_compared_with_the_file_before_anything_is_allocated_for_them() {
    let huge = [&u64::MAX.to_le_bytes()[..], b"{"].concat();
    let large = [&99_000_000u64.to_le_bytes()[..], b"{}"].concat();
    for file in [huge, large] {
        let scene = Scene::new(&[("model.safetensors", &file)]);
        let class = scene.publish_bounded().failed(4);
        assert!(class == "header_too_large" || class == "truncated", "{class}");
    }
    // A pickle whose one string claims 2^60 bytes, and a tuple of a size that no file holds.
    for claim in [
        &b"\x80\x04\x8d\0\0\0\0\0\0\0\x10"[..],
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x04X\xff\xff\xff\x7f",
    ] {
        let scene = Scene::new(&[(".metadata", claim), ("__0_0.distcp", b"")]);
        assert_eq!(scene.publish_bounded().failed(4), "pickle_malformed");
    }
}

/// `.metadata` files that reach for what is not on the list, each in another way.
const REACHING: [(&str, &[u8], &str); 7] = [
    ("GLOBAL", b"\x80\x02cos\nsystem\n(X\x04\0\0\0touctR.", "system"),
    ("STACK_GLOBAL", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", "system"),
    ("STACK_GLOBAL from the memo", b"\x80\x04\x8c\x08builtins\x94\x8c\x04eval\x94h\0h\x01\x93.", "eval"),
    ("INST", b"\x80\x02(ios\nsystem\n.", "system"),
    ("EXT1", b"\x80\x02\x82\x01.", "EXT1"),
    ("a walk by dots", b"\x80\x04\x8c\x05torch\x8c\x0eserialization.\x93.", "serialization"),
    ("a value, not a call", b"\x80\x02}X\x01\0\0\0acbuiltins\nexec\ns.", "exec"),
];

#[test]
fn b93_b95_a_pickle_that_reaches_for_anything_is_refused_by_name_and_runs_nothing() {
    for (way, metadata, word) in REACHING {
        let scene = Scene::new(&[(".metadata", metadata), ("__0_0.distcp", b"")]);
        let run = scene.publish("");
        let class = run.failed(4);
        let classes = ["forbidden_global", "unsupported_object", "pickle_malformed"];
        assert!(classes.contains(&class.as_str()), "{way}: {run:?}");
        assert!(run.stderr.contains(word), "{way}: {run:?}");
        let mut left: Vec<_> = std::fs::read_dir(scene.store.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left.len(), 3, "the checkpoint, the policy and an empty store: {left:?}");
    }
}

#[test]
fn b100_a_whole_file_and_shards_beside_it_are_ambiguous() {
    let whole = tables(&[("a", [1, 1], 1.0, None), ("b", [1, 1], 1.0, None)]);
    let (one, two) = (tables(&[("a", [1, 1], 2.0, None)]), tables(&[("b", [1, 1], 2.0, None)]));
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let scene = Scene::new(&[
        ("model.safetensors", &whole),
        (first, &one),
        (second, &two),
        ("model.safetensors.index.json", &index(&[("a", first), ("b", second)])),
    ]);
    let run = scene.publish("");
    assert_eq!(run.code, 4, "{run:?}");
    let store = &scene.store;
    store.publish(&scene.checkpoint.join("model.safetensors"), &[]).succeeded();
    store.publish(&scene.checkpoint.join("model.safetensors.index.json"), &["--model", "n"]);
}

#[test]
fn b111_a_header_length_of_the_other_byte_order_is_refused() {
    let file = tables(&[("t", [1, 1], 1.0, None)]);
    let mut swapped = file;
    swapped[..8].reverse();
    let scene = Scene::new(&[("model.safetensors", &swapped)]);
    let class = scene.publish_bounded().failed(4);
    assert!(class == "header_too_large" || class == "truncated", "{class}");
}

/// Whatever is in a store's way by a guessed name, a store writes nothing outside itself.
#[test]
fn b97_a_link_in_the_store_leads_no_write_out_of_it() {
    let scene = Scene::new(&[("model.safetensors", &tables(&[("t", [1, 1], 1.0, None)]))]);
    let outside = scene.store.folder.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir_all(scene.store.root()).unwrap();
    symlink(&outside, scene.store.root().join("models")).unwrap();
    let run = scene.publish("");
    assert_eq!(run.failed(1), "refused", "{run:?}");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{run:?}");
}

#[test]
fn b110_nothing_is_ever_unpacked_to_disk() {
    let scene = Scene::new(&[("model.safetensors", &tables(&[("../../escape", [1, 1], 1.0, None)]))]);
    scene.refused("unsafe_name", &["escape"]);
    let left = tree(scene.store.folder.path());
    assert_eq!(left.len(), 4, "the checkpoint and its file, the policy and an empty store: {left:?}");
}

fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.push(path);
    }
    found
}
