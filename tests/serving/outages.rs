//! A source that is away, lacks something, or says what cannot be: what is served is served on, the status says why,
//! and nobody has to do anything once it is well again.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::Value;
use weighbridge_tests::buckets::{Answer, Asked, Fault, FaultyProxy, Kind};

use crate::binary::Store;
use crate::follower::{Checkpoint, Host, Server, TABLE, serves, versions};
use crate::places::{House, Place, server};
use crate::site::Site;
use crate::volume::Volume;

/// B09: a channel that moves while the store is away.
#[test]
fn a_source_that_is_away_for_a_while_costs_time_and_nothing_else() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let direct = Store::elsewhere(server.url(&house.prefix), server.environment(None));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE; 2]);
    let first = checkpoint.publish(&direct);
    let mut host = Host::start(&house.store, &[]);
    host.until_current(&first);
    let load = Server::start(&host.into);
    let away = proxy.always(Fault::DropBefore, |_: &Asked| true);
    let began = Instant::now();
    checkpoint.change(..1);
    let second = checkpoint.publish(&direct);
    let status = host.until_behind("store_unreachable");
    println!("said after {:?}: {}", began.elapsed(), status["last_error"]["message"]);
    assert_eq!(status["serving"]["snapshot"], *first);
    assert!(status["attempts"].as_u64() >= Some(1));
    std::thread::sleep(Duration::from_secs(20).saturating_sub(began.elapsed()));
    // It is kept fresh, so that whoever looks sees that somebody is at it.
    let status = host.until_behind("store_unreachable");
    assert!(status["age_seconds"].as_u64() > Some(12), "{status}");
    away.end();
    let well = Instant::now();
    host.until_current(&second);
    println!("served {:?} after the source came back", well.elapsed());
    assert!(well.elapsed() < Duration::from_secs(60));
    assert_eq!(load.steps(), [1, 2]);

    // It begins while the source is away.
    assert_eq!(host.terminate(), Some(0));
    let away = proxy.always(Fault::DropBefore, |_: &Asked| true);
    let mut host = Host::start(&house.store, &[]);
    let status = host.until_behind("store_unreachable");
    assert_eq!(status["serving"]["snapshot"], *second);
    assert_eq!(status["serving"]["sequence"], 2, "which entry it was is remembered");
    away.end();
    host.until_current(&second);
}

#[test]
fn a_folder_that_is_not_mounted_is_waited_for_by_who_serves_already() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let mut host = Host::start(&store, &[]);
    host.until_current(&first);
    assert_eq!(host.terminate(), Some(0));
    let away = store.folder.path().join("away");
    std::fs::rename(store.root(), &away).unwrap();
    let mut host = Host::start(&store, &[]);
    let status = host.until_behind("store_unreachable");
    assert_eq!(status["serving"]["snapshot"], *first);
    // Who has nothing yet is told at once: the name may be wrong.
    let other = store.folder.path().join("other");
    let run = crate::binary::ended(Host::command(&store, &other, &[]).output().unwrap());
    assert_eq!(run.failed(6), "not_found");
    std::fs::rename(&away, store.root()).unwrap();
    host.until_current(&first);
    // Another folder in its place: a copy, or another mount.
    std::fs::rename(store.root(), &away).unwrap();
    host.until_behind("store_unreachable");
    let copied = std::process::Command::new("cp").arg("-a").args([&away, &store.root()]).status();
    assert!(copied.unwrap().success());
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    host.until_current(&second);
}

/// The keys of the chunks that a snapshot's manifest names.
fn chunks(house: &House, snapshot: &str) -> Vec<String> {
    let manifest: Value =
        serde_json::from_slice(&house.get(&format!("models/m/snapshots/{snapshot}"))).unwrap();
    let files = manifest["files"].as_array().unwrap().iter();
    let chunks = files.flat_map(|file| file["chunks"].as_array().unwrap());
    let key = |chunk: &Value| {
        let id = chunk["id"].as_str().unwrap();
        format!("models/m/chunks/{}/{id}", &id[..2])
    };
    chunks.map(key).collect()
}

