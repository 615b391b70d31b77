//! The reader of distributed checkpoints on real metadata, whole, altered and mutated.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::read::torch_item;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

fn open_at(path: &Path) -> Result<Checkpoint> {
    open(Source::open(path)?)
}

/// A folder with this `.metadata`, and empty space where its data files are.
fn folder(metadata: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(METADATA), metadata).unwrap();
    for name in ["__0_0.distcp", "__1_0.distcp"] {
        std::fs::File::create(folder.path().join(name)).unwrap().set_len(100_000).unwrap();
    }
    folder
}

fn open_metadata(metadata: &[u8]) -> Result<Checkpoint> {
    open_at(folder(metadata).path())
}

/// As many pickle opcodes as the tests need, written the plainest way.
mod write {
    pub(super) fn text(text: &str) -> Vec<u8> {
        let length = u32::try_from(text.len()).unwrap();
        [b"X", &length.to_le_bytes()[..], text.as_bytes()].concat()
    }

    pub(super) fn int(value: i64) -> Vec<u8> {
        [&b"\x8a\x08"[..], &value.to_le_bytes()].concat()
    }

    pub(super) fn size(values: &[i64]) -> Vec<u8> {
        let values: Vec<_> = values.iter().map(|&value| int(value)).collect();
        [b"ctorch\nSize\n(", &values.concat()[..], b"t\x85R"].concat()
    }

    pub(super) fn list(values: &[Vec<u8>]) -> Vec<u8> {
        [b"](", &values.concat()[..], b"e"].concat()
    }

    pub(super) fn dict(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        let pairs: Vec<_> = pairs.iter().map(|(key, value)| [&key[..], value].concat()).collect();
        [b"}(", &pairs.concat()[..], b"u"].concat()
    }

    pub(super) fn object(class: &str, fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let module = if class == "_StorageInfo" { "filesystem" } else { "metadata" };
        let head = format!("ctorch.distributed.checkpoint.{module}\n{class}\n)");
        let fields: Vec<_> = fields.iter().map(|(name, value)| (text(name), value.clone())).collect();
        [head.as_bytes(), b"\x81", &dict(&fields), b"b"].concat()
    }

    pub(super) fn properties(dtype: &str, layout: &str) -> Vec<u8> {
        let head = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\n";
        let layout =
            [b"\nctorch.serialization\n_get_layout\n", &text(layout)[..], b"\x85R\x89N\x89tb"].concat();
        [head, dtype.as_bytes(), &layout].concat()
    }

    /// A tensor of chunks, each by offsets and sizes.
    pub(super) fn tensor(properties: Vec<u8>, shape: &[i64], chunks: &[(&[i64], &[i64])]) -> Vec<u8> {
        let chunks: Vec<_> = chunks
            .iter()
            .map(|(offsets, sizes)| {
                object("ChunkStorageMetadata", &[("offsets", size(offsets)), ("sizes", size(sizes))])
            })
            .collect();
        let fields = [("properties", properties), ("size", size(shape)), ("chunks", list(&chunks))];
        object("TensorStorageMetadata", &fields)
    }

    pub(super) fn f32(shape: &[i64], chunks: &[(&[i64], &[i64])]) -> Vec<u8> {
        tensor(properties("float32", "torch.strided"), shape, chunks)
    }

    pub(super) fn index(name: &str, offset: &[i64]) -> Vec<u8> {
        object("MetadataIndex", &[("fqn", text(name)), ("offset", size(offset)), ("index", int(0))])
    }

    pub(super) fn info(path: &str, offset: i64, length: i64) -> Vec<u8> {
        let fields = [("relative_path", text(path)), ("offset", int(offset)), ("length", int(length))];
        object("_StorageInfo", &fields)
    }

    pub(super) fn metadata(tensors: &[(&str, Vec<u8>)], items: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        let tensors: Vec<_> = tensors.iter().map(|(name, entry)| (text(name), entry.clone())).collect();
        let fields = [("state_dict_metadata", dict(&tensors)), ("storage_data", dict(items))];
        [b"\x80\x02", &object("Metadata", &fields)[..], b"."].concat()
    }
}

/// One tensor `t` of 4 rows, in one item with this place.
fn one(entry: Vec<u8>, place: Vec<u8>) -> Vec<u8> {
    write::metadata(&[("t", entry)], &[(write::index("t", &[0]), place)])
}

