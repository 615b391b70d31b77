//! The definitions in a real broker: all of the topology comes to be, and each user may do what it has to, and no more.

use std::fmt::Debug;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use serde_json::Value;

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Taker, url};
use weighbridge_tests::rabbit::{Broker, Settings};

use crate::tools::{root, succeeds};
use crate::topology::{NAME, Topology, definitions};

const DEFINITIONS: &str = "deploy/rabbitmq/definitions.json";
/// A queue that work lies in, and one that only the broker takes from.
const WORK: &str = "weighbridge.normal";
const DELAY: &str = "weighbridge.normal.delay.4s";

/// Definitions in which every user's password is the user's name, but the operator's, who has none.
fn with_passwords(folder: &Path) -> PathBuf {
    let passwords = folder.join("passwords");
    std::fs::create_dir(&passwords).unwrap();
    for user in ["trainer", "worker", "watcher", "stranger"] {
        let user = format!("{NAME}-{user}");
        // As an editor leaves it.
        std::fs::write(passwords.join(&user), format!("{user}\n")).unwrap();
    }
    let script = root().join("deploy/rabbitmq/with-passwords.sh");
    let written = succeeds(Command::new(script).arg(root().join(DEFINITIONS)).arg(passwords)).stdout;
    let path = folder.join("definitions.json");
    std::fs::write(&path, written).unwrap();
    path
}

/// A broker with the definitions, as the package's own tools import them.
fn defined() -> Option<Broker> {
    let broker = Broker::start(&Settings::default())?;
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let done = broker.ctl(arguments);
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    };
    run(&["import_definitions", with_passwords(folder.path()).to_str().unwrap()]);
    let exported = folder.path().join("exported.json");
    let expected = Topology::of(&definitions());
    let mut found = None;
    // The import goes on while the tool has ended.
    for _ in 0..30 {
        run(&["export_definitions", exported.to_str().unwrap()]);
        let text = std::fs::read_to_string(&exported).unwrap();
        let definitions: Value = serde_json::from_str(&text).unwrap();
        found = Some(Topology::of(&definitions));
        if found.as_ref() == Some(&expected) {
            return Some(broker);
        }
    }
    panic!("the broker has not got all: {found:#?}");
}

/// A connection of a user's own, whose password is its name.
async fn connect(broker: &Broker, user: &str) -> lapin::Result<Connection> {
    let url = format!("amqp://{NAME}-{user}:{NAME}-{user}@{}/{NAME}", broker.address());
    Connection::connect(&url, ConnectionProperties::default()).await
}

/// A user, on a channel for each try: the broker closes one on which something was refused.
struct User {
    connection: Connection,
    name: &'static str,
}

impl User {
    async fn new(broker: &Broker, name: &'static str) -> Self {
        Self { connection: connect(broker, name).await.unwrap(), name }
    }

    async fn may<T: Debug, F: Future<Output = lapin::Result<T>>>(
        &self,
        what: &str,
        act: impl FnOnce(Channel) -> F,
    ) -> T {
        let channel = self.connection.create_channel().await.unwrap();
        act(channel).await.unwrap_or_else(|error| panic!("{} may not {what}: {error}", self.name))
    }

    async fn may_not<T: Debug, F: Future<Output = lapin::Result<T>>>(
        &self,
        what: &str,
        act: impl FnOnce(Channel) -> F,
    ) {
        let channel = self.connection.create_channel().await.unwrap();
        let refused = act(channel).await.expect_err(&format!("{} may {what}", self.name));
        assert!(refused.to_string().contains("ACCESS_REFUSED"), "{} and {what}: {refused}", self.name);
    }

