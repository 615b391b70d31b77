//! Operators move channels, pin snapshots and look after dead letters over the API.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::json;
use tonic::Code;

use weighbridge::api::proto::{
    ChannelEntry, DiscardDeadLetterRequest, GetDeadLetterRequest, HoldRequest, ListDeadLettersRequest,
    ListEntriesRequest, ListPinsRequest, MoveResponse, PinRequest, PromoteRequest, ReleaseRequest,
    RequeueDeadLetterRequest, RollbackRequest, SubmitRequest, UnpinRequest,
};

use crate::binary::Store;
use crate::queued::{drop_bytes, queue, work};
use crate::site::{Site, by, class, field, refused};

fn promote(to: &str, channel: &str) -> PromoteRequest {
    PromoteRequest { model: "m".into(), channel: channel.into(), to: to.into(), ..Default::default() }
}

fn rollback() -> RollbackRequest {
    RollbackRequest { model: "m".into(), ..Default::default() }
}

fn hold() -> HoldRequest {
    HoldRequest { model: "m".into(), ..Default::default() }
}

fn release() -> ReleaseRequest {
    ReleaseRequest { model: "m".into(), ..Default::default() }
}

fn told(answer: MoveResponse) -> (ChannelEntry, bool) {
    (answer.entry.unwrap(), answer.changed)
}

