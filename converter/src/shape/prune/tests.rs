//! Lists good and bad; reading kept rows against the naive way; remappings.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use std::path::Path;

use proptest::prelude::*;
use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::ids::Fingerprint;

use super::*;
use crate::checkpoint::{Location, Others, Slice};
use crate::source::Source;

/// A checkpoint of a table `t` of `rows` times `width` bytes and the list `ids` of I64, in one file.
fn checkpoint(folder: &Path, rows: u64, width: u64, ids: &[i64]) -> Checkpoint {
    let table: Vec<u8> = (0..rows * width).map(|at| (at % 251) as u8).collect();
    let ids_at = table.len() as u64;
    let list = ids.iter().flat_map(|id| id.to_le_bytes());
    std::fs::write(folder.join("data"), table.into_iter().chain(list).collect::<Vec<u8>>()).unwrap();
    let source = Source::open(folder).unwrap();
    let file = source.file("data").unwrap();
    let tensor = |name: &str, dtype, shape: &[u64], offset| Tensor {
        name: name.parse().unwrap(),
        dtype,
        shape: shape.to_vec(),
        slices: vec![Slice {
            offsets: vec![0; shape.len()],
            sizes: shape.to_vec(),
            location: Location::Dense { file: Arc::clone(&file), offset },
        }],
    };
    let tensors = vec![
        tensor("ids", Dtype::I64, &[ids.len() as u64], ids_at),
        tensor("t", Dtype::U8, &[rows, width], 0),
    ];
    let (format, fingerprint) = (Format::Safetensors, Fingerprint::of(b""));
    Checkpoint {
        source,
        format,
        fingerprint,
        tensors,
        unreadable: Vec::new(),
        others: Others::default(),
        notes: Vec::new(),
    }
}

fn from_file(folder: &Path, text: &str, rows: u64) -> Result<(KeptRows, Option<String>)> {
    std::fs::write(folder.join("list"), text).unwrap();
    let checkpoint = checkpoint(folder, rows, 1, &[]);
    read_list(&checkpoint, &checkpoint.tensors[1], &KeepRows::File("list".into()), &mut 1000)
}

fn from_tensor(ids: &[i64], rows: u64) -> Result<(KeptRows, Option<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path(), rows, 1, ids);
    let list = KeepRows::Tensor("ids".parse().unwrap());
    read_list(&checkpoint, &checkpoint.tensors[1], &list, &mut 1000)
}

#[test]
fn lists_are_sorted_and_each_row_kept_once() {
    let folder = tempfile::tempdir().unwrap();
    let (kept, note) = from_file(folder.path(), "7\n\n 2 \r\n\t7\n0\n2", 8).unwrap();
    assert_eq!(kept.rows, [0, 2, 7]);
    assert!(note.unwrap().starts_with("t: keep_rows names 2 rows more than once"));
    let (kept, note) = from_tensor(&[3, 1], 4).unwrap();
    assert_eq!((kept.rows, note), (vec![1, 3], None));
    assert_eq!(
        from_file(folder.path(), "\n", 0).unwrap().0.count(),
        0,
        "a table without rows has none to keep"
    );
}

#[test]
fn what_is_wrong_with_a_list_is_said_where() {
    let folder = tempfile::tempdir().unwrap();
    let of = |text: &str| from_file(folder.path(), text, 8).unwrap_err();
    for (text, words) in [
        ("1\n8\n", "list: tensor \"t\": line 2: there is no row 8; the table has 8 rows"),
        ("1\n2 3\n", "line 2: '3' where only"),
        ("1\n-1", "line 2: '-'"),
        ("0x1", "line 1: 'x'"),
        ("1\u{feff}", "line 1: '\\u{feff}' where only"),
        ("1\n\u{feff}2", "line 2: "),
        ("3\nzw\u{f6}lf", "line 2: 'z'"),
        ("\u{2212}1", "line 1: '\u{2212}' where only"),
        ("99999999999999999999999999999999999999999999", "there is no row 18446744073709551615"),
        (" \n", "is empty"),
        ("", "is empty; to leave the table out, drop it"),
    ] {
        let error = of(text);
        assert_eq!(error.class(), Class::RowListBad);
        assert!(error.to_string().contains(words), "{text:?}: {error}");
    }
    let marked = from_file(folder.path(), "\u{feff}1\n2", 8).unwrap().0;
    assert_eq!(marked.count(), 2, "a byte order mark in front is none of the list");
    std::fs::write(folder.path().join("bytes"), b"1\n\xff").unwrap();
    let error = from_tensor(&[0, -3], 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor \"t\": element 1 of \"ids\": there is no row -3; the table has 4 rows"
    );
    assert!(from_tensor(&[], 4).unwrap_err().to_string().contains("empty"));
    let checkpoint = checkpoint(folder.path(), 8, 1, &[]);
    let open = |path: &str| {
        let list = KeepRows::File(path.into());
        read_list(&checkpoint, &checkpoint.tensors[1], &list, &mut 1000).unwrap_err().class()
    };
    assert_eq!(open("none"), Class::RowListMissing);
    assert_eq!(open("bytes"), Class::RowListBad);
    assert_eq!(open("../list"), Class::IndexPathEscape);
    assert_eq!(open("/etc/hostname"), Class::IndexPathEscape);
}

