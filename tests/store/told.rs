//! What a store answers, one answer at a time: what passes is tried again, what does not is told with the way out, and
//! nothing counts as published that was not stored.

use std::time::Duration;

use serde_json::json;
use weighbridge_tests::buckets::{Answer, Asked, Fault, FaultyProxy, Kind, SECRET, Server};

use crate::again::Again;
use crate::binary::{Run, ended};
use crate::fixtures::torchrec;
use crate::places::{House, Place, server};

/// A store at a server of S3, behind a proxy.
fn house(kind: Kind) -> Option<(House, FaultyProxy, &'static Server)> {
    let place = if kind == Kind::Moto { Place::Moto } else { Place::SeaweedFs };
    let server = server(kind)?;
    let proxy = FaultyProxy::start(server, 1);
    Some((House::of_server(place, server, Some(proxy.port())), proxy, server))
}

fn publish(house: &House, step: u32) -> Run {
    house.store.publish(&torchrec(), &["--step", &step.to_string()])
}

/// Where one kind of object lies.
const KINDS: [&str; 4] = ["/chunks/", "/snapshots/", ".report", "/channels/prod/0"];

fn writes(what: &'static str) -> impl Fn(&Asked) -> bool + Send + Sync + 'static {
    let is_report = what == ".report";
    move |asked| asked.is_put() && asked.key.contains(what) && (is_report || !asked.key.ends_with(".report"))
}

/// B69: 409 is no answer to whether the object is there, and what was done but not told is done once.
#[test]
fn a_conflict_or_a_lost_answer_at_any_object_is_tried_again() {
    let Some((house, proxy, _)) = house(Kind::SeaweedFs) else { return };
    let mut step = 0;
    for what in KINDS {
        for fault in [
            Fault::Answer(Answer::conflict()),
            Fault::DropAfter,
            Fault::DropBefore,
            Fault::Answer(Answer::internal_error()),
        ] {
            step += 1;
            // Chunks are put where they are not there yet: another policy, other chunks.
            let policy = house
                .store
                .policy(&format!("[[rule]]\nmatch = '**'\nencode = 'bf16'\nrename = 's{step}.$1'"));
            let rule = proxy.times(1, fault.clone(), writes(what));
            let more = ["--step", &step.to_string(), "--policy", policy.to_str().unwrap()];
            let published = house.store.publish(&torchrec(), &more).succeeded();
            assert_eq!(published["outcome"], "published", "{what} {fault:?}");
            assert_eq!(rule.fired(), 1, "{what} {fault:?}");
        }
    }
    proxy.pass();
    let log = house.store.run(["channels", "log", "m"]).succeeded();
    assert_eq!(log["entries"].as_array().unwrap().len(), step, "each is there once");
    house.store.run(["verify"]).succeeded();
}

/// A store that says of what it has not got that it is there: nobody is told that it was published, unless it was.
#[test]
fn a_precondition_that_fails_for_no_reason_is_never_taken_for_success() {
    let Some((house, proxy, _)) = house(Kind::SeaweedFs) else { return };
    for (step, what) in (1..).zip(["/claims/", "/snapshots/", ".report", "/channels/prod/0"]) {
        let rule = proxy.times(1, Fault::Answer(Answer::precondition_failed()), writes(what));
        let run = publish(&house, step);
        println!("{what}: {} {}", run.code, run.stderr);
        assert_eq!(rule.fired(), 1, "{what}");
        let latest = house.store.run(["inspect", "m"]);
        let is_there = latest.code == 0 && latest.json()["step"] == step;
        assert_eq!(run.code == 0, is_there, "{what}: {run:?}");
        assert_eq!(publish(&house, step).code, 0, "{what}: it is finished by running it again");
        house.store.run(["verify"]).succeeded();
    }
}

#[test]
fn what_lies_there_already_with_other_content_is_a_conflict() {
    let Some((house, _proxy, _)) = house(Kind::SeaweedFs) else { return };
    let published = publish(&house, 1).succeeded();
    let manifest = format!("models/m/snapshots/{}", published["snapshot"].as_str().unwrap());
    for key in house.keys("models/m") {
        let is_content = key.contains("/chunks/") || key == manifest;
        if !is_content {
            house.delete(&key);
            continue;
        }
        house.put(&key, "somebody else's");
    }
    let run = publish(&house, 1);
    assert_eq!(run.failed(7), "integrity");
    assert!(house.keys("models/m/channels").is_empty(), "{run:?}");
}

/// B70: the bucket lies elsewhere, which is no success.
#[test]
fn another_region_is_named_and_nothing_counts_as_published() {
    let Some((house, proxy, _)) = house(Kind::SeaweedFs) else { return };
    proxy.always(Fault::Answer(Answer::other_region("eu-west-1")), |_: &Asked| true);
    for run in [publish(&house, 1), house.store.fetch("m"), house.store.run(["verify"])] {
        assert_eq!(run.failed(5), "store_access_denied");
        for word in ["region eu-west-1", "us-east-1", "AWS_REGION", "[bucket]"] {
            assert!(run.stderr.contains(word), "{word}: {run:?}");
        }
    }
    assert!(house.keys("").is_empty());
}

#[test]
fn what_no_further_try_mends_is_told_at_once_with_the_way_out() {
    let Some((house, proxy, _)) = house(Kind::SeaweedFs) else { return };
    for (answer, words) in [
        (Answer::expired_token(), &["expired", "renew"][..]),
        (Answer::access_denied(), &["AWS_ACCESS_KEY_ID", "does not allow it"]),
        (Answer::time_too_skewed(), &["clock is wrong", "behind the store's", "NTP"]),
    ] {
        let skewed = answer.clone();
        proxy.always(Fault::Answer(skewed), |_: &Asked| true);
        proxy.always(Fault::ShiftDate(3600), |_: &Asked| true);
        proxy.forget();
        let run = publish(&house, 1);
        assert_eq!(run.failed(5), "store_access_denied");
        assert!(words.iter().all(|word| run.stderr.contains(word)), "{words:?}: {run:?}");
        assert!(!run.stderr.contains(SECRET), "{run:?}");
        assert_eq!(proxy.log().len(), 1, "it is asked once");
        if words[0] == "clock is wrong" {
            let by = run.stderr.split_once("wrong (").unwrap().1.split_once(" s ").unwrap().0;
            assert!((3590..3660).contains(&by.parse::<u32>().unwrap()), "{run:?}");
        }
        proxy.pass();
    }
    assert!(house.keys("").is_empty());
}

#[test]
fn who_may_only_read_is_told_so_and_may_fetch() {
    let Some((house, proxy, server)) = house(Kind::SeaweedFs) else { return };
    let first = publish(&house, 1).succeeded();
    let mut command = house.store.publish_command(&torchrec(), &["--step", "2"]);
    server.lend_to_reader(&mut command, Some(proxy.port()));
    let run = ended(command.output().unwrap());
    assert_eq!(run.failed(5), "store_access_denied");
    assert!(run.stderr.contains("models/m/") && run.stderr.contains("AWS_ACCESS_KEY_ID"), "{run:?}");
    let mut command = house.store.fetch_command("m");
    server.lend_to_reader(&mut command, Some(proxy.port()));
    assert_eq!(ended(command.output().unwrap()).succeeded()["snapshot"], first["snapshot"]);
    proxy.always(Fault::Answer(Answer::access_denied()), Asked::is_put);
    for run in [publish(&house, 3), house.store.run(["hold", "m"])] {
        assert_eq!(run.failed(5), "store_access_denied");
    }
    house.store.fetch("m").succeeded();
    house.store.run(["verify"]).succeeded();
}

#[test]
fn wrong_keys_and_buckets_that_are_not_there_are_told_apart() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let house = House::of_server(Place::SeaweedFs, server, None);
    for command in [house.store.publish_command(&torchrec(), &[]), house.store.fetch_command("m")] {
        let mut wrong = command;
        let run = ended(wrong.env("AWS_SECRET_ACCESS_KEY", "wrong").output().unwrap());
        assert_eq!(run.failed(5), "store_access_denied");
        assert!(run.stderr.contains("AWS_SECRET_ACCESS_KEY") && !run.stderr.contains(SECRET), "{run:?}");
    }
    let elsewhere =
        crate::binary::Store::elsewhere("s3://no-such-bucket/p".to_owned(), server.environment(None));
    for run in [elsewhere.publish(&torchrec(), &[]), elsewhere.fetch("m")] {
        assert_eq!(run.failed(6), "not_found");
        assert!(run.stderr.contains("no such bucket") && run.stderr.contains("--store"), "{run:?}");
    }
}