    /// That it can change nothing of the topology.
    async fn may_not_configure(&self) {
        let (queue, exchange) = (QueueDeclareOptions::durable(), ExchangeDeclareOptions::default());
        self.may_not("declare a queue", async |it| it.queue_declare("own".into(), queue, quorum()).await)
            .await;
        let kind = ExchangeKind::Direct;
        let declare = async |it: Channel| {
            it.exchange_declare("own".into(), kind, exchange, FieldTable::default()).await
        };
        self.may_not("declare an exchange", declare).await;
        let options = QueueDeleteOptions::default();
        self.may_not("delete a queue", async |it| it.queue_delete(WORK.into(), options).await).await;
        let bind = async |it: Channel| {
            it.queue_bind(
                WORK.into(),
                NAME.into(),
                "low".into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
        };
        self.may_not("bind a queue", bind).await;
        // Nor can it fill queues past the exchange.
        self.may_not("publish to any queue", |it| publish(it, "", WORK)).await;
    }
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments
}

/// Publishes a message as clients do: with a confirm, and mandatory. Whether it has been routed.
async fn publish(channel: Channel, exchange: &'static str, key: &'static str) -> lapin::Result<bool> {
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let properties = BasicProperties::default().with_delivery_mode(2).with_expiration("600000".into());
    let confirmed =
        channel.basic_publish(exchange.into(), key.into(), options, b"{}", properties).await?.await?;
    Ok(confirmed.is_ack() && confirmed.take_message().is_none())
}

/// The length of a queue, by asking whether it is there.
async fn length(channel: Channel, queue: &'static str) -> lapin::Result<u32> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::durable() };
    Ok(channel.queue_declare(queue.into(), options, FieldTable::default()).await?.message_count())
}

async fn take(channel: Channel, queue: &'static str) -> lapin::Result<bool> {
    Ok(channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await?.is_some())
}

#[tokio::test]
async fn users_may_do_what_they_have_to_and_nothing_else() {
    let Some(broker) = defined() else { return };
    assert!(connect(&broker, "operator").await.is_err(), "who has no password gets in");
    assert!(connect(&broker, "stranger").await.is_err(), "whom the definitions do not know gets in");

    let trainer = User::new(&broker, "trainer").await;
    assert!(trainer.may("publish", |it| publish(it, NAME, "normal")).await, "it is not routed");
    trainer.may_not("publish what is delayed", |it| publish(it, "weighbridge.delay.4s", "normal")).await;
    trainer.may_not("take", |it| take(it, WORK)).await;
    trainer.may_not("take dead letters", |it| take(it, "weighbridge.dead")).await;
    let purge = async |it: Channel| it.queue_purge(WORK.into(), QueuePurgeOptions::default()).await;
    trainer.may_not("purge", purge).await;
    trainer.may_not_configure().await;

    let worker = User::new(&broker, "worker").await;
    let mut taken = false;
    for _ in 0..100 {
        // It is there once the queue's leader has it.
        taken = taken || worker.may("take", |it| take(it, WORK)).await;
        if taken {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(taken, "what was published cannot be taken");
    worker.may("take dead letters", |it| take(it, "weighbridge.dead")).await;
    for key in ["high", "low.cpu", "normal.gpu", "dead"] {
        assert!(worker.may("publish", |it| publish(it, NAME, key)).await, "{key} is not routed");
    }
    assert!(
        worker.may("delay", |it| publish(it, "weighbridge.delay.4s", "normal.gpu")).await,
        "it is not routed"
    );
    worker.may("look at a queue", |it| length(it, DELAY)).await;
    worker.may_not("take what is delayed", |it| take(it, DELAY)).await;
    worker.may_not_configure().await;

    let watcher = User::new(&broker, "watcher").await;
    watcher.may("look at a queue", |it| length(it, WORK)).await;
    watcher.may_not("publish", |it| publish(it, NAME, "normal")).await;
    watcher.may_not("take", |it| take(it, WORK)).await;
    watcher.may_not_configure().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_queue_works_on_what_the_definitions_make() {
    let Some(broker) = tokio::task::spawn_blocking(defined).await.unwrap() else { return };
    let open = |user: &str| {
        let url = format!("amqp://{user}:{user}@{}/{NAME}", broker.address());
        url::open(&url, Arc::new(SystemClock::new())).unwrap()
    };
    // Who may make nothing works on what is there.
    let (trainer, worker) = (open("weighbridge-trainer"), open("weighbridge-worker"));
    let message = Message {
        id: "a".to_owned(),
        kind: Kind::Checkpoint,
        body: b"{}".to_vec(),
        priority: Priority::High,
        device: Device::Cpu,
    };
    trainer.send(&message).await.unwrap();
    let lease = worker.lease(Taker::Cpu, Duration::from_secs(60)).await.unwrap().unwrap();
    assert_eq!(lease.message, message);
    worker.retry(&lease, Duration::from_millis(100)).await.unwrap();
    let again = loop {
        match worker.lease(Taker::Cpu, Duration::from_secs(60)).await.unwrap() {
            Some(lease) => break lease,
            None => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    assert_eq!((again.message.clone(), again.retries), (message, 1));
    worker.done(&again).await.unwrap();
    let refused = trainer.lease(Taker::Cpu, Duration::from_secs(60)).await;
    assert!(
        refused.is_ok_and(|lease| lease.is_none()),
        "looking at queues that are empty needs no permission"
    );

    // Who may make everything finds nothing to make otherwise: the broker would refuse it.
    let password = broker.ctl(&["change_password", "weighbridge-operator", "weighbridge-operator"]);
    assert!(password.status.success(), "{password:?}");
    let depth = open("weighbridge-operator").depth().await.unwrap();
    assert!(depth.iter().all(|class| class.ready + class.delayed == 0), "{depth:?}");
}
