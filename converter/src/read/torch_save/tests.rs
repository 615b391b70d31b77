//! The reader of torch.save files, on archives of every kind and on everything that they must not be.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use weighbridge_schemas::dtype::Dtype;

use super::*;
use crate::read::zip::tests::archive;
use crate::shape::gather::{Scratch, read_elements};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

fn open_bytes(bytes: &[u8]) -> Result<Checkpoint> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.pt"), bytes).unwrap();
    open(Source::open(&folder.path().join("model.pt"))?)
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

    fn tuple(values: &[i64]) -> Vec<u8> {
        let values: Vec<_> = values.iter().map(|&value| int(value)).collect();
        [b"(", &values.concat()[..], b"t"].concat()
    }

    pub(super) fn list(values: &[Vec<u8>]) -> Vec<u8> {
        [b"](", &values.concat()[..], b"e"].concat()
    }

    pub(super) fn dict(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        let pairs: Vec<_> = pairs.iter().map(|(key, value)| [&key[..], value].concat()).collect();
        [b"}(", &pairs.concat()[..], b"u"].concat()
    }

    /// A dict with texts as keys.
    pub(super) fn named(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
        dict(&pairs.iter().map(|(key, value)| (text(key), value.clone())).collect::<Vec<_>>())
    }

    /// A tensor: key and elements of its storage of F32, and offset, sizes and strides.
    pub(super) fn view(key: &str, storage: i64, offset: i64, sizes: &[i64], strides: &[i64]) -> Vec<u8> {
        [
            &b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"[..],
            &text(key),
            b"X\x03\0\0\0cpu",
            &int(storage),
            b"tQ",
            &int(offset),
            &tuple(sizes),
            &tuple(strides),
            b"\x89ccollections\nOrderedDict\n)RtR",
        ]
        .concat()
    }

    /// All four elements of the storage `0`.
    pub(super) fn tensor() -> Vec<u8> {
        view("0", 4, 0, &[4], &[1])
    }
}

fn pickled(object: &[u8]) -> Vec<u8> {
    [b"\x80\x02", object, b"."].concat()
}

/// A file of this object, with storages `0` and `1` of four elements each, as many as a number says.
fn file(object: &[u8]) -> Vec<u8> {
    let storage = |first: u8| (first..first + 4).flat_map(|n| f32::from(n).to_le_bytes()).collect::<Vec<_>>();
    archive(&[
        ("m/data.pkl", &pickled(object)),
        ("m/byteorder", b"little"),
        ("m/data/0", &storage(0)),
        ("m/data/1", &storage(10)),
        ("m/version", b"3\n"),
    ])
}

fn open_object(object: &[u8]) -> Result<Checkpoint> {
    open_bytes(&file(object))
}

fn refusal(object: &[u8]) -> (Class, String) {
    let error = open_object(object).unwrap_err();
    assert_eq!(error.file(), Some("model.pt"));
    (error.class(), error.to_string())
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors.iter().map(|tensor| tensor.name.as_str()).collect()
}

#[test]
fn objects_are_flattened_with_dots() {
    let object = write::named(&[
        ("model", write::named(&[("b.c", write::tensor()), ("a", write::view("1", 4, 0, &[2, 2], &[2, 1]))])),
        ("state", write::dict(&[(write::int(0), write::named(&[("x", write::tensor())]))])),
        ("list", write::list(&[write::tensor(), write::named(&[("y", write::tensor())])])),
        ("epoch", write::int(3)),
        ("tags", write::list(&[write::text("a"), write::text("b")])),
        ("rates", write::list(&[write::list(&[b"N".to_vec()])])),
        ("device", b"ctorch\ndevice\nX\x03\0\0\0cpu\x85R".to_vec()),
        ("dtype", b"ctorch\nfloat32\n".to_vec()),
        ("seed", b"\x8a\x09\0\0\0\0\0\0\0\0\x01".to_vec()),
        ("raw", b"c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R".to_vec()),
    ]);
    let checkpoint = open_object(&object).unwrap();
    assert_eq!(names(&checkpoint), ["list.0", "list.1.y", "model.a", "model.b.c", "state.0.x"]);
    assert_eq!(checkpoint.format, Format::TorchSave);
    let others: Vec<_> = checkpoint.others.listed.iter().map(|one| (one.name.as_str(), one.kind)).collect();
    let expected = [
        ("epoch", "int"),
        ("tags", "list"),
        ("rates.0", "list"),
        ("device", "device"),
        ("dtype", "dtype"),
        ("seed", "int"),
        ("raw", "bytes"),
    ];
    assert_eq!(others, expected);
    assert_eq!(checkpoint.notes[0], "epoch: not a tensor, passed over");
    assert_eq!(names(&open_object(&write::tensor()).unwrap()), ["tensor"]);
    let (class, message) = refusal(&write::named(&[("epoch", write::int(3))]));
    assert_eq!((class, message.contains("1 other value")), (Class::NoTensors, true), "{message}");
}

