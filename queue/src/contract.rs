//! What every backend has to pass: a test suite, in the open so that backends elsewhere can be held to it.
//!
//! It fails by panicking, or with the first error that no queue should give.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Error;
use crate::message::{BODY_BYTES, Device, ID_BYTES, Kind, Message, Priority};
use crate::{Depth, Lease, Queue, Taker};

/// A backend under test.
#[async_trait]
pub trait Backend: Send + Sync {
    /// A handle on the queue called `name`, such as another process would have; the queue is made when it is first
    /// asked for.
    async fn open(&self, name: &str) -> Result<Arc<dyn Queue>, Error>;

    /// Lets so much time pass, as far as the queues can tell.
    async fn pass(&self, time: Duration);
}

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// The whole suite.
///
/// # Errors
/// What a queue fails with where it should not.
pub async fn all(backend: &dyn Backend) -> Result<(), Error> {
    order(backend).await?;
    duplicates(backend).await?;
    leases_end(backend).await?;
    holders_are_told_apart(backend).await?;
    extensions(backend).await?;
    retries(backend).await?;
    depth(backend).await?;
    devices(backend).await?;
    sizes(backend).await?;
    takers_at_once(backend).await?;
    two_handles(backend).await
}

/// A message of the class and for the device given.
fn message(id: &str, priority: Priority, device: Device) -> Message {
    Message { id: id.to_owned(), kind: Kind::Step, body: id.as_bytes().to_vec(), priority, device }
}

fn plain(id: &str) -> Message {
    message(id, Priority::Normal, Device::Any)
}

/// Takes a message that has to be there.
async fn take(queue: &dyn Queue, taker: Taker) -> Result<Lease, Error> {
    let lease = queue.lease(taker, MINUTE).await?;
    lease.ok_or_else(|| Error::Refused { what: "the queue".to_owned(), why: "no message is due".to_owned() })
}

/// Takes everything off the queue, and tells the ids in order.
async fn empty(queue: &dyn Queue, taker: Taker) -> Result<Vec<String>, Error> {
    let mut ids = Vec::new();
    while let Some(lease) = queue.lease(taker, MINUTE).await? {
        queue.done(&lease).await?;
        ids.push(lease.message.id);
    }
    Ok(ids)
}

fn is_lost(result: &Result<(), Error>) -> bool {
    matches!(result, Err(Error::LeaseLost { .. }))
}

/// Higher classes go first, then what was sent first; and a message comes back as it was sent.
async fn order(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("order").await?;
    assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "a new queue is empty");
    let classes = [Priority::Low, Priority::Normal, Priority::High];
    for (at, priority) in classes.into_iter().cycle().take(6).enumerate() {
        queue.send(&message(&at.to_string(), priority, Device::Any)).await?;
        backend.pass(Duration::from_millis(5)).await;
    }
    assert_eq!(empty(queue.as_ref(), Taker::Cpu).await?, ["2", "5", "1", "4", "0", "3"]);
    for kind in [Kind::Checkpoint, Kind::Republish, Kind::Step] {
        let sent = Message { kind, ..plain("whole") };
        queue.send(&sent).await?;
        let lease = take(queue.as_ref(), Taker::Gpu).await?;
        assert_eq!(lease.message, sent);
        assert_eq!((lease.abandoned, lease.retries, lease.waited), (0, 0, Duration::ZERO));
        queue.done(&lease).await?;
    }
    Ok(())
}

/// A message that is on the queue and is sent again is whole, and goes for good. Backends may keep one or both.
async fn duplicates(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("duplicates").await?;
    for _ in 0..2 {
        queue.send(&plain("a")).await?;
    }
    let ids = empty(queue.as_ref(), Taker::Cpu).await?;
    assert!((1..=2).contains(&ids.len()) && ids.iter().all(|id| id == "a"), "{ids:?}");
    queue.send(&plain("a")).await?;
    assert_eq!(empty(queue.as_ref(), Taker::Cpu).await?, ["a"], "an id may come again once it is done");
    Ok(())
}

/// Whoever does not finish in time loses the message to the next one, who is told.
async fn leases_end(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("leases end").await?;
    queue.send(&plain("a")).await?;
    for abandoned in 0..3 {
        let lease = take(queue.as_ref(), Taker::Cpu).await?;
        assert_eq!((lease.abandoned, lease.retries), (abandoned, 0));
        backend.pass(MINUTE - SECOND).await;
        assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "it is somebody's");
        backend.pass(SECOND * 2).await;
    }
    let lease = take(queue.as_ref(), Taker::Cpu).await?;
    assert_eq!(lease.abandoned, 3);
    queue.done(&lease).await?;
    backend.pass(MINUTE * 2).await;
    assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "it is done");
    Ok(())
}

