//! What somebody did to the broker, or did not allow: queues are deleted, full or others than they should be, users
//! have no password or permission.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, BasicRejectOptions, ConfirmSelectOptions, ExchangeDeleteOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};

use weighbridge_queue::Taker;
use weighbridge_queue::error::Error;
use weighbridge_queue::message::{Message, Priority};
use weighbridge_queue::spool::{Sent, Spool, SpoolLimits};
use weighbridge_snapshots::dead;
use weighbridge_tests::rabbit::Broker;

use crate::accounts;
use crate::binary;
use crate::house::{House, drop_manifest};
use crate::network::message;
use crate::site::{
    CALL, LONG, RECOVERY, Slow, Working, all_are_published, house, job, made, open, order, shared, until,
    within,
};

/// Waits until job `number` has ended.
async fn ended(house: &House, number: u64) {
    let (root, model, id) = (house.root(), format!("m{number}"), crate::house::id(number));
    let has_ended = async || accounts::outcome(&root, &model, &id).await.is_some();
    until(&format!("job {number} has ended"), LONG, has_ended).await;
}

/// A connection of somebody else's.
async fn stranger(broker: &Broker) -> lapin::Channel {
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(&broker.url("stranger"), properties).await.unwrap();
    connection.create_channel().await.unwrap()
}

/// The URL of `queue`, as another user.
fn as_user(broker: &Broker, user: &str, password: &str, vhost: &str, queue: &str) -> String {
    format!("amqp://{user}:{password}@{}/{vhost}?queue={queue}&heartbeat=2", broker.address())
}

/// A user; what it may configure, write and read.
fn user(broker: &Broker, name: &str, password: &str, may: [&str; 3]) {
    order(broker, &["add_user", name, password]);
    order(broker, &["set_permissions", name, may[0], may[1], may[2]]);
}

/// The binary's `arguments` on a queue, in a folder.
fn run(folder: &Path, queue: &str, arguments: &[&str]) -> binary::Run {
    let mut command = Command::new(binary::path());
    command.args(arguments).arg("--json").current_dir(folder).stdin(Stdio::null());
    command.env("WEIGHBRIDGE_STORE", folder.join("store")).env("WEIGHBRIDGE_QUEUE", queue);
    command.env("WEIGHBRIDGE_SPOOL", folder.join("spool"));
    let run = binary::ended(tokio::task::block_in_place(|| command.output().unwrap()));
    for text in [&run.stdout, &run.stderr] {
        assert!(!text.contains("secret") && !text.contains("guest:guest"), "{run:?}");
    }
    run
}

/// Drops job 0 by the binary, which says that it did, and that it waits because of `said`: again where a broker that
/// is busy was too slow for that.
fn drop_waits(house: &House, queue: &str, said: &str) {
    let file = house.folder.join("manifest.json");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    std::fs::write(&file, job(0, &checkpoint).to_string()).unwrap();
    for _ in 0..10 {
        let run = run(&house.folder, queue, &["drop", "--manifest", file.to_str().unwrap()]);
        assert_eq!(run.code, 0, "{run:?}");
        assert_eq!(run.json()["sent"], false, "{run:?}");
        let document = run.json();
        let why = document["waits"].as_str().unwrap();
        if why.contains(said) {
            // What is refused was certainly not done.
            assert!(!why.contains("may have been done"), "{why}");
            return;
        }
        assert!(why.contains("within"), "{said}: {why}");
    }
    panic!("it is too slow each time");
}