fn refusal(metadata: &[u8]) -> (Class, String) {
    let error = open_metadata(metadata).unwrap_err();
    assert!(error.file().is_some(), "{error}");
    (error.class(), error.to_string())
}

#[test]
fn real_checkpoints_are_listed_and_located() {
    for (name, tensors) in [("nasty/cases/dcp_valid_two_ranks", 2), ("checkpoints/dcp_strided_dtypes", 22)] {
        let checkpoint = open_at(&data(name)).unwrap();
        assert_eq!((checkpoint.format, checkpoint.tensors.len()), (Format::Dcp, tensors));
        assert!(checkpoint.tensors.is_sorted_by(|a, b| a.name < b.name));
        for tensor in &checkpoint.tensors {
            for slice in &tensor.slices {
                let Location::TorchItem { file, offset, length, .. } = &slice.location else {
                    panic!("{slice:?}")
                };
                torch_item::locate(file, *offset, *length, tensor.dtype, &slice.sizes).unwrap();
            }
        }
    }
}

#[test]
fn a_transposed_tensor_keeps_its_strides() {
    let checkpoint = open_at(&data("checkpoints/dcp_strided_dtypes")).unwrap();
    let tensor = checkpoint.tensors.iter().find(|tensor| tensor.name.as_str() == "transposed").unwrap();
    assert_eq!(tensor.shape, [24, 40]);
    let Location::TorchItem { file, offset, length, .. } = &tensor.slices[0].location else { panic!() };
    let found = torch_item::locate(file, *offset, *length, tensor.dtype, &[24, 40]).unwrap();
    assert_eq!(found.strides, [1, 24]);
}

#[test]
fn what_torch_2_2_wrote_is_listed() {
    let checkpoint =
        open_metadata(include_bytes!("../../../../tests/data/checkpoints/dcp_torch22_2rank/.metadata"))
            .unwrap();
    assert_eq!(checkpoint.tensors.len(), 8);
    assert_eq!(checkpoint.notes[0], "epoch: not a tensor, passed over");
    assert_eq!(checkpoint.notes.len(), 2);
}

#[test]
fn the_metadata_itself_may_be_named_and_no_other_file() {
    let folder = data("nasty/cases/dcp_valid_two_ranks");
    let by_folder = open_at(&folder).unwrap();
    let by_file = open_at(&folder.join(METADATA)).unwrap();
    assert_eq!(by_folder.fingerprint, by_file.fingerprint);
    let error = open_at(&folder.join("__0_0.distcp")).unwrap_err();
    assert_eq!(error.class(), Class::UnsupportedFormat);
}

#[test]
fn the_fingerprint_follows_metadata_and_sizes() {
    let metadata = one(write::f32(&[4], &[(&[0], &[4])]), write::info("__0_0.distcp", 0, 9));
    let first = folder(&metadata);
    let fingerprint = open_at(first.path()).unwrap().fingerprint;
    assert_eq!(open_metadata(&metadata).unwrap().fingerprint, fingerprint);
    let file = std::fs::File::options().write(true).open(first.path().join("__0_0.distcp")).unwrap();
    file.set_len(99_999).unwrap();
    assert_ne!(open_at(first.path()).unwrap().fingerprint, fingerprint);
    let moved = one(write::f32(&[4], &[(&[0], &[4])]), write::info("__0_0.distcp", 1, 9));
    assert_ne!(open_metadata(&moved).unwrap().fingerprint, fingerprint);
}

#[test]
fn an_unfinished_save_has_no_metadata() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("__0_0.distcp"), "").unwrap();
    assert_eq!(open_at(folder.path()).unwrap_err().class(), Class::DcpNoMetadata);
}

/// A folder of a rank-local save with these metadata files.
fn ranks(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = folder(b"");
    std::fs::remove_file(folder.path().join(METADATA)).unwrap();
    for (name, metadata) in files {
        std::fs::write(folder.path().join(name), metadata).unwrap();
    }
    folder
}

/// Metadata of a rank that has the rows from `start` on of `t`, and all of `r`, in its data file.
fn rank(file: &str, start: i64, rows: i64, shape: &[i64]) -> Vec<u8> {
    write::metadata(
        &[
            ("t", write::f32(shape, &[(&[start], &[rows])])),
            ("r", write::f32(&[2], &[(&[0], &[2])])),
            ("epoch", write::object("BytesStorageMetadata", &[])),
        ],
        &[
            (write::index("t", &[start]), write::info(file, 0, 9)),
            (write::index("r", &[0]), write::info(file, 10, 9)),
        ],
    )
}

