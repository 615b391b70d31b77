//! Messages that others put on the queue: trainers with a library of their own, and versions to come.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Connection, ConnectionProperties};

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{BODY_BYTES, Device, Kind, Priority};
use weighbridge_queue::{Queue, Taker, url};
use weighbridge_tests::rabbit::Broker;

const MINUTE: Duration = Duration::from_secs(60);

/// A queue on the shared broker, and who puts messages on it by another library's means.
async fn queue_and_other(name: &str) -> Option<(Arc<dyn Queue>, Connection)> {
    let broker = tokio::task::spawn_blocking(Broker::shared).await.unwrap()?;
    let queue = url::open(&broker.url(name), Arc::new(SystemClock::new())).unwrap();
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none(), "looking makes exchanges and queues");
    let other = Connection::connect(&broker.url(name), ConnectionProperties::default()).await.unwrap();
    Some((queue, other))
}

async fn publish(other: &Connection, name: &str, key: &str, properties: BasicProperties, body: &[u8]) {
    let channel = other.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let sent = channel.basic_publish(name.into(), key.into(), options, body, properties).await.unwrap();
    let confirmed = sent.await.unwrap();
    assert!(confirmed.is_ack() && confirmed.take_message().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_may_send_a_manifest_with_any_library() {
    let name = "of a trainer";
    let Some((queue, other)) = queue_and_other(name).await else { return };
    publish(&other, name, "high", BasicProperties::default(), b"{\"step\": 1}").await;
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!((lease.message.kind, lease.message.priority), (Kind::Checkpoint, Priority::High));
    assert_eq!((lease.message.device, lease.message.body.as_slice()), (Device::Any, &b"{\"step\": 1}"[..]));
    assert_eq!((lease.abandoned, lease.retries), (0, 0));
    queue.retry(&lease, Duration::ZERO).await.unwrap();
    let again = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!((again.message, again.retries), (lease.message, 1));

    let named = BasicProperties::default().with_message_id("its own".into());
    publish(&other, name, "normal", named, &vec![b'x'; BODY_BYTES + 100_000]).await;
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!((lease.message.id.as_str(), lease.message.body.len()), ("its own", BODY_BYTES));
    queue.done(&lease).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_only_newer_versions_know_waits_for_one_and_holds_nothing_up() {
    let name = "of tomorrow";
    let Some((queue, other)) = queue_and_other(name).await else { return };
    let kind: ShortString = "of tomorrow".into();
    publish(&other, name, "normal", BasicProperties::default().with_type(kind), b"new").await;
    publish(&other, name, "normal", BasicProperties::default(), b"old").await;
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!(lease.message.body, b"old");
    queue.done(&lease).await.unwrap();
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none());
    let delayed: u64 = queue.depth().await.unwrap().iter().map(|class| class.delayed).sum();
    assert_eq!(delayed, 1, "it is looked at again later");
}