#[test]
fn views_of_a_shared_storage_come_out_dense() {
    let object = write::named(&[
        ("column", write::view("0", 4, 1, &[2], &[2])),
        ("empty", write::view("0", 4, 9, &[0, 3], &[7, 7])),
        ("expanded", write::view("1", 4, 2, &[3, 2], &[0, 1])),
        ("scalar", write::view("0", 4, 3, &[], &[])),
        ("transposed", write::view("0", 4, 0, &[2, 2], &[1, 2])),
    ]);
    // Bytes are read later, so the file has to stay.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.pt"), file(&object)).unwrap();
    let checkpoint = open(Source::open(folder.path()).unwrap()).unwrap();
    let read = |name: &str| {
        let tensor = checkpoint.tensors.iter().find(|tensor| tensor.name.as_str() == name).unwrap();
        let mut out = vec![0; usize::try_from(tensor.bytes()).unwrap()];
        read_elements(tensor, 0, &mut out, &mut Scratch::default()).unwrap();
        out.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect::<Vec<_>>()
    };
    assert_eq!(read("column"), [1.0, 3.0]);
    assert!(read("empty").is_empty());
    assert_eq!(read("expanded"), [12.0, 13.0, 12.0, 13.0, 12.0, 13.0]);
    assert_eq!(read("scalar"), [3.0]);
    assert_eq!(read("transposed"), [0.0, 2.0, 1.0, 3.0]);
    let Location::Strided { storage, .. } = &checkpoint.tensors[4].slices[0].location else { panic!() };
    let record = storage.record.unwrap();
    assert_eq!((record.length, record.offset), (16, storage.offset));
}

#[test]
fn names_that_collide_are_refused_naming_both_ways() {
    let object = write::named(&[("a.b", write::tensor()), ("a", write::named(&[("b", write::tensor())]))]);
    let (class, message) = refusal(&object);
    assert_eq!(class, Class::DuplicateKey);
    assert!(message.contains("[\"a.b\"] and [\"a\"][\"b\"]"), "{message}");
    let twice = write::named(&[("a", write::tensor()), ("a", write::tensor())]);
    assert_eq!(refusal(&twice).0, Class::DuplicateKey);
    let mixed = write::dict(&[(write::int(1), write::tensor()), (write::text("1"), write::tensor())]);
    assert_eq!(refusal(&mixed).0, Class::DuplicateKey);
}

#[test]
fn a_key_that_stands_twice_in_one_dict_is_refused() {
    let three = || write::int(3);
    for (pairs, key) in [
        ([(write::text("w"), write::tensor()), (write::text("w"), three())], "\"w\""),
        ([(three(), write::tensor()), (three(), three())], "3"),
        ([(write::int(1), write::tensor()), (b"\x88".to_vec(), three())], "True"),
        ([(write::int(1), write::tensor()), (b"G\x3f\xf0\0\0\0\0\0\0".to_vec(), three())], "1.0"),
    ] {
        let (class, message) = refusal(&write::named(&[("model", write::dict(&pairs))]));
        assert_eq!(class, Class::DuplicateKey);
        assert!(message.contains(&format!("key {key} twice")), "{message}");
    }
    let apart = [(write::text("1"), three()), (write::int(1), write::tensor()), (b"N".to_vec(), three())];
    assert!(open_object(&write::dict(&apart)).is_ok());
}

