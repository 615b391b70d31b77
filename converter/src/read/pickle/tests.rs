//! The pickle machine on real metadata, and on everything that a pickle must not be.

use proptest::prelude::*;

use super::*;
use crate::error::Class;

/// `body` between the protocol and STOP.
fn whole(body: &[u8]) -> Vec<u8> {
    [b"\x80\x02", body, b"."].concat()
}

fn class(body: &[u8], place: Place) -> Class {
    parse(&whole(body), place).unwrap_err().class()
}

fn message(body: &[u8]) -> String {
    parse(&whole(body), Place::Tensors).unwrap_err().to_string()
}

#[test]
fn plain_values_are_read() {
    let input = whole(
        b"(N\x88\x89K\xffM\xff\xffJ\xff\xff\xff\xff\x8a\x00\x8a\x01\xff\x8a\x08\0\0\0\0\0\0\0\x80\
          G\x3f\xf8\0\0\0\0\0\0X\x02\0\0\0\xc3\xa9\x8c\x01aC\x01\xffU\x01b)t",
    );
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::Tuple(tuple) = pickle.root() else { panic!("{pickle:?}") };
    let expected = [
        Value::None,
        Value::Bool(true),
        Value::Bool(false),
        Value::Int(255),
        Value::Int(65535),
        Value::Int(-1),
        Value::Int(0),
        Value::Int(-1),
        Value::Int(i64::MIN),
        Value::Float(1.5),
        Value::Text("é"),
        Value::Text("a"),
        Value::Bytes(b"\xff"),
        Value::Text("b"),
        Value::Tuple(Tuple::default()),
    ];
    assert_eq!(pickle.tuple(tuple), expected);
}

#[test]
fn containers_fill_in_the_order_of_writing() {
    let input = whole(b"}q\0(K\x01](K\x02K\x03eK\x04]K\x05auK\x06K\x07s");
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::Dict(dict) = pickle.root() else { panic!("{pickle:?}") };
    let pairs: Vec<_> = pickle
        .dict(dict)
        .iter()
        .map(|&(key, value)| match value {
            Value::List(list) => (key, pickle.list(list).to_vec()),
            other => (key, vec![other]),
        })
        .collect();
    let int = Value::Int;
    let expected = [(int(1), vec![int(2), int(3)]), (int(4), vec![int(5)]), (int(6), vec![int(7)])];
    assert_eq!(pairs, expected);
}

#[test]
fn ordered_dicts_counters_and_sizes_become_containers() {
    // What a module's state_dict() is: entries, and an attribute `_metadata`, which is dropped.
    let input = whole(b"ccollections\nOrderedDict\n)R(K\x01K\x02u}(X\x09\0\0\0_metadataK\x03ub");
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::Dict(dict) = pickle.root() else { panic!("{pickle:?}") };
    assert_eq!(pickle.dict(dict), [(Value::Int(1), Value::Int(2))]);

    let input = whole(b"ccollections\nCounter\n}K\x01K\x02s\x85R");
    let pickle = parse(&input, Place::Tensors).unwrap();
    assert!(matches!(pickle.root(), Value::Dict(_)));

    let input = whole(b"ctorch\nSize\nK\x03K\x04\x86\x85R");
    let pickle = parse(&input, Place::Metadata).unwrap();
    let Value::Tuple(size) = pickle.root() else { panic!("{pickle:?}") };
    assert_eq!(pickle.tuple(size), [Value::Int(3), Value::Int(4)]);
}

#[test]
fn objects_keep_what_they_were_made_of() {
    let input = whole(b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}K\x01K\x02sb");
    let pickle = parse(&input, Place::Metadata).unwrap();
    let made = pickle.made(pickle.root(), Global::MetadataIndex).unwrap();
    assert!(matches!(made.state, Value::Dict(_)));
    assert_eq!(pickle.made(pickle.root(), Global::Metadata), None);
}

#[test]
fn shared_values_stay_shared() {
    // 400 nested pairs of one another: as a tree, 2^400 leaves.
    let mut body = b"(K\x01\x94".to_vec();
    for index in 0u32..400 {
        let recall = [&b"j"[..], &index.to_le_bytes()].concat();
        body.extend([&recall[..], &recall, b"\x86\x94"].concat());
    }
    body.push(b't');
    let input = whole(&body);
    let pickle = parse(&input, Place::Tensors).unwrap();
    assert!(pickle.tuples.len() <= 1201, "{}", pickle.tuples.len());
}

