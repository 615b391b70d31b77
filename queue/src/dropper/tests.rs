//! Tests of the dropper: real files, real threads, queues in every state.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rusqlite::{Connection, TransactionBehavior};

use super::*;
use crate::embedded::Embedded;
use crate::faulty::{Fault, Faults, Faulty};
use crate::message::Message;
use crate::{Depth, Lease, Taker};

const MINUTE: Duration = Duration::from_secs(60);

fn manifest(number: u64) -> CheckpointManifest {
    let json = serde_json::json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": format!("0f8fad5b-d9cb-469f-a165-{number:012x}"),
        "model": "m", "run": "r", "step": number, "created_at": "2026-11-29T16:10:04Z",
        "location": "/checkpoints/1", "priority": 9,
    });
    CheckpointManifest::parse(json.to_string().as_bytes()).unwrap()
}

fn options(folder: &Path) -> Options {
    Options::new(folder.join("spool"), format!("embedded:{}", folder.join("queue").display()))
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder.join("spool"))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().ends_with(".json"))
        .count()
}

/// The steps on the queue, in order.
fn on_the_queue(folder: &Path) -> Vec<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let queue = Embedded::open(&folder.join("queue"), Arc::new(SystemClock::new()), MINUTE).unwrap();
        let mut steps = Vec::new();
        while let Some(lease) = queue.lease(Taker::Cpu, MINUTE).await.unwrap() {
            let manifest = CheckpointManifest::parse(&lease.message.body).unwrap();
            assert_eq!(lease.message.id, manifest.id);
            assert_eq!(lease.message.priority, crate::message::Priority::High);
            steps.push(manifest.step);
        }
        steps
    })
}

#[test]
fn what_is_handed_over_comes_to_the_queue_in_order() {
    for durability in [Durability::Durable, Durability::Background] {
        let folder = tempfile::tempdir().unwrap();
        let dropper = Dropper::open(Options { durability, ..options(folder.path()) }).unwrap();
        for number in 0..20 {
            dropper.hand_over(&manifest(number)).unwrap();
        }
        assert!(dropper.flush(MINUTE).is_nothing());
        assert_eq!(files(folder.path()), 0);
        assert_eq!(on_the_queue(folder.path()), (0..20).collect::<Vec<_>>());
    }
}

#[test]
fn a_dropper_that_goes_sends_what_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let durability = Durability::Background;
    let dropper = Dropper::open(Options { durability, flush: MINUTE, ..options(folder.path()) }).unwrap();
    (0..5).for_each(|number| dropper.hand_over(&manifest(number)).unwrap());
    drop(dropper);
    assert_eq!(on_the_queue(folder.path()), [0, 1, 2, 3, 4]);
}

#[test]
fn a_locked_queue_holds_nobody_up_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    assert!(on_the_queue(folder.path()).is_empty());
    let mut other = Connection::open(folder.path().join("queue/queue.sqlite3")).unwrap();
    let writing = other.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let flush = Duration::from_millis(50);
    let dropper = Dropper::open(Options { flush, ..options(folder.path()) }).unwrap();
    dropper.hand_over(&manifest(1)).unwrap();
    assert_eq!(dropper.flush(flush), Left { in_memory: 0, in_spool: 1 });
    assert!(matches!(dropper.send_now(&manifest(1).id, flush), Sent::Waits(_)));
    drop(dropper);
    assert_eq!(files(folder.path()), 1);
    drop(writing);
    // The next one takes along what the last one left.
    let dropper = Dropper::open(options(folder.path())).unwrap();
    assert!(dropper.flush(MINUTE).is_nothing());
    assert_eq!(on_the_queue(folder.path()), [1]);
}

#[test]
fn a_queue_that_comes_later_is_found() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("queue"), "in the way").unwrap();
    let dropper = Dropper::open(options(folder.path())).unwrap();
    dropper.hand_over(&manifest(1)).unwrap();
    assert_eq!(dropper.flush(Duration::from_millis(20)).in_spool, 1);
    std::fs::remove_file(folder.path().join("queue")).unwrap();
    assert!(dropper.flush(MINUTE).is_nothing());
    assert_eq!(on_the_queue(folder.path()), [1]);
}

