//! How the API is offered, and asked: `[api]` and `[client]`.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use weighbridge_snapshots::bucket;

use super::parse_bytes;
use crate::api::guard::Bounds;
use crate::error::{Failure, Result};

/// How the API is offered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Api {
    /// The address where it answers; default: 127.0.0.1:7461.
    pub listen: Option<SocketAddr>,
    /// The file of tokens; default: none, and only this machine is answered.
    pub tokens: Option<PathBuf>,
    /// The server's certificate in PEM; default: none.
    pub tls_certificate: Option<PathBuf>,
    /// Its private key in PEM.
    pub tls_key: Option<PathBuf>,
    /// Certificates in PEM by one of which every client's has to be signed; default: none.
    pub client_ca: Option<PathBuf>,
    /// Whether other machines are answered without TLS; default: false.
    pub plain_http: Option<bool>,
    /// The audit log's file; default: none.
    pub audit_log: Option<PathBuf>,
    /// Requests a second of one token; default: 500.
    pub requests_per_second: Option<u32>,
    /// Requests and streams of one token at the same time; default: 2000.
    pub requests_at_once: Option<usize>,
    /// Connections at the same time; default: 4096.
    pub connections: Option<usize>,
    /// How long a connection is kept, in seconds; default: 3600.
    pub connection_seconds: Option<u64>,
    /// How often a channel that is followed is looked at in the store, in milliseconds; default: 1000.
    pub watch_milliseconds: Option<u64>,
    /// Memory for chunks and manifests that several ask for, such as `256MiB` (the default).
    pub memory: Option<String>,
}

/// How much the API takes upon itself.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Of one caller.
    pub bounds: Bounds,
    /// Connections at the same time.
    pub connections: usize,
    /// How long one is kept.
    pub age: Duration,
    /// How often a channel is looked at.
    pub watch: Duration,
    /// Memory for what several ask for, in bytes.
    pub memory: u64,
}

impl Api {
    /// The limits, as far as they are said; else the defaults.
    ///
    /// # Errors
    /// Where a value makes no sense.
    pub fn limits(&self) -> Result<Limits> {
        let between = |name: &str, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                return Ok(value);
            }
            Err(Failure::usage(format!("api.{name}: {value} is not {least} to {most}")))
        };
        let count = |value: Option<usize>, default: usize| value.unwrap_or(default) as u64;
        let rate =
            between("requests_per_second", self.requests_per_second.unwrap_or(500).into(), 1, 1_000_000)?;
        let at_once = between("requests_at_once", count(self.requests_at_once, 2000), 1, 1_000_000)?;
        let connections = between("connections", count(self.connections, 4096), 1, 100_000)?;
        let age = between("connection_seconds", self.connection_seconds.unwrap_or(3600), 1, 604_800)?;
        let watch = between("watch_milliseconds", self.watch_milliseconds.unwrap_or(1000), 50, 3_600_000)?;
        let memory = match &self.memory {
            Some(text) => parse_bytes(text).map_err(|why| Failure::usage(format!("api.memory: {why}")))?,
            None => 256 << 20,
        };
        let memory = between("memory", memory, 64 << 20, 1 << 40)?;
        let narrow = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let rate = u32::try_from(rate).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN);
        Ok(Limits {
            bounds: Bounds { requests_a_second: rate, at_once: narrow(at_once) },
            connections: narrow(connections),
            age: Duration::from_secs(age),
            watch: Duration::from_millis(watch),
            memory,
        })
    }
}

/// How an API is asked. The token itself stands in the variable `WEIGHBRIDGE_API_TOKEN`, or in a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Client {
    /// The API's address, `https://HOST:PORT`; default: none. Variable `WEIGHBRIDGE_API`.
    pub url: Option<String>,
    /// A file that holds the token, which is read again when it is refused.
    pub token_file: Option<PathBuf>,
    /// Certificates in PEM by one of which the server's has to be signed; default: those that this machine trusts.
    pub ca: Option<PathBuf>,
    /// This client's certificate in PEM, where the server asks for one.
    pub certificate: Option<PathBuf>,
    /// Its private key in PEM.
    pub key: Option<PathBuf>,
    /// Whether a token may go over plain http to another machine; default: false.
    pub allow_http: Option<bool>,
}

impl Client {
    pub(super) fn check(&self) -> Result<()> {
        if let Some(url) = &self.url {
            bucket::check_endpoint(url).map_err(|error| Failure::usage(format!("client.url: {error}")))?;
        }
        if self.certificate.is_some() != self.key.is_some() {
            return Err(Failure::usage("client: certificate and key go together: give both"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn limits_are_checked_when_they_are_read() {
        let limits = Config::default().api.limits().unwrap();
        assert_eq!((limits.connections, limits.memory), (4096, 256 << 20));
        for text in [
            "api.requests_per_second = 0",
            "api.requests_at_once = 0",
            "api.connections = 0",
            "api.connection_seconds = 0",
            "api.watch_milliseconds = 1",
            "api.memory = '1MiB'",
            "api.memory = 'lots'",
            "api.token = 'x'",
            "client.url = 'ftp://x'",
            "client.url = 'https://user:hidden@x'",
            "client.token = 'hidden'",
            "client.certificate = 'x'",
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(!error.message.contains("hidden"), "{error}");
        }
    }
}