/// Who lost a message can no longer do anything to it.
async fn holders_are_told_apart(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("holders").await?;
    queue.send(&plain("a")).await?;
    let slow = take(queue.as_ref(), Taker::Cpu).await?;
    backend.pass(MINUTE * 2).await;
    let quick = take(queue.as_ref(), Taker::Cpu).await?;
    assert!(quick.fence > slow.fence, "fences rise");
    assert!(is_lost(&queue.extend(&slow, MINUTE).await));
    assert!(is_lost(&queue.retry(&slow, MINUTE).await));
    assert!(is_lost(&queue.done(&slow).await));
    queue.extend(&quick, MINUTE).await?;
    queue.done(&quick).await?;
    assert!(is_lost(&queue.extend(&quick, MINUTE).await), "it is done");
    // The same id again is another message: old leases have no hold on it.
    queue.send(&plain("a")).await?;
    let again = take(queue.as_ref(), Taker::Cpu).await?;
    assert_eq!((again.abandoned, again.retries), (0, 0));
    for old in [&slow, &quick] {
        assert!(is_lost(&queue.done(old).await));
    }
    queue.retry(&again, Duration::ZERO).await?;
    assert!(is_lost(&queue.done(&again).await), "it was given back");
    assert_eq!(empty(queue.as_ref(), Taker::Cpu).await?, ["a"]);
    Ok(())
}

/// A lease that is extended lasts from then on.
async fn extensions(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("extensions").await?;
    queue.send(&plain("a")).await?;
    let lease = take(queue.as_ref(), Taker::Cpu).await?;
    for _ in 0..3 {
        backend.pass(SECOND * 40).await;
        queue.extend(&lease, MINUTE).await?;
    }
    backend.pass(SECOND * 50).await;
    assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "it was extended");
    backend.pass(SECOND * 20).await;
    assert_eq!(take(queue.as_ref(), Taker::Cpu).await?.abandoned, 1);
    Ok(())
}

/// What is given back comes again after its delay, behind what became due before; all delays are counted.
async fn retries(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("retries").await?;
    queue.send(&plain("a")).await?;
    let lease = take(queue.as_ref(), Taker::Cpu).await?;
    queue.retry(&lease, SECOND * 30).await?;
    backend.pass(SECOND * 20).await;
    assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "its delay is not over");
    queue.send(&plain("b")).await?;
    backend.pass(SECOND * 11).await;
    let first = take(queue.as_ref(), Taker::Cpu).await?;
    assert_eq!(first.message.id, "b", "it became due first");
    let second = take(queue.as_ref(), Taker::Cpu).await?;
    assert_eq!(second.message, plain("a"));
    assert_eq!((second.abandoned, second.retries, second.waited), (0, 1, SECOND * 30));
    queue.retry(&second, SECOND * 5).await?;
    backend.pass(SECOND * 6).await;
    let third = take(queue.as_ref(), Taker::Cpu).await?;
    assert_eq!((third.abandoned, third.retries, third.waited), (0, 2, SECOND * 35));
    Ok(())
}

/// What is on the queue is counted by class and state.
async fn depth(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("depth").await?;
    let of = |depths: &[Depth], priority| depths.iter().find(|depth| depth.priority == priority).copied();
    for id in ["leased", "delayed", "ready"] {
        queue.send(&message(id, Priority::High, Device::Any)).await?;
        backend.pass(SECOND).await;
    }
    let leased = take(queue.as_ref(), Taker::Cpu).await?;
    let delayed = take(queue.as_ref(), Taker::Cpu).await?;
    queue.retry(&delayed, SECOND * 30).await?;
    let depths = queue.depth().await?;
    assert!(depths.is_sorted_by(|a, b| a.priority > b.priority), "the highest class first: {depths:?}");
    let high = of(&depths, Priority::High).unwrap_or_else(|| none(Priority::High));
    assert_eq!((high.ready, high.delayed, high.leased), (1, 1, 1));
    assert!(high.oldest.is_some_and(|oldest| oldest >= SECOND * 2), "{high:?}");
    let low = of(&depths, Priority::Low).unwrap_or_else(|| none(Priority::Low));
    assert_eq!(low, none(Priority::Low));
    backend.pass(SECOND * 70).await;
    let high = of(&queue.depth().await?, Priority::High).unwrap_or_else(|| none(Priority::High));
    assert_eq!((high.ready, high.delayed, high.leased), (3, 0, 0), "what ran out can be taken");
    assert_eq!(leased.message.id, "leased");
    empty(queue.as_ref(), Taker::Cpu).await?;
    assert!(queue.depth().await?.into_iter().all(|depth| depth == none(depth.priority)));
    Ok(())
}