#[test]
fn a_set_with_tensors_is_listed_as_what_cannot_be_read() {
    let of_call = |values: &[u8]| [b"c__builtin__\nset\n](", values, b"e\x85R"].concat();
    let in_tuple = [&write::tensor()[..], b"\x85"].concat();
    let object = write::named(&[
        ("called", of_call(&write::tensor())),
        ("frozen", [b"(", &write::tensor()[..], b"\x91"].concat()),
        ("inner", write::list(&[of_call(&of_call(&in_tuple)), write::int(1)])),
        ("marked", [b"\x8f(", &write::tensor()[..], b"\x90"].concat()),
        ("plain", of_call(&write::int(3))),
        ("w", write::tensor()),
    ]);
    let checkpoint = open_object(&object).unwrap();
    assert_eq!(names(&checkpoint), ["w"]);
    let unreadable: Vec<_> = checkpoint.unreadable.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(unreadable, ["called", "frozen", "inner.0", "marked"]);
    for (_, error) in &checkpoint.unreadable {
        assert!(error.to_string().contains("save a list"), "{error}");
    }
    assert!(checkpoint.others.listed.iter().any(|other| other.name == "plain" && other.kind == "set"));
}

#[test]
fn tensors_with_attributes_are_read_without_them() {
    let tensor = write::tensor();
    let arguments = &tensor["ctorch._utils\n_rebuild_tensor_v2\n".len()..tensor.len() - 1];
    let of_class = |class: &str| {
        let head =
            format!("ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nc{class}\n");
        [head.as_bytes(), arguments, &write::named(&[("persistent", b"\x88".to_vec())]), b"tR"].concat()
    };
    let object = write::named(&[
        ("buffer", of_class("torch\nTensor")),
        ("odd", of_class("torch\nFloatStorage")),
        ("parameter", of_class("torch.nn.parameter\nParameter")),
    ]);
    let checkpoint = open_object(&object).unwrap();
    assert_eq!(names(&checkpoint), ["buffer", "parameter"]);
    assert_eq!(checkpoint.unreadable[0].0.as_str(), "odd");
    assert_eq!(refusal(&write::named(&[("a", of_class("my.own\nTensor"))])).0, Class::ForbiddenGlobal);
}

/// Shared dicts: a small file that names far more tensors than the budget has memory for.
#[test]
fn a_listing_over_the_budget_is_refused_before_it_is_made() {
    let inner: Vec<_> = (0..300).map(|index| (write::int(index), b"h\0".to_vec())).collect();
    let outer: Vec<_> = (0..300).map(|index| (write::int(index), b"h\x01".to_vec())).collect();
    let shared =
        [&write::tensor()[..], b"q\0", &write::dict(&inner), b"q\x01", &write::dict(&outer), b"\x87"];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    std::fs::write(&path, file(&shared.concat())).unwrap();
    let error = open(Source::open(&path).unwrap().with_memory(64 << 20)).unwrap_err();
    assert_eq!(error.class(), Class::LimitExceeded);
    assert!(error.to_string().contains("--memory"), "{error}");
    assert!(open(Source::open(&path).unwrap().with_memory(256 << 20)).is_ok());
}

#[test]
fn odd_names_are_refused() {
    let long = "x".repeat(2000);
    for (object, expected) in [
        (write::named(&[("../a", write::tensor())]), Class::UnsafeName),
        (write::named(&[(&long, write::tensor())]), Class::UnsafeName),
        (write::named(&[(&long, write::named(&[("a", write::tensor())]))]), Class::UnsafeName),
        (write::dict(&[(b")".to_vec(), write::tensor())]), Class::UnsupportedObject),
    ] {
        assert_eq!(refusal(&object).0, expected);
    }
    let object = write::named(&[("t", write::tensor()), (&long, write::int(1))]);
    let checkpoint = open_object(&object).unwrap();
    assert!(checkpoint.others.listed[0].name.len() < 100);
    let tuple = write::dict(&[(b")".to_vec(), write::tensor())]);
    assert!(refusal(&tuple).1.contains("the dict at the top level"));
    assert!(refusal(&write::named(&[("a", tuple)])).1.contains("the dict at [\"a\"]"));
}