#[test]
fn a_chunk_that_is_missing_or_wrong_is_waited_for_and_what_came_is_not_read_again() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE; 5]);
    let first = checkpoint.publish(&house.store);
    let mut host = Host::start(&house.store, &["--streams", "1"]);
    host.until_current(&first);
    checkpoint.change(..);
    let is_entry = |asked: &Asked| asked.is_get() && asked.key.ends_with("/channels/prod/000000000002");
    let held = proxy.always(Fault::Answer(Answer::new(404, "NoSuchKey")), is_entry);
    let second = checkpoint.publish(&house.store);
    let chunks = chunks(&house, &second);
    let gone = chunks.last().unwrap();
    let right = house.get(gone);
    house.delete(gone);
    proxy.forget();
    held.end();
    let status = host.until_behind("integrity");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("missing from the store"), "{status}");
    house.put(gone, right.iter().map(|byte| !byte).collect::<Vec<_>>());
    host.until("it is wrong now", |status| {
        status["last_error"]["message"].as_str().is_some_and(|why| why.contains("the hash that is its name"))
    });
    assert_eq!(serves(&host.into), Some(first));
    house.put(gone, right);
    host.until_current(&second);
    for key in &chunks[..chunks.len() - 1] {
        let asked = proxy.log().into_iter().filter(|entry| entry.asked.key.ends_with(key.as_str())).count();
        assert!(asked <= 1, "{key} was read {asked} times");
    }
}

/// B81, and what was seen before: a channel does not go back.
#[test]
fn a_log_that_was_cut_is_refused_and_the_version_that_is_served_stays() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let ids: Vec<_> = (0..3)
        .map(|_| {
            checkpoint.change(..);
            checkpoint.publish(&store)
        })
        .collect();
    let entry = |number: u64| store.root().join(format!("models/m/channels/prod/{number:012}"));
    let mut host = Host::start(&store, &[]);
    host.until_current(&ids[2]);
    // Under its eyes.
    let (third, away) = (entry(3), store.folder.path().join("third"));
    std::fs::rename(&third, &away).unwrap();
    let status = host.until_behind("integrity");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("missing"), "{status}");
    assert_eq!(serves(&host.into).as_ref(), Some(&ids[2]));
    std::fs::rename(&away, &third).unwrap();
    host.until_current(&ids[2]);
    // While it was not there.
    assert_eq!(host.terminate(), Some(0));
    std::fs::rename(&third, &away).unwrap();
    std::fs::remove_file(store.root().join("models/m/channels/prod/hint")).unwrap();
    let mut host = Host::start(&store, &[]);
    let status = host.until_behind("integrity");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("--forget-sequence"), "{status}");
    assert_eq!(status["serving"]["snapshot"], *ids[2]);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(serves(&host.into).as_ref(), Some(&ids[2]));
    // What one that runs has seen it keeps: a fetch beside it would be undone.
    let forget =
        ["fetch", "m", "--forget-sequence", "--into", store.served().to_str().unwrap()].map(str::to_owned);
    let refused = store.run(&forget);
    assert_eq!(refused.failed(1), "conflict");
    assert!(refused.stderr.contains("stop it"), "{refused:?}");
    assert_eq!(serves(&host.into).as_ref(), Some(&ids[2]));
    assert_eq!(host.terminate(), Some(0));
    store.run(&forget).succeeded();
    let mut host = Host::start(&store, &[]);
    host.until_current(&ids[1]);
    // Or it forgets by itself.
    assert_eq!(host.terminate(), Some(0));
    std::fs::rename(entry(2), store.folder.path().join("second")).unwrap();
    let _ = std::fs::remove_file(store.root().join("models/m/channels/prod/hint"));
    let mut host = Host::start(&store, &["--forget-sequence"]);
    host.until_current(&ids[0]);
}

#[test]
fn a_disk_that_is_full_is_said_and_room_is_all_it_takes() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let Some(volume) = Volume::mount(store.folder.path(), "16m") else { return };
    let mut checkpoint = Checkpoint::new(&store, &[TABLE; 3]);
    let first = checkpoint.publish(&store);
    let into = volume.0.join("served");
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&first);
    let filler = volume.0.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    file.write_all(&vec![1; 10 << 20]).unwrap();
    drop(file);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    let status = host.until_behind("disk_full");
    assert_eq!(status["serving"]["snapshot"], *first);
    assert_eq!(versions(&into), [first]);
    std::fs::remove_file(&filler).unwrap();
    host.until_current(&second);
}