#[test]
fn one_manifest_is_sent_at_once_though_another_drains() {
    let folder = tempfile::tempdir().unwrap();
    // The spool's own drainer hangs: only the first call of the opener gets a queue that does.
    let queue: Arc<dyn Queue> =
        Arc::new(Embedded::open(&folder.path().join("queue"), Arc::new(SystemClock::new()), MINUTE).unwrap());
    let opened = Mutex::new(0);
    let opener: Opener = Arc::new(move || {
        let mut opened = opened.lock().unwrap();
        *opened += 1;
        let at = BTreeMap::from([(0, Fault::TimedOut)]);
        let hangs = Faulty::new(Arc::clone(&queue), Faults { at, delay: MINUTE, ..Faults::default() });
        Ok(if *opened == 1 { Arc::new(hangs) } else { Arc::clone(&queue) })
    });
    let dropper =
        Dropper::with_queue(Options { flush: Duration::ZERO, ..options(folder.path()) }, opener).unwrap();
    dropper.hand_over(&manifest(1)).unwrap();
    assert_eq!(dropper.flush(Duration::from_millis(100)).in_spool, 1);
    assert_eq!(dropper.send_now(&manifest(1).id, MINUTE), Sent::Yes);
    assert!(dropper.flush(Duration::ZERO).is_nothing());
    assert_eq!(on_the_queue(folder.path()), [1]);
}

/// A queue that takes nothing, and says so after a minute.
#[derive(Debug)]
struct Hanging;

#[async_trait::async_trait]
impl Queue for Hanging {
    async fn send(&self, _: &Message) -> Result<(), Error> {
        tokio::time::sleep(MINUTE).await;
        Ok(())
    }
    async fn lease(&self, _: Taker, _: Duration) -> Result<Option<Lease>, Error> {
        Ok(None)
    }
    async fn extend(&self, _: &Lease, _: Duration) -> Result<(), Error> {
        Ok(())
    }
    async fn done(&self, _: &Lease) -> Result<(), Error> {
        Ok(())
    }
    async fn retry(&self, _: &Lease, _: Duration) -> Result<(), Error> {
        Ok(())
    }
    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        Ok(Vec::new())
    }
}

#[test]
fn a_queue_that_hangs_keeps_nothing_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (durability, flush) = (Durability::Background, Duration::ZERO);
    let options = Options { durability, flush, ..options(folder.path()) };
    let dropper = Dropper::with_queue(options, Arc::new(|| Ok(Arc::new(Hanging)))).unwrap();
    for number in 0..10 {
        dropper.hand_over(&manifest(number)).unwrap();
    }
    let deadline = Instant::now() + MINUTE;
    while dropper.flush(Duration::from_millis(5)).in_memory > 0 {
        assert!(Instant::now() < deadline);
    }
    assert_eq!(files(folder.path()), 10);
}

#[test]
fn a_full_memory_and_a_full_spool_are_errors_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let hangs: Opener = Arc::new(|| Ok(Arc::new(Hanging)));
    let limits = SpoolLimits { items: 2, ..SpoolLimits::default() };
    let durable = Options { limits, flush: Duration::ZERO, ..options(folder.path()) };
    let dropper = Dropper::with_queue(durable.clone(), Arc::clone(&hangs)).unwrap();
    (0..2).for_each(|number| dropper.hand_over(&manifest(number)).unwrap());
    let error = dropper.hand_over(&manifest(2)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("is full"), "{error}");
    // The spool is full now, so what is handed over in the background stays in memory.
    let options = Options { durability: Durability::Background, backlog_items: 3, ..durable };
    let dropper = Dropper::with_queue(options, hangs).unwrap();
    (3..6).for_each(|number| dropper.hand_over(&manifest(number)).unwrap());
    let error = dropper.hand_over(&manifest(6)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("memory"), "{error}");
    assert_eq!(dropper.flush(Duration::ZERO), Left { in_memory: 3, in_spool: 2 });
    assert!(matches!(dropper.send_now(&manifest(3).id, MINUTE), Sent::Waits(_)));
}

#[test]
fn what_cannot_work_is_said_when_it_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let error =
        Dropper::open(Options { queue: "kafka://h".to_owned(), ..options(folder.path()) }).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    std::fs::write(folder.path().join("spool"), "").unwrap();
    let error = Dropper::open(options(folder.path())).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn an_unwritable_spool_is_said_when_handing_over() {
    let folder = tempfile::tempdir().unwrap();
    let dropper = Dropper::open(options(folder.path())).unwrap();
    std::fs::remove_dir(folder.path().join("spool")).unwrap();
    let error = dropper.hand_over(&manifest(1)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("mounted"), "{error}");
    std::fs::create_dir(folder.path().join("spool")).unwrap();
    std::fs::set_permissions(folder.path().join("spool"), PermissionsExt::from_mode(0o700)).unwrap();
    dropper.hand_over(&manifest(1)).unwrap();
    assert!(dropper.flush(MINUTE).is_nothing());
}

#[test]
fn in_another_process_a_dropper_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut dropper = Dropper::open(options(folder.path())).unwrap();
    dropper.process += 1;
    assert!(dropper.hand_over(&manifest(1)).unwrap_err().to_string().contains("forked"));
}
