//! The network between clients and their broker fails: connections are cut in the middle of a confirm, and every packet
//! is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weighbridge_queue::error::Error;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Queue, Taker};
use weighbridge_tests::proxy::Proxy;
use weighbridge_tests::rabbit::Broker;

use crate::house::{House, drop_manifest};
use crate::site::{
    CALL, HEARTBEAT, LONG, RECOVERY, Slow, Working, all_are_published, job, made, open, quick, shared, until,
    within,
};

/// For how long every packet is dropped.
const SILENCE: Duration = Duration::from_secs(20);

/// A message that is no manifest.
pub(crate) fn message(id: &str) -> Message {
    let (kind, body) = (Kind::Checkpoint, b"{}".to_vec());
    Message { id: id.to_owned(), kind, body, priority: Priority::Normal, device: Device::Any }
}

/// A house whose queue is reached through a proxy.
fn behind(proxy: &Proxy, broker: &Broker, name: &str) -> (tempfile::TempDir, House) {
    let (folder, house) = House::new();
    (folder, House { queue: quick(&broker.url_through(proxy, name), ""), ..house })
}

/// How many connections to the proxy clients hold: each costs one a thread, and memory.
fn connections(proxy: &Proxy) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let (port, established) = (format!(":{:04X}", proxy.port()), "01");
    let is_held = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.len() > 3 && fields[2].ends_with(&port) && fields[3] == established
    };
    table.lines().filter(is_held).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_in_a_confirm_leaves_the_outcome_unknown_and_one_job() {
    let Some(broker) = shared().await else { return };
    let proxy = Proxy::start(broker.address());
    let (_folder, house) = behind(&proxy, broker, "cut");
    let checkpoint = house.checkpoint("c.safetensors", 1);
    let queue = house.queue();
    // The queues are made by whoever takes, and then the connection for publishing has a channel.
    made(&*queue).await;
    queue.send(&message("before")).await.unwrap();
    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    queue.done(&lease).await.unwrap();

    let manifest = job(0, &checkpoint);
    let body = manifest.to_string().into_bytes();
    let message = Message { body, ..message(manifest["id"].as_str().unwrap()) };
    // The confirm's own first byte is the last that passes. A heartbeat may come before it: then it is cut there.
    proxy.cut_after_bytes_down(1);
    let error = within(CALL, queue.send(&message)).await.unwrap_err();
    assert!(matches!(error, Error::UnknownOutcome { .. }), "{error:?}");
    let again = async || queue.send(&message).await.is_ok();
    until("it is sent again", RECOVERY, again).await;
    let worker = Working::start(house.root(), Arc::clone(&queue), LONG);
    all_are_published(&house.root(), &*queue, 0..1).await;
    worker.stop().await;
}

