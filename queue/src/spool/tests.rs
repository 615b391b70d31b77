//! Tests of the spool: its files, its limits, its drainers.

use std::collections::BTreeMap;
use std::sync::Barrier;

use tokio::time::Instant;

use super::*;
use crate::clock::ManualClock;
use crate::embedded::Embedded;
use crate::faulty::{Fault, Faults, Faulty};
use crate::message::{Kind, Priority};
use crate::{Queue, Taker};

const MINUTE: Duration = Duration::from_secs(60);

struct Here {
    folder: tempfile::TempDir,
    clock: Arc<ManualClock>,
}

impl Here {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), clock: Arc::new(ManualClock::new()) }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("spool")
    }

    fn with_limits(&self, limits: SpoolLimits) -> Spool {
        Spool::open(&self.path(), limits, self.clock.clone()).unwrap()
    }

    fn spool(&self) -> Spool {
        self.with_limits(SpoolLimits::default())
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(Embedded::open(&self.folder.path().join("queue"), self.clock.clone(), MINUTE).unwrap())
    }

    fn files(&self) -> Vec<String> {
        let files =
            fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut files: Vec<_> = files.collect();
        files.sort();
        files
    }
}

fn soon() -> Instant {
    Instant::now() + MINUTE
}

fn ids(spool: &Spool) -> Vec<(String, bool)> {
    spool.list().unwrap().into_iter().map(|item| (item.id, item.refused.is_some())).collect()
}

/// The ids on the queue, in order, with their classes.
async fn taken(queue: &dyn Queue) -> Vec<(String, Priority)> {
    let mut taken = Vec::new();
    while let Some(lease) = queue.lease(Taker::Cpu, MINUTE).await.unwrap() {
        assert_eq!(lease.message.kind, Kind::Checkpoint);
        taken.push((lease.message.id, lease.message.priority));
    }
    taken
}

#[test]
fn what_is_put_is_there_in_order_and_an_id_once() {
    let here = Here::new();
    let spool = here.spool();
    for id in ["b", "a", "b"] {
        spool.put(id, b"{}").unwrap();
    }
    assert_eq!(here.files(), ["01800000000000000000-b.json", "01800000000000000001-a.json"]);
    assert_eq!(fs::read(here.path().join(&here.files()[0])).unwrap(), b"{}");
    // Another handle knows what is there, and a wall clock that goes back does not change the order within one.
    here.spool().put("a", b"{}").unwrap();
    here.clock.change(|now| now.wall -= MINUTE);
    spool.put("c", b"{}").unwrap();
    assert_eq!(ids(&spool), [("b".to_owned(), false), ("a".to_owned(), false), ("c".to_owned(), false)]);
    here.clock.change(|now| now.wall += MINUTE * 2);
    let first = &spool.list().unwrap()[0];
    assert_eq!((first.bytes, first.age), (2, MINUTE));
    for (id, size) in [("", 0), (".a", 0), ("a/b", 0), ("a b", 0), ("a", (1 << 20) + 1)] {
        assert!(matches!(spool.put(id, &vec![b' '; size]), Err(Error::Refused { .. }) | Ok(())), "{id}");
    }
    assert_eq!(here.files().len(), 3);
}

#[test]
fn a_full_spool_says_so_and_counts_anew() {
    let here = Here::new();
    let spool = here.with_limits(SpoolLimits { items: 2, bytes: 10 });
    spool.put("a", b"12345").unwrap();
    let error = spool.put("b", b"123456").unwrap_err().to_string();
    assert!(error.contains("is full (1 manifests, 5 bytes; at most 2 and 10)"), "{error}");
    spool.put("b", b"12345").unwrap();
    assert!(spool.put("c", b"").is_err());
    fs::remove_file(here.path().join(&here.files()[0])).unwrap();
    spool.put("c", b"").unwrap();
    assert_eq!(spool.waiting(), 2);
    // An id that was drained by somebody else may come again.
    spool.put("a", b"").unwrap_err();
    fs::remove_file(here.path().join(&here.files()[0])).unwrap();
    spool.put("b", b"1").unwrap();
    assert_eq!(ids(&spool), [("c".to_owned(), false), ("b".to_owned(), false)]);
}