#[test]
fn a_fetch_that_filled_the_disk_makes_way_for_a_rollback() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let Some(volume) = Volume::mount(store.folder.path(), "8m") else { return };
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let into = volume.0.join("served");
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&first);
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    host.until_current(&second);
    assert_eq!(host.terminate(), Some(0));
    std::fs::remove_file(into.join("status.json")).unwrap();
    let staging = into.join(".staging").join("0".repeat(64));
    std::fs::create_dir_all(&staging).unwrap();
    let mut half = std::fs::File::create(staging.join("model.safetensors")).unwrap();
    while half.write_all(&[1; 4096]).is_ok() {}
    drop(half);
    store.run(["rollback", "m"]).succeeded();
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&first);
}

/// Two hosts that share a volume could each wait for the room that the other's half takes.
#[test]
fn what_a_fetch_has_brought_goes_where_there_is_no_room_for_the_rest() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let Some(volume) = Volume::mount(store.folder.path(), "8m") else { return };
    let mut checkpoint = Checkpoint::new(&store, &[TABLE; 2]);
    let first = checkpoint.publish(&store);
    let into = volume.0.join("served");
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&first);
    assert_eq!(host.terminate(), Some(0));
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    let staging = into.join(".staging").join(&second);
    std::fs::create_dir_all(&staging).unwrap();
    std::fs::write(staging.join("half"), vec![1; 4 << 20]).unwrap();
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&second);
}

/// What is served, by somebody's hand, from now on.
fn move_by_hand(into: &std::path::Path, snapshot: &str) {
    let (next, version) = (into.join("by-hand"), std::path::Path::new("versions").join(snapshot));
    std::fs::create_dir_all(into.join(&version)).unwrap();
    std::os::unix::fs::symlink(version, &next).unwrap();
    std::fs::rename(next, into.join("current")).unwrap();
}

#[test]
fn what_is_moved_by_hand_is_put_back_while_what_is_wanted_cannot_be_had() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let log = store.folder.path().join("log");
    let command = format!("echo $WEIGHBRIDGE_PHASE $WEIGHBRIDGE_SNAPSHOT >>{}", log.display());
    let mut host = Host::start(&store, &["--exec", &command]);
    host.until_current(&first);
    let until_back = |host: &mut Host, times: usize| {
        let restored = format!("restore {first}");
        host.until("it is put back", |status| {
            let text = std::fs::read_to_string(&log).unwrap();
            status["serving"]["snapshot"] == *first && text.matches(&restored).count() == times
        });
        assert_eq!(serves(&host.into).as_ref(), Some(&first));
    };
    // There is an entry, and not what it points at.
    let (chunks, away) = (store.root().join("models/m/chunks"), store.folder.path().join("away"));
    checkpoint.change(..);
    let second = checkpoint.publish_with(&store, &["--channel", "other"]);
    std::fs::rename(&chunks, &away).unwrap();
    store.run(["promote", &format!("m@{second}")]).succeeded();
    host.until_behind("integrity");
    move_by_hand(&host.into, &"0".repeat(64));
    until_back(&mut host, 1);
    // There is no entry yet.
    assert_eq!(host.terminate(), Some(0));
    let gone = store.folder.path().join("gone");
    std::fs::rename(store.root(), &gone).unwrap();
    let mut host = Host::start(&store, &["--exec", &command]);
    host.until_behind("store_unreachable");
    move_by_hand(&host.into, &"0".repeat(64));
    until_back(&mut host, 2);
    std::fs::rename(&gone, store.root()).unwrap();
    std::fs::rename(&away, &chunks).unwrap();
    host.until_current(&second);
}

/// B86: many hosts, and a store that has enough of them.
#[test]
fn many_hosts_take_what_a_busy_store_gives_and_ask_for_little_twice() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let proxy = FaultyProxy::start(server, 1);
    let house = House::of_server(Place::SeaweedFs, server, Some(proxy.port()));
    let direct = Store::elsewhere(server.url(&house.prefix), server.environment(None));
    let mut checkpoint = Checkpoint::new(&house.store, &[TABLE; 2]);
    let first = checkpoint.publish(&direct);
    let into = |number: usize| house.store.folder.path().join(format!("host-{number}"));
    let mut hosts: Vec<_> =
        (0..8).map(|number| Host::start_into(&house.store, &into(number), &["--interval", "1s"])).collect();
    for host in &mut hosts {
        host.until_current(&first);
    }
    // At most 20 requests a second; who comes too soon is told to wait.
    let last = std::sync::Mutex::new(Instant::now());
    let busy = Fault::Answer(Answer::new(429, "SlowDown").with("retry-after", "1"));
    let refused = proxy.always(busy, move |_: &Asked| {
        let (mut last, now) = (last.lock().unwrap(), Instant::now());
        let is_soon = now - *last < Duration::from_millis(50);
        if !is_soon {
            *last = now;
        }
        is_soon
    });
    proxy.forget();
    checkpoint.change(..);
    let second = checkpoint.publish(&direct);
    let began = Instant::now();
    for host in &mut hosts {
        host.until_current(&second);
    }
    let log = proxy.log();
    let chunks = log.iter().filter(|entry| entry.asked.key.contains("/chunks/") && entry.status == Some(200));
    println!(
        "{} hosts in {:?}: {} requests, {} refused, {} chunks",
        hosts.len(),
        began.elapsed(),
        log.len(),
        refused.fired(),
        chunks.clone().count()
    );
    // Two tables and a header for each.
    assert!(chunks.count() <= 8 * 3 * 3 / 2);
}

