//! Any order of reads, on any number of threads, gives the digest that hashing at once gives.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

/// Bytes of which no two runs are alike.
pub(super) fn content(length: usize) -> Vec<u8> {
    let words = (0..length.div_ceil(8) as u64).map(|n| (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(length);
    bytes
}

fn range(bytes: &[u8], (start, length): &(Index, Index)) -> Range<usize> {
    let start = start.index(bytes.len() + 1);
    start..start + length.index(bytes.len() - start + 1)
}

fn digests(declared: &[u8], length: usize) -> FileDigests {
    FileDigests::new(Some(FileDigest::of(declared)), length as u64, &Arc::default())
}

/// Hashes what is missing, and says how many bytes that was.
fn finish(digests: &FileDigests, bytes: &[u8]) -> u64 {
    let missing = digests.missing_bytes();
    digests.finish();
    let mut from = 0;
    while let Some(range) = digests.missing(from) {
        assert!(range.start < range.end && range.end - range.start <= READ_BYTES);
        from = range.end;
        let place = |at: u64| usize::try_from(at).unwrap();
        digests.read(range.start, &bytes[place(range.start)..place(range.end)]);
    }
    assert_eq!(digests.missing_bytes(), 0);
    missing
}

pub(super) fn record(bytes: &[u8], offset: u64) -> SliceRecord {
    let record = Record { offset, length: bytes.len() as u64, crc32: crc32fast::hash(bytes) };
    SliceRecord { record, item: None }
}

/// Hashes what is missing of a record that lies at its offset in `file`.
pub(super) fn finish_record(digests: &FileDigests, record: SliceRecord, file: &[u8]) -> Result<u64> {
    let read = std::cell::Cell::new(0);
    digests.finish_record(record, &mut Vec::new(), |buffer, at| {
        read.set(read.get() + buffer.len() as u64);
        let at = usize::try_from(at).unwrap();
        buffer.copy_from_slice(&file[at..at + buffer.len()]);
        Ok(())
    })?;
    Ok(read.get())
}

/// Bytes as long as a few pages, and around them.
fn lengths() -> impl Strategy<Value = usize> {
    let near = (0..12usize, -2..3isize).prop_map(|(pages, more)| (pages << 16).saturating_add_signed(more));
    prop_oneof![0..4096usize, near, 0..900_000usize]
}

fn reads() -> impl Strategy<Value = Vec<(Index, Index)>> {
    prop::collection::vec((any::<Index>(), any::<Index>()), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn reads_in_any_order_give_the_digest_of_the_file(length in lengths(), reads in reads()) {
        let bytes = content(length);
        let digests = digests(&bytes, length);
        for read in &reads {
            let range = range(&bytes, read);
            digests.read(range.start as u64, &bytes[range]);
        }
        finish(&digests, &bytes);
        digests.check().unwrap();
    }

    #[test]
    fn reads_on_several_threads_give_the_digest_of_the_file(length in lengths(), reads in reads()) {
        let bytes = content(length);
        let (digests, offset) = (digests(&bytes, length), 7u64);
        let file = [&[0; 7], bytes.as_slice()].concat();
        let record = record(&bytes, offset);
        std::thread::scope(|scope| {
            for share in reads.chunks(6) {
                let (digests, bytes) = (&digests, &bytes);
                scope.spawn(move || {
                    for read in share {
                        let range = range(bytes, read);
                        digests.read(range.start as u64, &bytes[range.clone()]);
                        digests.read_of(record, offset + range.start as u64, &bytes[range]).unwrap();
                    }
                });
            }
        });
        finish(&digests, &bytes);
        digests.check().unwrap();
        finish_record(&digests, record, &file).unwrap();
        prop_assert!(lock(&digests.records).open.is_empty());
    }

    #[test]
    fn every_altered_byte_is_found(length in 1..300_000usize, at in any::<Index>(), reads in reads()) {
        let bytes = content(length);
        let mut altered = bytes.clone();
        altered[at.index(length)] ^= 1;
        let digests = digests(&bytes, length);
        let record = record(&bytes, 0);
        let mut found = false;
        for read in &reads {
            let range = range(&bytes, read);
            digests.read(range.start as u64, &altered[range.clone()]);
            found |= digests.read_of(record, range.start as u64, &altered[range]).is_err();
        }
        finish(&digests, &altered);
        prop_assert_eq!(digests.check().unwrap_err().class(), Class::FileDigestMismatch);
        let finished = finish_record(&digests, record, &altered);
        prop_assert!(found || finished.unwrap_err().class() == Class::ZipCrc);
    }

    #[test]
    fn a_budget_that_is_spent_costs_reads_and_nothing_else(length in lengths(), reads in reads()) {
        let bytes = content(length);
        let none = Arc::new(Budget(AtomicI64::new(0)));
        let digests = FileDigests::new(Some(FileDigest::of(&bytes)), length as u64, &none);
        let record = record(&bytes, 0);
        for read in &reads {
            let range = range(&bytes, read);
            digests.read(range.start as u64, &bytes[range.clone()]);
            digests.read_of(record, range.start as u64, &bytes[range]).unwrap();
        }
        finish(&digests, &bytes);
        digests.check().unwrap();
        finish_record(&digests, record, &bytes).unwrap();
        prop_assert_eq!(none.0.load(Ordering::Relaxed), 0, "all is given back");
    }
}

#[test]
fn a_file_that_is_read_in_order_is_hashed_once_and_keeps_next_to_nothing() {
    let bytes = content(9 << 20);
    let digests = digests(&bytes, bytes.len());
    let record = record(&bytes[11..], 11);
    let most = Budget::default().0.into_inner();
    for (index, step) in bytes.chunks(100_000).enumerate() {
        let at = index as u64 * 100_000;
        digests.read(at, step);
        digests.read_of(record, at, step).unwrap();
        let kept = most - digests.budget.0.load(Ordering::Relaxed);
        assert!(kept <= 4096, "{kept} bytes after {index} steps");
    }
    assert_eq!(finish(&digests, &bytes), 0, "nothing is read again");
    assert_eq!(finish_record(&digests, record, &bytes).unwrap(), 0);
    digests.check().unwrap();
    assert_eq!(digests.budget.0.load(Ordering::Relaxed), most);
}

#[test]
fn chunks_that_threads_take_in_turns_are_hashed_but_for_their_edges() {
    let bytes = content(32 << 20);
    let digests = digests(&bytes, bytes.len());
    // Four readers, 100 bytes off every page, each in order within its own 4 MiB.
    let starts = (0..8).map(|chunk| chunk * (4 << 20) + 100);
    let starts: Vec<usize> = starts.collect();
    for four in starts.chunks(4) {
        for step in 0..16 {
            for start in four {
                let from = start + step * (256 << 10);
                let end = (from + (256 << 10)).min(bytes.len());
                digests.read(from as u64, &bytes[from..end]);
            }
        }
    }
    let missing = finish(&digests, &bytes);
    assert!(missing <= 9 << 16, "{missing} bytes are read again");
    digests.check().unwrap();
}

#[test]
fn hundred_thousand_small_records_leave_none_open() {
    let bytes = content(100_000 * 8);
    let digests = FileDigests::new(None, bytes.len() as u64, &Arc::default());
    for (index, small) in bytes.chunks(8).enumerate() {
        let offset = index as u64 * 8;
        let record = record(small, offset);
        digests.read_of(record, offset, &small[..4]).unwrap();
        digests.read_of(record, offset + 4, &small[4..]).unwrap();
        digests.read_of(record, offset, small).unwrap();
    }
    assert!(lock(&digests.records).open.is_empty());
    let most = Budget::default().0.into_inner();
    assert_eq!(digests.budget.0.load(Ordering::Relaxed), most);
}

#[test]
fn an_empty_record_has_the_checksum_of_nothing() {
    let digests = digests(b"", 0);
    assert_eq!(finish(&digests, b""), 0);
    digests.check().unwrap();
    assert_eq!(finish_record(&digests, record(b"", 5), b"").unwrap(), 0);
    let mut wrong = record(b"", 5);
    wrong.record.crc32 = 1;
    assert_eq!(finish_record(&digests, wrong, b"").unwrap_err().class(), Class::ZipCrc);
}

#[test]
fn the_first_failure_ends_all_work() {
    let mut left = 1000;
    let done = std::sync::atomic::AtomicUsize::new(0);
    let next = || {
        left -= 1;
        (left > 0).then_some(left)
    };
    let failed = on_threads(4, next, |work, _| {
        if work == 990 {
            return Err(ReadError::new(Class::Unreadable, "work"));
        }
        done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    assert!(failed.is_err());
}
