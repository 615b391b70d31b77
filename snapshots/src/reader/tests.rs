//! Versions that are made here, byte by byte: what opens, what is refused, and what rows decode to.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use half::f16;
use proptest::prelude::*;

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form, Layout};
use weighbridge_schemas::ids::{ChunkId, Fingerprint, RulesDigest, SnapshotId};
use weighbridge_schemas::snapshot::{
    Chunk, MANIFEST_FILE, Pruned, SnapshotFile, SnapshotManifest, SnapshotSchema, SnapshotTensor,
};

use super::*;
use crate::error::Class;

const FILE: &str = "model.safetensors";

/// A tensor to write, and its bytes.
type Written = (SnapshotTensor, Vec<u8>);

fn tensor(name: &str, form: Form, source_dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Written {
    let Form { encoding, layout, row_alignment, stored_width } = form;
    let (shape, file) = (shape.to_vec(), FILE.to_owned());
    let name = name.parse().unwrap();
    let (pruned, begin, end) = (None, 0, 0);
    let described = SnapshotTensor {
        name,
        shape,
        source_dtype,
        encoding,
        layout,
        row_alignment,
        stored_width,
        pruned,
        file,
        begin,
        end,
    };
    (described, bytes)
}

fn kept(name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Written {
    tensor(name, Form::plain(Encoding::Keep), dtype, shape, bytes)
}

fn bytes_of<const N: usize>(values: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
    values.into_iter().flatten().collect()
}

/// One file of the tensors, each from a multiple of 8 on, and an artifact.
fn manifest(step: u64, tensors: Vec<Written>) -> (SnapshotManifest, Vec<(String, Vec<u8>)>) {
    let (mut bytes, mut chunks, mut described) = (Vec::new(), Vec::new(), Vec::new());
    for (mut tensor, content) in tensors {
        tensor.begin = bytes.len() as u64;
        tensor.end = tensor.begin + content.len() as u64;
        described.push(tensor);
        let from = bytes.len();
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        if bytes.len() > from {
            chunks.push(Chunk { id: ChunkId::of(&bytes[from..]), size: (bytes.len() - from) as u64 });
        }
    }
    let note = b"a note".to_vec();
    let file = |name: &str, bytes: &[u8], artifact, chunks| SnapshotFile {
        name: name.to_owned(),
        size: bytes.len() as u64,
        artifact,
        chunks,
    };
    let noted = vec![Chunk { id: ChunkId::of(&note), size: note.len() as u64 }];
    let files = vec![file(FILE, &bytes, false, chunks), file("notes/a.txt", &note, true, noted)];
    let manifest = SnapshotManifest {
        schema: SnapshotSchema::V1,
        model: "m".parse().unwrap(),
        run: "r".parse().unwrap(),
        step,
        format: Format::Safetensors,
        checkpoint: Fingerprint::of(b"checkpoint"),
        rules: RulesDigest::of(b"rules"),
        encoding_version: 1,
        files,
        tensors: described,
    };
    (manifest, vec![(FILE.to_owned(), bytes), ("notes/a.txt".to_owned(), note)])
}

/// Writes a version into `DIR/versions`, and points `DIR/current` at it.
fn write(folder: &Path, step: u64, tensors: Vec<Written>) -> PathBuf {
    let (manifest, files) = manifest(step, tensors);
    manifest.check().unwrap();
    let version = folder.join("versions").join(manifest.id().to_string());
    fs::create_dir_all(version.join("notes")).unwrap();
    for (name, bytes) in files {
        fs::write(version.join(name), bytes).unwrap();
    }
    fs::write(version.join(MANIFEST_FILE), manifest.to_bytes()).unwrap();
    flip(folder, &manifest.id());
    version
}

fn flip(folder: &Path, id: &SnapshotId) {
    let next = folder.join("next");
    std::os::unix::fs::symlink(format!("versions/{id}"), &next).unwrap();
    fs::rename(next, folder.join("current")).unwrap();
}

/// A table `t` of two rows of one element, both of them `value`.
fn table_of(value: f32) -> Vec<Written> {
    vec![kept("t", Dtype::F32, &[2, 1], bytes_of([value; 2].map(f32::to_le_bytes)))]
}

fn value(version: &Version) -> f32 {
    let mut values = [0.0; 2];
    assert_eq!(version.table("t").unwrap().decode_rows(&[1, 0], &mut values).unwrap(), 0);
    assert_eq!(values[0], values[1]);
    values[0]
}

fn refused(path: &Path) -> Class {
    Version::open(path, &Options::default()).unwrap_err().class()
}

#[test]
fn a_version_is_read_where_it_lies() {
    let folder = tempfile::tempdir().unwrap();
    let halves = [1.5, -2.0, 0.0].map(|value| f16::from_f32(value).to_le_bytes());
    let tensors = vec![
        kept("numbers", Dtype::I64, &[2], bytes_of([7i64, -7].map(i64::to_le_bytes))),
        tensor("halves", Form::plain(Encoding::F16), Dtype::F32, &[3], bytes_of(halves)),
        kept("none", Dtype::F32, &[0, 4], Vec::new()),
        kept("flags", Dtype::Bool, &[1], vec![1]),
    ];
    let path = write(folder.path(), 3, tensors);
    for pages in [Pages::OnDemand, Pages::Ahead, Pages::Present] {
        for at in [path.clone(), folder.path().join("current"), folder.path().join("current/")] {
            let version = Version::open(&at, &Options { pages, verify: true, threads: 3 }).unwrap();
            assert_eq!((version.manifest().step, version.id()), (3, version.manifest().id()));
            assert_eq!(version.tensor("numbers").unwrap().values::<i64>().unwrap(), [7, -7]);
            let halves = version.tensor("halves").unwrap();
            assert_eq!(halves.values::<f16>().unwrap()[1], f16::from_f32(-2.0));
            assert_eq!((halves.dtype(), halves.described().source_dtype), (Dtype::F16, Dtype::F32));
            assert_eq!(version.table("none").unwrap().rows(), 0);
            assert_eq!(version.tensor("flags").unwrap().bytes(), [1]);
            assert_eq!(version.file("notes/a.txt").unwrap(), b"a note");
            assert_eq!((version.file("notes"), version.tensors().count()), (None, 4));
        }
    }
}

#[test]
fn what_is_not_there_is_told_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = table_of(1.0);
    tensors.push(kept("one", Dtype::F32, &[2], vec![0; 8]));
    tensors.push(kept("ids", Dtype::I32, &[2, 1], vec![0; 8]));
    let version = Version::open(&write(folder.path(), 1, tensors), &Options::default()).unwrap();
    let classes = |error: LookupError| (error.class(), error.to_string());
    let (class, told) = classes(version.table("absent").unwrap_err());
    assert!(
        class == "unknown_tensor" && told.contains("\"absent\"") && told.contains(&version.id().to_string())
    );
    assert_eq!(version.table("one").unwrap_err().class(), "not_a_table");
    let (table, ids) = (version.table("t").unwrap(), version.table("ids").unwrap());
    let (class, told) = classes(table.decode_row(2, &mut [0.0]).unwrap_err());
    assert!(class == "row_out_of_range" && told.contains("no row 2; its 2 rows"), "{told}");
    assert_eq!(table.row(u64::MAX).unwrap_err().class(), "row_out_of_range");
    for wrong in [&mut [][..], &mut [0.0; 2]] {
        assert_eq!(table.decode_row(0, wrong).unwrap_err().class(), "wrong_buffer");
    }
    assert_eq!(table.decode_rows(&[], &mut []).unwrap(), 0);
    assert_eq!(ids.decode_row(0, &mut [0.0]).unwrap_err().class(), "not_floats");
    assert_eq!(ids.row(1).unwrap().unwrap().len(), 4, "its rows are there as they are");
    assert_eq!(version.tensor("ids").unwrap().values::<f32>().unwrap_err().class(), "wrong_type");
}

#[test]
fn values_that_are_not_aligned_are_bytes_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (mut made, files) = manifest(1, vec![kept("t", Dtype::F32, &[1, 2], vec![0; 12])]);
    (made.tensors[0].begin, made.tensors[0].end) = (2, 10);
    let path = folder.path().join(made.id().to_string());
    fs::create_dir_all(path.join("notes")).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(path.join(name), bytes).unwrap());
    fs::write(path.join(MANIFEST_FILE), made.to_bytes()).unwrap();
    let version = Version::open(&path, &Options::default()).unwrap();
    assert_eq!(version.tensor("t").unwrap().values::<f32>().unwrap_err().class(), "not_in_place");
    version.table("t").unwrap().decode_row(0, &mut [1.0; 2]).unwrap();
}