#[test]
fn a_list_may_hold_itself() {
    let input = whole(b"]q\0h\0a");
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::List(list) = pickle.root() else { panic!("{pickle:?}") };
    assert_eq!(pickle.list(list), [pickle.root()]);
}

#[test]
fn unlisted_globals_are_refused_by_name_however_they_are_named() {
    let cases: [&[u8]; 5] = [
        b"cposix\nsystem\nX\x02\0\0\0ls\x85R",
        b"\x8c\x05posix\x8c\x06system\x93)R",
        b"(X\x02\0\0\0lsiposix\nsystem\n",
        b"cposix\nsystem\n0N",
        b"(cposix\nsystem\no",
    ];
    for body in cases {
        for place in [Place::Metadata, Place::Tensors] {
            assert_eq!(class(body, place), Class::ForbiddenGlobal);
        }
        assert!(message(body).contains("\"posix.system\""), "{}", message(body));
    }
}

#[test]
fn what_is_allowed_depends_on_the_place() {
    let tensor = b"ctorch._utils\n_rebuild_tensor_v2\n";
    let metadata = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n";
    assert!(parse(&whole(tensor), Place::Tensors).is_ok());
    assert_eq!(class(tensor, Place::Metadata), Class::ForbiddenGlobal);
    assert!(parse(&whole(metadata), Place::Metadata).is_ok());
    assert_eq!(class(metadata, Place::Tensors), Class::ForbiddenGlobal);
}

#[test]
fn kinds_of_tensors_that_are_known_become_objects() {
    for name in ["_rebuild_sparse_tensor", "_rebuild_qtensor"] {
        let input = whole(format!("ctorch._utils\n{name}\n)R").as_bytes());
        let pickle = parse(&input, Place::Tensors).unwrap();
        assert_eq!(pickle.maker(pickle.root()), Some(Global::OtherTensor(name)));
        let input = whole(format!("ctorch._utils\n{name}\n").as_bytes());
        assert_eq!(parse(&input, Place::Metadata).unwrap_err().class(), Class::ForbiddenGlobal);
    }
}

#[test]
fn sets_and_long_integers_are_leaves() {
    for body in [&b"\x8f(K\x01K\x02\x90"[..], b"(K\x01K\x02\x91", b"c__builtin__\nset\n](K\x01K\x02e\x85R"] {
        let input = whole(body);
        let pickle = parse(&input, Place::Tensors).unwrap();
        let set = pickle.made(pickle.root(), Global::Set).unwrap();
        let &[Value::List(values)] = pickle.tuple(set.arguments) else { panic!("{pickle:?}") };
        assert_eq!(pickle.list(values), [Value::Int(1), Value::Int(2)]);
    }
    let input = whole(b"\x8a\x09\0\0\0\0\0\0\0\0\x01");
    assert_eq!(parse(&input, Place::Tensors).unwrap().root(), Value::LongInt);
    assert_eq!(class(b"](K\x01\x90", Place::Tensors), Class::PickleMalformed);
}

#[test]
fn containers_of_the_standard_library_are_what_they_hold() {
    let input = whole(b"ccollections\ndefaultdict\n(c__builtin__\nlist\ntR(K\x01K\x02u");
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::Dict(dict) = pickle.root() else { panic!("{pickle:?}") };
    assert_eq!(pickle.dict(dict), [(Value::Int(1), Value::Int(2))]);
    let input = whole(b"ccollections\ndeque\n)R(K\x01K\x02e");
    let pickle = parse(&input, Place::Tensors).unwrap();
    let Value::List(list) = pickle.root() else { panic!("{pickle:?}") };
    assert_eq!(pickle.list(list), [Value::Int(1), Value::Int(2)]);
    // One of a length drops what is over it.
    assert_eq!(
        class(b"ccollections\ndeque\n)K\x01\x86R(K\x01K\x02e", Place::Tensors),
        Class::UnsupportedObject
    );
    let input = whole(b"\x96\x01\0\0\0\0\0\0\0a");
    assert_eq!(parse(&input, Place::Tensors).unwrap().root(), Value::Bytes(b"a"));
}

