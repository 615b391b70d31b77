//! The broker stops, is killed, or takes nothing for want of memory, under everybody who uses it: a worker, a trainer
//! who hands manifests over by the library, one who does so by the binary, and a drainer of its spool.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weighbridge_queue::Taker;
use weighbridge_queue::dropper::{Dropper, Options};
use weighbridge_queue::error::Error;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_tests::rabbit::{Broker, Settings};

use crate::binary;
use crate::house::House;
use crate::network::message;
use crate::site::{
    CALL, LONG, RECOVERY, Slow, Working, all_are_published, house, job, open, order, quick, until, within,
};

/// How long the broker is away.
const AWAY: Duration = Duration::from_secs(10);
/// The longest that handing a manifest over may take: two syncs of a disk that others use too.
const HANDED_OVER: Duration = Duration::from_secs(1);
/// How long chunks take to be stored: so parts are worked on whenever the broker goes.
const CHUNK: Duration = Duration::from_millis(400);

/// Everybody on one queue.
struct Everybody {
    house: House,
    checkpoint: std::path::PathBuf,
    worker: Working,
    slow: std::sync::Arc<Slow>,
    dropper: Dropper,
    drainer: Child,
    jobs: u64,
}

impl Drop for Everybody {
    fn drop(&mut self) {
        let _ = (self.drainer.kill(), self.drainer.wait());
    }
}

impl Everybody {
    async fn new(house: House) -> Self {
        let checkpoint = house.checkpoint("c.safetensors", 2);
        let slow = Slow::new("/chunks/", CHUNK);
        let root = house.root().behind(slow.clone());
        let worker = Working::start(root, open(&house.queue).unwrap(), Duration::from_secs(3));
        let spool = house.folder.join("spool of the library");
        let flush = Duration::ZERO;
        let dropper = Dropper::open(Options { flush, ..Options::new(spool, &house.queue) }).unwrap();
        let mut drainer = binary(&house, &["spool", "drain", "--follow"]);
        let log = std::fs::File::create(house.folder.join("drainer.log")).unwrap();
        let drainer = drainer.stderr(log).stdout(Stdio::null()).spawn().unwrap();
        worker.is_ready().await;
        Self { house, checkpoint, worker, slow, dropper, drainer, jobs: 0 }
    }

    /// Hands over two manifests by the library, and one by the binary, which exits 0 in any case.
    fn hand_over(&mut self) {
        for _ in 0..2 {
            let manifest = job(self.jobs, &self.checkpoint).to_string();
            let manifest = CheckpointManifest::parse(manifest.as_bytes()).unwrap();
            let started = Instant::now();
            self.dropper.hand_over(&manifest).unwrap();
            assert!(started.elapsed() < HANDED_OVER, "{:?}", started.elapsed());
            self.jobs += 1;
        }
        let file = self.house.folder.join("manifest.json");
        std::fs::write(&file, job(self.jobs, &self.checkpoint).to_string()).unwrap();
        let started = Instant::now();
        let run = run(&self.house, &["drop", "--manifest", file.to_str().unwrap()]);
        // 2 s, and a process to start on a busy machine.
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}: {run:?}", started.elapsed());
        assert_eq!(run.code, 0, "{run:?}");
        self.jobs += 1;
    }

    /// Waits until a part is worked on.
    async fn at_work(&self) {
        let before = self.slow.begun();
        until("a part is worked on", LONG, async || self.slow.begun() > before).await;
    }

    /// While the broker is away: nobody says that all is well, and nobody fails.
    async fn during(&mut self) {
        self.worker.is_not_ready(RECOVERY).await;
        self.hand_over();
        let house = &self.house;
        let status = run(house, &["queue", "status"]);
        assert_eq!(status.code, 5, "{status:?}");
        assert!(status.json()["error"]["message"].as_str().unwrap().contains("127.0.0.1"), "{status:?}");
    }

    /// The broker is back: all is well again soon, and all that was handed over is published, once.
    async fn after(&mut self) {
        self.worker.is_ready().await;
        until("the spool is empty", LONG, async || self.dropper.spool().waiting() == 0).await;
        let queue = open(&self.house.queue).unwrap();
        all_are_published(&self.house.root(), &*queue, 0..self.jobs).await;
        self.worker.is_ready().await;
        assert!(self.worker.retries() > 0, "{}", self.worker.metrics.text());
    }
}