#[test]
fn a_pruned_tables_rows_are_numbered_as_in_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut table = kept("t", Dtype::F32, &[2, 1], bytes_of([4.0f32, 5.0].map(f32::to_le_bytes)));
    let index_remapping = "t.index_remapping".parse().unwrap();
    table.0.pruned = Some(Pruned { source_rows: 5, index_remapping });
    let remapping = bytes_of([1i32, -1, 0, 2, -2].map(i32::to_le_bytes));
    let tensors = vec![table, kept("t.index_remapping", Dtype::I32, &[5], remapping)];
    let version = Version::open(&write(folder.path(), 1, tensors), &Options::default()).unwrap();
    let table = version.table("t").unwrap();
    assert_eq!(table.rows(), 5);
    let mut decoded = [9.0; 4];
    assert_eq!(table.decode_rows(&[2, 1, 0, 1], &mut decoded).unwrap(), 2);
    assert_eq!(decoded, [4.0, 0.0, 5.0, 0.0]);
    assert_eq!(table.decode_row(1, &mut decoded[..1]).unwrap(), Row::Pruned);
    assert_eq!(table.decode_row(2, &mut decoded[..1]).unwrap(), Row::Kept);
    assert_eq!(table.row(1).unwrap(), None);
    for damaged in [3, 4] {
        assert_eq!(table.row(damaged).unwrap_err().class(), "integrity");
    }
    assert_eq!(table.row(5).unwrap_err().class(), "row_out_of_range");
}

