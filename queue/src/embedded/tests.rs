//! Tests of the embedded queue: the contract, files that are none, other processes, other boots.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use proptest::prelude::*;
use rusqlite::TransactionBehavior;

use super::*;
use crate::clock::{ManualClock, SystemClock};
use crate::contract::{self, Backend};
use crate::faulty::{Faults, Faulty};
use crate::message::{Device, Kind, Priority};

const PATIENCE: Duration = Duration::from_secs(20);
const MINUTE: Duration = Duration::from_secs(60);

/// Embedded queues in folders of one folder, on a clock that is moved by hand.
struct Folders {
    folder: tempfile::TempDir,
    clock: Arc<ManualClock>,
    behind_faults: bool,
}

impl Folders {
    fn new(behind_faults: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, clock: Arc::new(ManualClock::new()), behind_faults }
    }
}

#[async_trait]
impl Backend for Folders {
    async fn open(&self, name: &str) -> Result<Arc<dyn Queue>, Error> {
        let clock: Arc<dyn Clock> = self.clock.clone();
        let queue = Arc::new(Embedded::open(&self.folder.path().join(name), clock, PATIENCE)?);
        Ok(if self.behind_faults { Arc::new(Faulty::new(queue, Faults::default())) } else { queue })
    }

    async fn pass(&self, time: Duration) {
        self.clock.pass(time);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_queue_keeps_the_contract() {
    contract::all(&Folders::new(false)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_that_are_off_change_nothing() {
    contract::all(&Folders::new(true)).await.unwrap();
}

fn message(id: &str) -> Message {
    let (kind, priority) = (Kind::Step, Priority::Normal);
    Message { id: id.to_owned(), kind, body: b"body".to_vec(), priority, device: Device::Any }
}

/// A folder with a queue in it.
struct Here {
    folder: tempfile::TempDir,
    clock: Arc<ManualClock>,
}

impl Here {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), clock: Arc::new(ManualClock::new()) }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("q")
    }

    fn file(&self) -> PathBuf {
        self.path().join("queue.sqlite3")
    }

    fn open(&self, patience: Duration) -> Result<Embedded, Error> {
        Embedded::open(&self.path(), self.clock.clone(), patience)
    }

    fn queue(&self) -> Embedded {
        self.open(PATIENCE).unwrap()
    }

    fn refusal(&self) -> String {
        let error = self.open(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        error.to_string()
    }
}

#[tokio::test]
async fn another_boot_makes_everything_due() {
    let here = Here::new();
    let queue = here.queue();
    for id in ["leased", "delayed", "ready"] {
        queue.send(&message(id)).await.unwrap();
    }
    let before = queue.lease(Taker::Cpu, MINUTE * 600).await.unwrap().unwrap();
    let delayed = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    queue.retry(&delayed, MINUTE * 600).await.unwrap();
    here.clock.change(|now| (now.boot, now.since_boot, now.wall) = (2, MINUTE, now.wall + MINUTE * 10));
    let again = here.queue();
    let normal = again.depth().await.unwrap()[1];
    assert_eq!((normal.ready, normal.oldest), (3, Some(MINUTE * 10)));
    // A handle of the old boot sees it too, and its lease is over.
    assert!(matches!(queue.done(&before).await, Err(Error::LeaseLost { .. })));
    let leases = [
        again.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap(),
        again.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap(),
    ];
    assert_eq!(
        leases.each_ref().map(|lease| (lease.message.id.as_str(), lease.abandoned, lease.retries)),
        [("leased", 1, 0), ("delayed", 0, 1)]
    );
    assert!(leases[0].fence > delayed.fence);
}

#[tokio::test]
async fn a_wall_clock_that_jumps_changes_nothing() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    here.clock.change(|now| now.wall += MINUTE * 1_000_000);
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none());
    here.clock.change(|now| now.wall = Duration::ZERO);
    assert_eq!(queue.depth().await.unwrap()[1].oldest, Some(Duration::ZERO));
    // Another boot, long before: an age is never below nothing.
    here.clock.change(|now| now.boot = 9);
    assert_eq!(queue.depth().await.unwrap()[1].oldest, Some(Duration::ZERO));
    assert_eq!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap().abandoned, 1);
}

#[tokio::test]
async fn who_is_late_may_finish_while_nobody_else_came() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    here.clock.pass(MINUTE * 2);
    queue.extend(&lease, MINUTE).await.unwrap();
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none());
    here.clock.pass(MINUTE * 2);
    queue.done(&lease).await.unwrap();
    assert!(matches!(queue.done(&lease).await, Err(Error::LeaseLost { .. })));
}

#[tokio::test]
async fn sending_again_changes_nothing() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    queue.send(&Message { priority: Priority::High, ..message("a") }).await.unwrap();
    queue.send(&Message { body: b"other".to_vec(), ..message("a") }).await.unwrap();
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!(lease.message, message("a"));
    queue.send(&message("a")).await.unwrap();
    queue.done(&lease).await.unwrap();
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none());
    let bodies: i64 = Connection::open(here.file())
        .unwrap()
        .query_row("SELECT count(*) FROM bodies", [], |row| row.get(0))
        .unwrap();
    assert_eq!(bodies, 0, "no body is left over");
}

