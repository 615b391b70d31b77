//! A real RabbitMQ for tests: Debian's package, run as private brokers of the test process, in folders and at ports of
//! their own. A test that breaks its broker starts one; all others share one.
//!
//! Whatever a test process starts here ends with it, however it ends: see `node`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::process::Output;
use std::sync::OnceLock;
use std::time::Duration;

use crate::certificates::Certificates;
use crate::proxy::Proxy;
use node::Node;

mod install;
mod node;

/// The variable that names a broker to use instead of one of our own: `amqp://user:pass@host:port/vhost`.
const GIVEN: &str = "WEIGHBRIDGE_TEST_AMQP";
/// The user of our own brokers, who may do everything, and the password.
const USER: &str = "guest";

/// How a broker of a test's own differs from the usual.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// How long a delivery may stay without an answer before the broker closes its channel. It looks every 2 s.
    pub consumer_timeout: Option<Duration>,
    /// Another listener, for TLS: it demands a client's certificate, and takes its common name for the user.
    pub certificates: Option<Certificates>,
}

/// A broker. One that is dropped ends, and what it stored is gone.
#[derive(Debug)]
pub struct Broker {
    /// Without a query.
    url: String,
    /// `None` where it was there before.
    node: Option<Node>,
    certificates: Option<Certificates>,
}

impl Broker {
    /// The broker that the tests of this process share, started by the first that asks. Tests keep out of each other's
    /// way by the names of their queues. `None`, and a line that says so, where no RabbitMQ can be had.
    ///
    /// # Panics
    /// Where RabbitMQ can be had but does not start.
    pub fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Broker>> = OnceLock::new();
        let start = || given().or_else(|| Self::start(&Settings::default()));
        SHARED.get_or_init(start).as_ref()
    }

    /// A broker of a test's own; `None`, and a line that says so, where no RabbitMQ can be had.
    ///
    /// # Panics
    /// Where RabbitMQ can be had but does not start.
    #[must_use]
    pub fn start(settings: &Settings) -> Option<Self> {
        let programs = install::programs()?;
        let node = Node::start(programs, settings);
        let url = format!("amqp://{USER}:{USER}@127.0.0.1:{}/%2F", node.port());
        Some(Self { url, node: Some(node), certificates: settings.certificates.clone() })
    }

    /// The URL of the queue of this name.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        with_queue(&self.url, name)
    }

    /// The URL of the queue of this name, by way of `proxy`.
    #[must_use]
    pub fn url_through(&self, proxy: &Proxy, name: &str) -> String {
        let (before, _, vhost) = parts(&self.url);
        with_queue(&format!("{before}127.0.0.1:{}{vhost}", proxy.port()), name)
    }

    /// The URL of the queue of this name by TLS, with the client's certificate in place of a password.
    ///
    /// # Panics
    /// Where the broker was not started with certificates.
    #[must_use]
    #[expect(clippy::expect_used, reason = "only tests use it")]
    pub fn tls_url(&self, name: &str) -> String {
        let files = self.certificates.as_ref().expect("the broker was started with certificates");
        let port = self.node().tls_port();
        format!(
            "amqps://127.0.0.1:{port}/%2F?queue={name}&auth_mechanism=external&cacertfile={}&certfile={}&keyfile={}",
            files.authority.display(),
            files.client.display(),
            files.client_key.display()
        )
    }

    /// Where it listens without TLS.
    ///
    /// # Panics
    /// Where the host of a broker that was there before is not known.
    #[must_use]
    #[expect(clippy::expect_used, reason = "only tests use it")]
    pub fn address(&self) -> SocketAddr {
        let (_, host, _) = parts(&self.url);
        let with_port = if host.contains(':') { host.to_owned() } else { format!("{host}:5672") };
        let addresses = with_port.to_socket_addrs().expect("the broker's host is known");
        // A server that is called `localhost` may listen at one of its addresses alone.
        let addresses: Vec<_> = addresses.collect();
        let old = addresses.iter().find(|address| address.is_ipv4());
        *old.or_else(|| addresses.first()).expect("the broker's host has an address")
    }

    /// The port where it listens without TLS.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address().port()
    }

    /// Ends it as an operator would: all is written, and its port is free.
    ///
    /// # Panics
    /// Where it was there before, or does not end.
    pub fn stop(&mut self) {
        self.node_mut().stop();
    }

    /// Ends it as a crash would, by SIGKILL. What was declared a moment before is lost or broken by that, see
    /// [`Self::settle`]; messages that were confirmed are there afterwards.
    ///
    /// # Panics
    /// Where it was there before.
    pub fn kill(&mut self) {
        self.node_mut().kill();
    }

    /// Starts it again after [`Self::stop`] or [`Self::kill`], at the same port, with what it stored.
    ///
    /// # Panics
    /// Where it was there before, or does not start.
    pub fn start_again(&mut self) {
        self.node_mut().start_again();
    }

    /// Runs `rabbitmqctl`, which takes about a second. `set_vm_memory_high_watermark 0.00001`, for one, makes the
    /// broker block all who publish.
    ///
    /// # Panics
    /// Where the broker was there before, or the program cannot be run.
    #[must_use]
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        self.node().ctl(arguments)
    }

    /// Makes it write what was declared so far. By itself it does so within some seconds; a quorum queue of which it
    /// has written one half when it is killed stays without a leader for ever, and answers nothing.
    ///
    /// # Panics
    /// Where the broker was there before, or does not do so.
    pub fn settle(&self) {
        let done = self.ctl(&["eval", "ok = mnesia:sync_log(), [ok = dets:sync(T) || T <- dets:all()], ok."]);
        assert!(done.status.success(), "{done:?}");
    }

    #[expect(clippy::expect_used, reason = "only tests use it")]
    fn node(&self) -> &Node {
        self.node.as_ref().expect("only a broker that was started here takes orders")
    }

    #[expect(clippy::expect_used, reason = "only tests use it")]
    fn node_mut(&mut self) -> &mut Node {
        self.node.as_mut().expect("only a broker that was started here takes orders")
    }
}

/// The broker that the environment names.
#[expect(clippy::disallowed_methods, reason = "the environment says which broker the tests use")]
fn given() -> Option<Broker> {
    let url = std::env::var(GIVEN).ok().filter(|url| !url.is_empty())?;
    Some(Broker { url, node: None, certificates: None })
}

fn with_queue(url: &str, name: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}queue={name}")
}

/// What stands before the host, the host with its port, and what stands behind.
fn parts(url: &str) -> (&str, &str, &str) {
    let host = url.find("://").map_or(0, |at| at + 3);
    let end = url.get(host..).and_then(|rest| rest.find(['/', '?'])).map_or(url.len(), |at| host + at);
    let host = url.get(host..end).and_then(|authority| authority.rfind('@')).map_or(host, |at| host + at + 1);
    (
        url.get(..host).unwrap_or_default(),
        url.get(host..end).unwrap_or_default(),
        url.get(end..).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_falls_into_its_parts() {
        assert_eq!(parts("amqp://u:p@h:1/%2F"), ("amqp://u:p@", "h:1", "/%2F"));
        assert_eq!(parts("amqp://h?heartbeat=1"), ("amqp://", "h", "?heartbeat=1"));
        assert_eq!(with_queue("amqp://h?heartbeat=1", "a"), "amqp://h?heartbeat=1&queue=a");
    }
}