#[test]
fn what_is_not_to_the_byte_a_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), 1, table_of(1.0));
    let (file, described, note) = (path.join(FILE), path.join(MANIFEST_FILE), path.join("notes/a.txt"));
    let spoil = |at: &Path, bytes: Option<&[u8]>| {
        let right = fs::read(at).unwrap();
        fs::remove_file(at).unwrap();
        bytes.map_or(Ok(()), |bytes| fs::write(at, bytes)).unwrap();
        let class = refused(&path);
        fs::write(at, right).unwrap();
        class
    };
    for at in [&file, &described, &note] {
        let right = fs::read(at).unwrap();
        assert_eq!(spoil(at, None), Class::Integrity, "missing");
        assert_eq!(spoil(at, Some(&right[1..])), Class::Integrity, "short");
        assert_eq!(spoil(at, Some(&[&right[..], b" "].concat())), Class::Integrity, "long");
        let away = folder.path().join("away");
        fs::rename(at, &away).unwrap();
        std::os::unix::fs::symlink(&away, at).unwrap();
        assert_eq!(refused(&path), Class::Integrity, "a link");
        fs::remove_file(at).unwrap();
        fs::create_dir(at).unwrap();
        assert_eq!(refused(&path), Class::Integrity, "a folder");
        fs::remove_dir(at).unwrap();
        fs::rename(&away, at).unwrap();
    }
    let away = folder.path().join("notes");
    fs::rename(path.join("notes"), &away).unwrap();
    std::os::unix::fs::symlink(&away, path.join("notes")).unwrap();
    assert_eq!(refused(&path), Class::Integrity, "a folder behind a link");
    fs::remove_file(path.join("notes")).unwrap();
    fs::rename(&away, path.join("notes")).unwrap();
    Version::open(&path, &Options::default()).unwrap();

    // Another snapshot's files under this one's name, though all is whole.
    let other = write(folder.path(), 2, table_of(2.0));
    fs::rename(&path, folder.path().join("old")).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(refused(&path), Class::Integrity);
}

#[test]
fn a_flipped_bit_is_found_when_chunks_are_verified() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = (0..20).map(|n| kept(&format!("t{n}"), Dtype::U8, &[100], vec![n; 100])).collect();
    let path = write(folder.path(), 1, tensors);
    let mut bytes = fs::read(path.join(FILE)).unwrap();
    bytes[1500] ^= 1;
    fs::write(path.join(FILE), bytes).unwrap();
    Version::open(&path, &Options::default()).unwrap();
    for threads in [0, 1, 4, 100] {
        let options = Options { verify: true, threads, ..Options::default() };
        let error = Version::open(&path, &options).unwrap_err();
        assert_eq!(error.class(), Class::Integrity, "{error}");
        assert!(error.object().ends_with(FILE), "{error}");
    }
}

#[test]
fn folders_that_are_no_versions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert_eq!(refused(&at("absent")), Class::NotFound);
    assert_eq!(refused(folder.path()), Class::Refused);
    let id = SnapshotId::of(b"nothing").to_string();
    fs::write(at(&id), "").unwrap();
    assert_eq!(refused(&at(&id)), Class::Refused);
    std::os::unix::fs::symlink(SnapshotId::of(b"gone").to_string(), at("current")).unwrap();
    assert_eq!(refused(&at("current")), Class::NotFound);
    let real = write(folder.path(), 1, table_of(1.0));
    fs::remove_file(at(&id)).unwrap();
    std::os::unix::fs::symlink(&real, at(&id)).unwrap();
    std::os::unix::fs::symlink(&id, at("twice")).unwrap();
    assert_eq!(refused(&at("twice")), Class::Refused, "a link to a link");
}