#[tokio::test]
async fn channels_are_moved_held_and_released() {
    let site = Site::start("api");
    let (first, second) = (site.publish(1, &[]), site.publish(2, &[]));
    let mut client = site.operating();
    let by_ops = |said: &str| {
        let mut request = by(&site.operate, promote("prod", "canary"));
        request.metadata_mut().insert("weighbridge-who", said.parse().unwrap());
        request
    };
    let (entry, changed) = told(client.promote(by_ops("alice, for incident 7")).await.unwrap().into_inner());
    assert_eq!((entry.channel.as_str(), &entry.snapshot, entry.sequence), ("canary", &second, 1));
    assert_eq!((entry.reason.as_str(), entry.who.as_str()), ("promote", "ops (alice, for incident 7)"));
    assert!(changed && !entry.held && entry.previous.is_empty());

    let (entry, _) = told(client.rollback(by(&site.operate, rollback())).await.unwrap().into_inner());
    assert_eq!((entry.channel.as_str(), &entry.snapshot, &entry.previous), ("prod", &first, &second));
    assert!(entry.held && entry.step == 1);
    let document: serde_json::Value = serde_json::from_slice(&entry.document).unwrap();
    assert_eq!((&document["sequence"], &document["snapshot"]), (&json!(3), &json!(first)));
    let stored = std::fs::read(site.store.root().join("models/m/channels/prod/000000000003")).unwrap();
    assert_eq!(entry.document, stored, "what is signed is given to the byte");

    let (entry, changed) = told(client.hold(by(&site.operate, hold())).await.unwrap().into_inner());
    assert!(!changed && entry.sequence == 3 && entry.document == stored, "it was held already");
    let (entry, changed) = told(client.release(by(&site.operate, release())).await.unwrap().into_inner());
    assert!(changed && entry.reason == "release" && entry.sequence == 4);
    let (entry, changed) = told(client.hold(by(&site.operate, hold())).await.unwrap().into_inner());
    assert!(changed && entry.held && entry.sequence == 5);
    let (entry, _) =
        told(client.promote(by(&site.operate, promote(&second[..8], ""))).await.unwrap().into_inner());
    assert_eq!((&entry.snapshot, entry.sequence), (&second, 6));

    let listed = site.store.run(["channels", "log", "m@prod"]).succeeded();
    assert_eq!(listed["entries"][0]["who"], "ops");
    let deeds: Vec<_> = site
        .audit()
        .into_iter()
        .map(|deed| {
            [deed["action"].clone(), deed["object"].clone(), deed["before"].clone(), deed["after"].clone()]
        })
        .collect();
    assert_eq!(
        deeds,
        [
            [json!("promote"), json!("canary"), json!(null), json!(second)],
            [json!("rollback"), json!("prod"), json!(second), json!(first)],
            [json!("hold"), json!("prod"), json!(second), json!(first)],
            [json!("release"), json!("prod"), json!(first), json!(first)],
            [json!("hold"), json!("prod"), json!(first), json!(first)],
            [json!("promote"), json!("prod"), json!(first), json!(second)],
        ]
    );
    assert_eq!(site.audit()[0]["said"], "alice, for incident 7");
    let outcomes: Vec<_> = site.audit().into_iter().map(|deed| deed["outcome"].clone()).collect();
    assert_eq!(outcomes, ["done", "done", "unchanged", "done", "done", "done"]);

    let (mut entries, mut token) = (Vec::new(), String::new());
    loop {
        let request =
            ListEntriesRequest { model: "m".into(), page_size: 4, page_token: token, ..Default::default() };
        let page = client.list_entries(by(&site.operate, request)).await.unwrap().into_inner();
        entries.extend(page.entries.into_iter().map(|entry| entry.sequence));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(entries, [6, 5, 4, 3, 2, 1]);
}

#[tokio::test]
async fn a_request_that_is_made_again_is_done_once() {
    let site = Site::start("api");
    let (first, second, third) = (site.publish(1, &[]), site.publish(2, &[]), site.publish(3, &[]));
    let mut client = site.operating();
    let back = |id: &str| RollbackRequest { request_id: id.into(), ..rollback() };
    let (entry, _) = told(client.rollback(by(&site.operate, back("back-1"))).await.unwrap().into_inner());
    assert_eq!(&entry.snapshot, &second);
    let (again, changed) =
        told(client.rollback(by(&site.operate, back("back-1"))).await.unwrap().into_inner());
    assert_eq!((&again, changed), (&entry, true), "an answer that was lost is given again");
    assert_eq!(
        (&site.audit()[0]["outcome"], &site.audit()[1]["outcome"]),
        (&json!("done"), &json!("repeated"))
    );
    // Also after others have moved the channel.
    told(client.promote(by(&site.operate, promote(&third, ""))).await.unwrap().into_inner());
    let (again, _) = told(client.rollback(by(&site.operate, back("back-1"))).await.unwrap().into_inner());
    assert_eq!(again, entry);
    let (other, _) = told(client.rollback(by(&site.all, back("back-1"))).await.unwrap().into_inner());
    assert!(other.sequence > entry.sequence, "another caller's id is another one");

    let to = |to: &str| PromoteRequest { request_id: "deploy-1".into(), ..promote(to, "canary") };
    let (entry, _) = told(client.promote(by(&site.operate, to(&first))).await.unwrap().into_inner());
    let (again, _) = told(client.promote(by(&site.operate, to(&first[..9]))).await.unwrap().into_inner());
    assert_eq!(again, entry);
    let status = refused(client.promote(by(&site.operate, to(&second))).await, Code::FailedPrecondition);
    assert_eq!(class(&status), "id_used");
    // A channel's name may look like digits of an id.
    told(client.promote(by(&site.operate, promote(&first, "beefcafe"))).await.unwrap().into_inner());
    let to = PromoteRequest { request_id: "deploy-2".into(), ..promote("beefcafe", "prod") };
    let (named, _) = told(client.promote(by(&site.operate, to.clone())).await.unwrap().into_inner());
    assert_eq!(named.snapshot, first);
    let (again, _) = told(client.promote(by(&site.operate, to)).await.unwrap().into_inner());
    assert_eq!(again, named);
    // Several at once write one entry.
    let at_once = (0..8).map(|_| {
        let (mut client, token) = (site.operating(), site.operate.clone());
        let request = HoldRequest { channel: "canary".into(), request_id: "hold-1".into(), ..hold() };
        tokio::spawn(async move { told(client.hold(by(&token, request)).await.unwrap().into_inner()).0 })
    });
    for held in at_once.collect::<Vec<_>>() {
        assert_eq!(held.await.unwrap().sequence, entry.sequence + 1);
    }
}

#[tokio::test]
async fn what_a_gate_rejected_is_promoted_by_force_alone() {
    let site = Site::start("api");
    site.publish(1, &[]);
    let strict = site.store.policy("[[rule]]\nmatch = '**'\nencode = 'int8'\n[gates]\nmax_rms_error = 1e-9");
    let strict = ["--step", "9", "--policy", strict.to_str().unwrap()];
    let run = site.store.publish(&crate::fixtures::torchrec(), &strict);
    assert_eq!(run.failed(3), "rejected_by_gate");
    let rejected = run.json()["snapshot"].as_str().unwrap().to_owned();
    let mut client = site.operating();
    let status =
        refused(client.promote(by(&site.operate, promote(&rejected, ""))).await, Code::FailedPrecondition);
    assert_eq!(class(&status), "rejected_by_gate");
    let forced = PromoteRequest { force: true, ..promote(&rejected, "") };
    let (entry, _) = told(client.promote(by(&site.operate, forced)).await.unwrap().into_inner());
    assert_eq!(entry.snapshot, rejected);
    assert_eq!(site.audit()[0]["outcome"], "rejected_by_gate");
}

#[tokio::test]
async fn snapshots_are_pinned_and_not_any_more() {
    let site = Site::start("api");
    let id = site.publish(1, &[]);
    let mut client = site.operating();
    let pin = PinRequest { model: "m".into(), snapshot: id[..6].into(), why: "incident 7".into() };
    for _ in 0..2 {
        let pinned = client.pin(by(&site.operate, pin.clone())).await.unwrap().into_inner();
        assert_eq!(pinned.snapshot, id);
    }
    let pinned = || site.store.run(["snapshots", "m"]).succeeded()["snapshots"][0]["pinned"].clone();
    assert_eq!(pinned(), true);
    let unpin = UnpinRequest { model: "m".into(), snapshot: id.clone() };
    let unpinned = client.unpin(by(&site.operate, unpin)).await.unwrap().into_inner();
    assert_eq!((unpinned.snapshot, pinned()), (id.clone(), json!(false)));
    let changes: Vec<_> =
        site.audit().into_iter().map(|deed| (deed["before"].clone(), deed["after"].clone())).collect();
    let (on, off) = (json!("pinned"), json!("not pinned"));
    assert_eq!(changes, [(off.clone(), on.clone()), (on.clone(), on.clone()), (on, off)]);
    let second = site.publish(2, &[]);
    for (snapshot, why) in [(&id, "a baseline"), (&second, "")] {
        let (model, snapshot, why) = ("m".into(), snapshot.clone(), why.into());
        client.pin(by(&site.operate, PinRequest { model, snapshot, why })).await.unwrap();
    }
    let (mut pins, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListPinsRequest { model: "m".into(), page_size: 1, page_token };
        let page = client.list_pins(by(&site.operate, request)).await.unwrap().into_inner();
        assert!(page.pins.len() <= 1);
        pins.extend(page.pins.into_iter().map(|pin| (pin.snapshot, pin.why, pin.who, pin.when.is_some())));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let pin = |id: &String, why: &str| (id.clone(), why.to_owned(), "ops".to_owned(), true);
    let mut expected = [pin(&id, "a baseline"), pin(&second, "")];
    expected.sort();
    assert_eq!(pins, expected);
    let absent = PinRequest { model: "m".into(), snapshot: "abcdef".into(), why: String::new() };
    refused(client.pin(by(&site.operate, absent)).await, Code::NotFound);
}

#[test]
fn dead_letters_are_seen_by_who_operates_their_model() {
    let store = Store::new();
    let queued = queue(&store);
    drop_bytes(&*queued, "nonsense", b"no manifest at all");
    let dead = |model: &str, location: &str| {
        let id = weighbridge::clock::operation_id();
        let manifest = json!({
            "schema": "weighbridge.checkpoint/v1", "id": id, "model": model, "run": "r", "step": 1,
            "created_at": "2026-11-29T16:10:04Z", "location": location,
        });
        drop_bytes(&*queued, &id, manifest.to_string().as_bytes());
        id
    };
    // A place where no worker reads: dead at once.
    let (mine, others) = (dead("m", "s3://bucket/x"), dead("other", "s3://bucket/x"));
    work(&store);
    let site = Site::on(store, "api");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(letters(&site, &mine, &others));
}

/// Another process that writes to a queue's database, until its input ends.
fn lock(database: &Path) -> Child {
    let code = "import sqlite3, sys\n\
                connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n\
                connection.execute('BEGIN IMMEDIATE')\n\
                print('held', flush=True)\n\
                sys.stdin.read()";
    let mut python = Command::new("python3");
    python.args(["-c", code]).arg(database).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = python.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    child
}

/// Whoever waits for a queue that does not answer keeps nobody from moving channels, and has a share alone.
#[tokio::test(flavor = "multi_thread")]
async fn channels_are_moved_while_the_queue_is_stuck_and_what_was_begun_is_written_down() {
    let mut site = Site::start("api");
    let (first, _) = (site.publish(1, &[]), site.publish(2, &[]));
    // The queue is made by its first use.
    drop(queue(&site.store));
    let mut stuck = lock(&site.store.folder.path().join("weighbridge-data/queue/queue.sqlite3"));
    let submits: Vec<_> = (0..20u64)
        .map(|step| {
            let (_, manifest) = crate::site::manifest("m", step, &site.checkpoint(step));
            let manifest = manifest.into();
            let (mut client, token) = (site.publishing(), site.drop.clone());
            tokio::spawn(async move { client.submit(by(&token, SubmitRequest { manifest })).await })
        })
        .collect();
    let (mut under_way, mut refusals) = (Vec::new(), 0);
    let deadline = std::time::Instant::now() + crate::site::PATIENCE;
    let mut submits = submits;
    while refusals < 4 {
        assert!(std::time::Instant::now() < deadline, "{refusals}");
        let (ended, going): (Vec<_>, Vec<_>) = submits.into_iter().partition(|task| task.is_finished());
        for task in ended {
            refused(task.await.unwrap(), Code::ResourceExhausted);
            refusals += 1;
        }
        submits = going;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    under_way.extend(submits);
    assert_eq!((under_way.len(), refusals), (16, 4));
    let (entry, _) =
        told(site.operating().rollback(by(&site.operate, rollback())).await.unwrap().into_inner());
    assert_eq!(entry.snapshot, first);
    // The callers go, and the server is told to stop; the queue answers again.
    under_way.iter().for_each(tokio::task::JoinHandle::abort);
    let unlock = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        drop(stuck.stdin.take());
        assert!(stuck.wait().unwrap().success());
    });
    tokio::task::block_in_place(|| site.stop());
    unlock.join().unwrap();
    let audit = site.audit();
    let count = |outcome: &str| {
        audit.iter().filter(|deed| deed["action"] == "submit" && deed["outcome"] == outcome).count()
    };
    assert_eq!((count("done"), count("over_limit")), (16, 4), "{audit:?}");
    assert_eq!(site.store.run(["queue", "status"]).succeeded()["ready"], 16);
}

/// A server that ends cuts off what takes too long; that it was begun stands in the log.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_cut_off_when_the_server_ends_is_written_down() {
    let mut site = Site::start("api");
    drop(queue(&site.store));
    let mut stuck = lock(&site.store.folder.path().join("weighbridge-data/queue/queue.sqlite3"));
    let submits: Vec<_> = (0..4u64)
        .map(|step| {
            let manifest = crate::site::manifest("m", step, &site.checkpoint(step)).1.into();
            let (mut client, token) = (site.publishing(), site.drop.clone());
            tokio::spawn(async move { client.submit(by(&token, SubmitRequest { manifest })).await })
        })
        .collect();
    // All of them are under way before the first has waited for too long.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    submits.iter().for_each(tokio::task::JoinHandle::abort);
    tokio::task::block_in_place(|| site.stop());
    drop(stuck.stdin.take());
    assert!(stuck.wait().unwrap().success());
    let audit = site.audit();
    assert!(audit.len() == 4 && audit.iter().all(|deed| deed["action"] == "submit"), "{audit:?}");
    assert!(audit.iter().any(|deed| deed["outcome"] == "interrupted"), "{audit:?}");
    assert!(audit.iter().all(|deed| deed["outcome"] != "done"), "{audit:?}");
}

