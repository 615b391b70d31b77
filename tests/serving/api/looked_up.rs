//! Rows by number: every encoding and layout, pruned and whole, encoded and decoded, are what a reader of the fetched
//! snapshot gives, bit for bit; and what cannot be asked is refused.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tonic::Code;
use weighbridge::api::proto;
use weighbridge::api::proto::snapshots_client::SnapshotsClient;
use weighbridge_schemas::ids::ChunkId;
use weighbridge_schemas::snapshot::{Chunk, SnapshotManifest};
use weighbridge_snapshots::reader::{Options, Row, Version};

use super::served::Served;
use crate::binary::Store;
use crate::site::refused;

const ROWS: usize = 403;
const WIDTH: usize = 20;
const ENCODINGS: [&str; 11] = [
    "keep",
    "f32",
    "f16",
    "bf16",
    "f8_e4m3fn",
    "f8_e5m2",
    "hfp8_e4b7_max240",
    "int8_sbf32",
    "int8_sbf16",
    "int4_sbf16",
    "int2_sbf16",
];

/// A checkpoint with a table for every encoding, layout and way to prune, and the policy that makes them.
fn published(store: &Store) -> String {
    let (mut rules, mut names) = (String::new(), Vec::new());
    for encoding in ENCODINGS {
        let leading = ", layout = 'leading', row_alignment = 32";
        let layouts = if encoding.starts_with("int") { vec!["", leading] } else { vec![""] };
        for (number, layout) in layouts.iter().enumerate() {
            for (kind, prune) in
                [("whole", ""), ("pruned", ", keep_rows = 'kept.ids'"), ("one", ", keep_rows = 'one.ids'")]
            {
                let name = format!("{encoding}.{number}.{kind}");
                rules += &format!(
                    "{{ match = '{name}', encode = {{ encoding = '{encoding}'{layout} }}{prune} }},\n"
                );
                names.push(name);
            }
        }
    }
    let folder = store.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let kept: Vec<_> = (0..ROWS).filter(|row| row % 7 == 3).map(|row| row.to_string()).collect();
    std::fs::write(folder.join("kept.ids"), kept.join("\n")).unwrap();
    std::fs::write(folder.join("one.ids"), "400").unwrap();
    let mut random = fastrand::Rng::with_seed(5);
    let values: Vec<u8> =
        (0..ROWS * WIDTH).flat_map(|_| ((random.f32() - 0.5) * 3.0).to_le_bytes()).collect();
    let numbers: Vec<u8> = (0..64_u8).collect();
    let table =
        |name: &String| (name.clone(), TensorView::new(Dtype::F32, vec![ROWS, WIDTH], &values).unwrap());
    let mut tensors: Vec<_> = names.iter().map(table).collect();
    let view = |dtype, shape: &[usize], bytes| TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    tensors.push(("flat".to_owned(), view(Dtype::U8, &[64], &numbers)));
    tensors.push(("cube".to_owned(), view(Dtype::U8, &[4, 4, 4], &numbers)));
    tensors.push(("numbers".to_owned(), view(Dtype::I64, &[4, 2], &numbers)));
    tensors.push(("empty".to_owned(), view(Dtype::F32, &[0, 4], &[])));
    tensors.push(("thin".to_owned(), view(Dtype::F32, &[4, 0], &[])));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    let policy = store.policy(&format!("rule = [\n{rules}]"));
    let more = ["--policy", policy.to_str().unwrap(), "--step", "1", "--no-sync"];
    store.publish(&folder, &more).succeeded()["snapshot"].as_str().unwrap().to_owned()
}

/// The same snapshot, but for where its files are cut into chunks: every so many bytes.
fn cut_again(store: &Store, snapshot: &str, version: &Path, size: usize) -> String {
    let model = store.root().join("models/m");
    let manifest = std::fs::read(model.join("snapshots").join(snapshot)).unwrap();
    let mut manifest = SnapshotManifest::parse(&manifest).unwrap();
    for file in &mut manifest.files {
        let bytes = std::fs::read(version.join(&file.name)).unwrap();
        let put = |bytes: &[u8]| {
            let id = ChunkId::of(bytes);
            let folder = model.join("chunks").join(&id.to_string()[..2]);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(id.to_string()), bytes).unwrap();
            Chunk { id, size: bytes.len() as u64 }
        };
        file.chunks = bytes.chunks(size).map(put).collect();
    }
    let id = manifest.id().to_string();
    std::fs::write(model.join("snapshots").join(&id), manifest.to_bytes()).unwrap();
    id
}