/// How many of this process's maps are of files below `folder`, deleted ones too.
fn maps_of(folder: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(folder.to_str().unwrap())).count()
}

#[test]
fn a_batch_keeps_its_version_and_memory_is_given_back_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(folder.path(), 1, table_of(1.0));
    let serving = Serving::open(folder.path(), Options::default()).unwrap();
    assert_eq!(serving.refresh().unwrap(), None);
    let batch = serving.current();
    let second = write(folder.path(), 2, table_of(2.0));
    let swap = serving.refresh().unwrap().unwrap();
    assert_eq!((swap.from, swap.to), (batch.id(), serving.current().id()));
    // Its files may even be deleted.
    fs::remove_dir_all(&first).unwrap();
    assert_eq!((value(&batch), value(&serving.current())), (1.0, 2.0));
    assert_eq!((serving.refresh().unwrap(), serving.retired()), (None, 1));
    assert!(maps_of(&first) > 0 && maps_of(&second) > 0);
    drop(batch);
    assert_eq!((serving.refresh().unwrap(), serving.retired()), (None, 0));
    assert!(maps_of(&first) == 0 && maps_of(&second) > 0);
    drop(serving);
    assert_eq!(maps_of(folder.path()), 0);
}

#[test]
fn what_cannot_be_served_leaves_the_old_version_serving() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(folder.path(), 1, table_of(1.0));
    let serving = Serving::open(folder.path(), Options::default()).unwrap();
    let link = folder.path().join("current");
    fs::remove_file(&link).unwrap();
    assert_eq!(serving.refresh().unwrap_err().class(), Class::NotFound);
    let second = write(folder.path(), 2, table_of(2.0));
    let right = fs::read(second.join(FILE)).unwrap();
    fs::write(second.join(FILE), &right[1..]).unwrap();
    assert_eq!(serving.refresh().unwrap_err().class(), Class::Integrity);
    assert_eq!((value(&serving.current()), serving.retired()), (1.0, 0));
    fs::write(second.join(FILE), right).unwrap();
    serving.refresh().unwrap().unwrap();
    assert_eq!(value(&serving.current()), 2.0);

    // Back to the first, which is a swap as any other.
    let back = first.file_name().unwrap().to_str().unwrap().parse().unwrap();
    flip(folder.path(), &back);
    assert_eq!(serving.refresh().unwrap().unwrap().to, back);
    assert_eq!(value(&serving.current()), 1.0);

    // A version that was replaced under its name is opened anew.
    let copy = folder.path().join("copy");
    fs::rename(&first, &copy).unwrap();
    write(folder.path(), 1, table_of(1.0));
    let swap = serving.refresh().unwrap().unwrap();
    assert_eq!((swap.from, swap.to), (back, back));
    assert_eq!(serving.refresh().unwrap(), None);
}

#[test]
fn whoever_waited_for_a_turn_opens_what_is_pointed_at_then() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(folder.path(), 1, table_of(1.0));
    let serving = Serving::open(folder.path(), Options::default()).unwrap();
    write(folder.path(), 2, table_of(2.0));
    std::thread::scope(|scope| {
        let turn = serving.turn();
        let late = scope.spawn(|| serving.refresh());
        // Time to look before its turn.
        std::thread::sleep(Duration::from_millis(100));
        flip(folder.path(), &first.file_name().unwrap().to_str().unwrap().parse().unwrap());
        drop(turn);
        assert_eq!(late.join().unwrap(), Ok(None));
    });
    assert_eq!(value(&serving.current()), 1.0);
}

#[test]
fn a_watch_follows_tells_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, table_of(1.0));
    let serving = Arc::new(Serving::open(folder.path(), Options::default()).unwrap());
    let (send, events) = mpsc::channel();
    let watch = serving.watch(Duration::ZERO, move |event| send.send(event).unwrap()).unwrap();
    let second = write(folder.path(), 2, table_of(2.0));
    let next = || events.recv_timeout(Duration::from_secs(60)).unwrap();
    let Event::Swapped(swap) = next() else { panic!("it is swapped") };
    assert_eq!(swap.to.to_string(), second.file_name().unwrap().to_str().unwrap());
    fs::remove_file(folder.path().join("current")).unwrap();
    let Event::Failed(error) = next() else { panic!("the link is gone") };
    assert_eq!(error.class(), Class::NotFound);
    assert!(watch.is_alive());
    write(folder.path(), 3, table_of(3.0));
    // However long the pause is by now: what is new is looked at.
    while !matches!(next(), Event::Swapped(_)) {}
    assert_eq!(value(&serving.current()), 3.0);
    drop(watch);
    write(folder.path(), 4, table_of(4.0));
    assert_eq!(events.recv(), Err(mpsc::RecvError), "the watch has ended");
    assert_eq!((value(&serving.current()), Arc::strong_count(&serving)), (3.0, 1));
}