/// B09, by way of an API: it cannot read its store, and says so.
#[test]
fn while_an_api_cannot_read_its_store_its_hosts_stay_behind_and_say_so() {
    let mut site = Site::start("api");
    let first = site.publish(1, &[]);
    let token = site.store.folder.path().join("token");
    std::fs::write(&token, &site.fetch).unwrap();
    let into = site.store.served();
    let more = ["--api", site.url.as_str(), "--api-token-file", token.to_str().unwrap()];
    let mut host = Host::start_into(&site.store, &into, &more);
    host.until_current(&first);
    let (store, away) = (site.store.root(), site.store.folder.path().join("away"));
    std::fs::rename(&store, &away).unwrap();
    let status = host.until_behind("store_unreachable");
    let before = host.lines().len();
    // It is told again and again that nothing is known for certain: none of that is a sign that all is well.
    std::thread::sleep(Duration::from_secs(16));
    let states: Vec<_> = host.lines()[before..].iter().map(|line| line["state"].clone()).collect();
    assert!(states.iter().all(|state| state == "behind"), "{states:?}");
    let now = host.status().unwrap();
    assert!(now["attempts"].as_u64() > status["attempts"].as_u64(), "{now}");
    std::fs::rename(&away, &store).unwrap();
    let second = site.publish(2, &[]);
    host.until_current(&second);
    site.stop();
}

/// What was found out about a folder is not so of another one in its place: whoever supervises the follower starts it.
#[test]
fn a_follower_whose_folder_goes_ends_and_one_without_versions_fetches_again() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let into = store.served();
    let mut host = Host::start_into(&store, &into, &[]);
    host.until_current(&first);
    std::fs::remove_dir_all(into.join("versions")).unwrap();
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    host.until_current(&second);
    assert_eq!(serves(&into), Some(second.clone()));

    // Another model's folder in its place stays as it is.
    let other = store.folder.path().join("other");
    let theirs = crate::fixtures::torchrec();
    store.run(["publish", theirs.to_str().unwrap(), "--model", "other"]).succeeded();
    store.run(["fetch", "other", "--into", other.to_str().unwrap()]).succeeded();
    let theirs = versions(&other);
    std::fs::rename(&into, into.with_extension("old")).unwrap();
    std::fs::rename(&other, &into).unwrap();
    assert_eq!(host.wait(), Some(1), "{}", host.said());
    assert_eq!(versions(&into), theirs);
    assert!(into.join("current").is_dir());
}

#[test]
fn a_command_that_writes_into_a_version_before_the_swap_has_it_not_served() {
    let store = Store::new();
    std::fs::create_dir(store.root()).unwrap();
    let mut checkpoint = Checkpoint::new(&store, &[4096]);
    let first = checkpoint.publish(&store);
    let into = store.served();
    let harm = store.folder.path().join("harm");
    let change = "cd $WEIGHBRIDGE_VERSION && chmod u+w . *.safetensors && echo x >>model.safetensors";
    let write = format!("test ! -e {} || {{ {change}; }}", harm.display());
    let mut host = Host::start_into(&store, &into, &["--exec-before", &write]);
    host.until_current(&first);
    std::fs::write(&harm, "").unwrap();
    checkpoint.change(..);
    let second = checkpoint.publish(&store);
    let status = host.until_behind("integrity");
    assert!(status["last_error"]["message"].as_str().unwrap().contains("may read a version"), "{status}");
    assert_eq!(serves(&into), Some(first));
    std::fs::remove_file(&harm).unwrap();
    host.until_current(&second);
}