#[tokio::test]
async fn two_manifests_of_one_id_do_not_pass_for_one() {
    let here = Here::new();
    let queue = here.queue();
    let first = Message { kind: Kind::Checkpoint, ..message("a") };
    queue.send(&first).await.unwrap();
    queue.send(&first).await.unwrap();
    let other = queue.send(&Message { body: b"other".to_vec(), ..first.clone() }).await;
    assert!(matches!(other, Err(Error::Refused { .. })), "{other:?}");
    let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
    assert_eq!(lease.message, first);
}

#[tokio::test]
async fn a_locked_queue_is_unreachable_within_its_patience_but_can_be_polled() {
    let here = Here::new();
    let queue = here.open(Duration::from_millis(50)).unwrap();
    let mut other = Connection::open(here.file()).unwrap();
    let writing = other.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none(), "an idle poll takes no lock");
    assert!(queue.depth().await.is_ok());
    let error = queue.send(&message("a")).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }));
    let text = error.to_string();
    assert!(text.contains("another process") && !text.contains("database is locked"), "{text}");
    let error = here.open(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    drop(writing);
    queue.send(&message("a")).await.unwrap();
}

#[test]
fn what_is_no_queue_is_refused_with_the_way_out() {
    let here = Here::new();
    std::fs::create_dir(here.path()).unwrap();
    std::fs::write(here.file(), "no database at all, but long enough to be looked at".repeat(100)).unwrap();
    assert!(here.refusal().contains("move queue.sqlite3*"));
    std::fs::remove_file(here.file()).unwrap();
    let other = Connection::open(here.file()).unwrap();
    other.execute_batch("CREATE TABLE theirs (a)").unwrap();
    assert!(here.refusal().contains("something else"));
}

#[tokio::test]
async fn newer_and_damaged_files_are_refused() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    let other = Connection::open(here.file()).unwrap();
    other.execute_batch("UPDATE messages SET kind = 77").unwrap();
    // It waits for a newer worker, and holds up no other message.
    assert!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().is_none());
    queue.send(&message("after")).await.unwrap();
    assert_eq!(queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap().message.id, "after");
    other.execute_batch("DROP TABLE bodies").unwrap();
    assert!(queue.send(&message("b")).await.is_err());
    other.pragma_update(None, "user_version", 2).unwrap();
    assert!(here.refusal().contains("newer Weighbridge"));
    drop((queue, other));
    // A file whose middle is garbage.
    let mut bytes = std::fs::read(here.file()).unwrap();
    bytes.iter_mut().skip(100).for_each(|byte| *byte = 0xA5);
    std::fs::write(here.file(), bytes).unwrap();
    assert!(here.refusal().contains("damaged"));
}

#[tokio::test]
async fn bodies_that_another_program_made_too_large_are_not_read() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    Connection::open(here.file())
        .unwrap()
        .execute_batch("UPDATE bodies SET body = zeroblob(3145729)")
        .unwrap();
    let error = queue.lease(Taker::Cpu, MINUTE).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

#[tokio::test]
async fn a_file_that_is_moved_away_takes_no_more_messages() {
    let here = Here::new();
    let queue = here.queue();
    queue.send(&message("a")).await.unwrap();
    let aside = here.folder.path().join("aside");
    std::fs::rename(here.path(), &aside).unwrap();
    let error = queue.send(&message("b")).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    std::fs::create_dir(here.path()).unwrap();
    assert!(queue.send(&message("b")).await.is_err(), "an empty folder is no queue");
    std::fs::remove_dir(here.path()).unwrap();
    std::fs::rename(&aside, here.path()).unwrap();
    queue.send(&message("b")).await.unwrap();
    assert_eq!(queue.depth().await.unwrap()[1].ready, 2);
}

#[tokio::test]
async fn odd_folders_work() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    for name in [b"a b".as_slice(), b"%41?x=y#z", b"not \xFF text", b"file:x"] {
        let path = folder.path().join(std::ffi::OsStr::from_bytes(name));
        let queue = Embedded::open(&path, Arc::new(SystemClock::new()), PATIENCE).unwrap();
        queue.send(&message("a")).await.unwrap();
        assert!(path.join("queue.sqlite3").is_file());
    }
}

const CHILD: &str = "WEIGHBRIDGE_TEST_QUEUE";

/// The other side of the next test: another process that sends and takes.
#[test]
#[ignore = "run by another test, as a process of its own"]
#[expect(clippy::disallowed_methods, reason = "how the parent tells it the folder")]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let queue = Embedded::open(path.as_ref(), Arc::new(SystemClock::new()), PATIENCE).unwrap();
        for number in 0..100 {
            queue.send(&message(&format!("{} {number}", std::process::id()))).await.unwrap();
            let lease = queue.lease(Taker::Cpu, MINUTE).await.unwrap().unwrap();
            queue.done(&lease).await.unwrap();
            println!("took {}", lease.message.id);
        }
    });
}