const fn none(priority: Priority) -> Depth {
    Depth { priority, ready: 0, delayed: 0, leased: 0, oldest: None }
}

/// GPUs are for what needs them first; what has waited for one long enough goes to anyone.
async fn devices(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("devices").await?;
    let fill = async || {
        for (id, priority, device) in [
            ("cpu", Priority::High, Device::Cpu),
            ("gpu", Priority::Normal, Device::Gpu { wait: SECOND * 10 }),
            ("any", Priority::Normal, Device::Any),
            ("patient", Priority::High, Device::Gpu { wait: MINUTE * 60 }),
        ] {
            queue.send(&message(id, priority, device)).await?;
            backend.pass(Duration::from_millis(5)).await;
        }
        Ok::<(), Error>(())
    };
    fill().await?;
    assert_eq!(empty(queue.as_ref(), Taker::Gpu).await?, ["patient", "gpu", "any", "cpu"]);
    fill().await?;
    assert_eq!(empty(queue.as_ref(), Taker::Cpu).await?, ["cpu", "any"]);
    backend.pass(SECOND * 11).await;
    assert_eq!(empty(queue.as_ref(), Taker::Cpu).await?, ["gpu"], "it has waited long enough");
    assert_eq!(empty(queue.as_ref(), Taker::Gpu).await?, ["patient"]);
    Ok(())
}

/// Bodies of every size up to the largest, and ids of every character.
async fn sizes(backend: &dyn Backend) -> Result<(), Error> {
    let queue = backend.open("sizes").await?;
    for size in [0, 1, 4096, BODY_BYTES] {
        let body: Vec<u8> = (0..=255).cycle().take(size).collect();
        let sent = Message { body, ..plain("body") };
        queue.send(&sent).await?;
        let lease = take(queue.as_ref(), Taker::Cpu).await?;
        assert!(lease.message == sent, "a body of {size} bytes");
        queue.done(&lease).await?;
    }
    let longest = "x".repeat(ID_BYTES);
    for id in ["'; DROP TABLE messages; --", "a/b\\c", "é ü\u{1F600}", "\u{0}\n\t", "%41?*[", " ", &longest]
    {
        queue.send(&plain(id)).await?;
        let lease = take(queue.as_ref(), Taker::Cpu).await?;
        assert_eq!(lease.message, plain(id));
        queue.done(&lease).await?;
    }
    let (long, large) =
        (plain(&"x".repeat(ID_BYTES + 1)), Message { body: vec![0; BODY_BYTES + 1], ..plain("a") });
    for refused in [plain(""), long, large] {
        assert!(matches!(queue.send(&refused).await, Err(Error::Refused { .. })));
    }
    assert!(queue.lease(Taker::Cpu, MINUTE).await?.is_none(), "what is refused is not on the queue");
    Ok(())
}

/// Many who take at once never get the same message, and get them all.
async fn takers_at_once(backend: &dyn Backend) -> Result<(), Error> {
    const MESSAGES: usize = 64;
    let queue = backend.open("takers").await?;
    for at in 0..MESSAGES {
        queue.send(&plain(&at.to_string())).await?;
    }
    let mut takers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let queue = backend.open("takers").await?;
        takers.spawn(async move {
            let mut ids = Vec::new();
            while let Some(lease) = queue.lease(Taker::Cpu, MINUTE * 60).await? {
                ids.push(lease.message.id);
            }
            Ok::<_, Error>(ids)
        });
    }
    let mut all = Vec::new();
    while let Some(ended) = takers.join_next().await {
        let ended =
            ended.map_err(|error| Error::Refused { what: "a taker".to_owned(), why: error.to_string() })?;
        all.extend(ended?);
    }
    assert_eq!(all.len(), MESSAGES, "each is taken once");
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>().len(), MESSAGES);
    Ok(())
}

/// What one handle does, the other sees.
async fn two_handles(backend: &dyn Backend) -> Result<(), Error> {
    let (trainer, worker) = (backend.open("handles").await?, backend.open("handles").await?);
    trainer.send(&plain("a")).await?;
    let lease = take(worker.as_ref(), Taker::Cpu).await?;
    assert!(trainer.lease(Taker::Cpu, MINUTE).await?.is_none(), "the other one has it");
    let leased: u64 = trainer.depth().await?.iter().map(|depth| depth.leased).sum();
    assert_eq!(leased, 1);
    // A lease is the message's, not the handle's.
    trainer.extend(&lease, MINUTE).await?;
    worker.done(&lease).await?;
    assert!(trainer.lease(Taker::Cpu, MINUTE).await?.is_none());
    Ok(())
}
