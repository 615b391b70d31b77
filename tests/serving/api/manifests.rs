//! Large things in small messages: a client with its defaults reads what is larger than a message may be.

use blake3::Hasher;
use weighbridge::api::proto;
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_schemas::snapshot::SnapshotManifest;
use weighbridge_tests::synthetic;

use super::served::{Served, chunk_path, chunks, get};
use crate::binary::Store;

/// What a gRPC client takes of a message unless it is told otherwise.
const DEFAULT_BYTES: usize = 4 << 20;
/// What the server promises.
const PIECE_BYTES: usize = 1 << 20;
const TENSORS: usize = 16_000;

/// A checkpoint of very many small tables with long names.
fn many(store: &Store) -> std::path::PathBuf {
    let mut header = String::from("{");
    for number in 0..TENSORS {
        let name =
            format!("model.sparse.{}.embedding_bags.t{number:05}.weight", "features_of_a_kind.".repeat(4));
        let begin = number * 16;
        let comma = if number == 0 { "" } else { "," };
        header += &format!(
            "{comma}\"{name}\":{{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[{begin},{}]}}",
            begin + 16
        );
    }
    header.push('}');
    let path = store.folder.path().join("many.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..TENSORS * 4).flat_map(|number| (number as f32).to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_larger_than_a_message_is_read_by_a_client_with_its_defaults() {
    let store = Store::new();
    let policy = store.policy("rule = []");
    let more = ["--policy", policy.to_str().unwrap(), "--step", "1", "--no-sync"];
    let published = store.publish(&many(&store), &more).succeeded();
    let snapshot = published["snapshot"].as_str().unwrap();
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    let request = proto::GetManifestRequest { model: "m".into(), snapshot: snapshot.into() };
    let mut stream = client.get_manifest(request).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    let mut size = None;
    while let Some(piece) = stream.message().await.unwrap() {
        assert!(!piece.data.is_empty() && piece.data.len() <= PIECE_BYTES);
        assert_eq!(*size.get_or_insert(piece.size), piece.size);
        bytes.extend_from_slice(&piece.data);
    }
    assert!(bytes.len() > DEFAULT_BYTES && size == Some(bytes.len() as u64), "{} bytes", bytes.len());
    assert_eq!(SnapshotId::of(&bytes).to_string(), snapshot);
    let manifest = SnapshotManifest::parse(&bytes).unwrap();
    assert_eq!(manifest.tensors.len(), TENSORS);
    // Over HTTP it is the same, in whole and in parts.
    let path = format!("/v1/objects/models/m/snapshots/{snapshot}");
    let whole = get(&served, &path, None, &[]).await;
    assert!(whole.status == 200 && whole.body == bytes);
    let part = get(&served, &path, None, &[("range", "bytes=4194000-4195000")]).await;
    assert!(part.status == 206 && part.body == bytes[4_194_000..=4_195_000]);
    // And what is in it is found.
    let tensor = manifest.tensors.last().unwrap().name.to_string();
    let rows = proto::LookUpRowsRequest { model: "m".into(), tensor, rows: vec![1], ..Default::default() };
    let found = client.look_up_rows(rows).await.unwrap().into_inner();
    let values: Vec<_> = [2, 3].iter().flat_map(|n| ((TENSORS * 4 - 4 + n) as f32).to_le_bytes()).collect();
    assert_eq!((found.snapshot.as_str(), found.data.as_ref()), (snapshot, values.as_slice()));
    let listed = proto::ListSnapshotsRequest { model: "m".into(), ..Default::default() };
    let listed = client.list_snapshots(listed).await.unwrap().into_inner().snapshots;
    assert_eq!((listed.len(), listed[0].tensors, listed[0].gates.as_str()), (1, TENSORS as u64, "passed"));
    store.fetch("m").succeeded();
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_larger_than_a_message_come_in_pieces_and_as_far_as_they_are_asked_for() {
    let store = Store::new();
    let checkpoint = store.folder.path().join("large.safetensors");
    synthetic(&checkpoint, 1, 70_001, 64);
    let policy = store.policy("rule = []");
    let published =
        store.publish(&checkpoint, &["--policy", policy.to_str().unwrap(), "--no-sync"]).succeeded();
    let chunks = chunks(&store, "m", published["snapshot"].as_str().unwrap());
    assert!(chunks.iter().any(|(_, size)| *size > 2 * DEFAULT_BYTES as u64 - (64 << 10)), "{chunks:?}");
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    let range =
        |chunk: usize, offset, length| proto::ChunkRange { chunk: chunks[chunk].0.clone(), offset, length };
    // All of them, some twice, and parts: in the order asked for, each without a gap.
    let mut asked: Vec<_> = (0..chunks.len()).map(|chunk| range(chunk, 0, 0)).collect();
    asked.extend([range(0, 5, 7), range(chunks.len() - 1, chunks[chunks.len() - 1].1, 0), range(0, 0, 0)]);
    asked.push(range(0, chunks[0].1 - 3, 1000));
    let request = proto::ReadChunksRequest { model: "m".into(), chunks: asked.clone() };
    let mut stream = client.read_chunks(request).await.unwrap().into_inner();
    let mut read: Vec<Vec<u8>> = vec![Vec::new(); asked.len()];
    let mut last = 0;
    while let Some(piece) = stream.message().await.unwrap() {
        let index = piece.index as usize;
        assert!(index >= last && !piece.data.is_empty() && piece.data.len() <= PIECE_BYTES);
        assert_eq!(piece.offset, asked[index].offset + read[index].len() as u64);
        read[index].extend_from_slice(&piece.data);
        last = index;
    }
    for (number, (chunk, size)) in chunks.iter().enumerate() {
        assert_eq!(ChunkId::of(&read[number]).to_string(), *chunk);
        assert_eq!(read[number].len() as u64, *size);
        let over_http = get(&served, &chunk_path("m", chunk), None, &[]).await;
        assert_eq!(Hasher::new().update(&over_http.body).finalize().to_string(), *chunk);
        assert_eq!(over_http.headers["etag"], format!("\"{chunk}\""));
        let known =
            get(&served, &chunk_path("m", chunk), None, &[("if-none-match", &format!("\"{chunk}\""))]).await;
        assert!(known.status == 304 && known.body.is_empty());
    }
    let parts = &read[chunks.len()..];
    assert_eq!(parts[0], read[0][5..12]);
    assert!(parts[1].is_empty() && parts[2] == read[0]);
    assert_eq!(parts[3], read[0][read[0].len() - 3..]);
    // What begins behind the end, or is not there, ends the stream with an error, after what came before.
    let absent = proto::ChunkRange { chunk: ChunkId::of(b"absent").to_string(), offset: 0, length: 0 };
    for (wrong, code) in
        [(range(0, chunks[0].1 + 1, 0), tonic::Code::InvalidArgument), (absent, tonic::Code::NotFound)]
    {
        let asked = vec![range(0, 0, 9), wrong, range(0, 0, 9)];
        let request = proto::ReadChunksRequest { model: "m".into(), chunks: asked };
        let mut stream = client.read_chunks(request).await.unwrap().into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().data.len(), 9);
        assert_eq!(stream.message().await.unwrap_err().code(), code);
        assert!(stream.message().await.unwrap().is_none());
    }
    let outside = [("range", format!("bytes={}-", chunks[0].1))];
    let outside = get(&served, &chunk_path("m", &chunks[0].0), None, &[(outside[0].0, &outside[0].1)]).await;
    assert_eq!(
        (outside.status, outside.headers["content-range"].as_str()),
        (416, format!("bytes */{}", chunks[0].1).as_str())
    );
    assert_eq!(outside.headers["cache-control"], "no-store");
}
