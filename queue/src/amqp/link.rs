//! A connection to the broker that is made anew when it is lost; and no call on it that waits for longer than it may.
//!
//! The library can recover connections by itself, but calls made meanwhile wait for it, for as long as that takes. Here
//! whoever asks while the broker is away is told so at once, and the next attempt is made by whoever asks after a
//! pause.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use lapin::options::ConfirmSelectOptions;
use lapin::tcp::{AMQPUriTcpExt, AsyncTcpStream, RustlsConnector, TLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, Connection, ConnectionProperties, ErrorKind, Event};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::address::Address;
use super::topology::Topology;
use crate::error::Error;

/// Pauses between attempts to connect: the first, doubled up to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
/// How long a connection that is given up may take to say goodbye.
const GOODBYE: Duration = Duration::from_millis(300);
/// For how long exchanges, queues and bindings that were made are taken to be there. A binding that somebody deletes is
/// missed by those who send, and they may not be allowed to make it; those who take do so for them.
const PREPARED: Duration = Duration::from_secs(60);
/// How many channels wait to be used again.
const IDLE_CHANNELS: usize = 16;

/// What a connection is for. Publishing has one of its own: a broker that is short of memory or disk stops reading from
/// connections that publish, and acknowledgements must not wait behind that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Publish,
    Take,
}

/// A connection, made anew when it is lost.
#[derive(Debug)]
pub(super) struct Link {
    address: Arc<Address>,
    /// What makes connections safe, where they are to be.
    tls: Option<Arc<RustlsConnector>>,
    topology: Topology,
    purpose: Purpose,
    /// The longest that a call waits for the broker's answer.
    limit: Duration,
    state: tokio::sync::Mutex<State>,
    news: Arc<Mutex<News>>,
}

#[derive(Debug, Default)]
struct State {
    open: Option<Open>,
    /// Whether exchanges and queues were seen on this connection.
    prepared: Option<Prepared>,
    idle: Vec<Channel>,
    failed: Option<Failed>,
}

/// Exchanges and queues are there.
#[derive(Debug, Clone, Copy)]
enum Prepared {
    /// They were made, where they were not there, at this moment.
    Made(Instant),
    /// They were looked for: this user may make none.
    Seen,
}

impl Prepared {
    fn holds(self) -> bool {
        match self {
            Self::Made(at) => at.elapsed() < PREPARED,
            Self::Seen => true,
        }
    }
}

/// A connection, what it is made of, and who listens to what the broker says on it by itself.
#[derive(Debug)]
struct Open {
    connection: Arc<Connection>,
    socket: Socket,
    listener: JoinHandle<()>,
}

/// The socket of a connection, to end it by. The library has a thread and some MiB of memory for each connection until
/// that ends; and where nothing comes from a broker any more, a connection that was given up would not end.
#[derive(Debug, Clone, Default)]
struct Socket(Arc<OnceLock<TcpStream>>);

