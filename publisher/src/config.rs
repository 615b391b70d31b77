//! `weighbridge.toml`: what would otherwise be said on every command line. Unknown fields are refused.

use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use weighbridge_schemas::limits;
use weighbridge_snapshots::bucket;
use weighbridge_snapshots::root::check_location;
use weighbridge_snapshots::sign::PublicKey;

use crate::error::{Failure, Result};
use crate::sources::Allowed;

mod api;

pub use api::{Api, Client, Limits};

/// Where the configuration is looked for when none is named.
pub const DEFAULT_FILE: &str = "weighbridge.toml";
/// The store when none is named anywhere.
pub const DEFAULT_STORE: &str = "weighbridge-data/store";
/// The queue when none is named anywhere.
pub const DEFAULT_QUEUE: &str = "embedded:weighbridge-data/queue";
/// The spool when none is named anywhere.
pub const DEFAULT_SPOOL: &str = "weighbridge-data/spool";
/// Where `serve` answers those who watch it, when nothing else is said.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7460);
/// Where the API answers, when nothing else is said.
pub const DEFAULT_API_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7461);
/// The bytes of a checkpoint that make a part, when nothing else is said.
pub const DEFAULT_PART: u64 = 1 << 30;
/// The memory budget when none is named anywhere, in bytes.
pub const DEFAULT_MEMORY: u64 = 512 << 20;
/// The smallest memory budget that lets a publish go on, in bytes.
pub const LEAST_MEMORY: u64 = 128 << 20;

/// The configuration file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The store: a path, or a `file://`, `s3://`, `gs://` or `az://` URL. Variable `WEIGHBRIDGE_STORE`; default
    /// `weighbridge-data/store`.
    pub store: Option<String>,
    /// The memory that one process may use, such as `512MiB` (the default). Variable `WEIGHBRIDGE_MEMORY`.
    pub memory: Option<String>,
    /// Threads that read and encode; default: all cores. Variable `WEIGHBRIDGE_THREADS`.
    pub threads: Option<usize>,
    /// Whether `publish` and `fetch` leave it to the system when what they write gets to the disk, so that a crash of
    /// the machine may lose or damage what was written last; default: false. Variable `WEIGHBRIDGE_NO_SYNC`.
    pub no_sync: Option<bool>,
    /// The queue: `embedded:PATH`, or a broker's `amqp://` or `amqps://` URL. Variable `WEIGHBRIDGE_QUEUE`; default
    /// `embedded:weighbridge-data/queue`.
    pub queue: Option<String>,
    /// The trainer's spool: a folder. Variable `WEIGHBRIDGE_SPOOL`; default `weighbridge-data/spool`.
    pub spool: Option<PathBuf>,
    /// Where checkpoints come from.
    #[serde(default)]
    pub sources: Sources,
    /// How workers work.
    #[serde(default)]
    pub worker: Worker,
    /// Who signs, and whose signature is demanded.
    #[serde(default)]
    pub signing: Signing,
    /// How a store in a bucket is spoken to.
    #[serde(default)]
    pub bucket: Bucket,
    /// How snapshots are fetched.
    #[serde(default)]
    pub fetch: Fetch,
    /// How the API is offered.
    #[serde(default)]
    pub api: Api,
    /// How an API is asked.
    #[serde(default)]
    pub client: Client,
}

/// Who signs what is written, and whose signature is demanded of what is read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signing {
    /// Files of private keys, all of which sign what is published and where channels go; default: nobody signs.
    /// Variable `WEIGHBRIDGE_SIGNING_KEYS`, with `:` between them.
    pub keys: Option<Vec<PathBuf>>,
    /// Public keys, files or `ed25519:BASE64`, one of which must have signed what is fetched, verified, moved to,
    /// or built upon by a publish (what its channel points at, and parts that others made); default: none is
    /// demanded. Variable `WEIGHBRIDGE_REQUIRE_SIGNED_BY`, with `,` between them.
    pub require: Option<Vec<String>>,
}