#[test]
fn the_metadata_of_all_ranks_is_put_together() {
    let first = || ("__0.metadata", rank("__0_0.distcp", 0, 3, &[4]));
    let second = || ("__1.metadata", rank("__1_0.distcp", 3, 1, &[4]));
    let folder = ranks(&[first(), second()]);
    let checkpoint = open_at(folder.path()).unwrap();
    let [replicated, sharded] = &checkpoint.tensors[..] else { panic!("{checkpoint:?}") };
    assert_eq!((replicated.name.as_str(), replicated.slices.len()), ("r", 1));
    assert_eq!(replicated.slices[0].location.file().name(), "__0_0.distcp", "of the lowest rank");
    assert_eq!((sharded.name.as_str(), sharded.slices.len()), ("t", 2));
    assert_eq!(checkpoint.others.count, 1, "each once");

    let changed = ranks(&[first(), ("__1.metadata", rank("__1_0.distcp", 3, 1, &[4]).repeat(1))]);
    assert_eq!(open_at(changed.path()).unwrap().fingerprint, checkpoint.fingerprint);
    let elsewhere = |file| ranks(&[first(), ("__1.metadata", rank(file, 3, 1, &[4]))]);
    let other = open_at(elsewhere("__0_0.distcp").path()).unwrap();
    assert_ne!(other.fingerprint, checkpoint.fingerprint);
}

