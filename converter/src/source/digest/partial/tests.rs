//! However a file is parted among sources, what they know together is what one that reads all of it knows.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::sample::Index;
use tempfile::TempDir;
use weighbridge_schemas::checkpoint::ManifestFile;
use weighbridge_schemas::digests::{PAGE_BYTES, Run, Subtree};
use weighbridge_schemas::ids::ChainingValue;

use super::super::tests::{content, finish_record, record};
use super::*;

/// A file, parted among sources.
#[derive(Debug, Clone)]
struct Case {
    bytes: Vec<u8>,
    /// The record that lies in it.
    record: SliceRecord,
    /// Runs of it in the order in which they are read, with the number of the source that reads them; nobody reads
    /// those of the last.
    runs: Vec<(usize, std::ops::Range<usize>)>,
    /// Whose digests are adopted, in this order, as often as they stand here.
    order: Vec<usize>,
}

const SOURCES: usize = 5;

fn case() -> impl Strategy<Value = Case> {
    let near = (0..12usize, -2..3isize).prop_map(|(pages, more)| (pages << 16).saturating_add_signed(more));
    let length = prop_oneof![1..4096usize, near.prop_map(|length| length.max(1)), 1..1_500_000usize];
    let cuts = prop::collection::vec((any::<Index>(), 0..=SOURCES), 0..24);
    let order =
        prop::collection::vec(0..SOURCES, 0..6).prop_map(|again| [(0..SOURCES).collect(), again].concat());
    let item = prop::option::of(Just(()));
    (length, cuts, order.prop_shuffle(), any::<(Index, Index)>(), item).prop_perturb(
        |(length, cuts, order, (start, end), item), mut random| {
            let bytes = content(length);
            let start = start.index(length);
            let end = start + 1 + end.index(length - start);
            let mut record = record(&bytes[start..end], start as u64);
            record.item = item.map(|()| Item { offset: 0, length: length as u64 });
            let mut starts: Vec<_> = cuts.iter().map(|(at, source)| (at.index(length), *source)).collect();
            starts.push((0, 0));
            starts.sort_unstable();
            let ends = starts.iter().skip(1).map(|&(at, _)| at).chain([length]);
            let mut runs: Vec<_> =
                starts.iter().zip(ends).map(|(&(at, source), end)| (source, at..end)).collect();
            for at in (1..runs.len()).rev() {
                runs.swap(at, random.random_range(0..=at));
            }
            Case { bytes, record, runs, order }
        },
    )
}

/// A source of the file that `folder` holds, `bytes` being what is declared of it.
fn source(folder: &Path, bytes: &[u8]) -> Source {
    let declared =
        ManifestFile { path: "f".to_owned(), size: bytes.len() as u64, blake3: Some(FileDigest::of(bytes)) };
    Source::open(folder).unwrap().declare(&[declared]).unwrap()
}

/// Reads a run, in pieces as the record's bounds cut it.
fn read(source: &Source, record: SliceRecord, run: &std::ops::Range<usize>) -> Result<()> {
    let file = source.file("f").unwrap();
    let place = |at: u64| usize::try_from(at).unwrap().clamp(run.start, run.end);
    let (start, end) = (place(record.record.offset), place(record.record.end()));
    file.read_exact_at(&mut vec![0; start - run.start], run.start as u64)?;
    if start < end {
        file.read_record_at(record, &mut vec![0; end - start], start as u64)?;
    }
    file.read_exact_at(&mut vec![0; run.end - end], end as u64)
}

/// The document, as it comes out of a store.
fn through_json(digests: &PartialDigests) -> PartialDigests {
    let json = digests.to_bytes();
    assert!(json.len() <= limits::PARTIAL_DIGESTS_BYTES);
    PartialDigests::parse(&json).unwrap()
}