#[test]
fn a_watch_that_is_dropped_by_itself_or_panics_ends() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, table_of(1.0));
    let serving = Arc::new(Serving::open(folder.path(), Options::default()).unwrap());
    fs::remove_file(folder.path().join("current")).unwrap();
    let (give, take) = mpsc::channel::<Watch>();
    let (say, heard) = mpsc::channel();
    let within = serving.watch(Duration::ZERO, move |_| {
        drop(take.recv());
        say.send(()).unwrap();
    });
    give.send(within.unwrap()).unwrap();
    heard.recv().unwrap();
    let panicking = serving.watch(Duration::ZERO, |_| panic!("a fault in what is told")).unwrap();
    while panicking.is_alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every encoding of every source that it may have, in both layouts, aligned and padded.
fn forms() -> Vec<(Form, Dtype)> {
    let mut forms = Vec::new();
    for &encoding in Encoding::ALL {
        let plain = Form::plain(encoding);
        let floats = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E4m3, Dtype::F8E5m2];
        forms.extend(floats.map(|source| (plain, source)));
        if encoding.is_row_wise() {
            let leading = Form { layout: Layout::Leading, row_alignment: 16, ..plain };
            let padded = Form { stored_width: Some(72), ..plain };
            let both = Form { stored_width: Some(72), ..leading };
            forms.extend([leading, padded, both].map(|form| (form, Dtype::F32)));
        }
    }
    forms
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn rows_decode_as_their_bytes_do(
        width in 0u64..70,
        rows in 1u64..9,
        noise in prop::collection::vec(any::<u8>(), 1..2000),
        asked in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let sized = |form: &Form, source| usize::try_from(form.row_bytes(width, source).unwrap()).unwrap();
        let tensors = forms().into_iter().enumerate().map(|(n, (form, source))| {
            let bytes = noise.iter().cycle().copied().take(sized(&form, source) * usize::try_from(rows).unwrap());
            tensor(&n.to_string(), form, source, &[rows, width], bytes.collect())
        });
        let path = write(folder.path(), 1, tensors.collect());
        let version = Version::open(&path, &Options::default()).unwrap();
        let asked: Vec<u64> = asked.iter().map(|row| row.index(usize::try_from(rows).unwrap()) as u64).collect();
        let width = usize::try_from(width).unwrap();
        for (n, (form, source)) in forms().into_iter().enumerate() {
            let table = version.table(&n.to_string()).unwrap();
            let mut decoded = vec![7.0; asked.len() * width];
            prop_assert_eq!(table.decode_rows(&asked, &mut decoded).unwrap(), 0);
            let bytes = table.tensor().bytes();
            for (k, &row) in asked.iter().enumerate() {
                let size = sized(&form, source);
                let begin = usize::try_from(row).unwrap() * size;
                let mut expected = vec![0.0; width];
                prop_assert!(form.decode_row(source, &bytes[begin..begin + size], &mut expected));
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&decoded[k * width..(k + 1) * width]), bits(&expected), "{}", form);
            }
        }
    }
}

/// The seeds in `fuzz/corpus/version/`, and changes of them that are the same in every run.
#[test]
fn every_version_folder_is_read_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/version");
    let folder = tempfile::tempdir().unwrap();
    let mut random = fastrand::Rng::with_seed(81);
    let mut seeds: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    assert!(!seeds.is_empty());
    fuzzing::version(folder.path(), b"").unwrap();
    for seed in seeds.iter().map(|seed| fs::read(seed).unwrap()) {
        fuzzing::version(folder.path(), &seed).unwrap();
        for _ in 0..300 {
            let mut changed = seed.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..changed.len());
                // Digits stay digits, so that most manifests still parse.
                changed[at] =
                    if changed[at].is_ascii_digit() { random.u8(b'0'..=b'9') } else { random.u8(..) };
            }
            fuzzing::version(folder.path(), &changed).unwrap();
        }
    }
}