#[test]
fn lone_surrogates_are_told_as_what_they_are() {
    assert!(message(b"X\x04\0\0\0a\xed\xa0\x80").contains("lone surrogate"));
    assert!(message(b"X\x02\0\0\0a\xff").contains("UTF-8"));
}

#[test]
fn opcodes_that_could_do_more_are_refused_by_name() {
    for (body, name) in [
        (&b"\x82\x01"[..], "EXT1"),
        (b"\x83\x01\0", "EXT2"),
        (b"\x84\x01\0\0\0", "EXT4"),
        (b"Pid\n", "PERSID"),
        (b"))}\x92", "NEWOBJ_EX"),
        (b"(o", "OBJ"),
        (b"N2", "DUP"),
        (b"\x97", "NEXT_BUFFER"),
        (b"I1\n", "protocol 0"),
    ] {
        assert_eq!(class(body, Place::Tensors), Class::UnsupportedObject, "{name}");
        assert!(message(body).contains(name), "{}", message(body));
    }
}

#[test]
fn calls_of_what_is_no_function_are_refused() {
    let cases: [&[u8]; 6] = [
        b"ctorch\nfloat32\n)R",
        b"ctorch\nSize\nK\x01\x85R",
        b"ctorch._utils\n_rebuild_tensor_v2\n)\x81",
        b"X\x01\0\0\0a)R",
        b"Nq\0}b",
        b"(K\x01tQN\x86K\x01b",
    ];
    for body in cases {
        assert_eq!(class(body, Place::Tensors), Class::UnsupportedObject, "{body:?}");
    }
    assert_eq!(class(b"(K\x01tQ", Place::Metadata), Class::UnsupportedObject);
}

#[test]
fn broken_streams_are_malformed() {
    let cases: [&[u8]; 16] = [
        b"",
        b"t",
        b"\x85",
        b"K\x01(\x85t",
        b"a",
        b"K\x01K\x02a",
        b"](K\x01K\x02e}e",
        b"}K\x01s",
        b"}(K\x01u",
        b"h\0",
        b"Nq\x01",
        b"j\xff\xff\xff\xff",
        b"X\xff\xff\xff\x7fa",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN",
        b"NN",
        b"\xff",
    ];
    for body in cases {
        assert_eq!(class(body, Place::Tensors), Class::PickleMalformed, "{body:?}");
    }
    for input in
        [&b""[..], b"\x80", b"\x80\x01N.", b"\x80\x06N.", b"N.", b"\x80\x02N.x", b"\x80\x02X\x01\0\0\0\xff."]
    {
        assert_eq!(parse(input, Place::Tensors).unwrap_err().class(), Class::PickleMalformed, "{input:?}");
    }
}

#[test]
fn limits_hold() {
    let deep = [b"(".repeat(256), b"t".repeat(256)].concat();
    assert!(parse(&whole(&deep), Place::Tensors).is_ok());
    let deeper = [b"(".repeat(257), b"t".repeat(257)].concat();
    let lists = [&b"]("[..], &b"]".repeat(5000), b"e"].concat();
    let stack = [&b"("[..], &b"N".repeat((1 << 20) + 1), b"t"].concat();
    for body in [&deeper[..], &lists, &stack] {
        assert_eq!(class(body, Place::Tensors), Class::LimitExceeded);
    }
}

const SEEDS: [&[u8]; 3] = [
    include_bytes!("../../../../tests/data/nasty/cases/dcp_valid_two_ranks/.metadata"),
    include_bytes!("../../../../tests/data/checkpoints/dcp_strided_dtypes/.metadata"),
    include_bytes!("../../../../tests/data/checkpoints/dcp_torch22_2rank/.metadata"),
];

#[test]
fn every_beginning_of_a_real_pickle_is_malformed() {
    for seed in SEEDS {
        assert!(parse(seed, Place::Metadata).is_ok());
        for end in 0..seed.len() {
            let error = parse(&seed[..end], Place::Metadata).unwrap_err();
            assert_eq!(error.class(), Class::PickleMalformed, "{end}: {error}");
        }
    }
}

proptest! {
    #[test]
    fn altered_pickles_never_panic(
        seed in 0..SEEDS.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = SEEDS[seed].to_vec();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = parse(&bytes, Place::Metadata);
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&whole(&bytes), Place::Tensors);
    }
}