impl Case {
    fn write(&self, bytes: &[u8]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), bytes).unwrap();
        folder
    }

    /// What each source knows once it has read its runs, and what went wrong.
    fn parts(&self, folder: &Path) -> (Vec<PartialDigests>, Result<()>) {
        let sources: Vec<_> = (0..SOURCES).map(|_| source(folder, &self.bytes)).collect();
        let mut done = Ok(());
        for (number, run) in &self.runs {
            if let Some(source) = sources.get(*number) {
                done = done.and(read(source, self.record, run));
            }
        }
        (sources.iter().map(|source| through_json(&source.partial_digests())).collect(), done)
    }

    /// How many bytes of whole pages nobody has read as one run, and of the record nobody at all.
    fn unread(&self) -> (u64, u64) {
        let length = self.bytes.len() as u64;
        let read = self.runs.iter().filter(|(source, _)| *source < SOURCES);
        let read: Vec<_> = read.map(|(_, run)| run.start as u64..run.end as u64).collect();
        let pages = (0..length.div_ceil(PAGE_BYTES)).map(|page| (page * PAGE_BYTES, (page + 1) * PAGE_BYTES));
        let pages = pages.map(|(start, end)| (start, end.min(length)));
        let open =
            pages.filter(|(start, end)| !read.iter().any(|run| run.start <= *start && *end <= run.end));
        let (start, end) = (self.record.record.offset, self.record.record.end());
        let of_record = read.iter().map(|run| run.end.min(end).saturating_sub(run.start.max(start)));
        (open.map(|(start, end)| end - start).sum(), (end - start) - of_record.sum::<u64>())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_several_sources_read_is_read_once(case in case()) {
        let folder = case.write(&case.bytes);
        let (parts, done) = case.parts(folder.path());
        done.unwrap();
        let last = source(folder.path(), &case.bytes);
        for &part in &case.order {
            last.adopt(&parts[part]).unwrap();
        }
        let (pages, of_record) = case.unread();
        let file = last.file("f").unwrap();
        let read = finish_record(&file.digests, case.record, &case.bytes).unwrap();
        prop_assert_eq!(read, of_record);
        prop_assert!(last.unhashed_bytes() <= pages);
        let read = AtomicU64::new(0);
        last.check_digests(2, &|bytes| { read.fetch_add(bytes, Ordering::Relaxed); }).unwrap();
        prop_assert!(read.load(Ordering::Relaxed) <= pages, "{} of {pages}", read.load(Ordering::Relaxed));
        prop_assert!(lock(&file.digests.records).open.is_empty());
        let kept = limits::DIGEST_BYTES - last.digest_budget.0.load(Ordering::Relaxed);
        prop_assert!(kept == 0 || kept == CHECKED_BYTES, "{kept} bytes are kept");
        // Whoever has all tells all.
        let whole = through_json(&last.partial_digests());
        let other = source(folder.path(), &case.bytes);
        other.adopt(&whole).unwrap();
        prop_assert_eq!(other.unhashed_bytes(), 0);
        prop_assert!(other.file("f").unwrap().has_checked(case.record.checkable()));
        prop_assert_eq!(other.partial_digests(), whole);
    }

    #[test]
    fn parts_that_overlap_come_to_the_same(case in case(), more in any::<[(Index, Index); 3]>()) {
        let folder = case.write(&case.bytes);
        let (parts, _) = case.parts(folder.path());
        // One source that has taken up some parts, and read more by itself.
        let between = source(folder.path(), &case.bytes);
        for &part in case.order.iter().take(4) {
            between.adopt(&parts[part]).unwrap();
        }
        let last = source(folder.path(), &case.bytes);
        for (start, end) in &more {
            let start = start.index(case.bytes.len());
            let run = start..start + 1 + end.index(case.bytes.len() - start);
            read(&between, case.record, &run).unwrap();
            read(&last, case.record, &(run.start / 2..run.end)).unwrap();
        }
        for part in case.order.iter().map(|&part| &parts[part]).chain([&through_json(&between.partial_digests())]) {
            last.adopt(part).unwrap();
        }
        last.file("f").unwrap().check_record(case.record, &mut Vec::new()).unwrap();
        last.check_digests(2, &|_| ()).unwrap();
    }

    #[test]
    fn an_altered_byte_is_found_whoever_reads_it(case in case(), at in any::<Index>()) {
        let mut altered = case.bytes.clone();
        let at = at.index(altered.len());
        altered[at] ^= 1;
        let folder = case.write(&altered);
        let (parts, done) = case.parts(folder.path());
        let last = source(folder.path(), &case.bytes);
        let mut classes: Vec<_> = done.err().into_iter().map(|error| error.class()).collect();
        for &part in &case.order {
            classes.extend(last.adopt(&parts[part]).err().map(|error| error.class()));
        }
        let file = last.file("f").unwrap();
        classes.extend(file.check_record(case.record, &mut Vec::new()).err().map(|error| error.class()));
        prop_assert_eq!(last.check_digests(2, &|_| ()).unwrap_err().class(), Class::FileDigestMismatch);
        let in_record = (case.record.record.offset..case.record.record.end()).contains(&(at as u64));
        prop_assert_eq!(classes.contains(&Class::ZipCrc), in_record);
    }

    #[test]
    fn no_document_makes_it_panic_or_take_more_memory(documents in prop::collection::vec(document(), 1..4)) {
        let bytes = content(FUZZED);
        let case = Case { record: record(&bytes, 0), bytes, runs: vec![(0, 0..100_000)], order: vec![] };
        let folder = case.write(&case.bytes);
        let last = source(folder.path(), &case.bytes);
        read(&last, case.record, &(0..100_000)).unwrap();
        for document in &documents {
            if let Err(error) = last.adopt(&through_json(document)) {
                let known = [Class::DigestsBad, Class::FileDigestMismatch, Class::ZipCrc];
                prop_assert!(known.contains(&error.class()), "{error}");
            }
            prop_assert!(last.digest_budget.0.load(Ordering::Relaxed) >= 0);
        }
        let _ = last.file("f").unwrap().check_record(case.record, &mut Vec::new());
        let _ = last.check_digests(2, &|_| ());
        let _ = last.partial_digests();
    }

    #[test]
    fn altered_documents_never_panic(
        case in case(), edits in prop::collection::vec((any::<Index>(), any::<u8>()), 1..6),
    ) {
        let folder = case.write(&case.bytes);
        for part in case.parts(folder.path()).0 {
            let mut json = part.to_bytes();
            for (at, byte) in &edits {
                let at = at.index(json.len());
                json[at] = *byte;
            }
            let last = source(folder.path(), &case.bytes);
            if let Ok(part) = PartialDigests::parse(&json) {
                let _ = last.adopt(&part).and_then(|()| last.check_digests(1, &|_| ()));
            }
        }
    }
}