fn spool(house: &House) -> Spool {
    let clock = std::sync::Arc::new(weighbridge_queue::clock::SystemClock::new());
    Spool::open(&house.folder.join("spool"), SpoolLimits::default(), clock).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_is_made_again_by_those_who_may() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "deleted", "");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let worker = Working::start(house.root(), house.queue(), LONG);
    worker.is_ready().await;
    let trainer = house.queue();
    let other = stranger(broker).await;
    let none = FieldTable::default();
    other.queue_unbind("deleted.normal".into(), "deleted".into(), "normal".into(), none).await.unwrap();
    within(CALL, drop_manifest(&*trainer, &job(0, &checkpoint))).await;
    // What is on a queue that somebody deletes is gone with it.
    ended(&house, 0).await;
    other.queue_delete("deleted.normal".into(), QueueDeleteOptions::default()).await.unwrap();
    until("it is taken again", LONG, async || trainer.send(&message("garbage")).await.is_ok()).await;
    within(CALL, drop_manifest(&*trainer, &job(1, &checkpoint))).await;
    // What waits for its delay when the exchange goes is tried again by the broker in three minutes.
    ended(&house, 1).await;
    other.exchange_delete("deleted".into(), ExchangeDeleteOptions::default()).await.unwrap();
    within(CALL, drop_manifest(&*trainer, &job(2, &checkpoint))).await;
    until("the garbage is buried", LONG, async || accounts::letters(&house.root()).await.len() == 1).await;
    let (letter, _) = accounts::letters(&house.root()).await.remove(0);
    std::fs::remove_file(house.folder.join("store/dead").join(letter)).unwrap();
    all_are_published(&house.root(), &*trainer, 0..3).await;
    worker.stop().await;
}