#[test]
fn processes_at_once_take_each_message_once() {
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "embedded::tests::child", "--ignored", "--nocapture"])
                .env(CHILD, folder.path().join("made by all at once"))
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut taken = BTreeMap::<String, usize>::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        for id in text.split_inclusive('\n').filter_map(|line| line.split_once("took ")) {
            *taken.entry(id.1.trim().to_owned()).or_default() += 1;
        }
    }
    assert_eq!(taken.len(), 300);
    assert!(taken.values().all(|times| *times == 1), "{taken:?}");
}

/// What one may do to a queue.
#[derive(Debug, Clone)]
enum Step {
    Send(u8, Priority),
    Lease(u64),
    Extend(usize, u64),
    Done(usize),
    Retry(usize, u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let class = prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)];
    prop_oneof![
        (0..6_u8, class).prop_map(|(id, class)| Step::Send(id, class)),
        (0..20_u64).prop_map(Step::Lease),
        (0..8_usize, 0..20_u64).prop_map(|(at, time)| Step::Extend(at, time)),
        (0..8_usize).prop_map(Step::Done),
        (0..8_usize, 0..20_u64).prop_map(|(at, time)| Step::Retry(at, time)),
        (0..15_u64).prop_map(Step::Pass),
    ]
}

/// A message in the model: the plainest thing that behaves as a queue should.
#[derive(Debug)]
struct Row {
    id: String,
    class: Priority,
    due: u64,
    fence: Option<u64>,
    counts: (u32, u32, u64),
}

#[derive(Debug, Default)]
struct Model {
    rows: Vec<Row>,
    now: u64,
}

impl Model {
    fn lease(&mut self, fence: u64, time: u64) -> Option<(String, (u32, u32, u64))> {
        let now = self.now;
        let due = self.rows.iter_mut().filter(|row| row.due <= now);
        let row = due.min_by_key(|row| (std::cmp::Reverse(row.class), row.due))?;
        row.counts.0 += u32::from(row.fence.is_some());
        (row.fence, row.due) = (Some(fence), now + time);
        Some((row.id.clone(), row.counts))
    }

    fn held(&mut self, lease: &Lease) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| row.id == lease.message.id && row.fence == Some(lease.fence))
    }
}

async fn compare(steps: Vec<Step>) {
    let here = Here::new();
    let queue = here.queue();
    let seconds = Duration::from_secs;
    let (mut model, mut leases) = (Model::default(), Vec::<Lease>::new());
    for step in steps {
        match step {
            Step::Send(id, class) => {
                let id = id.to_string();
                queue.send(&Message { priority: class, ..message(&id) }).await.unwrap();
                if model.rows.iter().all(|row| row.id != id) {
                    model.rows.push(Row { id, class, due: model.now, fence: None, counts: (0, 0, 0) });
                }
            }
            Step::Lease(time) => {
                let lease = queue.lease(Taker::Cpu, seconds(time)).await.unwrap();
                let wanted = model.lease(lease.as_ref().map_or(0, |lease| lease.fence), time);
                let found = lease.as_ref().map(|lease| {
                    (lease.message.id.clone(), (lease.abandoned, lease.retries, lease.waited.as_secs()))
                });
                assert_eq!(found, wanted);
                leases.extend(lease);
            }
            Step::Extend(at, time) => {
                let Some(lease) = leases.get(at) else { continue };
                let now = model.now;
                let held = model.held(lease).map(|row| row.due = now + time);
                assert_eq!(queue.extend(lease, seconds(time)).await.is_ok(), held.is_some());
            }
            Step::Done(at) => {
                let Some(lease) = leases.get(at) else { continue };
                let held = model.held(lease).map(|row| row.id.clone());
                assert_eq!(queue.done(lease).await.is_ok(), held.is_some());
                model.rows.retain(|row| Some(&row.id) != held.as_ref());
            }
            Step::Retry(at, time) => {
                let Some(lease) = leases.get(at) else { continue };
                let now = model.now;
                let held = model.held(lease).map(|row| {
                    (row.fence, row.due) = (None, now + time);
                    row.counts = (row.counts.0, row.counts.1 + 1, row.counts.2 + time);
                });
                assert_eq!(queue.retry(lease, seconds(time)).await.is_ok(), held.is_some());
            }
            Step::Pass(time) => {
                here.clock.pass(seconds(time));
                model.now += time;
            }
        }
        let ready: u64 = queue.depth().await.unwrap().iter().map(|depth| depth.ready).sum();
        assert_eq!(ready, model.rows.iter().filter(|row| row.due <= model.now).count() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_embedded_queue_is_as_the_model(steps in proptest::collection::vec(step(), 0..50)) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(compare(steps));
    }
}