#[test]
fn tensors_that_are_no_dense_arrays_are_put_aside() {
    let replaced = |from: &str, to: &str| {
        let tensor = write::tensor();
        let at = tensor.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&tensor[..at], to.as_bytes(), &tensor[at + from.len()..]].concat()
    };
    let object = write::named(&[
        ("complex", replaced("FloatStorage", "ComplexFloatStorage")),
        ("meta", replaced("\u{3}\0\0\0cpu", "\u{4}\0\0\0meta")),
        ("ok", write::tensor()),
        ("quantized", b"ctorch._utils\n_rebuild_qtensor\n)R".to_vec()),
        ("sparse", b"ctorch._utils\n_rebuild_sparse_tensor\n)R".to_vec()),
    ]);
    let checkpoint = open_object(&object).unwrap();
    assert_eq!(names(&checkpoint), ["ok"]);
    let ways_out = ["view_as_real", "meta", "dequantize", "to_dense"];
    assert_eq!(checkpoint.unreadable.len(), ways_out.len());
    for ((name, error), way_out) in checkpoint.unreadable.iter().zip(ways_out) {
        assert!(error.to_string().contains(way_out), "{error}");
        assert_eq!(error.tensor(), Some(name.as_str()));
    }
}

#[test]
fn storages_are_checked() {
    for (view, expected) in [
        (write::view("0", 5, 0, &[4], &[1]), Class::StorageSizeMismatch),
        (write::view("0", 4, 1, &[4], &[1]), Class::StorageOutOfBounds),
        (write::view("0", 4, 0, &[4], &[i64::MAX]), Class::StorageOutOfBounds),
        (write::view("0", 4, -1, &[4], &[1]), Class::StorageOutOfBounds),
        (write::view("7", 4, 0, &[4], &[1]), Class::ZipMissingEntry),
        (write::view("../0", 4, 0, &[4], &[1]), Class::ZipMissingEntry),
        (write::view("0", 4, 0, &[i64::MAX, i64::MAX], &[0, 0]), Class::ShapeOverflow),
        (write::view("0", 4, 0, &[1; 17], &[1; 17]), Class::LimitExceeded),
    ] {
        let (class, message) = refusal(&write::named(&[("t", view)]));
        assert_eq!(class, expected, "{message}");
        assert!(message.contains("tensor \"t\""), "{message}");
    }
}

#[test]
fn a_small_file_stands_for_a_bounded_amount_of_data() {
    let expanded = |count: i64| write::view("0", 4, 0, &[count, 1], &[0, 1]);
    let most = i64::try_from(limits::EXPANDED_BYTES / 4).unwrap();
    assert!(open_object(&write::named(&[("t", expanded(most))])).is_ok());
    assert_eq!(refusal(&write::named(&[("t", expanded(most + 1))])).0, Class::LimitExceeded);
    let together = write::named(&[("a", expanded(most)), ("b", expanded(5))]);
    assert_eq!(refusal(&together).0, Class::LimitExceeded);
}

#[test]
fn walks_over_shared_and_endless_containers_end() {
    // A dict that holds itself.
    let (class, message) = refusal(b"}q\0X\x01\0\0\0ah\0s");
    assert_eq!(class, Class::UnsupportedObject);
    assert!(message.contains("holds itself"), "{message}");
    let deep = (0..300).fold(write::tensor(), |inner, _| [b"]", &inner[..], b"a"].concat());
    assert_eq!(refusal(&deep).0, Class::LimitExceeded);
    // Pairs of pairs: as a tree, 2^100 leaves.
    let mut object = b"K\x01\x94".to_vec();
    for index in 0..100u8 {
        object.extend([b'h', index, b'h', index, b'\x86', b'\x94']);
        // What was memoized stays on the stack below; drop it by wrapping the whole in one tuple at the end.
    }
    let object = [b"(", &object[..], b"t"].concat();
    assert_eq!(refusal(&object).0, Class::LimitExceeded);
}

