//! A store in which something is not what it has to be: it is told as that, and hides nothing else.

use tonic::Code;
use weighbridge::api::proto;

use super::served::{Served, chunk_path, chunks, get, publish};
use crate::binary::Store;
use crate::site::{class, http, refused};

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_channel_is_told_as_damaged_and_hides_no_other() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    store.run(["promote", "m@prod", "--channel", "canary"]).succeeded();
    let log = store.root().join("models/m/channels/canary");
    let entry = log.join(format!("{:012}", 1));
    std::fs::remove_file(&entry).unwrap();
    std::fs::write(&entry, "{}").unwrap();
    let served = Served::start(&store, "", &[]);
    let mut client = served.snapshots();
    let request = proto::ListChannelsRequest { model: "m".into(), ..Default::default() };
    for _ in 0..2 {
        let listed = client.list_channels(request.clone()).await.unwrap().into_inner();
        let found: Vec<_> = listed.channels.iter().map(|entry| (&entry.channel, &entry.snapshot)).collect();
        assert_eq!(found, [(&"prod".to_owned(), &snapshot)]);
        assert_eq!(listed.damaged, ["canary"]);
        let canary = proto::ResolveRequest { model: "m".into(), at: "canary".into() };
        let status = refused(client.resolve(canary).await, Code::DataLoss);
        assert_eq!(class(&status), "integrity");
    }
    let told = get(&served, "/v1/models/m/resolve?at=canary", None, &[]).await;
    assert_eq!((told.status, told.class().as_str()), (500, "integrity"));
}

/// A cache between would keep what is answered whole, for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_object_of_a_folder_is_never_answered_whole() {
    let store = Store::new();
    let snapshot = publish(&store, "m", 1);
    let (chunk, size) = chunks(&store, "m", &snapshot).swap_remove(0);
    let path = store.root().join(format!("models/m/chunks/{}/{chunk}", &chunk[..2]));
    let mut bytes = std::fs::read(&path).unwrap();
    let served = Served::start(&store, "", &[]);
    let at = served.at(&chunk_path("m", &chunk));
    assert_eq!(http().get(&at).send().await.unwrap().bytes().await.unwrap(), bytes);
    bytes[0] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    // The connection may end before the headers have gone, too.
    if let Ok(answer) = http().get(&at).send().await {
        assert_eq!(answer.content_length(), Some(size));
        answer.bytes().await.unwrap_err();
    }
    let range = proto::ChunkRange { chunk, offset: 0, length: 0 };
    let request = proto::ReadChunksRequest { model: "m".into(), chunks: vec![range] };
    let status = match served.snapshots().read_chunks(request).await {
        Ok(answer) => {
            let mut stream = answer.into_inner();
            loop {
                match stream.message().await {
                    Ok(piece) => assert!(piece.is_some(), "it ends with a failure"),
                    Err(status) => break status,
                }
            }
        }
        Err(status) => status,
    };
    assert_eq!((status.code(), class(&status).as_str()), (Code::DataLoss, "integrity"));
}