#[test]
fn ranks_that_are_missing_or_disagree_are_seen() {
    let first = || ("__0.metadata", rank("__0_0.distcp", 0, 3, &[4]));
    for (others, expected, word) in [
        (vec![], Class::DcpChunkGap, "\"t\""),
        (vec![("__2.metadata", rank("__1_0.distcp", 3, 1, &[4]))], Class::DcpNoMetadata, "__1.metadata"),
        (vec![("__1.metadata", rank("__1_0.distcp", 3, 2, &[5]))], Class::DcpChunkMismatch, "one save"),
        (vec![("__1.metadata", rank("__1_0.distcp", 0, 1, &[4]))], Class::DcpChunkMismatch, "one save"),
        (vec![("__1.metadata", rank("__1_0.distcp", 2, 2, &[4]))], Class::DcpChunkOverlap, "\"t\""),
        (vec![("__1.metadata", b"\x80\x02".to_vec())], Class::PickleMalformed, "__1.metadata"),
    ] {
        let error = open_at(ranks(&[vec![first()], others].concat()).path()).unwrap_err();
        assert_eq!(error.class(), expected, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn places_that_cannot_be_are_refused() {
    let entry = || write::f32(&[4], &[(&[0], &[4])]);
    for (place, expected) in [
        (write::info("../__0_0.distcp", 0, 9), Class::IndexPathEscape),
        (write::info("/etc/passwd", 0, 9), Class::IndexPathEscape),
        (write::info("__7_0.distcp", 0, 9), Class::DcpMissingFile),
        (write::info(&"x".repeat(5000), 0, 9), Class::LimitExceeded),
        (write::info("__0_0.distcp", 99_999, 9), Class::Truncated),
        (write::info("__0_0.distcp", i64::MAX, i64::MAX), Class::Truncated),
        (write::info("__0_0.distcp", -1, 9), Class::DcpChunkBounds),
    ] {
        let (class, message) = refusal(&one(entry(), place));
        assert_eq!(class, expected, "{message}");
        assert!(message.contains("\"t\""), "{message}");
    }
    let elsewhere = [(write::index("t", &[1]), write::info("__0_0.distcp", 0, 9))];
    let (class, message) = refusal(&write::metadata(&[("t", entry())], &elsewhere));
    assert_eq!(class, Class::DcpChunkBounds, "{message}");
}

#[test]
fn other_transforms_are_refused_by_name() {
    let place = |descriptors: Vec<u8>| {
        let fields = [
            ("relative_path", write::text("__0_0.distcp")),
            ("offset", write::int(0)),
            ("length", write::int(9)),
            ("transform_descriptors", descriptors),
        ];
        one(write::f32(&[4], &[(&[0], &[4])]), write::object("_StorageInfo", &fields))
    };
    let named = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| write::text(name)).collect();
        place(write::list(&names))
    };
    for (names, word) in
        [(&["stream.lz4/1"][..], "stream.lz4/1"), (&["stream.zstd/1", "stream.zstd/1"], "2 transforms")]
    {
        let (class, message) = refusal(&named(names));
        assert_eq!(class, Class::UnsupportedFormat);
        assert!(message.contains(word), "{message}");
    }
    let packed = open_metadata(&named(&["stream.zstd/1"])).unwrap();
    assert!(matches!(packed.tensors[0].slices[0].location, Location::ZstdItem { .. }));
    assert!(open_metadata(&place(b"N".to_vec())).is_ok());
    assert!(open_metadata(&place(b"]".to_vec())).is_ok());
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let place = || write::info("__0_0.distcp", 0, 9);
    let whole = |properties: Vec<u8>| write::tensor(properties, &[4], &[(&[0], &[4])]);
    for (entry, expected) in [
        (whole(write::properties("float32", "torch.sparse_coo")), Class::UnsupportedObject),
        (whole(b"N".to_vec()), Class::UnsupportedObject),
        (write::f32(&[-4], &[(&[0], &[4])]), Class::BadShape),
        (write::f32(&[4], &[(&[0], &[-4])]), Class::BadShape),
        (write::f32(&[1 << 40, 1 << 40], &[]), Class::ShapeOverflow),
        (write::f32(&[1; 17], &[]), Class::LimitExceeded),
        (write::object("ChunkStorageMetadata", &[]), Class::UnsupportedObject),
    ] {
        let (class, message) = refusal(&one(entry, place()));
        assert_eq!(class, expected, "{message}");
        assert!(message.contains("tensor \"t\""), "{message}");
    }
}

#[test]
fn tensors_of_other_types_are_put_aside() {
    let complex = write::tensor(write::properties("complex64", "torch.strided"), &[4], &[(&[0], &[4])]);
    let checkpoint = open_metadata(&one(complex, write::info("__0_0.distcp", 0, 9))).unwrap();
    let [(name, error)] = &checkpoint.unreadable[..] else { panic!("{checkpoint:?}") };
    assert_eq!((name.as_str(), error.class(), error.tensor()), ("t", Class::BadDtype, Some("t")));
    assert!(error.to_string().contains("view_as_real"), "{error}");
    assert!(checkpoint.tensors.is_empty());
}

#[test]
fn names_are_checked() {
    let entry = || write::f32(&[4], &[(&[0], &[4])]);
    let item = |name| (write::index(name, &[0]), write::info("__0_0.distcp", 0, 9));
    let twice = write::metadata(&[("t", entry()), ("t", entry())], &[item("t")]);
    assert_eq!(refusal(&twice).0, Class::DuplicateKey);
    let items_twice = write::metadata(&[("t", entry())], &[item("t"), item("t")]);
    assert_eq!(refusal(&items_twice).0, Class::DuplicateKey);
    let escape = write::metadata(&[("a/../t", entry())], &[item("a/../t")]);
    assert_eq!(refusal(&escape).0, Class::UnsafeName);
    let any = write::metadata(&[("", entry()), ("模型.表", entry())], &[item(""), item("模型.表")]);
    assert_eq!(open_metadata(&any).unwrap().tensors.len(), 2);
}

#[test]
fn other_entries_are_noted_up_to_a_bound() {
    let names: Vec<_> = (0..60).map(|number| format!("state\n{number}")).collect();
    let bytes = || write::object("BytesStorageMetadata", &[]);
    let mut entries: Vec<_> = names.iter().map(|name| (name.as_str(), bytes())).collect();
    let item = (write::index("t", &[0]), write::info("__0_0.distcp", 0, 9));
    assert_eq!(refusal(&write::metadata(&entries, &[])).0, Class::NoTensors);
    entries.push(("t", write::f32(&[4], &[(&[0], &[4])])));
    let notes = open_metadata(&write::metadata(&entries, &[item])).unwrap().notes;
    assert_eq!(notes.len(), 51);
    assert_eq!(notes[0], "state\\n0: not a tensor, passed over");
    assert_eq!(notes[50], "and 10 more entries that are no tensors were passed over");
}

#[test]
fn a_pickle_of_something_else_is_refused() {
    assert_eq!(refusal(b"\x80\x02N.").0, Class::UnsupportedObject);
    assert_eq!(refusal(b"\x80\x02cposix\ngetcwd\n)R.").0, Class::ForbiddenGlobal);
    assert_eq!(refusal(b"").0, Class::PickleMalformed);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn altered_metadata_never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = include_bytes!("../../../../tests/data/checkpoints/dcp_strided_dtypes/.metadata").to_vec();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = open_metadata(&bytes);
    }
}