/// The length of the file that random documents are of.
const FUZZED: usize = 9 * (64 << 10) + 17;

fn number() -> impl Strategy<Value = u64> + Clone {
    let length = FUZZED as u64;
    prop_oneof![0..10u64, 0..length, length - 2..length + 2, any::<u64>(), u64::MAX - 2..=u64::MAX]
}

fn document() -> impl Strategy<Value = PartialDigests> {
    let some = 0..6usize;
    let value = any::<[u8; 32]>().prop_map(ChainingValue::from_bytes);
    let subtree = (number(), prop_oneof![0..4u32, any::<u32>()], value);
    let subtree = subtree.prop_map(|(first_page, level, value)| Subtree { first_page, level, value });
    let item = (number(), number()).prop_map(|(offset, length)| digests::Item { offset, length });
    let record = (number(), number(), any::<u32>());
    let record = record.prop_map(|(offset, length, crc32)| digests::Record { offset, length, crc32 });
    let known = told(record_of_all());
    let of = prop_oneof![record.clone(), Just(known)];
    let run = (of, prop::option::of(item.clone()), number(), number(), any::<u32>());
    let run =
        run.prop_map(|(record, item, offset, length, crc32)| Run { record, item, offset, length, crc32 });
    let lists = (
        prop::collection::vec(subtree, some.clone()),
        prop::collection::vec(item, some.clone()),
        prop::collection::vec(record, some.clone()),
        prop::collection::vec(run, some),
    );
    let file = (
        prop_oneof![9 => Just("f"), 1 => Just("../g")],
        prop::option::weighted(0.1, any::<[u8; 32]>()),
        lists,
    );
    let file = file.prop_map(|(name, blake3, (subtrees, items, records, runs))| PartialFile {
        name: name.to_owned(),
        blake3: blake3.map(FileDigest::from_bytes),
        subtrees,
        items,
        records,
        runs,
    });
    prop::collection::vec(file, 0..3).prop_map(|files| PartialDigests { files, ..PartialDigests::default() })
}

