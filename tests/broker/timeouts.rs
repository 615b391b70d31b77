//! A broker lets nobody hold a message for longer than it is told to (`consumer_timeout`): here for 6 s, and parts take
//! longer.

use std::time::Duration;

use weighbridge_queue::Taker;
use weighbridge_schemas::job::Event;
use weighbridge_snapshots::jobs::Job;
use weighbridge_tests::rabbit::{Broker, Settings};

use crate::accounts;
use crate::house::{House, drop_manifest, id};
use crate::site::{HEARTBEAT, LONG, Slow, Working, all_are_published, house, job, made, open, until};

/// For how long the broker lets a message be held.
const LIMIT: Duration = Duration::from_secs(6);
/// How long the only part of a job takes.
const PART: Duration = Duration::from_secs(20);
/// How long workers take a message for at a time.
const LEASE: Duration = Duration::from_secs(3);

async fn events(house: &House, number: u64) -> Vec<Event> {
    let (model, id) = (format!("m{number}").parse().unwrap(), id(number).parse().unwrap());
    Job::new(&house.root(), &model, &id).events(1000).await.unwrap()
}

fn taken_back(events: &[Event]) -> usize {
    let is = |event: &&Event| event.error.as_ref().is_some_and(|why| why.class == "taken_back");
    events.iter().filter(is).count()
}

/// B05: workers whose messages are taken back while they work on a long part; each of them, and in the end the job, was
/// taken for dead. `more` goes into the URL; gives how often a message was taken back.
async fn one_long_part(broker: &Broker, name: &str, more: &str, workers: usize) -> usize {
    let (_folder, house) = house(broker, name, more);
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let slow = Slow::new("/chunks/", PART);
    let start = |_| {
        let root = house.root().behind(slow.clone());
        Working::start(root, open(&house.queue).unwrap(), LEASE)
    };
    let working: Vec<_> = (0..workers).map(start).collect();
    let queue = open(&house.queue).unwrap();
    drop_manifest(&*queue, &job(0, &checkpoint)).await;
    all_are_published(&house.root(), &*queue, 0..1).await;
    for worker in working {
        assert_eq!(worker.health.ready(), Ok(()));
        worker.stop().await;
    }
    taken_back(&events(&house, 0).await)
}

/// A part that would take longer than half of what the broker allows is never begun.
async fn a_part_that_is_too_long(broker: &Broker) {
    let (_folder, house) = house(broker, "too long", "&delivery_timeout=1");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let worker = Working::start(house.root(), house.queue(), LEASE);
    drop_manifest(&*house.queue(), &job(0, &checkpoint)).await;
    until("the job has ended", LONG, async || accounts::outcome(&house.root(), "m0", &id(0)).await.is_some())
        .await;
    let letters = accounts::letters(&house.root()).await;
    assert_eq!(letters, [(id(0), "part_too_long".to_owned())]);
    worker.stop().await;
}

/// The broker's own clock runs for messages that were fetched one at a time, too; and who holds one is told.
async fn the_limit_is_learned(broker: &Broker) {
    let queue = open(&format!("{}&heartbeat={HEARTBEAT}", broker.url("learned"))).unwrap();
    let message = super::network::message("held");
    made(&*queue).await;
    queue.send(&message).await.unwrap();
    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    assert_eq!(queue.longest_hold(), Some(Duration::from_secs(1800)));
    until("it is taken back", LONG, async || queue.extend(&lease, LONG).await.is_err()).await;
    let error = queue.extend(&lease, LONG).await.unwrap_err().to_string();
    assert!(error.contains("took it back") && error.contains("imeout"), "{error}");
    assert_eq!(queue.longest_hold(), Some(LIMIT), "what the broker said is remembered");
    queue.done(&lease).await.unwrap_err();
    let again = loop {
        // The broker says that it has it back a moment before it gives it to others.
        if let Some(lease) = queue.lease(Taker::Cpu, LONG).await.unwrap() {
            break lease;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((again.message.id.as_str(), again.abandoned), ("held", 1));
    queue.done(&again).await.unwrap();
}

pub(crate) async fn b05_a_part_that_takes_longer_than_the_broker_allows_is_published_once() {
    let settings = Settings { consumer_timeout: Some(LIMIT), ..Settings::default() };
    let broker = tokio::task::spawn_blocking(move || Broker::start(&settings)).await.unwrap();
    let Some(broker) = broker else { return };
    let (alone, several, told, (), ()) = tokio::join!(
        one_long_part(&broker, "alone", "", 1),
        one_long_part(&broker, "several", "", 3),
        one_long_part(&broker, "told", "&delivery_timeout=6", 1),
        a_part_that_is_too_long(&broker),
        the_limit_is_learned(&broker),
    );
    assert!(alone >= 1, "the broker let a message be held for longer than its limit");
    assert!(several >= 1, "the broker let a message be held for longer than its limit");
    assert_eq!(told, 0, "a message was taken back, though the URL names the limit");
}