async fn letters(site: &Site, mine: &str, others: &str) {
    let mut client = site.operating();
    let list = async |token: &str, model: &str, page_size: u32| {
        let (mut seen, mut place) = (Vec::new(), String::new());
        loop {
            let request =
                ListDeadLettersRequest { model: model.into(), page_size, page_token: place.clone() };
            let page = site.operating().list_dead_letters(by(token, request)).await.unwrap().into_inner();
            assert!(page.letters.iter().all(|letter| letter.body.is_empty()));
            seen.extend(page.letters);
            place = page.next_page_token;
            if place.is_empty() {
                return seen;
            }
        }
    };
    let ids = |letters: &[weighbridge::api::proto::DeadLetter]| {
        letters.iter().map(|letter| letter.id.clone()).collect::<Vec<_>>()
    };
    let all = list(&site.all, "", 1).await;
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|letter| !letter.class.is_empty() && letter.when.is_some()));
    assert_eq!(ids(&list(&site.operate, "", 0).await), [mine]);
    assert_eq!(ids(&list(&site.other, "", 2).await), [others]);
    assert_eq!(ids(&list(&site.all, "m", 2).await), [mine]);

    let get = |id: &str| GetDeadLetterRequest { id: id.into() };
    let nonsense = all.iter().find(|letter| letter.model.is_empty()).unwrap();
    let letter = client.get_dead_letter(by(&site.all, get(&nonsense.id))).await.unwrap().into_inner();
    let letter = letter.letter.unwrap();
    assert_eq!((&letter.body[..], letter.body_size), (&b"no manifest at all"[..], 18));
    refused(client.get_dead_letter(by(&site.operate, get(&nonsense.id))).await, Code::NotFound);
    let theirs = refused(client.get_dead_letter(by(&site.operate, get(others))).await, Code::NotFound);
    let absent = weighbridge::clock::operation_id();
    let status = refused(client.get_dead_letter(by(&site.operate, get(&absent))).await, Code::NotFound);
    let without_id = |status: &tonic::Status, id: &str| status.message().replace(id, "");
    assert_eq!(without_id(&theirs, others), without_id(&status, &absent), "what is others' is not there");
    refused(client.get_dead_letter(by(&site.fetch, get(mine))).await, Code::PermissionDenied);

    let requeue = |id: &str| RequeueDeadLetterRequest { id: id.into() };
    refused(client.requeue_dead_letter(by(&site.operate, requeue(others))).await, Code::NotFound);
    refused(client.requeue_dead_letter(by(&site.drop, requeue(mine))).await, Code::PermissionDenied);
    let status = client.requeue_dead_letter(by(&site.all, requeue(&nonsense.id))).await.unwrap_err();
    assert_eq!((status.code(), class(&status).as_str()), (Code::InvalidArgument, "bad_document"));
    let discard = |id: &str| DiscardDeadLetterRequest { id: id.into() };
    refused(client.discard_dead_letter(by(&site.operate, discard(others))).await, Code::NotFound);
    refused(client.discard_dead_letter(by(&site.drop, discard(mine))).await, Code::PermissionDenied);
    for _ in 0..2 {
        client.discard_dead_letter(by(&site.all, discard(&nonsense.id))).await.unwrap();
    }
    assert_eq!(list(&site.all, "", 0).await.len(), 2);
    client.get_dead_letter(by(&site.all, get(&nonsense.id))).await.unwrap();
    let job = client.requeue_dead_letter(by(&site.operate, requeue(mine))).await.unwrap().into_inner().job;
    assert_ne!(job, mine);
    let again = client.requeue_dead_letter(by(&site.operate, requeue(mine))).await;
    let status = refused(again, Code::FailedPrecondition);
    assert!(class(&status) == "already_requeued" && status.message().contains(&job), "{status:?}");
    assert!(list(&site.operate, "", 0).await.is_empty(), "it waits for nobody any more");
    refused(client.discard_dead_letter(by(&site.operate, discard(mine))).await, Code::InvalidArgument);
    let queued = site.store.run(["queue", "status"]).succeeded();
    assert_eq!(queued["ready"], 1);
}

