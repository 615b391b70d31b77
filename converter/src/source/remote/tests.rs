//! Remote sources over a store that breaks bodies, fails calls and changes objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use super::blocks::SMALL_BYTES;
use super::{RemoteLocation, fetch::TRIES};
use crate::error::{Class, ReadError};
use crate::read::safetensors;
use crate::source::{Location, Source};

/// What a faulty store does to reads.
#[derive(Debug, Default)]
struct Faults {
    /// Every so-manieth body is cut at a place by chance; 0: none.
    cut_every: u64,
    /// Bodies of ranges that begin here or later break at once.
    broken_from: Option<u64>,
    /// So many calls fail first.
    failing: AtomicU64,
}

/// A store in memory that counts what it sends.
#[derive(Debug, Default)]
struct Faulty {
    inner: InMemory,
    faults: Faults,
    gets: AtomicU64,
    sent: Arc<AtomicU64>,
}

impl std::fmt::Display for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faulty")
    }
}

fn broken() -> object_store::Error {
    let source = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "cut");
    object_store::Error::Generic { store: "faulty", source: Box::new(source) }
}

type StoreResult<T> = object_store::Result<T>;

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        self.inner.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
        let order = Ordering::Relaxed;
        if self.faults.failing.fetch_update(order, order, |left| left.checked_sub(1)).is_ok() {
            return Err(broken());
        }
        let head = options.head;
        let answer = self.inner.get_opts(path, options).await?;
        if head {
            return Ok(answer);
        }
        let count = self.gets.fetch_add(1, order) + 1;
        let (meta, range, attributes) =
            (answer.meta.clone(), answer.range.clone(), answer.attributes.clone());
        let extensions = answer.extensions.clone();
        let bytes = answer.bytes().await?;
        let breaks = self.faults.broken_from.is_some_and(|from| range.end > from);
        let cuts = self.faults.cut_every > 0 && count.is_multiple_of(self.faults.cut_every);
        let length = bytes.len() as u64;
        let keep = match self.faults.broken_from {
            Some(from) if breaks => from.saturating_sub(range.start).min(length),
            _ if cuts => count.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (length + 1),
            _ => length,
        };
        self.sent.fetch_add(keep, order);
        let mut parts: Vec<StoreResult<Bytes>> = vec![Ok(bytes.slice(..usize::try_from(keep).unwrap()))];
        if breaks || cuts {
            parts.push(Err(broken()));
        }
        let payload = GetResultPayload::Stream(futures::stream::iter(parts).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

fn wait<T>(future: BoxFuture<'_, T>) -> T {
    futures::executor::block_on(future)
}

fn put(store: &Faulty, name: &str, bytes: Vec<u8>) {
    wait(Box::pin(store.put(&Path::from(name), bytes.into()))).unwrap();
}

fn open(store: &Arc<Faulty>, path: &str) -> Result<Source, ReadError> {
    let store: Arc<dyn ObjectStore> = Arc::clone(store) as _;
    let mut location = RemoteLocation::new(store, Path::from(path), format!("s3://bucket/{path}"));
    location.backoff = Duration::from_millis(1);
    Source::open_location(&Location::Remote(location))
}

/// Bytes of which no two stretches are alike.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(length);
    bytes
}

#[test]
fn cut_bodies_are_resumed_at_the_missing_byte() {
    let bytes = noise(50 << 20);
    let store =
        Arc::new(Faulty { faults: Faults { cut_every: 3, ..Faults::default() }, ..Faulty::default() });
    put(&store, "run/a", bytes.clone());
    let source = open(&store, "run").unwrap().with_memory(128 << 20);
    let file = source.file("a").unwrap();
    // Two readers, in steps, as workers read.
    std::thread::scope(|scope| {
        for half in 0..2 {
            let (file, bytes) = (&file, &bytes);
            scope.spawn(move || {
                let mut buffer = vec![0; 256 << 10];
                for step in half * 100..(half + 1) * 100 {
                    let offset = step * buffer.len();
                    file.read_exact_at(&mut buffer, offset as u64).unwrap();
                    assert_eq!(buffer, bytes[offset..offset + buffer.len()], "step {step}");
                }
            });
        }
    });
    source.check_unchanged().unwrap();
    let sent = store.sent.load(Ordering::Relaxed);
    assert!(sent < bytes.len() as u64 * 13 / 10, "{sent} bytes were read");
}

#[test]
fn a_place_that_stays_broken_is_named_with_offset_and_tries() {
    let faults = Faults { broken_from: Some(1_000_000), ..Faults::default() };
    let store = Arc::new(Faulty { faults, ..Faulty::default() });
    put(&store, "a", noise(3 << 20));
    let file = open(&store, "a").unwrap().file("a").unwrap();
    let mut buffer = vec![0; 2 << 20];
    let error = file.read_exact_at(&mut buffer, 0).unwrap_err();
    assert_eq!(error.class(), Class::Unreachable);
    assert_eq!(error.kind(), weighbridge_schemas::error::Kind::Transient);
    let text = error.to_string();
    assert!(text.contains("a: byte 1000000 ") && text.contains(&format!("{TRIES} tries")), "{text}");
}

