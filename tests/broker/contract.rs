//! The suite that every queue has to pass, on a real broker.
//!
//! Leases are watched by a clock, which is moved; delays are the broker's, and a tenth of what the suite asks for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use weighbridge_queue::clock::ManualClock;
use weighbridge_queue::contract::{self, Backend};
use weighbridge_queue::error::Error;
use weighbridge_queue::message::{Device, Message};
use weighbridge_queue::{Depth, Lease, Queue, Taker, url};
use weighbridge_tests::rabbit::Broker;

/// How much shorter the broker's delays are than what the suite asks for.
const HURRY: u32 = 10;
/// What the broker, and whoever looks after leases, may take to do what is due.
const SETTLING: Duration = Duration::from_millis(350);

/// A queue whose delays are shorter than they are said to be.
#[derive(Debug)]
struct Hurried(Arc<dyn Queue>);

#[async_trait]
impl Queue for Hurried {
    async fn send(&self, message: &Message) -> Result<(), Error> {
        let device = match message.device {
            Device::Gpu { wait } => Device::Gpu { wait: wait / HURRY },
            device => device,
        };
        self.0.send(&Message { device, ..message.clone() }).await
    }

    async fn lease(&self, taker: Taker, time: Duration) -> Result<Option<Lease>, Error> {
        let lease = self.0.lease(taker, time).await?;
        Ok(lease.map(|lease| Lease { waited: lease.waited * HURRY, ..lease }))
    }

    async fn extend(&self, lease: &Lease, time: Duration) -> Result<(), Error> {
        self.0.extend(lease, time).await
    }

    async fn done(&self, lease: &Lease) -> Result<(), Error> {
        self.0.done(lease).await
    }

    async fn retry(&self, lease: &Lease, delay: Duration) -> Result<(), Error> {
        self.0.retry(lease, delay / HURRY).await
    }

    async fn depth(&self) -> Result<Vec<Depth>, Error> {
        self.0.depth().await
    }
}

/// Queues on the shared broker. A lease is a connection's, so that a queue has one handle here, which is asked for
/// several times; two connections are tested beside this suite.
struct OnABroker {
    broker: &'static Broker,
    clock: Arc<ManualClock>,
    opened: Mutex<BTreeMap<String, Arc<dyn Queue>>>,
}

#[async_trait]
impl Backend for OnABroker {
    async fn open(&self, name: &str) -> Result<Arc<dyn Queue>, Error> {
        let mut opened = self.opened.lock().unwrap();
        if let Some(queue) = opened.get(name) {
            return Ok(Arc::clone(queue));
        }
        let clock = Arc::clone(&self.clock);
        let name_here = format!("contract {name}");
        let queue: Arc<dyn Queue> = Arc::new(Hurried(url::open(&self.broker.url(&name_here), clock)?));
        opened.insert(name.to_owned(), Arc::clone(&queue));
        Ok(queue)
    }

    async fn pass(&self, time: Duration) {
        self.clock.pass(time);
        let settling = if time < Duration::from_secs(1) { Duration::ZERO } else { SETTLING };
        tokio::time::sleep(time / HURRY + settling).await;
    }
}

/// The broker passes the contract suite.
pub(crate) async fn suite() {
    let Some(broker) = tokio::task::spawn_blocking(Broker::shared).await.unwrap() else { return };
    let clock = Arc::new(ManualClock::new());
    let backend = OnABroker { broker, clock, opened: Mutex::default() };
    contract::all(&backend).await.unwrap();
}