#[test]
fn many_threads_put_at_once() {
    let here = Here::new();
    let (spool, start) = (here.spool(), Barrier::new(8));
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (spool, start) = (&spool, &start);
            scope.spawn(move || {
                start.wait();
                (0..20).for_each(|number| spool.put(&format!("{thread}-{number}"), b"{}").unwrap());
            });
        }
    });
    assert_eq!((spool.waiting(), here.files().len()), (160, 160));
}

#[tokio::test]
async fn draining_sends_in_order_with_id_and_class() {
    let here = Here::new();
    let (spool, queue) = (here.spool(), here.queue());
    spool.put("own", br#"{"id": "manifests-own", "priority": 8}"#).unwrap();
    spool.put("no-json", b"\xff anything").unwrap();
    spool.put("odd", br#"{"id": 5, "priority": 300}"#).unwrap();
    spool.put("low", br#"{"priority": 0}"#).unwrap();
    let drained = spool.drain(queue.as_ref(), soon()).await.unwrap();
    assert_eq!(drained, Drained { sent: 4, refused: 0, left: 0 });
    let [high, normal, low] = [Priority::High, Priority::Normal, Priority::Low];
    let wanted = [("manifests-own", high), ("no-json", normal), ("odd", normal), ("low", low)];
    assert_eq!(taken(queue.as_ref()).await, wanted.map(|(id, class)| (id.to_owned(), class)));
    assert_eq!((here.files(), spool.waiting()), (vec![".lock".to_owned()], 0));
}

#[tokio::test]
async fn every_fault_of_the_queue_costs_only_time() {
    for fault in Fault::ALL {
        let here = Here::new();
        let (spool, queue) = (here.spool(), here.queue());
        let faults = Faults { at: BTreeMap::from([(0, fault), (2, fault)]), ..Faults::default() };
        ["a", "b"].iter().for_each(|id| spool.put(id, b"{}").unwrap());
        let drained = spool.drain(&Faulty::new(Arc::clone(&queue), faults), soon()).await.unwrap();
        assert_eq!(drained, Drained { sent: 2, refused: 0, left: 0 });
        let taken: Vec<_> = taken(queue.as_ref()).await.into_iter().map(|(id, _)| id).collect();
        assert_eq!(taken, ["a", "b"], "{fault:?}");
    }
}

#[tokio::test]
async fn an_unreachable_queue_is_tried_until_the_time_is_over() {
    let here = Here::new();
    let (spool, queue) = (here.spool(), here.queue());
    let always =
        Faults { at: (0..1000).map(|number| (number, Fault::Before)).collect(), ..Faults::default() };
    let faulty = Faulty::new(queue, always);
    ["a", "b"].iter().for_each(|id| spool.put(id, b"{}").unwrap());
    let drained = spool.drain(&faulty, Instant::now() + Duration::from_millis(500)).await.unwrap();
    assert_eq!(drained, Drained { sent: 0, refused: 0, left: 2 });
    // 0.1 s, then 0.2 s, or half of each: not in a hurry.
    assert!((1..=5).contains(&faulty.calls()), "{} calls", faulty.calls());
}

#[tokio::test]
async fn what_cannot_be_sent_is_put_aside_with_the_reason() {
    let here = Here::new();
    let (mut spool, queue) = (here.spool(), here.queue());
    spool.longest_pause = Duration::from_millis(1);
    fs::write(here.path().join("01800000000000000000-large.json"), vec![b' '; (1 << 20) + 1]).unwrap();
    std::os::unix::fs::symlink("a", here.path().join("01800000000000000000-link.json")).unwrap();
    fs::create_dir(here.path().join("01800000000000000000-folder.json")).unwrap();
    here.clock.pass(MINUTE);
    ["a", "b", "c"].iter().for_each(|id| spool.put(id, b"{}").unwrap());
    // The second manifest fails ten times, and then the queue is asked whether it is well.
    let unknown =
        Faults { at: (1..=10).map(|number| (number, Fault::TimedOut)).collect(), ..Faults::default() };
    let drained = spool.drain(&Faulty::new(Arc::clone(&queue), unknown), soon()).await.unwrap();
    assert_eq!(drained, Drained { sent: 2, refused: 4, left: 0 });
    assert_eq!(ids(&spool), ["folder", "large", "link", "b"].map(|id| (id.to_owned(), true)));
    let reasons: Vec<_> = spool.list().unwrap().into_iter().filter_map(|item| item.refused).collect();
    for (reason, words) in reasons.iter().zip(["no file", "1048576", "a link", "a fault was asked for"]) {
        assert!(reason.contains(words), "{reason}");
    }
    let sent: Vec<_> = taken(queue.as_ref()).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(sent, ["a", "c"]);
    assert!(matches!(spool.send_one(queue.as_ref(), "b", MINUTE).await.unwrap(), Sent::Waits(_)));
    assert_eq!(spool.waiting(), 0);
}

#[tokio::test]
async fn a_broken_queue_puts_nothing_aside() {
    let here = Here::new();
    let (spool, queue) = (here.spool(), here.queue());
    spool.put("a", b"{}").unwrap();
    let file = here.folder.path().join("queue/queue.sqlite3");
    rusqlite::Connection::open(&file).unwrap().execute_batch("DROP TABLE messages").unwrap();
    let drained = spool.drain(queue.as_ref(), Instant::now() + Duration::from_millis(300)).await.unwrap();
    assert_eq!(drained, Drained { sent: 0, refused: 0, left: 1 });
}

#[tokio::test]
async fn one_drains_at_a_time_but_one_item_can_be_sent() {
    let here = Here::new();
    let (spool, other, queue) = (here.spool(), here.spool(), here.queue());
    spool.put("a", b"{}").unwrap();
    let lock = other.lock().unwrap().unwrap();
    let drained = spool.drain(queue.as_ref(), Instant::now() + Duration::from_millis(50)).await.unwrap();
    assert_eq!(drained, Drained { sent: 0, refused: 0, left: 1 });
    assert_eq!(spool.send_one(queue.as_ref(), "a", MINUTE).await.unwrap(), Sent::Yes);
    assert_eq!(spool.send_one(queue.as_ref(), "a", MINUTE).await.unwrap(), Sent::Yes);
    spool.put("b", b"{}").unwrap();
    drop(lock);
    assert_eq!(spool.drain(queue.as_ref(), soon()).await.unwrap().sent, 1);
    assert_eq!(taken(queue.as_ref()).await.len(), 2);
}

#[tokio::test]
async fn who_follows_sends_what_comes() {
    let here = Here::new();
    let (spool, queue) = (here.spool(), here.queue());
    let stop = async {
        while queue.depth().await.unwrap()[1].ready < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let put = async {
        for id in ["a", "b"] {
            here.spool().put(id, b"{}").unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    let (drained, ()) = tokio::join!(spool.follow(queue.as_ref(), stop), put);
    assert!(drained.unwrap().sent >= 1);
    assert_eq!(taken(queue.as_ref()).await.len(), 2);
}

#[tokio::test]
async fn what_is_left_over_goes_and_what_is_foreign_stays() {
    let here = Here::new();
    let (spool, queue) = (here.spool(), here.queue());
    let path = here.path();
    for file in [".tmp-old", ".tmp-new", "notes.txt", "1.json"] {
        fs::write(path.join(file), "").unwrap();
    }
    let now = std::time::UNIX_EPOCH + here.clock.now().wall;
    let set = |file: &str, time| {
        File::options().write(true).open(path.join(file)).unwrap().set_modified(time).unwrap();
    };
    set(".tmp-old", now - MINUTE * 61);
    set(".tmp-new", now - MINUTE * 59);
    spool.put("a", b"{}").unwrap();
    spool.drain(queue.as_ref(), soon()).await.unwrap();
    spool.drain(queue.as_ref(), soon()).await.unwrap();
    assert_eq!(here.files(), [".lock", ".tmp-new", "1.json", "notes.txt"]);
    assert_eq!(spool.memory().foreign.len(), 2);
}

#[test]
fn a_folder_that_is_gone_is_said() {
    let here = Here::new();
    let spool = here.spool();
    fs::remove_dir(here.path()).unwrap();
    let error = spool.put("a", b"{}").unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("mounted"), "{error}");
    assert!(spool.list().is_err());
    assert_eq!(spool.waiting(), 0);
}