/// What only a newer version knows is put off for one, and is not lost where it cannot be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_newer_version_sent_waits_for_one() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "newer", "");
    let queue = house.queue();
    made(&*queue).await;
    let (other, none) = (stranger(broker).await, FieldTable::default());
    other
        .queue_unbind("newer.normal.delay.16s".into(), "newer.delay.16s".into(), "normal.#".into(), none)
        .await
        .unwrap();
    let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
    let properties = properties.with_type("of tomorrow".into()).with_delivery_mode(2);
    other.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let sent = other.basic_publish("newer".into(), "normal".into(), options, b"?", properties);
    sent.await.unwrap().await.unwrap();
    queue.lease(Taker::Cpu, LONG).await.unwrap_err();
    until("it is put off", LONG, async || {
        assert!(!queue.lease(Taker::Cpu, LONG).await.is_ok_and(|lease| lease.is_some()));
        queue.depth().await.is_ok_and(|depth| depth.iter().any(|class| class.delayed == 1))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_who_may_make_nothing_keeps_its_manifest_until_it_is_routed() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "unrouted", "");
    user(broker, "unrouted-trainer", "secret", ["^$", "^unrouted$", "^$"]);
    let trainer = as_user(broker, "unrouted-trainer", "secret", "%2F", "unrouted");
    // Before there is any queue, and when a binding is gone.
    drop_waits(&house, &trainer, "start a worker");
    made(&*house.queue()).await;
    let other = stranger(broker).await;
    let none = FieldTable::default();
    other.queue_unbind("unrouted.normal".into(), "unrouted".into(), "normal".into(), none).await.unwrap();
    drop_waits(&house, &trainer, "not routed");
    assert_eq!(spool(&house).waiting(), 1);
    let works = |arguments: &[&str], queue: &str| {
        let run = run(&house.folder, queue, arguments);
        assert_eq!(run.code, 0, "{run:?}");
        run.json()
    };
    // Whoever may makes it again.
    works(&["worker", "--until-empty", "--threads", "2"], &house.queue);
    works(&["spool", "drain"], &trainer);
    assert_eq!(spool(&house).waiting(), 0);
    assert_eq!(works(&["queue", "status"], &house.queue)["ready"], 1);
    works(&["worker", "--until-empty", "--threads", "2"], &house.queue);
    all_are_published(&house.root(), &*house.queue(), 0..1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_says_so_and_nothing_is_lost() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "full", "");
    let queue = house.queue();
    made(&*queue).await;
    order(broker, &["set_policy", "full", "^full\\.", r#"{"max-length":1}"#, "--apply-to", "queues"]);
    queue.send(&message("held")).await.unwrap();
    let held = queue.lease(Taker::Cpu, 10 * LONG).await.unwrap().unwrap();
    // The limit is a soft one: some more may fit in.
    let fill = async |delay: Option<Duration>| {
        let mut taken = 0;
        for number in 0..20 {
            let sent = within(CALL, queue.send(&message(&format!("{number}")))).await;
            match (sent, delay) {
                (Ok(()), None) => taken += 1,
                (Ok(()), Some(delay)) => {
                    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
                    match within(CALL, queue.retry(&lease, delay)).await {
                        Ok(()) => taken += 1,
                        Err(error) => {
                            queue.done(&lease).await.unwrap();
                            return (taken, error);
                        }
                    }
                }
                (Err(error), _) => return (taken, error),
            }
        }
        panic!("it takes more and more");
    };
    let (delayed, error) = fill(Some(Duration::from_secs(900))).await;
    assert!(error.to_string().contains("full"), "{error}");
    let error = within(CALL, queue.retry(&held, Duration::from_secs(900))).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    let (ready, error) = fill(None).await;
    assert!(error.to_string().contains("full") && error.to_string().contains("policy"), "{error}");
    drop_waits(&house, &house.queue, "full");
    // It is still this one's.
    queue.extend(&held, LONG).await.unwrap();
    order(broker, &["clear_policy", "full"]);
    until("it is given back", RECOVERY, async || queue.retry(&held, Duration::from_secs(900)).await.is_ok())
        .await;
    let sent = spool(&house).send_one(&*queue, &crate::house::id(0), CALL).await.unwrap();
    assert_eq!(sent, Sent::Yes);
    let count = async || {
        let depth = queue.depth().await.unwrap();
        depth.iter().fold((0, 0), |sum, class| (sum.0 + class.ready, sum.1 + class.delayed))
    };
    until("all are there", LONG, async || count().await == (ready + 1, delayed + 1)).await;
}

/// A worker whose password was changed, and its connections closed, is not ready until it is let in again; no job dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_password_that_is_changed_under_a_worker_costs_no_job() {
    let Some(broker) = shared().await else { return };
    user(broker, "changed", "secret", [".*", ".*", ".*"]);
    let (_folder, house) = House::new();
    let url = as_user(broker, "changed", "secret", "%2F", "changed");
    let checkpoint = house.checkpoint("c.safetensors", 3);
    let slow = Slow::new("/chunks/", Duration::from_secs(2));
    let root = house.root().behind(slow.clone());
    let worker = Working::start(root, open(&url).unwrap(), Duration::from_secs(3));
    let queue = open(&broker.url("changed")).unwrap();
    drop_manifest(&*queue, &job(0, &checkpoint)).await;
    until("a part is worked on", LONG, async || slow.begun() > 0).await;
    order(broker, &["change_password", "changed", "another"]);
    order(broker, &["close_all_user_connections", "changed", "the password was changed"]);
    let why = worker.is_not_ready(RECOVERY).await;
    until("the reason is known", RECOVERY, async || {
        worker.health.ready().err().is_some_and(|why| why.contains("check user, password"))
    })
    .await;
    assert!(!why.contains("secret"), "{why}");
    order(broker, &["change_password", "changed", "secret"]);
    worker.is_ready().await;
    all_are_published(&house.root(), &*queue, 0..1).await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_let_in_is_told_what_to_check() {
    let Some(broker) = shared().await else { return };
    user(broker, "nobody", "secret", ["^$", "^$", "^$"]);
    let (_folder, house) = House::new();
    for (url, said) in [
        (as_user(broker, "guest", "wrong-secret", "%2F", "denied"), "check user, password"),
        (as_user(broker, "guest", "guest", "nowhere", "denied"), "nowhere"),
        (as_user(broker, "nobody", "secret", "%2F", "denied"), "denied"),
    ] {
        let worker = run(&house.folder, &url, &["worker"]);
        let class = worker.failed(2);
        assert_eq!(class, "queue_refused");
        assert!(worker.stderr.contains(said), "{said}: {worker:?}");
        let status = run(&house.folder, &url, &["queue", "status"]);
        // Who may not read a queue is told that it is not there: nothing else is asked.
        assert!([2, 6].contains(&status.code), "{status:?}");
        drop_waits(&house, &url, if said == "denied" { "what the user may do" } else { said });
    }
    assert_eq!(spool(&house).waiting(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_other_arguments_is_named() {
    let Some(broker) = shared().await else { return };
    let other = stranger(broker).await;
    let options = QueueDeclareOptions::durable();
    other.queue_declare("others.normal".into(), options, FieldTable::default()).await.unwrap();
    let (_folder, house) = house(broker, "others", "");
    let worker = run(&house.folder, &house.queue, &["worker"]);
    assert_eq!(worker.failed(2), "queue_refused");
    for said in ["others.normal", "x-", "other arguments"] {
        assert!(worker.stderr.contains(said), "{said}: {worker:?}");
    }
}

/// B61: what was put back again and again, by whomever, was dropped by the broker in the end, with what it held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b61_what_the_broker_does_not_deliver_any_more_becomes_a_dead_letter() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "returned", "");
    let queue = house.queue();
    made(&*queue).await;
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let body = job(0, &checkpoint).to_string().into_bytes();
    let other = stranger(broker).await;
    other.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    // As a trainer may send it by any library.
    let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
    let sent = other.basic_publish(
        "returned".into(),
        "normal".into(),
        options,
        &body,
        properties.with_delivery_mode(2),
    );
    sent.await.unwrap().await.unwrap();
    let mut returned = 0;
    for _ in 0..25 {
        let got = other.basic_get("returned.normal".into(), BasicGetOptions::default()).await.unwrap();
        let Some(got) = got else { break };
        assert_eq!(got.delivery.data, body);
        other.basic_reject(got.delivery.delivery_tag, BasicRejectOptions { requeue: true }).await.unwrap();
        returned += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!((20..25).contains(&returned), "{returned}");
    let worker = Working::start(house.root(), queue.clone(), LONG);
    until("it is buried", LONG, async || !accounts::letters(&house.root()).await.is_empty()).await;
    let letters = accounts::letters(&house.root()).await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].1, "abandoned");
    assert_eq!(dead::get(&house.root(), &letters[0].0).await.unwrap().body.0, body);
    until("the queue is empty", LONG, async || {
        let depth = queue.depth().await.unwrap();
        depth.iter().all(|class| class.ready + class.delayed + class.leased == 0)
    })
    .await;
    worker.stop().await;
}

/// B64: short jobs have waited behind a long one, since a worker that was busy with it had taken them too.
#[tokio::test(flavor = "multi_thread", worker_threads = 6)]
async fn b64_short_jobs_do_not_wait_for_a_long_one() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "short", "");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let queue = house.queue();
    let slow = Slow::new("models/m0/chunks/", Duration::from_secs(6));
    for number in 0..9 {
        drop_manifest(&*queue, &job(number, &checkpoint)).await;
    }
    let start = |_| Working::start(house.root().behind(slow.clone()), house.queue(), LONG);
    let workers: Vec<_> = (0..3).map(start).collect();
    until("the long job is worked on", LONG, async || slow.begun() > 0).await;
    for number in 1..9 {
        ended(&house, number).await;
    }
    let long = accounts::outcome(&house.root(), "m0", &crate::house::id(0)).await;
    assert!(long.is_none(), "the long job ends last: {long:?}");
    all_are_published(&house.root(), &*queue, 0..9).await;
    for worker in workers {
        worker.stop().await;
    }
}

/// A quorum queue without a leader, as a broker that is killed at a bad moment leaves one, takes nothing: that holds up
/// no other queue, is told, and is over as soon as there is a leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_without_a_leader_holds_up_no_other() {
    let Some(broker) = shared().await else { return };
    let (_folder, house) = house(broker, "leaderless", "");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let queue = house.queue();
    made(&*queue).await;
    let worker = Working::start(house.root(), house.queue(), LONG);
    worker.is_ready().await;
    let member = "{'%2F_leaderless.low', node()}";
    order(broker, &["eval", &format!("ra:stop_server(quorum_queues, {member}).")]);
    let low = Message { priority: Priority::Low, ..message("low") };
    let error = within(CALL, queue.send(&low)).await.unwrap_err();
    assert!(error.to_string().contains("leader"), "{error}");
    // All others go on, with handles that were there before, and with new ones.
    for number in 0..2 {
        until("it is sent", CALL, async || queue.send(&message_of(number, &checkpoint)).await.is_ok()).await;
    }
    let late = Working::start(house.root(), house.queue(), LONG);
    for number in 0..2 {
        ended(&house, number).await;
    }
    within(CALL, late.is_ready()).await;
    order(broker, &["eval", &format!("ra:restart_server(quorum_queues, {member}).")]);
    until("it is sent", LONG, async || queue.send(&low).await.is_ok()).await;
    until("it is taken", LONG, async || !accounts::letters(&house.root()).await.is_empty()).await;
    for worker in [worker, late] {
        worker.stop().await;
    }
}

fn message_of(number: u64, checkpoint: &Path) -> Message {
    let manifest = job(number, checkpoint);
    let body = manifest.to_string().into_bytes();
    Message { body, ..message(manifest["id"].as_str().unwrap()) }
}
