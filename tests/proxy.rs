//! A TCP proxy between a client and a server that fails as networks do, when a test says so.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A proxy on a port of its own. What it is told holds for the connections that there are and for those to come. When
/// it is dropped, its connections end.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    orders: watch::Sender<Orders>,
    shared: Arc<Shared>,
}

/// What the proxy does at present.
#[derive(Debug, Clone, Copy, Default)]
struct Orders {
    /// Nothing passes.
    drops: bool,
    /// New connections are reset.
    refuses: bool,
    /// How long each piece waits.
    delay: Duration,
    /// How often all connections were cut.
    cuts: u64,
    /// How often all connections were made mute.
    mutes: u64,
    /// How long a connection may be idle before it is mute.
    idle: Option<Duration>,
}

/// What all connections share.
#[derive(Debug, Default)]
struct Shared {
    up: Budget,
    down: Budget,
    accepted: AtomicU64,
    refused: AtomicU64,
    open: AtomicU64,
}

/// How many more bytes may pass in one direction.
#[derive(Debug, Default)]
struct Budget(Mutex<Option<u64>>);

impl Budget {
    fn set(&self, bytes: Option<u64>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    /// How many of `bytes` may pass before the connection is cut; `None` where it is not cut. It cuts once.
    fn take(&self, bytes: usize) -> Option<usize> {
        let mut budget = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = (*budget)?;
        match left.checked_sub(bytes as u64) {
            Some(left @ 1..) => {
                *budget = Some(left);
                None
            }
            _ => {
                *budget = None;
                usize::try_from(left).ok()
            }
        }
    }
}

/// A connection that counts as open while this is there.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Proxy {
    /// A proxy in front of `upstream` that lets everything pass.
    ///
    /// # Panics
    /// Where no port or no thread can be had.
    #[must_use]
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (orders, given) = watch::channel(Orders::default());
        let shared = Arc::new(Shared::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let served = Arc::clone(&shared);
        std::thread::spawn(move || runtime.block_on(serve(listener, upstream, given, served)));
        Self { port, orders, shared }
    }

    /// Its port at `127.0.0.1`.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Everything passes again: what was held back by [`Self::drop_packets`] arrives late, as TCP sends it again; there
    /// is no delay any more, and no cut to come. New connections are accepted.
    pub fn pass(&self) {
        self.shared.up.set(None);
        self.shared.down.set(None);
        self.orders.send_modify(|orders| {
            *orders = Orders { cuts: orders.cuts, mutes: orders.mutes, ..Orders::default() };
        });
    }

    /// Nothing passes in either direction, not even the end of a connection: a network that drops every packet.
    /// Connections stay open; new ones are accepted and hear nothing.
    pub fn drop_packets(&self) {
        self.orders.send_modify(|orders| orders.drops = true);
    }

    /// Resets all connections that there are, on both sides.
    pub fn cut(&self) {
        self.orders.send_modify(|orders| orders.cuts += 1);
    }

    /// All connections that there are hear nothing any more, for ever, and stay open; new ones pass. So does a network
    /// that has forgotten them.
    pub fn mute(&self) {
        self.orders.send_modify(|orders| orders.mutes += 1);
    }

    /// From now on a connection over which nothing has gone for so long is made mute, as by [`Self::mute`].
    pub fn mute_idle(&self, after: Duration) {
        self.orders.send_modify(|orders| orders.idle = Some(after));
    }

    /// From now on new connections are reset at once; those that there are stay.
    pub fn refuse(&self) {
        self.orders.send_modify(|orders| orders.refuses = true);
    }

    /// Accepts new connections again.
    pub fn accept(&self) {
        self.orders.send_modify(|orders| orders.refuses = false);
    }

    /// Closes the connection that sends the `bytes`th byte from now on towards the server, once that byte has been
    /// passed on. With 0 the next byte is not passed on. It happens once, and the bytes of all connections count.
    pub fn cut_after_bytes_up(&self, bytes: u64) {
        self.shared.up.set(Some(bytes));
    }

    /// As [`Self::cut_after_bytes_up`], for what the server sends.
    pub fn cut_after_bytes_down(&self, bytes: u64) {
        self.shared.down.set(Some(bytes));
    }

