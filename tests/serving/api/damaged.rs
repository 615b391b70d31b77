//! A store in which something is not what it has to be: it is told as that, and hides nothing else.

use tonic::Code;
use weighbridge::api::proto;

use super::served::{Served, get, publish};
use crate::binary::Store;
use crate::site::{class, refused};

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