/// The binary on the house's store, queue and spool.
fn binary(house: &House, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary::path());
    command.args(arguments).arg("--json").current_dir(&house.folder).stdin(Stdio::null());
    command.env("WEIGHBRIDGE_STORE", house.folder.join("store")).env("WEIGHBRIDGE_QUEUE", &house.queue);
    command.env("WEIGHBRIDGE_SPOOL", house.folder.join("spool of the binary"));
    command
}

fn run(house: &House, arguments: &[&str]) -> binary::Run {
    let run = binary::ended(tokio::task::block_in_place(|| binary(house, arguments).output().unwrap()));
    assert!(!run.stderr.contains("guest:guest") && !run.stdout.contains("guest:guest"), "{run:?}");
    run
}

async fn start() -> Option<Broker> {
    tokio::task::spawn_blocking(|| Broker::start(&Settings::default())).await.unwrap()
}

/// B06: clients of brokers have hung for ever, or ended, when the connection closed while they took or published; here
/// by a clean stop, by a kill, and (in `network`) by a network that drops everything.
pub(crate) async fn b06_everybody_outlives_a_broker_that_stops_blocks_and_is_killed() {
    let Some(mut broker) = start().await else { return };
    let (_folder, house) = house(&broker, "stops", "");
    let mut all = Everybody::new(house).await;
    all.hand_over();
    all.at_work().await;
    tokio::task::block_in_place(|| broker.stop());
    let stopped = Instant::now();
    all.during().await;
    tokio::time::sleep(AWAY.saturating_sub(stopped.elapsed())).await;
    tokio::task::block_in_place(|| broker.start_again());
    all.after().await;

    broker_is_out_of_memory(&broker, &mut all).await;

    tokio::task::block_in_place(|| broker.settle());
    all.hand_over();
    all.at_work().await;
    // While it takes nothing, too: who was told so must not go by it for ever.
    order(&broker, &["set_vm_memory_high_watermark", "absolute", "1"]);
    all.worker.is_not_ready(LONG).await;
    tokio::task::block_in_place(|| broker.kill());
    all.during().await;
    tokio::task::block_in_place(|| broker.start_again());
    all.after().await;
    let log = std::fs::read_to_string(all.house.folder.join("drainer.log")).unwrap();
    assert!(log.contains("the connection was lost") && !log.contains("guest:guest"), "{log}");
    all.drainer.kill().unwrap();
}

/// Who sends is told so at once; who is done with a message can say so; nothing is lost, and it goes on afterwards.
async fn broker_is_out_of_memory(broker: &Broker, all: &mut Everybody) {
    let queue = open(&quick(&broker.url("memory"), "")).unwrap();
    queue.send(&message("in hand")).await.unwrap();
    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    let before = all.worker.retries();
    all.hand_over();
    all.at_work().await;
    order(broker, &["set_vm_memory_high_watermark", "absolute", "1"]);
    // The first is on its way when the broker says that it takes none.
    let first = within(CALL, queue.send(&message("first"))).await.unwrap_err();
    assert!(first.to_string().contains("takes no messages"), "{first}");
    let second = within(Duration::from_secs(1), queue.send(&message("second"))).await.unwrap_err();
    assert!(matches!(second, Error::Unreachable { .. }) && second.to_string().contains("memory"), "{second}");
    within(Duration::from_secs(2), queue.done(&lease)).await.unwrap();
    let why = all.worker.is_not_ready(LONG).await;
    assert!(why.contains("takes no messages"), "{why}");
    all.hand_over();
    assert!(all.dropper.spool().waiting() > 0);
    order(broker, &["set_vm_memory_high_watermark", "absolute", "1GiB"]);
    all.after().await;
    assert!(all.worker.retries() > before);
    // What had an unknown outcome may have come through or not; it is sent again.
    for id in ["first", "second"] {
        queue.send(&message(id)).await.unwrap();
    }
    let mut taken = std::collections::BTreeSet::new();
    while let Some(lease) = queue.lease(Taker::Cpu, LONG).await.unwrap() {
        queue.done(&lease).await.unwrap();
        taken.insert(lease.message.id);
    }
    assert_eq!(taken.into_iter().collect::<Vec<_>>(), ["first", "second"]);
}