    /// From now on each piece that arrives waits so long, in each direction, before it is passed on.
    pub fn delay(&self, delay: Duration) {
        self.orders.send_modify(|orders| orders.delay = delay);
    }

    /// How many connections were accepted so far, those aside that were refused.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// How many connections were refused so far.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::SeqCst)
    }

    /// How many connections are open.
    #[must_use]
    pub fn open(&self) -> u64 {
        self.shared.open.load(Ordering::SeqCst)
    }
}

/// Serves until the proxy is dropped.
async fn serve(
    listener: std::net::TcpListener,
    upstream: SocketAddr,
    orders: watch::Receiver<Orders>,
    shared: Arc<Shared>,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let mut dropped = orders.clone();
    let accept = async {
        loop {
            let Ok((client, _)) = listener.accept().await else { continue };
            let now = *orders.borrow();
            if now.refuses {
                let _ = client.set_zero_linger();
                shared.refused.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            shared.accepted.fetch_add(1, Ordering::SeqCst);
            shared.open.fetch_add(1, Ordering::SeqCst);
            let open = Open(Arc::clone(&shared));
            tokio::spawn(connection(client, upstream, orders.clone(), now, open));
        }
    };
    tokio::select! {
        () = accept => {}
        _ = dropped.wait_for(|_| false) => {}
    }
}

/// When something went over a connection last.
type Heard = Mutex<Instant>;

fn heard(heard: &Heard) -> Instant {
    *heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Comes back when a connection that was made under these orders is to hear nothing any more.
async fn silenced(mut orders: watch::Receiver<Orders>, made: Orders, last: &Heard) {
    loop {
        let now = *orders.borrow_and_update();
        let ends = now.idle.map(|idle| heard(last) + idle);
        if now.mutes != made.mutes || ends.is_some_and(|ends| ends <= Instant::now()) {
            return;
        }
        let idle = async {
            match ends {
                Some(ends) => tokio::time::sleep_until(ends.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = orders.changed() => if changed.is_err() { return },
            () = idle => {}
        }
    }
}

/// Passes on what `client` and the server say, until one of them ends it or the proxy cuts it.
async fn connection(
    mut client: TcpStream,
    upstream: SocketAddr,
    mut orders: watch::Receiver<Orders>,
    made: Orders,
    open: Open,
) {
    let mut cut = orders.clone();
    // What is waited for must not be kept: it is a lock.
    let cut = async { drop(cut.wait_for(|orders| orders.cuts != made.cuts).await) };
    let last = Heard::new(Instant::now());
    let silenced = silenced(orders.clone(), made, &last);
    let mut server = None;
    let pass = async {
        orders.wait_for(|orders| !orders.drops).await.ok()?;
        let server = server.insert(TcpStream::connect(upstream).await.ok()?);
        let _ = (server.set_nodelay(true), client.set_nodelay(true));
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let up = pump(from_client, to_server, orders.clone(), &open.0.up, &last);
        let down = pump(from_server, to_client, orders.clone(), &open.0.down, &last);
        tokio::try_join!(up, down).ok()
    };
    tokio::pin!(cut);
    let is_reset = tokio::select! {
        () = cut.as_mut() => true,
        _ = pass => false,
        () = silenced => {
            cut.await;
            true
        }
    };
    // What was passed on arrives even so, unless the connection is reset.
    if is_reset {
        let _ = (client.set_zero_linger(), server.map(|server| server.set_zero_linger()));
    }
}

/// The connection ends in both directions.
struct Ended;

/// Passes on what `from` says, until it has said all.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut orders: watch::Receiver<Orders>,
    budget: &Budget,
    last_heard: &Heard,
) -> Result<(), Ended> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await;
        *last_heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let delay = orders.borrow().delay;
        if delay > Duration::ZERO {
            tokio::time::sleep(delay).await;
        }
        orders.wait_for(|orders| !orders.drops).await.map_err(|_| Ended)?;
        let count = read.map_err(|_| Ended)?;
        if count == 0 {
            return to.shutdown().await.map_err(|_| Ended);
        }
        let last = budget.take(count);
        let passed = buffer.get(..last.unwrap_or(count)).unwrap_or_default();
        to.write_all(passed).await.map_err(|_| Ended)?;
        if last.is_some() {
            return Err(Ended);
        }
    }
}
