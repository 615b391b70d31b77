//! Files beyond 4 GiB, where formats change to their wide forms. They are sparse: gigabytes of zeros, and a few rows.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_tests::peak_memory;
use weighbridge_tests::tables::{Cut, Table, Values};
use weighbridge_tests::torch::{distributed, state_dict};

use crate::binary::Store;

/// Rows of a table of 6 GiB.
const ROWS: u64 = 12 << 20;
const WIDTH: u64 = 128;
/// The memory budget, in MiB.
const MEMORY: u64 = 256;

/// Values in the first and the last row, and on both sides of 4 GiB.
const VALUES: [(u64, u64, f32); 4] =
    [(0, 0, 1.0), (8_388_607, 127, 2.0), (8_388_608, 0, 3.0), (ROWS - 1, 127, 4.0)];

const TABLES: [Table<'_>; 2] = [
    Table { name: "ebc.embedding_bags.t.weight", rows: ROWS, width: WIDTH, values: Values::Sparse(&VALUES) },
    // Behind the large one: its place needs more than 32 bits.
    Table {
        name: "ebc.embedding_bags.u.weight",
        rows: 3,
        width: WIDTH,
        values: Values::Sparse(&[(2, 5, 5.0)]),
    },
];

/// Whether the disk has room for what a fetch of such a snapshot writes.
fn has_room(folder: &Path) -> bool {
    let volume = rustix::fs::statvfs(folder).unwrap();
    let room = volume.f_bavail * volume.f_frsize > 6 << 30;
    if !room {
        println!("skipped: less than 6 GiB of the disk are free");
    }
    room
}

/// Publishes within the budget, fetches, and looks at the rows that are not zero and at some that are.
fn check(store: &Store, checkpoint: &Path) {
    let mut publish = store.publish_command(checkpoint, &["--memory", &format!("{MEMORY}MiB")]);
    let (ended, peak) = peak_memory(&mut publish).unwrap();
    assert!(ended.success());
    assert!(peak < MEMORY << 20, "{peak}");
    store.fetch("m").succeeded();
    for table in TABLES {
        let Values::Sparse(values) = table.values else { continue };
        let [row_bytes, width] = [WIDTH + 8, WIDTH].map(|size| usize::try_from(size).unwrap());
        let (file, begin, rows) = find(&store.served().join("current"), table.name);
        assert_eq!(rows, table.rows);
        let looked_at = values.iter().map(|&(row, ..)| row).chain([1, table.rows / 3]);
        for row in looked_at {
            let mut encoded = vec![0; row_bytes];
            file.read_exact_at(&mut encoded, begin + row * (WIDTH + 8)).unwrap();
            let mut decoded = vec![0.0; width];
            assert!(Form::plain(Encoding::Int8Sbf32).decode_row(Dtype::F32, &encoded, &mut decoded));
            let mut expected = vec![0.0; width];
            for &(_, column, value) in values.iter().filter(|&&(there, ..)| there == row) {
                expected[usize::try_from(column).unwrap()] = value;
            }
            assert_eq!(decoded, expected, "{} row {row}", table.name);
        }
    }
}

/// The header of a safetensors file, and where its data starts.
fn header(file: &File) -> (Value, u64) {
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).unwrap();
    let length = u64::from_le_bytes(length);
    let mut header = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut header, 8).unwrap();
    (serde_json::from_slice(&header).unwrap(), 8 + length)
}

/// The file that holds a tensor, where its bytes start, and its rows.
fn find(version: &Path, tensor: &str) -> (File, u64, u64) {
    let files = std::fs::read_dir(version).unwrap().map(|entry| entry.unwrap().path());
    let mut files = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files
        .find_map(|path| {
            let file = File::open(path).unwrap();
            let (header, data) = header(&file);
            let entry = header.get(tensor)?;
            let begin = data + entry["data_offsets"][0].as_u64().unwrap();
            Some((file, begin, entry["shape"][0].as_u64().unwrap()))
        })
        .unwrap()
}

#[test]
fn a_torch_save_file_of_6_gib_is_published_right_in_bounded_memory() {
    let store = Store::new();
    if has_room(store.folder.path()) {
        let file = store.folder.path().join("model.pt");
        state_dict(&file, &TABLES).unwrap();
        assert!(std::fs::metadata(&file).unwrap().len() > 6 << 30);
        check(&store, &file);
    }
}

#[test]
fn an_item_of_6_gib_in_a_distributed_checkpoint_is_published_right_in_bounded_memory() {
    let store = Store::new();
    if has_room(store.folder.path()) {
        let folder = store.folder.path().join("checkpoint");
        std::fs::create_dir(&folder).unwrap();
        distributed(&folder, &TABLES, Cut::Rows(1)).unwrap();
        check(&store, &folder);
    }
}
