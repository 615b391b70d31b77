//! Bytes that change on their way from the store: once, and it is as if nothing had been; always, and nothing is
//! swapped.

use weighbridge_tests::buckets::{Asked, Fault, FaultyProxy, Kind};

use crate::fixtures::torchrec;
use crate::places::{House, Place, files, server};

fn is_chunk(asked: &Asked) -> bool {
    asked.is_get() && asked.key.contains("/chunks/")
}

/// B13: the right size and wrong bytes, or another object's bytes.
#[test]
fn wrong_bytes_once_are_read_again_and_always_are_refused() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let store = &house.store;
    let first = store.publish(&torchrec(), &["--step", "1"]).succeeded();
    let old = first["snapshot"].as_str().unwrap();
    store.fetch("m").succeeded();
    let policy = store.policy("[[rule]]\nmatch = '**'\nencode = 'bf16'");
    store.publish(&torchrec(), &["--step", "2", "--policy", policy.to_str().unwrap()]).succeeded();
    let another = format!("{}/models/m/snapshots/{old}", house.prefix);
    for fault in [
        Fault::FlipByte(1000),
        Fault::WrongBytes,
        Fault::Truncate(1000),
        Fault::Truncate(0),
        Fault::BodyOf(another),
    ] {
        println!("{fault:?}");
        let always = proxy.always(fault.clone(), is_chunk);
        let run = store.fetch("m");
        assert_eq!(run.failed(7), "integrity");
        assert!(run.stderr.contains("/chunks/"), "{run:?}");
        assert!(always.fired() >= 2, "it is read once more");
        house.serves_alone(old);
        let staged = std::fs::read_dir(store.served().join(".staging")).map_or(0, Iterator::count);
        assert_eq!(staged, 0, "nothing of it is left");
        proxy.pass();

        let once = proxy.times(1, fault, is_chunk);
        let elsewhere = store.folder.path().join("elsewhere");
        let arguments = ["fetch".as_ref(), "m".as_ref(), "--into".as_ref(), elsewhere.as_os_str()];
        store.run(arguments).succeeded();
        assert_eq!(once.fired(), 1);
        assert!(files(&elsewhere.join("current")).len() > 1);
        crate::tensors::tensors(&elsewhere.join("current"));
        std::fs::remove_dir_all(&elsewhere).unwrap();
        proxy.pass();
    }
    for document in ["/channels/prod/0", "/snapshots/"] {
        for fault in [Fault::FlipByte(10), Fault::WrongBytes, Fault::Truncate(100), Fault::Truncate(0)] {
            proxy.always(fault.clone(), move |asked: &Asked| asked.is_get() && asked.key.contains(document));
            let run = store.fetch("m");
            assert_eq!(run.failed(7), "integrity", "{document} {fault:?}");
            house.serves_alone(old);
            proxy.pass();
        }
    }
    store.fetch("m").succeeded();
}