/// What a process is told that is patient for two seconds.
fn impatient(server: &Server, port: u16, order: &serde_json::Value) -> String {
    let patience = Duration::from_secs(2);
    let mut process = Again::start(&server.url("impatient"), &server.environment(Some(port)), patience);
    process.ask(order)["error"].as_str().unwrap().to_owned()
}

#[test]
fn patience_has_an_end_and_tries_are_told() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    server.put("impatient/a", vec![1; 100_000]);
    let told = impatient(server, 9, &json!({ "do": "get", "key": "a" }));
    assert!(told.contains("given up after") && told.contains("http://127.0.0.1:9"), "{told}");
    let proxy = FaultyProxy::start(server, 1);
    for (fault, word) in [
        (Fault::CutAnswer(weighbridge_tests::buckets::At::Byte(1000)), "broke off"),
        (Fault::Answer(Answer::internal_error()), "InternalError"),
        (Fault::DropBefore, "given up"),
    ] {
        proxy.always(fault, Asked::is_get);
        let told = impatient(server, proxy.port(), &json!({ "do": "get", "key": "a" }));
        assert!(told.contains(word) && told.contains("tries") && told.contains("impatient/a"), "{told}");
        proxy.pass();
    }
}

#[test]
fn a_store_that_asks_for_a_pause_gets_it() {
    let Some((house, proxy, _)) = house(Kind::Moto) else { return };
    publish(&house, 1).succeeded();
    let is_chunk = |asked: &Asked| asked.is_get() && asked.key.contains("/chunks/");
    proxy.times(1, Fault::Answer(Answer::slow_down().with("retry-after", "3")), is_chunk);
    proxy.forget();
    house.store.fetch("m").succeeded();
    let log = proxy.log();
    let refused = log.iter().find(|entry| entry.status == Some(503)).unwrap();
    let again = log.iter().find(|entry| entry.asked == refused.asked && entry.status == Some(200)).unwrap();
    assert!(again.when - refused.when >= Duration::from_secs(3), "{:?}", again.when - refused.when);
}