async fn look_up(
    client: &mut SnapshotsClient<tonic::transport::Channel>,
    at: &str,
    tensor: &str,
    rows: &[u64],
    encoded: bool,
) -> Result<proto::LookUpRowsResponse, tonic::Status> {
    let form = if encoded { proto::RowForm::Encoded } else { proto::RowForm::Decoded };
    let request = proto::LookUpRowsRequest {
        model: "m".into(),
        at: at.into(),
        tensor: tensor.into(),
        rows: rows.to_vec(),
        form: form.into(),
    };
    Ok(client.look_up_rows(request).await?.into_inner())
}

/// That rows of a table are what the reader says; how many of them are kept.
async fn check(
    client: &mut SnapshotsClient<tonic::transport::Channel>,
    at: &str,
    version: &Version,
    name: &str,
    rows: &[u64],
) -> usize {
    let table = version.table(name).unwrap();
    let described = version.tensor(name).unwrap();
    let form = described.described().form();
    let decoded = look_up(client, at, name, rows, false).await.unwrap();
    let encoded = look_up(client, at, name, rows, true).await.unwrap();
    assert_eq!(decoded.row_bytes as usize, WIDTH * 4);
    let mut kept = 0;
    let (values, bytes) = (decoded.data.chunks(WIDTH * 4), encoded.data.chunks(encoded.row_bytes as usize));
    assert_eq!((values.len(), bytes.len()), (rows.len(), rows.len()));
    for ((place, row), (values, bytes)) in (0u32..).zip(rows).zip(values.zip(bytes)) {
        let mut expected = vec![7.0; WIDTH];
        let is_kept = table.decode_row(*row, &mut expected).unwrap() == Row::Kept;
        let expected: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(values, expected, "{name} {row}");
        let stored = table.row(*row).unwrap();
        assert_eq!(stored.is_some(), is_kept);
        assert!(
            stored.map_or_else(|| bytes.iter().all(|byte| *byte == 0), |stored| stored == bytes),
            "{name} {row}"
        );
        for answer in [&decoded, &encoded] {
            assert_eq!(answer.pruned.contains(&place), !is_kept, "{name} {row}");
        }
        kept += usize::from(is_kept);
    }
    for answer in [decoded, encoded] {
        assert_eq!(
            (answer.encoding.as_str(), answer.layout.as_str()),
            (form.encoding.as_str(), form.layout.as_str())
        );
        assert_eq!(
            (answer.width as usize, answer.snapshot.as_str()),
            (WIDTH, version.id().to_string().as_str())
        );
    }
    kept
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_every_kind_are_what_a_reader_of_the_snapshot_gives() {
    let store = Store::new();
    let snapshot = published(&store);
    store.fetch("m").succeeded();
    let whole = store.served().join("versions").join(&snapshot);
    // Chunks so small that rows lie over two, three, and over their ends exactly.
    let again = cut_again(&store, &snapshot, &whole, 37);
    let larger = cut_again(&store, &snapshot, &whole, 4096);
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    let open = |id: &str| {
        store.fetch(&format!("m@{id}")).succeeded();
        Version::open(
            &store.served().join("versions").join(id),
            &Options { verify: true, ..Options::default() },
        )
        .unwrap()
    };
    let mut random = fastrand::Rng::with_seed(9);
    let (mut tables, mut kept) = (0, 0);
    for (id, rows) in [(&snapshot, ROWS), (&larger, ROWS), (&again, 40)] {
        let version = open(id);
        for tensor in version.tensors() {
            let name = tensor.described().name.as_str();
            if !ENCODINGS.iter().any(|encoding| name.starts_with(encoding))
                || name.contains("index_remapping")
            {
                continue;
            }
            // All of them in no order, and some twice.
            let mut asked: Vec<_> = (0..ROWS as u64).collect();
            random.shuffle(&mut asked);
            asked.truncate(rows);
            asked.extend([0, ROWS as u64 - 1, 0, 3]);
            kept += check(&mut client, id, &version, name, &asked).await;
            tables += 1;
        }
    }
    println!("{kept} rows of {tables} tables");
    assert_eq!(tables, 3 * 3 * (ENCODINGS.len() + 4));
    assert!(kept > 10_000);
    // What is at the front of the id is enough, and so is the channel.
    let by_channel = look_up(&mut client, "prod", "keep.0.whole", &[5], false).await.unwrap();
    let by_digits = look_up(&mut client, &snapshot[..12], "keep.0.whole", &[5], false).await.unwrap();
    assert_eq!((by_channel.sequence, by_digits.sequence), (1, 0));
    assert_eq!(by_channel.data, by_digits.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_cannot_be_given_are_refused_with_the_reason() {
    let store = Store::new();
    let snapshot = published(&store);
    store.fetch("m").succeeded();
    let again = cut_again(&store, &snapshot, &store.served().join("versions").join(&snapshot), 61);
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    let all: Vec<_> = (0..ROWS as u64).collect();
    let many = vec![0; 50_000];
    let long = "x".repeat(1024);
    for (at, tensor, rows, code, says) in [
        ("", "absent", &[0][..], Code::NotFound, "no such tensor"),
        ("", long.as_str(), &[0], Code::NotFound, "no such tensor"),
        ("", "", &[0], Code::NotFound, "no such tensor"),
        ("", "keep.0.whole", &[], Code::InvalidArgument, "rows"),
        ("", "keep.0.whole", &[1, 403], Code::InvalidArgument, "403"),
        ("", "keep.0.pruned", &[403], Code::InvalidArgument, "402"),
        ("", "keep.0.whole", &[u64::MAX], Code::InvalidArgument, "rows"),
        ("", "keep.0.whole", &many, Code::InvalidArgument, "3932"),
        ("", "flat", &[0], Code::InvalidArgument, "no table"),
        ("", "cube", &[0], Code::InvalidArgument, "no table"),
        ("", "numbers", &[0], Code::InvalidArgument, "floating-point"),
        ("", "empty", &[0], Code::InvalidArgument, "rows"),
        ("", "thin", &[0], Code::InvalidArgument, "empty"),
        ("canary", "keep.0.whole", &[0], Code::NotFound, "no such channel"),
        ("ffffff", "keep.0.whole", &[0], Code::NotFound, "no such"),
        (again.as_str(), "keep.0.whole", &all, Code::InvalidArgument, "256"),
    ] {
        let answer = look_up(&mut client, at, tensor, rows, false).await;
        let status = refused(answer, code);
        assert!(status.message().contains(says), "{tensor}: {}", status.message());
        assert!(status.message().len() < 2000, "{}", status.message().len());
    }
    // What has no decoded form has its stored one.
    let numbers = look_up(&mut client, "", "numbers", &[1], true).await.unwrap();
    assert_eq!((numbers.data.as_ref(), numbers.width), (&(16..32).collect::<Vec<u8>>()[..], 2));
    let form = proto::LookUpRowsRequest {
        model: "m".into(),
        tensor: "keep.0.whole".into(),
        rows: vec![0],
        form: 7,
        ..Default::default()
    };
    refused(client.look_up_rows(form).await, Code::InvalidArgument);
    // A manifest that says what its chunks are not.
    let model = store.root().join("models/m");
    let text = std::fs::read_to_string(model.join("snapshots").join(&snapshot)).unwrap();
    let mut lying = SnapshotManifest::parse(text.as_bytes()).unwrap();
    let short = ChunkId::of(b"short");
    let folder = model.join("chunks").join(&short.to_string()[..2]);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(short.to_string()), b"short").unwrap();
    lying.files.iter_mut().flat_map(|file| &mut file.chunks).for_each(|chunk| chunk.id = short);
    std::fs::write(model.join("snapshots").join(lying.id().to_string()), lying.to_bytes()).unwrap();
    for encoded in [true, false] {
        let answer = look_up(&mut client, &lying.id().to_string(), "keep.0.whole", &[0, 7], encoded).await;
        refused(answer, Code::DataLoss);
    }
    // And it goes on.
    look_up(&mut client, "", "keep.0.whole", &[0], false).await.unwrap();
}
