//! Nothing goes wrong.

use std::time::Duration;

use crate::accounts;
use crate::house::{House, MODEL, drop_manifest, id, manifest, options, work};

#[tokio::test]
async fn a_dropped_manifest_is_published_in_parts() {
    let (_folder, house) = House::new();
    let checkpoint = house.checkpoint("c.safetensors", 3);
    let (root, queue) = (house.root(), house.queue());
    drop_manifest(&*queue, &manifest(&id(1), 7, &checkpoint)).await;
    work(root.clone(), queue.clone(), options(), Duration::from_secs(10)).await;
    let outcome = accounts::outcome(&root, MODEL, &id(1)).await.unwrap();
    println!("{outcome:?}");
    accounts::published_once(&root, &*queue, MODEL, &id(1), &outcome.snapshot.unwrap().to_string()).await;
}