/// How a store in a bucket is spoken to. Who asks stands in the environment alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// The endpoint's URL, of a store that is not Amazon's, Google's or Microsoft's own; default: what the
    /// environment says.
    pub endpoint: Option<String>,
    /// The bucket's region (S3); default: what the environment says.
    pub region: Option<String>,
    /// Whether the bucket stands in the path, `https://HOST/BUCKET` (the default), or in the host's name (S3).
    pub path_style: Option<bool>,
    /// Whether the endpoint may be plain `http://`; default: false.
    pub allow_http: Option<bool>,
    /// Most requests on their way at once; default: 64.
    pub requests: Option<usize>,
    /// For how long what may pass is tried again, in seconds; default: 120.
    pub retry_seconds: Option<u64>,
}

/// How snapshots are fetched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetch {
    /// The most bytes a second that come out of the store, such as `100MiB`; default: no bound.
    pub bandwidth: Option<String>,
    /// Chunks that come out of a bucket at once; default: 16.
    pub streams: Option<usize>,
    /// The command that is run after each swap of a host that follows a channel; default: none.
    pub exec: Option<String>,
    /// The command that is run before each swap; default: none.
    pub exec_before: Option<String>,
    /// How long these may take, in seconds; default: 60.
    pub exec_seconds: Option<u64>,
    /// Versions that stay in a followed folder; default: 2.
    pub keep: Option<usize>,
    /// How often a store is asked for a followed channel's next entry, such as `2s` (the default).
    pub interval: Option<String>,
    /// The address where a follower's health and metrics are served; default: none.
    pub listen: Option<SocketAddr>,
    /// What a host that follows is called; default: the machine's name.
    pub host_name: Option<String>,
}

/// Where checkpoints come from that are dropped on the queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sources {
    /// Absolute paths and URLs below which workers may read; default: every path of this machine, no URL.
    pub allow: Option<Vec<String>>,
}

/// How workers work.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Messages handled at the same time, which share memory and threads; default: 1.
    pub concurrency: Option<usize>,
    /// How many bytes of a checkpoint make a part; default: 1GiB.
    pub part_size: Option<String>,
    /// Jobs of one model that are converted at the same time, at most; default: 4.
    pub jobs_per_model: Option<usize>,
    /// `cpu`, `gpu` or `auto` (the default).
    pub device: Option<Device>,
    /// The address where health and metrics are served; default: none for `worker`, 127.0.0.1:7460 for `serve`.
    pub listen: Option<SocketAddr>,
    /// How long a message is taken for at a time, in seconds; default: 60.
    pub lease_seconds: Option<u64>,
    /// How long messages at hand may take to end when the worker is asked to stop, in seconds; default: 20.
    pub stop_seconds: Option<u64>,
}

/// Which messages a worker takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// Those that need no GPU.
    Cpu,
    /// Those for a GPU first.
    Gpu,
    /// As `gpu` where this machine has one, else as `cpu`.
    Auto,
}

impl Config {
    /// Reads the configuration: `named`, which has to be there, or [`DEFAULT_FILE`], which need not.
    ///
    /// # Errors
    /// Where the file cannot be read, or does not parse.
    pub fn load(named: Option<&Path>) -> Result<Self> {
        let path = named.unwrap_or(Path::new(DEFAULT_FILE));
        match read_text(path) {
            Ok(text) => Self::parse(&text).map_err(|failure| failure.while_doing(path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => Ok(Self::default()),
            Err(error) => Err(Failure::usage(format!("{}: it cannot be read: {error}", path.display()))),
        }
    }

    /// Reads configuration text.
    ///
    /// # Errors
    /// Where it does not parse, or a value makes no sense.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line =
                error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            Failure::usage(format!("line {line}: {}", error.message()))
        })?;
        if let Some(store) = &config.store {
            check_location(store).map_err(|error| Failure::usage(format!("store: {error}")))?;
        }
        if let Some(memory) = &config.memory {
            check_memory(memory).map_err(|why| Failure::usage(format!("memory: {why}")))?;
        }
        if let Some(threads) = config.threads {
            check_threads(threads).map_err(|why| Failure::usage(format!("threads: {why}")))?;
        }
        if let Some(queue) = &config.queue {
            weighbridge_queue::url::check(queue)?;
        }
        if let Some(prefixes) = &config.sources.allow {
            Allowed::new(prefixes)?;
        }
        config.worker.check()?;
        config.signing.check()?;
        config.bucket.check()?;
        config.fetch.check()?;
        config.api.limits()?;
        config.client.check()?;
        Ok(config)
    }
}