/// B06, a network that drops every packet: see `stops`. While nothing is done, while a part is worked on, and while
/// messages are sent.
pub(crate) async fn b06_a_network_that_drops_every_packet_is_noticed_and_outlived() {
    let Some(broker) = shared().await else { return };
    let proxy = Proxy::start(broker.address());
    let (_idle_folder, idle) = behind(&proxy, broker, "silence idle");
    let (_busy_folder, busy) = behind(&proxy, broker, "silence busy");
    let checkpoint = busy.checkpoint("c.safetensors", 3);
    let slow = Slow::new("models/m0/chunks/", Duration::from_secs(4));
    let idler = Working::start(idle.root(), idle.queue(), LONG);
    let worker = Working::start(busy.root().behind(slow.clone()), busy.queue(), Duration::from_secs(3));
    let trainer = busy.queue();
    drop_manifest(&*trainer, &job(0, &checkpoint)).await;
    idler.is_ready().await;
    until("a part is worked on", LONG, async || slow.begun() > 0).await;
    let other = open(&quick(&broker.url_through(&proxy, "silence other"), "")).unwrap();
    made(&*other).await;
    other.send(&message("held")).await.unwrap();
    let held = other.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    let before = connections(&proxy);

    proxy.drop_packets();
    let silence = Instant::now();
    within(CALL, other.done(&held)).await.unwrap_err();
    within(CALL, other.lease(Taker::Cpu, LONG)).await.unwrap_err();
    within(CALL, other.depth()).await.unwrap_err();
    let mut sent = Vec::new();
    let mut number = 1;
    while silence.elapsed() < SILENCE {
        let manifest = job(number, &checkpoint);
        let message =
            Message { body: manifest.to_string().into_bytes(), ..message(manifest["id"].as_str().unwrap()) };
        within(CALL, trainer.send(&message)).await.unwrap_err();
        sent.push(message);
        number += 1;
        // The proxy takes connections and says nothing: they are ended here all the same.
        assert!(connections(&proxy) <= before, "{} connections, {before} at first", connections(&proxy));
        for worker in [&idler, &worker] {
            worker.is_not_ready(RECOVERY).await;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(number < 40, "each try is answered, and none at once: {number}");

    proxy.pass();
    idler.is_ready().await;
    worker.is_ready().await;
    // What it was done with may have come through late, as TCP does it.
    until("it is well again", RECOVERY, async || match other.lease(Taker::Cpu, LONG).await {
        Ok(Some(lease)) => other.done(&lease).await.is_ok(),
        Ok(None) => true,
        Err(_) => false,
    })
    .await;
    for message in &sent {
        until("it is sent", RECOVERY, async || trainer.send(message).await.is_ok()).await;
    }
    all_are_published(&busy.root(), &*trainer, 0..number).await;
    until("connections do not pile up", RECOVERY, async || {
        connections(&proxy) <= before && proxy.open() <= before as u64
    })
    .await;
    for worker in [idler, worker] {
        assert!(worker.retries() > 0, "{}", worker.metrics.text());
        worker.stop().await;
    }
}

/// Two processes on one queue, or two handles: a message is one's alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_at_once_never_gets_the_same_message() {
    let Some(broker) = shared().await else { return };
    let queues: Vec<Arc<dyn Queue>> = (0..2).map(|_| open(&broker.url("two handles")).unwrap()).collect();
    made(&*queues[0]).await;
    let all: Vec<String> = (0..60).map(|number| format!("{number:02}")).collect();
    for (number, id) in all.iter().enumerate() {
        queues[number % 2].send(&message(id)).await.unwrap();
    }
    let takers = (0..6).map(|taker| {
        let queue = Arc::clone(&queues[taker % 2]);
        tokio::spawn(async move {
            let mut taken = Vec::new();
            while let Some(lease) = queue.lease(Taker::Cpu, LONG).await.unwrap() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                queue.done(&lease).await.unwrap();
                taken.push(lease.message.id);
            }
            taken
        })
    });
    let mut taken = Vec::new();
    for taker in takers.collect::<Vec<_>>() {
        taken.extend(taker.await.unwrap());
    }
    taken.sort();
    assert_eq!(taken, all);
}

/// Heartbeats are sent and heard whatever the processors do: encoding on all of them, and the caller's only thread
/// blocked.
#[tokio::test]
async fn heartbeats_survive_busy_processors_and_a_blocked_caller() {
    let Some(broker) = shared().await else { return };
    let proxy = Proxy::start(broker.address());
    let queue = open(&quick(&broker.url_through(&proxy, "busy"), "")).unwrap();
    made(&*queue).await;
    queue.send(&message("kept")).await.unwrap();
    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    let connections = proxy.accepted();
    let over = Instant::now() + Duration::from_secs(3 * HEARTBEAT + 1);
    let processors = std::thread::available_parallelism().unwrap().get();
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                let mut bytes = vec![0; 1 << 16];
                while Instant::now() < over {
                    let hash = blake3::hash(&bytes);
                    bytes[..32].copy_from_slice(hash.as_bytes());
                }
            });
        }
    });
    // The caller's thread has stood still: more than three heartbeats, and the broker gives up after two.
    queue.extend(&lease, LONG).await.unwrap();
    queue.done(&lease).await.unwrap();
    queue.send(&message("more")).await.unwrap();
    assert_eq!(proxy.accepted(), connections, "a connection was made anew");
}
