//! Stores and queues that fail, or at which the process dies, at every request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weighbridge_queue::Queue;
use weighbridge_queue::faulty::{Call, Fault, Faults, Faulty, Phase};
use weighbridge_snapshots::error::{Class, Result, StoreError};
use weighbridge_snapshots::root::{Intercept, Request};

/// Ends this process as `kill -9` does.
fn die() {
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_secs(10));
}

/// A request, by its number from 0 on, and whether before or after it was done.
pub(crate) type Point = (u64, Phase);

/// What stands between a root and its store, and fails as told.
#[derive(Debug)]
pub(crate) struct FaultyStore {
    faults: Faults,
    kill: Option<Point>,
    calls: AtomicU64,
    /// The numbers of requests that are under way.
    under_way: Mutex<BTreeMap<String, Vec<u64>>>,
}

impl FaultyStore {
    pub(crate) fn new(faults: Faults, kill: Option<Point>) -> Arc<Self> {
        Arc::new(Self { faults, kill, calls: AtomicU64::new(0), under_way: Mutex::default() })
    }

    /// How many requests there were.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn fails(&self, number: u64, faults: [Fault; 2], request: &Request) -> Result<()> {
        if self.faults.of(number).is_some_and(|fault| faults.contains(&fault)) {
            let why = format!("{} {number}: a fault was asked for", request.name);
            return Err(StoreError::new(Class::Unreachable, &request.key, why));
        }
        Ok(())
    }
}

fn place(request: &Request) -> String {
    format!("{} {}", request.name, request.key)
}

impl Intercept for FaultyStore {
    fn before(&self, request: &Request) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        if self.kill == Some((number, Phase::Before)) {
            die();
        }
        self.fails(number, [Fault::Before, Fault::TimedOut], request)?;
        self.under_way.lock().unwrap().entry(place(request)).or_default().push(number);
        Ok(())
    }

    fn after(&self, request: &Request) -> Result<()> {
        let number = self.under_way.lock().unwrap().get_mut(&place(request)).and_then(Vec::pop);
        let Some(number) = number else { return Ok(()) };
        if self.kill == Some((number, Phase::After)) {
            die();
        }
        self.fails(number, [Fault::After, Fault::Lost], request)
    }
}

/// A queue that fails as told, or at which the process dies.
pub(crate) fn faulty_queue(queue: Arc<dyn Queue>, faults: Faults, kill: Option<Point>) -> Arc<Faulty> {
    let hook = move |call: Call| {
        if kill == Some((call.number, call.phase)) {
            die();
        }
    };
    Arc::new(Faulty::new(queue, faults).with_hook(Arc::new(hook)))
}