impl Signing {
    /// Checks what can be checked without looking at files. An empty list is refused: it would demand nothing, where
    /// somebody meant to demand something.
    fn check(&self) -> Result<()> {
        let lists =
            [("keys", self.keys.as_ref().map(Vec::len)), ("require", self.require.as_ref().map(Vec::len))];
        if let Some((name, _)) = lists.into_iter().find(|(_, length)| *length == Some(0)) {
            return Err(Failure::usage(format!("signing.{name}: it names no key; leave it out")));
        }
        let nameless = self.keys.iter().flatten().any(|file| file.as_os_str().is_empty())
            || self.require.iter().flatten().any(String::is_empty);
        if nameless {
            return Err(Failure::usage("signing: a key's name is empty"));
        }
        for text in self.require.iter().flatten().filter(|text| text.starts_with("ed25519:")) {
            text.parse::<PublicKey>().map_err(|error| Failure::usage(format!("signing.require: {error}")))?;
        }
        Ok(())
    }
}

impl Worker {
    fn check(&self) -> Result<()> {
        if let Some(size) = &self.part_size {
            check_part(size).map_err(|why| Failure::usage(format!("worker.part_size: {why}")))?;
        }
        for (name, number) in [("concurrency", self.concurrency), ("jobs_per_model", self.jobs_per_model)] {
            if let Some(number) = number {
                check_threads(number).map_err(|why| Failure::usage(format!("worker.{name}: {why}")))?;
            }
        }
        if let Some(seconds) = self.lease_seconds.filter(|seconds| !(1..=86_400).contains(seconds)) {
            return Err(Failure::usage(format!("worker.lease_seconds: {seconds} is not 1 to 86400")));
        }
        if let Some(seconds) = self.stop_seconds.filter(|seconds| *seconds > 86_400) {
            return Err(Failure::usage(format!("worker.stop_seconds: {seconds} is not 0 to 86400")));
        }
        Ok(())
    }
}

impl Bucket {
    fn check(&self) -> Result<()> {
        if let Some(endpoint) = &self.endpoint {
            bucket::check_endpoint(endpoint)
                .map_err(|error| Failure::usage(format!("bucket.endpoint: {error}")))?;
        }
        if self.region.as_ref().is_some_and(String::is_empty) {
            return Err(Failure::usage("bucket.region: it is empty"));
        }
        if let Some(requests) = self.requests {
            check_threads(requests).map_err(|why| Failure::usage(format!("bucket.requests: {why}")))?;
        }
        if let Some(seconds) = self.retry_seconds.filter(|seconds| !(1..=3600).contains(seconds)) {
            return Err(Failure::usage(format!("bucket.retry_seconds: {seconds} is not 1 to 3600")));
        }
        Ok(())
    }

    /// The same, for who opens a store.
    #[must_use]
    pub fn options(&self) -> bucket::Options {
        let default = bucket::Options::default();
        bucket::Options {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            path_style: self.path_style,
            allow_http: self.allow_http.unwrap_or(default.allow_http),
            requests: self.requests.unwrap_or(default.requests),
            patience: self.retry_seconds.map_or(default.patience, Duration::from_secs),
        }
    }
}

