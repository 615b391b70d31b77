//! What is served while a channel moves: always something whole, never something older, and soon the newest.

use std::time::{Duration, Instant};

use weighbridge_tests::buckets::{Asked, Fault, FaultyProxy, Kind};

use crate::binary::Store;
use crate::follower::{Checkpoint, Host, Server, TABLE, serves, versions};
use crate::places::{House, Place, everywhere, server};

/// The requests that a follower makes while nothing happens: the next entry, and now and then the last one.
fn is_a_look(asked: &Asked) -> bool {
    asked.is_get() && asked.key.contains("/channels/prod/0000")
}

#[test]
fn a_host_goes_with_a_channel_wherever_the_store_lies() {
    everywhere(|house| {
        let store = &house.store;
        let mut checkpoint = Checkpoint::new(store, &[TABLE, 4096]);
        let mut host = Host::start(store, &["--log", "info"]);
        host.until("it waits", |status| status["state"] == "starting" && status["heard_at"].is_string());
        let mut published = Vec::new();
        for _ in 0..3 {
            checkpoint.change(1..);
            published.push(checkpoint.publish(store));
            let began = Instant::now();
            let status = host.until_current(published.last().unwrap());
            println!("served {:?} after the publish", began.elapsed());
            assert_eq!(status["attempts"], 0);
            assert!(status["age_seconds"].as_u64().is_some() && status["last_error"].is_null(), "{status}");
        }
        // What is served, and what was before.
        host.until_held(2);
        let mut kept = published[1..].to_vec();
        kept.sort();
        assert_eq!(versions(&host.into), kept);
        store.run(["rollback", "m"]).succeeded();
        let status = host.until_current(&published[1]);
        assert_eq!(status["serving"]["sequence"], 4);
        store.run(["release", "m"]).succeeded();
        host.until("another entry names it", |status| status["serving"]["sequence"] == 5);
        assert_eq!(host.terminate(), Some(0));
        let lines = host.lines();
        let states: Vec<_> = lines.iter().map(|line| line["state"].as_str().unwrap()).collect();
        assert!(states.contains(&"fetching") && states.ends_with(&["current"]), "{states:?}");
        assert!(lines.iter().all(|line| line["schema"] == "weighbridge.host/v1"));
    });
}

#[test]
fn twenty_publishes_through_a_slow_store_end_with_the_newest_and_no_load_fails() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE; 6]);
    checkpoint.publish(&house.store);
    let mut host = Host::start(&house.store, &[]);
    host.until("the first is served", |status| status["state"] == "current");
    let is_chunk = |asked: &Asked| asked.is_get() && asked.key.contains("/chunks/");
    proxy.always(Fault::Throttle(Duration::from_millis(200)), is_chunk);
    let loads: Vec<_> = (0..2).map(|_| Server::start(&host.into)).collect();
    let mut newest = String::new();
    for number in 0..20 {
        checkpoint.change(number % 5..number % 5 + 2);
        newest = checkpoint.publish(&house.store);
    }
    let began = Instant::now();
    let status = host.until_current(&newest);
    println!("the newest is served {:?} after it was published", began.elapsed());
    assert_eq!(status["serving"]["step"], 21);
    for load in loads {
        let steps = load.steps();
        println!("steps loaded: {steps:?}");
        assert!(steps.is_sorted() && steps.first() == Some(&1) && steps.last() == Some(&21), "{steps:?}");
        assert!(steps.len() > 2, "a host whose fetches are slow is not starved: {steps:?}");
    }
    host.until_held(2);
    assert!(host.said().is_empty(), "{}", host.said());
}

#[test]
fn what_was_served_before_it_was_followed_is_kept() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let mut published = vec![checkpoint.publish(&store)];
    store.fetch("m").succeeded();
    checkpoint.change(..);
    published.push(checkpoint.publish(&store));
    let mut host = Host::start(&store, &["--keep", "2"]);
    host.until_current(&published[1]);
    assert_eq!(host.terminate(), Some(0), "what it had begun to remove has gone then");
    published.sort();
    assert_eq!(versions(&host.into), published);
}

/// B31: readers, and swaps all the time. Each load sees one snapshot.
#[test]
fn no_load_fails_or_sees_two_snapshots_while_sixty_swaps_happen() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[TABLE, 4096]);
    let first = checkpoint.publish(&store);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    // What is loaded while two swaps happen has to stay meanwhile.
    let mut host = Host::start(&store, &["--interval", "100ms", "--keep", "3"]);
    host.until_current(&second);
    let loads: Vec<_> = (0..4).map(|_| Server::start(&host.into)).collect();
    for swap in 0..60 {
        let to = if swap % 2 == 0 { &first } else { &second };
        store.run(["promote", &format!("m@{to}")]).succeeded();
        host.until_current(to);
    }
    for load in loads {
        let steps = load.steps();
        assert!(steps.len() > 10 && steps.iter().all(|step| [1, 2].contains(step)), "{steps:?}");
    }
}

#[test]
fn nothing_is_listed_while_nothing_happens_and_one_object_is_asked_for() {
    let Some(server) = server(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::Moto, server, Some(proxy.port()));
    let mut checkpoint = Checkpoint::new(&house.store, &[4096]);
    let first = checkpoint.publish(&house.store);
    let mut host = Host::start(&house.store, &[]);
    host.until_current(&first);
    proxy.forget();
    let time = Duration::from_secs(8);
    std::thread::sleep(time);
    let log = proxy.log();
    let next = log.iter().filter(|entry| entry.asked.key.ends_with("/channels/prod/000000000002")).count();
    println!("{} requests in {time:?}, {next} of them for the next entry", log.len());
    assert!(log.iter().all(|entry| is_a_look(&entry.asked)), "{log:#?}");
    // 200 ms, and a fifth less or more.
    assert!((10..=51).contains(&next) && log.len() <= next + 2, "{} {next}", log.len());
    // Entries that come are found by asking for the next one.
    proxy.forget();
    let listed = proxy.counts();
    let direct = Store::elsewhere(server.url(&house.prefix), server.environment(None));
    let second = checkpoint.publish(&direct);
    host.until_current(&second);
    assert!(proxy.log().iter().all(|entry| !entry.asked.query.contains("list")), "{listed:?}");
}

