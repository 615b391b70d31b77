//! A queue that fails as told, for tests: any queue, with faults by number or by chance, from a seed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Error;
use crate::message::Message;
use crate::{Depth, Lease, Queue, Taker};

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and that is said.
    Before,
    /// It is done, but said to be unreachable.
    After,
    /// It is done; after a while its outcome is said to be unknown.
    Lost,
    /// Nothing is done; after a while its outcome is said to be unknown.
    TimedOut,
}

impl Fault {
    /// Every way to fail.
    pub const ALL: [Self; 4] = [Self::Before, Self::After, Self::Lost, Self::TimedOut];

    const fn does(self) -> bool {
        matches!(self, Self::After | Self::Lost)
    }
}

/// Which calls fail, and how.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// By the call's number, from 0 on.
    pub at: BTreeMap<u64, Fault>,
    /// How many of a thousand others fail, in ways that the seed chooses.
    pub of_a_thousand: u64,
    /// Where chance begins: the same seed and number always give the same.
    pub seed: u64,
    /// How long it takes until an outcome is called unknown.
    pub delay: Duration,
}

impl Faults {
    /// How call number `number` fails, if it does.
    #[must_use]
    pub fn of(&self, number: u64) -> Option<Fault> {
        if let Some(fault) = self.at.get(&number) {
            return Some(*fault);
        }
        let chance = mix(self.seed.wrapping_add(mix(number)));
        let [first, second, third, fourth] = Fault::ALL;
        let fault = match (chance >> 32) % 4 {
            0 => first,
            1 => second,
            2 => third,
            _ => fourth,
        };
        (chance % 1000 < self.of_a_thousand).then_some(fault)
    }
}

/// SplitMix64's step: every bit of the result depends on every bit given.
pub(crate) const fn mix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// A call, as a hook is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// How many calls came before it.
    pub number: u64,
    /// The method.
    pub name: &'static str,
    /// Before or after it.
    pub phase: Phase,
}

/// When a hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is done yet.
    Before,
    /// It is done, where it is done at all; its caller does not know yet.
    After,
}

/// What is called before and after every call, and may end the process.
pub type Hook = Arc<dyn Fn(Call) + Send + Sync>;

/// A queue that fails as told.
pub struct Faulty {
    queue: Arc<dyn Queue>,
    faults: Faults,
    hook: Hook,
    calls: AtomicU64,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty")
            .field("queue", &self.queue)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl Faulty {
    /// `queue`, with `faults`.
    #[must_use]
    pub fn new(queue: Arc<dyn Queue>, faults: Faults) -> Self {
        Self { queue, faults, hook: Arc::new(|_| ()), calls: AtomicU64::new(0) }
    }

    /// Calls `hook` before and after every call.
    #[must_use]
    pub fn with_hook(self, hook: Hook) -> Self {
        Self { hook, ..self }
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Does `work`, or fails, or both.
    async fn call<T>(
        &self,
        name: &'static str,
        work: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        (self.hook)(Call { number, name, phase: Phase::Before });
        let fault = self.faults.of(number);
        // What fails by itself fails as it does.
        let result = if fault.is_none_or(Fault::does) { Some(work.await?) } else { None };
        (self.hook)(Call { number, name, phase: Phase::After });
        let what = format!("call {number} ({name})");
        match (fault, result) {
            (None, Some(result)) => Ok(result),
            (Some(Fault::Lost | Fault::TimedOut), _) => {
                tokio::time::sleep(self.faults.delay).await;
                Err(Error::UnknownOutcome { what, why: "a fault was asked for".to_owned() })
            }
            _ => Err(Error::Unreachable { what, why: "a fault was asked for".to_owned() }),
        }
    }
}

#[async_trait]
impl Queue for Faulty {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        self.call("send", self.queue.send(message)).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        self.call("lease", self.queue.lease(taker, time)).await
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.call("extend", self.queue.extend(lease, time)).await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.call("done", self.queue.done(lease)).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.call("retry", self.queue.retry(lease, delay)).await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.call("depth", self.queue.depth()).await
    }

    async fn prepare(&self) -> Result<(), Error> {
        self.queue.prepare().await
    }

    fn longest_hold(&self) -> Option<Duration> {
        self.queue.longest_hold()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::clock::ManualClock;
    use crate::embedded::Embedded;
    use crate::message::{Device, Kind, Priority};

    fn message() -> Message {
        let (kind, priority) = (Kind::Checkpoint, Priority::Normal);
        Message { id: "a".to_owned(), kind, body: Vec::new(), priority, device: Device::Any }
    }

    fn queue(folder: &tempfile::TempDir) -> Arc<dyn Queue> {
        let clock = Arc::new(ManualClock::new());
        Arc::new(Embedded::open(folder.path(), clock, Duration::from_secs(5)).unwrap())
    }

    #[tokio::test]
    async fn each_fault_does_what_it_says() {
        for (fault, done, unknown) in [
            (Fault::Before, false, false),
            (Fault::After, true, false),
            (Fault::Lost, true, true),
            (Fault::TimedOut, false, true),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let queue = queue(&folder);
            let faults = Faults { at: BTreeMap::from([(1, fault)]), ..Faults::default() };
            let faulty = Faulty::new(Arc::clone(&queue), faults);
            assert_eq!(
                faulty.lease(Taker::Cpu, Duration::ZERO).await.unwrap().map(|lease| lease.fence),
                None
            );
            let error = faulty.send(&message()).await.unwrap_err();
            assert_eq!(matches!(error, Error::UnknownOutcome { .. }), unknown, "{error}");
            let there = queue.lease(Taker::Cpu, Duration::ZERO).await.unwrap().is_some();
            assert_eq!(there, done, "{fault:?}");
            assert!(faulty.depth().await.is_ok());
            assert_eq!(faulty.calls(), 3);
        }
    }

    #[test]
    fn chance_is_the_seeds() {
        let faults = Faults { of_a_thousand: 300, seed: 7, ..Faults::default() };
        let drawn = |faults: &Faults| (0..1000).map(|number| faults.of(number)).collect::<Vec<_>>();
        let first = drawn(&faults);
        assert_eq!(first, drawn(&faults));
        assert_ne!(first, drawn(&Faults { seed: 8, ..faults }));
        let failed = first.iter().flatten().count();
        assert!((200..400).contains(&failed), "{failed} of 1000");
        assert!(Fault::ALL.iter().all(|fault| first.contains(&Some(*fault))));
        assert!(drawn(&Faults::default()).iter().all(Option::is_none));
    }

    #[tokio::test]
    async fn a_hook_sees_every_call() {
        let folder = tempfile::tempdir().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hook: Hook = {
            let seen = Arc::clone(&seen);
            Arc::new(move |call| seen.lock().unwrap().push((call.number, call.name, call.phase)))
        };
        let faulty = Faulty::new(queue(&folder), Faults::default()).with_hook(hook);
        faulty.send(&message()).await.unwrap();
        faulty.depth().await.unwrap();
        let [before, after] = [Phase::Before, Phase::After];
        let wanted = [(0, "send", before), (0, "send", after), (1, "depth", before), (1, "depth", after)];
        assert_eq!(*seen.lock().unwrap(), wanted);
    }
}