impl Fetch {
    fn check(&self) -> Result<()> {
        if let Some(text) = &self.bandwidth {
            check_bandwidth(text).map_err(|why| Failure::usage(format!("fetch.bandwidth: {why}")))?;
        }
        if let Some(streams) = self.streams {
            check_threads(streams).map_err(|why| Failure::usage(format!("fetch.streams: {why}")))?;
        }
        if let Some(seconds) = self.exec_seconds {
            check_seconds(seconds).map_err(|why| Failure::usage(format!("fetch.exec_seconds: {why}")))?;
        }
        if let Some(keep) = self.keep {
            check_keep(keep).map_err(|why| Failure::usage(format!("fetch.keep: {why}")))?;
        }
        if let Some(text) = &self.interval {
            check_interval(text).map_err(|why| Failure::usage(format!("fetch.interval: {why}")))?;
        }
        Ok(())
    }
}

/// Reads a number of bytes a second.
///
/// # Errors
/// A message for people.
pub fn check_bandwidth(text: &str) -> std::result::Result<u64, String> {
    let bandwidth = parse_bytes(text)?;
    // Less, and a chunk of 8 MiB takes a quarter of an hour.
    if bandwidth >= 8 << 10 {
        return Ok(bandwidth);
    }
    Err(format!("{bandwidth} bytes a second are too few; at least 8KiB"))
}

/// Checks how long a command may take, in seconds.
///
/// # Errors
/// A message for people.
pub fn check_seconds(seconds: u64) -> std::result::Result<u64, String> {
    if (1..=86_400).contains(&seconds) { Ok(seconds) } else { Err(format!("{seconds} is not 1 to 86400")) }
}

/// Checks how many versions stay in a folder.
///
/// # Errors
/// A message for people.
pub fn check_keep(keep: usize) -> std::result::Result<usize, String> {
    let most = limits::HOST_VERSIONS;
    if (1..=most).contains(&keep) { Ok(keep) } else { Err(format!("{keep} is not 1 to {most}")) }
}

/// Reads how often something is done: a number with `ms`, `s` or `m` behind it.
///
/// # Errors
/// A message for people.
pub fn check_interval(text: &str) -> std::result::Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match text.get(digits.len()..).unwrap_or_default().trim() {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => 0,
    };
    let time = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).unwrap_or(0);
    if (100..=3_600_000).contains(&time) {
        return Ok(Duration::from_millis(time));
    }
    Err(format!("{text:?} is no time from 100ms to 60m; write it like 2s"))
}

/// Reads the size of a part, in bytes.
///
/// # Errors
/// A message for people.
pub fn check_part(text: &str) -> std::result::Result<u64, String> {
    let size = parse_bytes(text)?;
    if (1 << 16..=1 << 40).contains(&size) {
        return Ok(size);
    }
    Err(format!("{size} bytes are not 64KiB to 1024GiB"))
}

/// Reads a file that a person wrote: a regular one (a pipe would be waited for), of at most [`limits::POLICY_BYTES`].
///
/// # Errors
/// As reading fails.
pub fn read_text(path: &Path) -> io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let most = limits::POLICY_BYTES as u64;
    let mut text = String::new();
    File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(text)
}

/// Reads a memory budget, in bytes.
///
/// # Errors
/// A message for people.
pub fn check_memory(text: &str) -> std::result::Result<u64, String> {
    let memory = parse_bytes(text)?;
    if memory < LEAST_MEMORY {
        return Err(format!("{memory} bytes are too few; at least {}MiB", LEAST_MEMORY >> 20));
    }
    Ok(memory)
}

/// Checks a number of threads.
///
/// # Errors
/// A message for people.
pub fn check_threads(threads: usize) -> std::result::Result<usize, String> {
    if (1..=1024).contains(&threads) { Ok(threads) } else { Err(format!("{threads} is not 1 to 1024")) }
}