#[tokio::test]
async fn who_may_not_operate_is_refused_and_that_is_written_down() {
    let site = Site::start("api");
    let id = site.publish(1, &[]);
    let mut client = site.operating();
    let mut asked = 0;
    for token in [&site.drop, &site.fetch, &site.other] {
        refused(client.promote(by(token, promote(&id, ""))).await, Code::PermissionDenied);
        refused(client.rollback(by(token, rollback())).await, Code::PermissionDenied);
        refused(client.hold(by(token, hold())).await, Code::PermissionDenied);
        refused(client.release(by(token, release())).await, Code::PermissionDenied);
        let pin = PinRequest { model: "m".into(), snapshot: id.clone(), why: String::new() };
        refused(client.pin(by(token, pin)).await, Code::PermissionDenied);
        let unpin = UnpinRequest { model: "m".into(), snapshot: id.clone() };
        refused(client.unpin(by(token, unpin)).await, Code::PermissionDenied);
        asked += 6;
        let entries = ListEntriesRequest { model: "m".into(), ..Default::default() };
        refused(client.list_entries(by(token, entries)).await, Code::PermissionDenied);
        let pins = ListPinsRequest { model: "m".into(), ..Default::default() };
        refused(client.list_pins(by(token, pins)).await, Code::PermissionDenied);
        let letters = ListDeadLettersRequest { model: "m".into(), ..Default::default() };
        refused(client.list_dead_letters(by(token, letters)).await, Code::PermissionDenied);
    }
    refused(client.hold(by("wb_nobody", hold())).await, Code::Unauthenticated);
    let audit = site.audit();
    assert_eq!(audit.len(), asked);
    assert!(audit.iter().all(|deed| deed["outcome"] == "forbidden" && deed["model"] == "m"), "{audit:?}");
    let entries = site.store.run(["channels", "log", "m"]).succeeded();
    assert_eq!(entries["entries"].as_array().unwrap().len(), 1, "nothing moved");
}