#[test]
fn a_store_that_lets_everybody_win_is_refused_before_anything_is_published() {
    let Some((house, proxy, _)) = house(Kind::SeaweedFs) else { return };
    proxy.always(Fault::IgnoreIfNoneMatch, Asked::is_put);
    let run = publish(&house, 1);
    assert_eq!(run.failed(5), "store_unfit");
    assert!(run.stderr.contains("stores that do it are"), "{run:?}");
    assert!(house.keys("models").is_empty(), "{:?}", house.keys("models"));
    let checked = house.store.run(["store", "check"]);
    assert_eq!(checked.failed(5), "store_unfit");
    proxy.pass();
    publish(&house, 1).succeeded();
    assert_eq!(house.store.run(["store", "check"]).succeeded()["fit"], true);
}

#[test]
fn a_server_that_is_away_is_waited_for_as_long_as_the_configuration_says() {
    let Some(server) = server(Kind::SeaweedFs) else { return };
    let house = House::of_server(Place::SeaweedFs, server, Some(9));
    let config = house.store.folder.path().join("weighbridge.toml");
    std::fs::write(config, "[bucket]\nretry_seconds = 1\n").unwrap();
    for run in [publish(&house, 1), house.store.fetch("m"), house.store.run(["verify"])] {
        assert_eq!(run.failed(5), "store_unreachable");
        assert!(run.stderr.contains("given up after") && run.stderr.contains("127.0.0.1:9"), "{run:?}");
    }
}