#[test]
fn failing_calls_are_tried_again_within_the_budget() {
    let store = Arc::new(Faulty::default());
    put(&store, "run/a", noise(1000));
    store.faults.failing.store(u64::from(TRIES) - 1, Ordering::Relaxed);
    let source = open(&store, "run/a").unwrap();
    assert_eq!(source.entry(), Some("a"));
    store.faults.failing.store(u64::from(TRIES) + 1, Ordering::Relaxed);
    assert_eq!(source.file("a").unwrap_err().class(), Class::Unreachable);
}

#[test]
fn an_object_that_changes_is_never_mixed() {
    let store = Arc::new(Faulty::default());
    put(&store, "run/a", vec![1; 20 << 20]);
    let source = open(&store, "run").unwrap().with_memory(128 << 20);
    let file = source.file("a").unwrap();
    let mut buffer = vec![0; 256 << 10];
    file.read_exact_at(&mut buffer, 1 << 20).unwrap();
    put(&store, "run/a", vec![2; 20 << 20]);
    let error = file.read_exact_at(&mut buffer, 15 << 20).unwrap_err();
    assert_eq!((error.class(), error.file()), (Class::CheckpointChanged, Some("a")));
    assert_eq!(source.check_unchanged().unwrap_err().class(), Class::CheckpointChanged);
    wait(Box::pin(store.delete(&Path::from("run/a")))).unwrap();
    assert_eq!(source.check_unchanged().unwrap_err().class(), Class::CheckpointChanged);
    assert_eq!(file.read_exact_at(&mut buffer, 17 << 20).unwrap_err().class(), Class::CheckpointChanged);
}

#[test]
fn names_are_keys_below_the_prefix() {
    let store = Arc::new(Faulty::default());
    for name in ["run/b", "run/a", "run/deep/c", "running/x"] {
        put(&store, name, vec![0; 3]);
    }
    put(&store, "run/empty", Vec::new());
    let source = open(&store, "run").unwrap();
    assert_eq!(source.entry(), None);
    assert_eq!(source.names().unwrap(), ["a", "b", "empty"]);
    assert_eq!(source.tree(&mut |_| true).unwrap().files, ["a", "b", "deep/c", "empty"]);
    assert_eq!(source.file("deep/c").unwrap().read_vec_at(1, 2).unwrap(), [0, 0]);
    assert!(source.file("empty").unwrap().is_empty());
    assert!(source.modified_at() > 0);
    // Blocks of a budget's 16th part, as many again for readers as there are requests, windows, connections.
    assert_eq!(source.cache_bytes(), (32 << 20) + (4 << 20) + 12 * (2 << 20) + 12 * (512 << 10));
    assert_eq!(source.file("absent").unwrap_err().class(), Class::NotFound);
    assert_eq!(source.file("../running/x").unwrap_err().class(), Class::IndexPathEscape);
    assert_eq!(source.file("a").unwrap().read_vec_at(2, 2).unwrap_err().class(), Class::Truncated);
    assert_eq!(open(&store, "ru").unwrap_err().class(), Class::NotFound);
    assert_eq!(open(&store, "").unwrap().tree(&mut |_| true).unwrap().files.len(), 5);
}

/// A file with one tensor whose header takes `header` bytes.
fn file_of(header: usize) -> Vec<u8> {
    let json = r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let mut bytes = (header as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(8 + header, b' ');
    bytes.extend([1, 2, 3, 4]);
    bytes
}

#[test]
fn headers_about_as_long_as_the_first_read_take_one_further_request_at_most() {
    for header in SMALL_BYTES - 24..=SMALL_BYTES + 16 {
        let store = Arc::new(Faulty::default());
        put(&store, "m.safetensors", file_of(header));
        let checkpoint = safetensors::open(open(&store, "m.safetensors").unwrap()).unwrap();
        assert_eq!(checkpoint.tensors.len(), 1, "{header}");
        let gets = store.gets.load(Ordering::Relaxed);
        assert!(gets <= 2, "a header of {header} bytes took {gets} requests");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

    #[test]
    fn any_read_gives_what_lies_there(
        length in 1usize..3_000_000,
        reads in proptest::collection::vec((0.0f64..1.0, 0usize..600_000), 1..20),
        cut_every in 0u64..4,
    ) {
        // Every body cut would be none at all.
        let cut_every = if cut_every == 1 { 2 } else { cut_every };
        let store = Arc::new(Faulty { faults: Faults { cut_every, ..Faults::default() }, ..Faulty::default() });
        let bytes = noise(length);
        put(&store, "a", bytes.clone());
        let file = open(&store, "a").unwrap().with_memory(64 << 20).file("a").unwrap();
        for (place, count) in reads {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss,
                     reason = "a share of a small length")]
            let offset = (place * length as f64) as usize;
            let count = count.min(length - offset);
            let read = file.read_vec_at(offset as u64, count as u64).unwrap();
            proptest::prop_assert!(read == bytes[offset..offset + count]);
        }
    }
}