/// Reads a size in bytes: a number, with `KiB`, `MiB` or `GiB` behind it, or nothing.
///
/// # Errors
/// A message for people.
pub fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let bad = || format!("{text:?} is no size; write it like 512MiB (KiB, MiB or GiB)");
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match text.get(digits.len()..).unwrap_or_default().trim() {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" | "m" => 1 << 20,
        "GiB" | "G" | "g" => 1 << 30,
        _ => return Err(bad()),
    };
    digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1 GiB"), Ok(1 << 30));
        assert_eq!(parse_bytes("7"), Ok(7));
        for text in ["", "MiB", "1.5GiB", "-1", "1TB", "99999999999GiB", "é"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn intervals() {
        for (text, milliseconds) in [("2s", 2000), ("500 ms", 500), ("60m", 3_600_000)] {
            assert_eq!(check_interval(text), Ok(Duration::from_millis(milliseconds)));
        }
        for text in ["", "2", "s", "99ms", "61m", "-1s", "1h", "99999999999999999999s"] {
            assert!(check_interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn unknown_fields_and_bad_values_are_refused_with_their_line() {
        assert_eq!(Config::parse("store = 'x'\nthreads = 2").unwrap().threads, Some(2));
        assert_eq!(Config::parse("no_sync = true").unwrap().no_sync, Some(true));
        let error = Config::parse("store = 'x'\nstoer = 'y'").unwrap_err();
        assert!(error.message.contains("line 2") && error.message.contains("stoer"), "{error}");
        for text in ["store = 'hdfs://x'", "memory = 'lots'", "memory = '1MiB'", "threads = 0", "no_sync = 1"]
        {
            assert!(Config::parse(text).is_err(), "{text}");
        }
        assert!(!error.message.contains('\n'));
    }

    #[test]
    fn keys_are_named_or_left_out() {
        let good = "[signing]\nkeys = ['a.pem', 'b.pem']\nrequire = ['a.pem.pub', \
                    'ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=']";
        assert_eq!(Config::parse(good).unwrap().signing.keys.map(|keys| keys.len()), Some(2));
        for text in ["keys = []", "require = []", "keys = ['']", "require = ['']", "key = ['a']"] {
            assert!(Config::parse(&format!("[signing]\n{text}")).is_err(), "{text}");
        }
        let error = Config::parse("[signing]\nrequire = ['ed25519:0123456789abcdef']").unwrap_err();
        assert!(error.message.contains("signing.require"), "{error}");
    }

    #[test]
    fn how_a_bucket_is_spoken_to_is_checked_when_it_is_read() {
        let text = "[bucket]\nendpoint = 'https://s3.example.org'\nregion = 'eu'\npath_style = false\n\
                    requests = 8\nretry_seconds = 30\n[fetch]\nbandwidth = '100MiB'\nstreams = 4";
        let options = Config::parse(text).unwrap().bucket.options();
        assert_eq!((options.region.as_deref(), options.path_style), (Some("eu"), Some(false)));
        assert_eq!((options.requests, options.patience), (8, Duration::from_secs(30)));
        assert_eq!(Config::default().bucket.options(), bucket::Options::default());
        for text in [
            "bucket.endpoint = 's3.example.org'",
            "bucket.endpoint = 'ftp://s3.example.org'",
            "bucket.endpoint = 'https://key:hidden@s3.example.org'",
            "bucket.endpoint = 'https://s3.example.org/?token=hidden'",
            "bucket.region = ''",
            "bucket.requests = 0",
            "bucket.requests = 1025",
            "bucket.retry_seconds = 0",
            "bucket.retry_seconds = 3601",
            "bucket.secret_access_key = 'hidden'",
            "fetch.bandwidth = '1KiB'",
            "fetch.streams = 0",
            "fetch.exec_seconds = 0",
            "fetch.keep = 0",
            "fetch.interval = '2'",
            "fetch.listen = 'x'",
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(!error.message.contains("hidden"), "{error}");
        }
    }
}