impl Socket {
    fn end(&self) {
        if let Some(socket) = self.0.get() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// The last attempt to connect.
#[derive(Debug)]
struct Failed {
    error: Error,
    again: Instant,
    pause: Duration,
}

/// What the broker said by itself.
#[derive(Debug, Default)]
struct News {
    blocked: Option<String>,
    last_error: Option<String>,
}

impl Link {
    pub(super) fn new(
        address: Arc<Address>,
        tls: Option<Arc<RustlsConnector>>,
        purpose: Purpose,
        limit: Duration,
    ) -> Self {
        let (state, news) = (tokio::sync::Mutex::default(), Arc::default());
        let topology = Topology::new(&address.queue);
        Self { address, tls, topology, purpose, limit, state, news }
    }

    /// A channel, on a connection that is made where there is none; in confirm mode where it is to publish, else on a
    /// broker that has all exchanges and queues.
    pub(super) async fn channel(&self) -> Result<Channel, Error> {
        self.a_channel(self.purpose == Purpose::Take).await
    }

    /// Whether there is a connection that can be used, which is made where there is none.
    pub(super) async fn check(&self) -> Result<(), Error> {
        let channel = self.channel().await?;
        self.give_back(channel).await;
        Ok(())
    }

    /// A channel to look at what is there, of which nothing is made.
    pub(super) async fn bare_channel(&self) -> Result<Channel, Error> {
        self.a_channel(false).await
    }

    async fn a_channel(&self, prepared: bool) -> Result<Channel, Error> {
        let mut state = self.state.lock().await;
        let connection = self.connection(&mut state).await?;
        if connection.status().blocked() {
            // It would not even open a channel.
            return Err(self.unreachable(self.blocked().unwrap_or_else(|| BLOCKED.to_owned())));
        }
        if prepared && !state.prepared.is_some_and(Prepared::holds) {
            state.prepared = Some(self.prepare(&connection).await?);
        }
        while let Some(channel) = state.idle.pop() {
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let opened = self.open(&connection).await;
        if opened.is_err() {
            // A connection that opens no channel within the time that a call has is of no use.
            forget(&mut state);
        }
        opened
    }

    /// Takes back a channel on which nothing is under way.
    pub(super) async fn give_back(&self, channel: Channel) {
        let mut state = self.state.lock().await;
        let current = state.open.as_ref().is_some_and(|open| open.connection.status().connected());
        if current && channel.status().connected() && state.idle.len() < IDLE_CHANNELS {
            state.idle.push(channel);
        }
    }

    /// Waits for the broker's answer for as long as a call may; then the connection is given up.
    pub(super) async fn answer<T>(&self, answer: impl Future<Output = lapin::Result<T>>) -> Result<T, Error> {
        match timeout(self.limit, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                if code(&error) == Some(404) {
                    self.looks_again().await;
                }
                Err(self.error(&error))
            }
            Err(_) => {
                self.give_up("it does not answer").await;
                Err(self.unreachable(format!("it has not answered for {:?}; {LEADERLESS}", self.limit)))
            }
        }
    }

    /// Whether what was asked for is there.
    pub(super) async fn exists<T>(
        &self,
        answer: impl Future<Output = lapin::Result<T>>,
    ) -> Result<bool, Error> {
        match timeout(self.limit, answer).await {
            Ok(Ok(_)) => Ok(true),
            Ok(Err(error)) if code(&error) == Some(404) => Ok(false),
            Ok(Err(error)) => Err(self.error(&error)),
            Err(_) => Err(self.unreachable(format!("it has not answered for {:?}", self.limit))),
        }
    }

    /// Exchanges and queues are looked for, or made, before the next use.
    pub(super) async fn looks_again(&self) {
        self.state.lock().await.prepared = None;
    }

    /// The connection is given up; the next call makes another.
    pub(super) async fn give_up(&self, why: &str) {
        let mut state = self.state.lock().await;
        if state.open.is_some() {
            tracing::warn!(broker = %self.address.shown, purpose = ?self.purpose, why, "the connection is given up");
        }
        forget(&mut state);
    }

    /// Says goodbye to the broker.
    pub(super) async fn close(&self) {
        let open = self.state.lock().await.open.take();
        if let Some(open) = open {
            open.end().await;
        }
    }

    /// As [`Self::blocked`], of the connection that there is now: one that was lost says nothing any more.
    pub(super) async fn blocked_now(&self) -> Option<String> {
        let state = self.state.lock().await;
        let status = state.open.as_ref()?.connection.status();
        if status.connected() && status.blocked() { self.blocked() } else { None }
    }

    /// That the broker takes no messages at the moment, and why, where it said so.
    pub(super) fn blocked(&self) -> Option<String> {
        self.news().blocked.as_ref().map(|why| format!("{BLOCKED}: {why}"))
    }

    /// What the broker said last when it closed a channel or the connection.
    pub(super) fn last_error(&self) -> Option<String> {
        self.news().last_error.clone()
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    fn news(&self) -> std::sync::MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self, state: &mut State) -> Result<Arc<Connection>, Error> {
        if let Some(open) = &state.open {
            if open.connection.status().connected() {
                return Ok(Arc::clone(&open.connection));
            }
            tracing::warn!(
                broker = %self.address.shown, purpose = ?self.purpose, why = self.last_error(),
                "the connection was lost"
            );
            forget(state);
        }
        let pause = match &state.failed {
            Some(failed) if Instant::now() < failed.again => return Err(failed.error.clone()),
            Some(failed) => (failed.pause * 2).min(PAUSES.1),
            None => PAUSES.0,
        };
        match self.connect().await {
            Ok(open) => {
                tracing::info!(broker = %self.address.shown, purpose = ?self.purpose, "connected");
                let connection = Arc::clone(&open.connection);
                *state = State { open: Some(open), ..State::default() };
                Ok(connection)
            }
            Err(error) => {
                // Many that lost the same broker are not to come back at the same moment.
                let spread = pause.mul_f64(0.75 + 0.5 * fraction());
                state.failed = Some(Failed { error: error.clone(), again: Instant::now() + spread, pause });
                Err(error)
            }
        }
    }

    async fn connect(&self) -> Result<Open, Error> {
        let purpose = match self.purpose {
            Purpose::Publish => "weighbridge, publishing",
            Purpose::Take => "weighbridge, taking",
        };
        let properties = ConnectionProperties::default().with_connection_name(purpose.into());
        let runtime = lapin::runtime::default_runtime().map_err(|error| self.error(&error))?;
        let (tls, limit, socket) = (self.tls.clone(), self.address.connecting, Socket::default());
        let reached = socket.clone();
        // Inline, since the runtime's type has no public name.
        let connecting = Connection::connector(
            self.address.uri.clone(),
            runtime,
            async move |uri: AMQPUri, runtime| {
                let reaching = async {
                    let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
                    let stream = plain.connect_with_config_async(TLSConfig::default(), &runtime).await?;
                    if let AsyncTcpStream::Plain(stream) = &stream {
                        let _ = reached.0.set(stream.get_ref().as_fd().try_clone_to_owned()?.into());
                    }
                    match &tls {
                        None => Ok(stream),
                        Some(connector) => stream.into_rustls(connector, &uri.authority.host).await,
                    }
                };
                let reached = timeout(limit, reaching).await;
                reached
                    .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
                    .map_err(lapin::Error::from)
            },
            properties,
        );
        let connected = match timeout(limit, connecting).await {
            Ok(connected) => connected.map_err(|error| self.error(&error)),
            Err(_) => Err(self.unreachable(format!("no connection within {limit:?}"))),
        };
        let connection = connected.inspect_err(|_| socket.end())?;
        *self.news() = News::default();
        let listener = tokio::spawn(listen(
            Box::pin(connection.events_listener()),
            Arc::clone(&self.news),
            self.address.shown.clone(),
        ));
        Ok(Open { connection: Arc::new(connection), socket, listener })
    }

    async fn open(&self, connection: &Connection) -> Result<Channel, Error> {
        let opened = timeout(self.limit, async {
            let channel = connection.create_channel().await?;
            if self.purpose == Purpose::Publish {
                channel.confirm_select(ConfirmSelectOptions::default()).await?;
            }
            Ok(channel)
        });
        match opened.await {
            Ok(opened) => opened.map_err(|error| self.error(&error)),
            Err(_) => Err(self.unreachable(format!("it has opened no channel for {:?}", self.limit))),
        }
    }

    /// Makes exchanges and queues, or looks for them where they may not be made.
    async fn prepare(&self, connection: &Connection) -> Result<Prepared, Error> {
        // A broker of several nodes has to agree on each queue. What does not get done in this time is done all the
        // same: it was asked for, and is found the next time.
        let limit = self.limit;
        let making = async { self.topology.declare(&connection.create_channel().await?).await };
        let Ok(made) = timeout(limit, making).await else {
            return Err(self.unreachable(format!("it has not made the queues for {limit:?}")));
        };
        match made {
            Ok(()) => Ok(Prepared::Made(Instant::now())),
            Err(error) if code(&error) == Some(403) => {
                let looking = async { self.topology.look(&connection.create_channel().await?).await };
                let Ok(found) = timeout(limit, looking).await else {
                    return Err(self.unreachable(format!("it has not shown the queues for {limit:?}")));
                };
                found.map(|()| Prepared::Seen).map_err(|missing| match code(&missing) {
                    Some(404) => self.refused(format!(
                        "{missing}; and this user may not make it ({error}): import the definitions of \
                         deploy/rabbitmq, or let the user configure ^{}(\\.|$)",
                        self.address.queue
                    )),
                    _ => self.error(&missing),
                })
            }
            Err(error) if code(&error) == Some(406) => Err(self.refused(format!(
                "{error}; something is there with other arguments than this version makes it with: drain and delete \
                 it, or use another name (?queue=NAME in the URL)"
            ))),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// What an error of the library says, to people.
    pub(super) fn error(&self, error: &lapin::Error) -> Error {
        let said = match error.kind() {
            ErrorKind::IOError(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                format!("no connection within {:?}", self.address.connecting)
            }
            ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidConnectionState(_) => {
                self.last_error().unwrap_or_else(|| error.to_string())
            }
            // What a broker has against a client's certificate comes behind the handshake, and may get lost.
            ErrorKind::IOError(error)
                if error.to_string().contains("ertificate")
                    || self.address.uri.scheme == AMQPScheme::AMQPS
                        && matches!(
                            error.kind(),
                            std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::ConnectionAborted
                        ) =>
            {
                format!("{error}; check cacertfile, certfile and keyfile of the URL, and how long they hold")
            }
            _ => error.to_string(),
        };
        match code(error) {
            Some(402 | 403 | 530) => self.refused(format!(
                "{said}; check user, password and virtual host of the URL, and what the user may do"
            )),
            _ => self.unreachable(said),
        }
    }

    fn what(&self) -> String {
        format!("queue {}", self.address.shown)
    }

    pub(super) fn unreachable(&self, why: String) -> Error {
        Error::Unreachable { what: self.what(), why }
    }

    pub(super) fn unknown(&self, why: String) -> Error {
        Error::UnknownOutcome { what: self.what(), why }
    }

    fn refused(&self, why: String) -> Error {
        Error::Refused { what: self.what(), why }
    }
}

/// What is said of a broker that is short of memory or disk.
const BLOCKED: &str = "the broker takes no messages at the moment";

/// What may be the matter with a broker that lets people in, and then does not answer.
pub(super) const LEADERLESS: &str = "if others can use the broker, a queue has no leader: see `rabbitmqctl list_queues \
                                     name leader online messages`, and restart its nodes, or delete it";

/// Remembers what the broker says by itself.
async fn listen(
    mut events: impl futures::Stream<Item = Event> + Unpin,
    news: Arc<Mutex<News>>,
    broker: String,
) {
    while let Some(event) = events.next().await {
        let mut news = news.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::ConnectionBlocked(why) => {
                tracing::warn!(broker, why, "the broker takes no messages");
                news.blocked = Some(why);
            }
            Event::ConnectionUnblocked => {
                tracing::info!(broker, "the broker takes messages again");
                news.blocked = None;
            }
            // What was asked for and refused is told to who asked, and is no reason why anything else was closed.
            Event::Error(error) if matches!(code(&error), Some(403 | 404)) => {}
            Event::Error(error) => {
                tracing::warn!(broker, %error, "the broker closed a channel or the connection");
                news.last_error = Some(error.to_string());
            }
            _ => {}
        }
    }
}

impl Open {
    /// Says goodbye to the broker, if it listens.
    async fn end(self) {
        self.listener.abort();
        let _ = timeout(GOODBYE, self.connection.close(200, "goodbye".into())).await;
        self.socket.end();
    }
}

/// Lets a connection go, without waiting for what the broker says to it.
fn forget(state: &mut State) {
    if let Some(open) = state.open.take() {
        tokio::spawn(open.end());
    }
    state.idle.clear();
    state.prepared = None;
}

/// The broker's code, where it is the broker's error.
pub(super) fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// A number from 0 to 1 that differs from process to process and from time to time.
fn fraction() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    // The hasher's keys are random.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough")]
    let number = (RandomState::new().hash_one(0u8) >> 11) as f64;
    number / (1u64 << 53) as f64
}