#[tokio::test]
async fn what_is_not_there_or_makes_no_sense_is_refused() {
    let site = Site::start("api");
    site.publish(1, &[]);
    site.store.run(["publish", site.checkpoint(9).to_str().unwrap(), "--model", "secret"]).succeeded();
    let mut client = site.operating();
    let unknown = |model: &str| PromoteRequest { model: model.into(), ..promote("canary", "") };
    let status = refused(client.promote(by(&site.operate, unknown("m"))).await, Code::NotFound);
    assert!(status.message().contains("no such channel"), "{status:?}");
    let status = refused(client.promote(by(&site.operate, unknown("missing"))).await, Code::NotFound);
    assert!(!status.message().contains("secret"), "other models are nobody's business: {status:?}");
    refused(client.rollback(by(&site.operate, rollback())).await, Code::NotFound);
    let absent = HoldRequest { channel: "canary".into(), ..hold() };
    refused(client.hold(by(&site.operate, absent)).await, Code::NotFound);

    let bad = |status: tonic::Status| (status.code(), field(&status));
    let wrong = |name: &str| (Code::InvalidArgument, name.to_owned());
    let status = client.promote(by(&site.all, promote("", ""))).await.unwrap_err();
    assert_eq!(bad(status), wrong("to"));
    let status = client.promote(by(&site.all, promote("prod", "a/b"))).await.unwrap_err();
    assert_eq!(bad(status), wrong("channel"));
    let long = RollbackRequest { request_id: "x".repeat(129), ..rollback() };
    assert_eq!(bad(client.rollback(by(&site.all, long)).await.unwrap_err()), wrong("request_id"));
    let entries = ListEntriesRequest { model: "m".into(), page_size: 101, ..Default::default() };
    assert_eq!(bad(client.list_entries(by(&site.all, entries)).await.unwrap_err()), wrong("page_size"));
    let letter = GetDeadLetterRequest { id: "../../tokens".into() };
    assert_eq!(bad(client.get_dead_letter(by(&site.all, letter)).await.unwrap_err()), wrong("id"));
    let why = PinRequest { model: "m".into(), snapshot: "abcdef".into(), why: "x".repeat(2000) };
    assert_eq!(bad(client.pin(by(&site.all, why)).await.unwrap_err()), wrong("why"));
}