#[test]
fn lists_share_their_part_of_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path(), 8, 1, &[1, 2, 3]);
    let list = KeepRows::Tensor("ids".parse().unwrap());
    let mut memory = 20;
    let read = |memory: &mut u64| read_list(&checkpoint, &checkpoint.tensors[1], &list, memory);
    assert_eq!(read(&mut memory).unwrap().0.memory(), 12);
    assert_eq!(memory, 8);
    let error = read(&mut memory).unwrap_err();
    assert_eq!(error.class(), Class::LimitExceeded);
    assert!(error.to_string().contains("takes 12 bytes, and the memory budget has 8 left"), "{error}");
}

#[test]
fn every_integer_type_is_read() {
    let one = |dtype, bytes: &[u8]| numbers(dtype, bytes).collect::<Vec<_>>();
    assert_eq!(one(Dtype::U8, &[200, 1]), [200, 1]);
    assert_eq!(one(Dtype::I8, &[200, 1]), [-56, 1]);
    assert_eq!(one(Dtype::U16, &[1, 255]), [65281]);
    assert_eq!(one(Dtype::I32, &(-5i32).to_le_bytes()), [-5]);
    assert_eq!(one(Dtype::U64, &u64::MAX.to_le_bytes()), [u64::MAX.into()]);
    assert_eq!(one(Dtype::I64, &i64::MIN.to_le_bytes()), [i64::MIN.into()]);
}

#[test]
fn close_rows_are_read_together_and_far_ones_apart() {
    let spans = |rows: &[u32], row_bytes| {
        let kept = KeptRows { rows: rows.to_vec(), source_rows: 1 << 31 };
        kept.spans(0..rows.len(), row_bytes).map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    assert_eq!(spans(&[0, 1, 2, 3], 1 << 20), [vec![0, 1, 2, 3]], "no gaps: however large");
    assert_eq!(spans(&[0, 2, 19], 256), [vec![0, 2, 19]], "a gap of 16 rows is 4 KiB");
    assert_eq!(spans(&[0, 2, 20], 256), [vec![0, 2], vec![20]]);
    assert_eq!(spans(&[0, 2], 8192), [vec![0], vec![2]]);
    let every_second: Vec<u32> = (0..1000).map(|row| row * 2).collect();
    assert!(spans(&every_second, 1024).iter().all(|span| span.len() <= 128), "256 KiB at most");
    assert!(spans(&[], 4).is_empty());
}

proptest! {
    #[test]
    fn kept_rows_are_those_of_the_whole_table(
        rows in prop::collection::btree_set(0u32..3000, 1..300),
        width in 1u64..40,
        wide in any::<bool>(),
        cut in 0.0..1.0f64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let width = if wide { width * 150 } else { width };
        let checkpoint = checkpoint(folder.path(), 3000, width, &[]);
        let table = &checkpoint.tensors[1];
        let whole = std::fs::read(folder.path().join("data")).unwrap();
        let kept = KeptRows { rows: rows.into_iter().collect(), source_rows: 3000 };
        let size = width as usize;
        let expected: Vec<u8> = kept.rows.iter()
            .flat_map(|&row| whole[row as usize * size..][..size].to_vec())
            .collect();
        // From any element on, to any element: whole rows and parts of them.
        let first = (expected.len() as f64 * cut) as usize;
        let mut buffers = Buffers::default();
        for range in [first..expected.len(), 0..first, first / 2..first] {
            let mut out = vec![0; range.len()];
            kept.read(table, range.start as u64, &mut out, &mut buffers).unwrap();
            prop_assert_eq!(&out, &expected[range]);
        }
        let beyond = &mut vec![0; expected.len() + 1];
        prop_assert!(kept.read(table, 0, beyond, &mut buffers).is_err());
    }

    #[test]
    fn a_remapping_is_the_same_in_any_pieces(
        rows in prop::collection::btree_set(0u32..200, 0..100),
        step in 1u64..50,
    ) {
        let kept = KeptRows { rows: rows.into_iter().collect(), source_rows: 200 };
        let mut out = Vec::new();
        for first in (0..200).step_by(step as usize) {
            let mut piece = vec![7; 4 * step.min(200 - first) as usize];
            kept.remapping(first, &mut piece);
            out.extend(piece);
        }
        for (row, new) in out.as_chunks::<4>().0.iter().enumerate() {
            let expected = kept.rows.iter().position(|&kept| kept as usize == row);
            prop_assert_eq!(i32::from_le_bytes(*new), expected.map_or(-1, |new| new as i32));
        }
    }
}