fn record_of_all() -> Record {
    record(&content(FUZZED), 0).record
}

#[test]
fn a_document_tells_the_largest_and_adopting_keeps_within_the_budget() {
    let bytes = content(10 << 20);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f"), &bytes).unwrap();
    let (worker, last) = (source(folder.path(), &bytes), source(folder.path(), &bytes));
    let file = worker.file("f").unwrap();
    for offset in 0..150_000u64 {
        file.pass_item(Item { offset, length: 1 + offset % 1000 });
    }
    file.read_exact_at(&mut vec![0; 1 << 20], 0).unwrap();
    let told = worker.partial_digests();
    assert_eq!(told.files.len(), 1);
    let (json, told) = (told.to_bytes(), told.files[0].clone());
    assert!((limits::PARTIAL_DIGESTS_BYTES - 200..=limits::PARTIAL_DIGESTS_BYTES).contains(&json.len()));
    let smallest = told.items.iter().map(|item| item.length).min().unwrap();
    let larger = (0..150_000).filter(|offset| 1 + offset % 1000 > smallest).count();
    assert!(larger <= told.items.len() && larger > 50_000 && !told.subtrees.is_empty());
    assert!(told.items.is_sorted() && told.subtrees.is_sorted());
    for shift in 0..3 {
        let mut other = told.clone();
        other.items.iter_mut().for_each(|item| item.offset += shift * 200_000);
        last.adopt(&PartialDigests { files: vec![other], ..PartialDigests::default() }).unwrap();
    }
    let left = last.digest_budget.0.load(Ordering::Relaxed);
    assert!((limits::DIGEST_BYTES / 2..limits::DIGEST_BYTES / 2 + 100).contains(&left), "{left}");
    assert_eq!(last.unhashed_bytes(), 9 << 20);
    last.check_digests(2, &|_| ()).unwrap();
}

#[test]
fn what_cannot_be_of_the_checkpoint_is_refused_by_name() {
    let bytes = content(4 * (64 << 10));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f"), &bytes).unwrap();
    let last = source(folder.path(), &bytes);
    let subtree = |first_page, level| Subtree { first_page, level, value: ChainingValue::of(b"") };
    let length = bytes.len() as u64;
    let file = |name: &str| PartialFile { name: name.into(), ..PartialFile::default() };
    let outer = digests::Record { offset: 10, length: 20, crc32: 0 };
    let run = Run { record: outer, item: None, offset: 10, length: 1, crc32: 0 };
    let small = Some(digests::Item { offset: 11, length: 30 });
    for wrong in [
        file("g"),
        PartialFile { subtrees: vec![subtree(4, 0)], ..file("f") },
        PartialFile { subtrees: vec![subtree(1, 1)], ..file("f") },
        PartialFile { subtrees: vec![subtree(0, 2)], ..file("f") },
        PartialFile { subtrees: vec![subtree(0, 64)], ..file("f") },
        PartialFile { items: vec![digests::Item { offset: 1, length }], ..file("f") },
        PartialFile { items: vec![digests::Item { offset: 1, length: 0 }], ..file("f") },
        PartialFile { records: vec![digests::Record { offset: u64::MAX, ..outer }], ..file("f") },
        PartialFile { runs: vec![Run { offset: 9, ..run }], ..file("f") },
        PartialFile { runs: vec![Run { length: 21, ..run }], ..file("f") },
        PartialFile { runs: vec![Run { item: small, ..run }], ..file("f") },
    ] {
        let name = wrong.name.clone();
        let error =
            last.adopt(&PartialDigests { files: vec![wrong], ..PartialDigests::default() }).unwrap_err();
        assert_eq!((error.class(), error.file()), (Class::DigestsBad, Some(name.as_str())));
    }
    assert_eq!(last.partial_digests().files, []);
    let wrong = PartialFile { blake3: Some(FileDigest::of(b"")), ..file("f") };
    let error = last.adopt(&PartialDigests { files: vec![wrong], ..PartialDigests::default() }).unwrap_err();
    assert_eq!((error.class(), error.file()), (Class::FileDigestMismatch, Some("f")));
}