#[test]
fn going_back_to_what_is_held_needs_nothing_but_the_entry() {
    let Some(server) = server(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::Moto, server, Some(proxy.port()));
    let direct = Store::elsewhere(server.url(&house.prefix), server.environment(None));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE]);
    let first = checkpoint.publish(&direct);
    let mut host = Host::start(&house.store, &[]);
    host.until_current(&first);
    checkpoint.change(..);
    let second = checkpoint.publish(&direct);
    host.until_current(&second);
    // From now on the host can read entries, and nothing else.
    let is_more = |asked: &Asked| asked.key.contains("/chunks/") || asked.key.contains("/snapshots/");
    let away = proxy.always(Fault::DropBefore, is_more);
    direct.run(["rollback", "m"]).succeeded();
    host.until_current(&first);
    assert_eq!(away.fired(), 0, "nothing else is asked for");
    // A host that begins anew needs no more than that either.
    assert_eq!(host.terminate(), Some(0));
    direct.run(["promote", &format!("m@{second}")]).succeeded();
    let mut host = Host::start(&house.store, &[]);
    host.until_current(&second);
    assert_eq!(away.fired(), 0, "nothing else is asked for");
}

#[test]
fn an_operators_order_is_not_kept_waiting_by_a_fetch_and_publishes_do_not_starve_one() {
    let Some(server) = server(Kind::Moto) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::Moto, server, Some(proxy.port()));
    let direct = Store::elsewhere(server.url(&house.prefix), server.environment(None));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE; 4]);
    let first = checkpoint.publish(&direct);
    let mut host = Host::start(&house.store, &[]);
    host.until_current(&first);
    let is_chunk = |asked: &Asked| asked.is_get() && asked.key.contains("/chunks/");
    let slow = proxy.always(Fault::Delay(Duration::from_secs(600)), is_chunk);
    checkpoint.change(..);
    let bad = checkpoint.publish(&direct);
    host.until("it fetches", |status| status["wanted"]["snapshot"] == *bad && slow.fired() > 0);
    direct.run(["rollback", "m"]).succeeded();
    let status = host.until_current(&first);
    assert_eq!(status["wanted"]["sequence"], 3);
    assert!(
        host.lines().iter().all(|line| line["serving"]["snapshot"] != *bad),
        "it was served for a moment"
    );
}

#[test]
fn somebody_elses_hand_on_current_is_put_right() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let mut host = Host::start(&store, &[]);
    host.until_current(&first);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    host.until_current(&second);
    store.run(["fetch", &format!("m@{first}"), "--into", host.into.to_str().unwrap()]).succeeded();
    let put_right = || {
        let deadline = Instant::now() + Duration::from_secs(30);
        while serves(&host.into).as_ref() != Some(&second) {
            assert!(Instant::now() < deadline, "{}", host.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    put_right();
    std::fs::remove_file(host.into.join("current")).unwrap();
    put_right();
}

#[test]
fn two_do_not_follow_into_one_folder() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let mut host = Host::start(&store, &[]);
    host.until_current(&first);
    let refused = crate::binary::ended(Host::command(&store, &host.into, &[]).output().unwrap());
    assert_eq!(refused.failed(1), "conflict");
    // One that comes while the other goes takes over.
    let mut other = Host::start(&store, &[]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(!other.has_ended());
    assert_eq!(host.terminate(), Some(0));
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    other.until_current(&second);
}

#[test]
fn what_does_not_move_is_not_followed_and_a_channel_that_is_not_there_is_said_and_waited_for() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let run = |arguments: &[&str]| store.run(arguments.iter().chain(&["--into", "x", "--follow"]).copied());
    for at in [first.as_str(), &first[..8]] {
        let refused = run(&["fetch", &format!("m@{at}")]);
        assert_eq!(refused.failed(2), "usage");
        assert!(refused.stderr.contains("does not move"), "{refused:?}");
    }
    for wrong in [
        ["--keep", "0"],
        ["--interval", "2"],
        ["--exec", " "],
        ["--exec-seconds", "0"],
        ["--host-name", "a\nb"],
    ] {
        assert_eq!(run(&["fetch", "m", wrong[0], wrong[1]]).failed(2), "usage", "{wrong:?}");
    }
    assert_eq!(
        store.run(["fetch", "m", "--into", "x", "--exec", "true"]).failed(2),
        "usage",
        "without --follow"
    );
    let mut command = store.command(["fetch", "m@v2", "--into", "x", "--follow", "--interval", "100ms"]);
    command.current_dir(store.folder.path());
    let mut host = Host::spawn(command, &store.folder.path().join("x"));
    host.until("it waits", |status| status["heard_at"].is_string());
    assert!(host.said().contains("waiting for m@v2") && host.said().contains("prod"), "{}", host.said());
    assert_eq!(host.said().matches("m@v2").count(), 1, "{}", host.said());
    store.run(["promote", &format!("m@{first}"), "--channel", "v2"]).succeeded();
    host.until_current(&first);
}