#[test]
fn other_archives_are_refused_by_name() {
    let tensor = pickled(&write::tensor());
    let script = archive(&[("m/data.pkl", &tensor), ("m/constants.pkl", b"x"), ("m/data/0", &[0; 16])]);
    let error = open_bytes(&script).unwrap_err();
    assert_eq!(error.class(), Class::UnsupportedFormat);
    assert!(error.to_string().contains("TorchScript"), "{error}");
    let big = archive(&[("m/data.pkl", &tensor), ("m/byteorder", b"big"), ("m/data/0", &[0; 16])]);
    assert_eq!(open_bytes(&big).unwrap_err().class(), Class::BadByteorder);
    let legacy = data("checkpoints/pt_legacy/legacy.pt");
    let error = open(Source::open(&legacy).unwrap()).unwrap_err();
    assert_eq!(error.class(), Class::UnsupportedFormat);
    assert!(error.to_string().contains("1.6"), "{error}");
    assert_eq!(open_bytes(b"\x80\x02N.").unwrap_err().class(), Class::UnsupportedFormat);
}

#[test]
fn an_unknown_class_is_refused_with_its_name_and_a_way_out() {
    let object = write::named(&[("w", write::tensor()), ("config", b"cmy.trainer\nConfig\n)\x81".to_vec())]);
    let (class, message) = refusal(&object);
    assert_eq!(class, Class::ForbiddenGlobal);
    assert!(message.contains("my.trainer.Config") && message.contains("state_dict()"), "{message}");
}

#[test]
fn what_is_read_whole_is_checked_against_its_checksum() {
    let good = file(&write::named(&[("t", write::tensor())]));
    assert!(open_bytes(&good).is_ok());
    // The number that `requires_grad` is, in the pickle: another opcode, and no other meaning.
    let at = good.windows(14).position(|window| window == b"\x89ccollections\n").unwrap();
    let mut damaged = good;
    damaged[at] = 0x88;
    let error = open_bytes(&damaged).unwrap_err();
    assert_eq!(error.class(), Class::ZipCrc);
    assert!(error.to_string().contains("data.pkl"), "{error}");
}

#[test]
fn many_small_tensors_are_listed_by_few_reads() {
    let keys: Vec<_> = (0..2000).map(|index| format!("m/data/{index}")).collect();
    let views: Vec<_> = (0..2000).map(|index| write::view(&index.to_string(), 1, 0, &[1], &[1])).collect();
    let pickle = pickled(&write::list(&views));
    let mut entries = vec![("m/data.pkl", pickle.as_slice())];
    entries.extend(keys.iter().map(|key| (key.as_str(), &[1, 2, 3, 4][..])));
    let checkpoint = open_bytes(&archive(&entries)).unwrap();
    assert_eq!(checkpoint.tensors.len(), 2000);
    let mut places: Vec<_> = checkpoint
        .tensors
        .iter()
        .map(|tensor| match &tensor.slices[0].location {
            Location::Strided { storage, .. } => storage.offset,
            other => panic!("{other:?}"),
        })
        .collect();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 2000);
}

#[test]
fn real_files_are_listed() {
    for (name, tensors, others) in [
        ("pt_views_dtypes/views.pt", 46, 0),
        ("pt_pickle_protocol4/model.pt", 10, 6),
        ("pt_complex_sparse_refuse/mixed.pt", 1, 0),
    ] {
        let path = data("checkpoints").join(name);
        let checkpoint = open(Source::open(&path).unwrap()).unwrap();
        assert_eq!((checkpoint.tensors.len(), checkpoint.others.count), (tensors, others), "{name}");
        assert!(checkpoint.tensors.iter().any(|tensor| tensor.dtype == Dtype::F32));
        let by_folder = open(Source::open(path.parent().unwrap()).unwrap()).unwrap();
        assert_eq!(by_folder.fingerprint, checkpoint.fingerprint);
    }
}

proptest! {
    #[test]
    fn altered_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = std::fs::read(data("checkpoints/pt_complex_sparse_refuse/mixed.pt")).unwrap();
        let length = bytes.len() as u64;
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        for tensor in open_bytes(&bytes).into_iter().flat_map(|checkpoint| checkpoint.tensors) {
            let Location::Strided { storage, .. } = &tensor.slices[0].location else { panic!() };
            prop_assert!(storage.offset <= length);
        }
    }
}
