//! What must hold of requests, whatever their bytes are. The fuzz target `api_requests` calls this, and a test that
//! replays its corpus.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use bytes::Bytes;
use prost::Message;

use weighbridge_snapshots::layout;

use super::answers::Refusal;
use super::web::{Condition, conditions};
use super::{fleet, guard, operating, proto, publishing, requests, tokens};

/// Longest message of a refusal, in bytes: what was sent is not sent back whole.
const MESSAGE_BYTES: usize = 8 << 10;
/// The size of the object that ranges are of.
const SIZE: u64 = 1000;

/// Reads a request: the first byte says of which kind, what follows is the request.
///
/// # Panics
/// Where something does not hold.
pub fn api_requests(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 8 {
        0..4 => rpc(kind % 40, bytes),
        4 => headers(bytes),
        5 => key(bytes),
        6 => token_file(bytes),
        _ => checked(fleet::Report::try_from(Bytes::copy_from_slice(bytes)), |report| {
            assert_eq!(report.written, bytes);
        }),
    }
}

/// That what is refused is told in few words, and what is accepted is as it must be.
fn checked<T>(read: Result<T, Refusal>, holds: impl FnOnce(T)) {
    match read {
        Ok(read) => holds(read),
        Err(refusal) => {
            let status = refusal.status();
            let length = status.message().len();
            assert!((1..=MESSAGE_BYTES).contains(&length), "{length}: {}", status.message());
        }
    }
}

/// A message of gRPC, read as this one; where it is one, it goes on to `read`.
fn message<M: Message + Default>(bytes: &[u8], read: impl FnOnce(M)) {
    if let Ok(message) = M::decode(bytes) {
        read(message);
    }
}

/// A message that is read whole by one function.
macro_rules! read {
    ($message:ident as $read:ty, $bytes:expr) => {
        message($bytes, |asked: proto::$message| checked(<$read>::try_from(asked), drop))
    };
}

fn rpc(kind: u8, bytes: &[u8]) {
    // Of every eight numbers the first four are for messages.
    match kind / 8 * 4 + kind % 8 {
        0 => message(bytes, |asked: proto::ResolveRequest| {
            checked(requests::reference(&asked.model, &asked.at), |reference| {
                assert_eq!(reference.model.as_str(), asked.model);
            });
        }),
        1 => message(bytes, |asked: proto::GetManifestRequest| {
            checked(requests::snapshot(&asked.snapshot), |id| assert_eq!(id.to_string(), asked.snapshot));
        }),
        2 => message(bytes, |asked: proto::ListModelsRequest| {
            checked(requests::page_size(asked.page_size, 100, 1000), |size| {
                assert!((1..=1000).contains(&size));
            });
        }),
        3 => message(bytes, |asked: proto::WatchChannelRequest| {
            checked(requests::channel(&asked.channel), |name| assert!(!name.as_str().contains('/')));
        }),
        4 => message(bytes, ranges),
        5 => message(bytes, |asked: proto::LookUpRowsRequest| {
            checked(requests::look_up(asked), |look_up| {
                assert!((1..=requests::ROWS).contains(&look_up.rows.len()));
            });
        }),
        6 => read!(SubmitRequest as publishing::requests::Submit, bytes),
        7 => read!(RepublishRequest as publishing::requests::Again, bytes),
        8 => read!(ListJobsRequest as publishing::requests::List, bytes),
        9 => read!(CancelRequest as publishing::requests::Named, bytes),
        10 => read!(PromoteRequest as operating::requests::Promote, bytes),
        11 => read!(RollbackRequest as operating::requests::Rollback, bytes),
        12 => read!(ListEntriesRequest as operating::requests::Entries, bytes),
        13 => read!(PinRequest as operating::requests::Pin, bytes),
        14 => read!(ListDeadLettersRequest as operating::requests::Letters, bytes),
        15 => read!(ListPinsRequest as operating::requests::Pins, bytes),
        _ => read!(ListHostsRequest as fleet::List, bytes),
    }
}

fn ranges(asked: proto::ReadChunksRequest) {
    checked(requests::ranges(&asked.chunks), |ranges| {
        assert!((1..=requests::CHUNKS).contains(&ranges.len()));
        for (range, asked) in ranges.iter().zip(&asked.chunks) {
            assert_eq!((range.chunk.to_string(), range.offset), (asked.chunk.clone(), asked.offset));
            assert!(range.offset.checked_add(range.length.unwrap_or(0)).is_some());
        }
    });
}

/// Headers of HTTP, one a line.
fn headers(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (HeaderName::from_bytes(&line[..at]), HeaderValue::from_bytes(&line[at + 1..]));
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    for size in [0, 1, SIZE, u64::MAX] {
        if let Condition::Part(from, end) = conditions(&headers, "\"tag\"", size) {
            assert!(from <= end && end <= size && (from < end || size == 0), "{from}-{end} of {size}");
        }
    }
    let _ = guard::deadline(&headers);
    let _ = guard::is_rpc(&Method::POST, &Uri::default(), &headers);
    let _ = guard::is_of_this_machine(&Uri::default(), &headers);
}

/// An object's key.
fn key(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Some(fetched) = layout::fetched(text) else { return };
    assert_eq!(fetched.key.as_ref(), text);
    let parts: Vec<_> = text.split('/').collect();
    assert!(parts.len() > 3 && parts[0] == "models" && parts[1] == fetched.model.as_str(), "{text}");
    assert!(parts.iter().all(|part| !part.is_empty() && !part.starts_with('.')), "{text}");
    let is_chunk = matches!(fetched.content, Some(layout::Content::Chunk(_)));
    assert_eq!(is_chunk, parts[2] == "chunks", "{text}");
}

/// A file of tokens.
fn token_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(entries) = tokens::listed(text) else { return };
    for entry in &entries {
        let taken = tokens::without(text, &entry.name, false);
        let left = taken.as_ref().map(|(rest, _)| tokens::listed(rest));
        let (Ok((_, gone)), Ok(Ok(left))) = (&taken, left) else {
            unreachable!("what was listed can be taken out, and what is left is a file of tokens")
        };
        assert!(*gone > 0 && gone + left.len() == entries.len());
        assert!(left.iter().all(|other| other.name != entry.name && entries.contains(other)));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The seeds in `fuzz/corpus/api_requests/`, and changes of them that are the same in every run.
    #[test]
    fn every_request_is_read_or_refused() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/api_requests");
        let mut random = fastrand::Rng::with_seed(17);
        let mut seeds: Vec<_> =
            std::fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
        seeds.sort();
        assert!(seeds.len() > 16);
        api_requests(b"");
        for seed in seeds.iter().map(|seed| std::fs::read(seed).unwrap()) {
            api_requests(&seed);
            for _ in 0..500 {
                let mut changed = seed.clone();
                for _ in 0..random.usize(1..6) {
                    let at = random.usize(..changed.len());
                    match random.u8(..4) {
                        0 => changed.insert(at, random.u8(..)),
                        1 if changed.len() > 1 => drop(changed.remove(at)),
                        2 => changed[at] = changed[at].wrapping_add(1),
                        _ => changed[at] = random.u8(..),
                    }
                }
                api_requests(&changed);
            }
        }
        for kind in 0..=u8::MAX {
            let noise: Vec<u8> =
                std::iter::once(kind).chain((0..random.usize(..64)).map(|_| random.u8(..))).collect();
            api_requests(&noise);
        }
    }
}
