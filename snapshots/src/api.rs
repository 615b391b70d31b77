//! An API that answers in a store's place (`docs/api.md`): hosts need no credentials of the store, and nothing polls
//! it.
//!
//! What comes from an API is believed no more than what comes from a store: manifests and chunks are hashed, entries
//! and snapshots have to be signed where that is demanded.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use reqwest::{Certificate, Identity, RequestBuilder, Response};
use serde::Deserialize;
use tokio::net::lookup_host;
use url::Url;

use weighbridge_schemas::host::HostStatus;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::{ChannelName, ModelName};

use crate::bucket::{self, Client, check_endpoint};
use crate::error::{Class, Result, StoreError};
use crate::outside;

/// The variable that holds the token.
const TOKEN_VARIABLE: &str = "WEIGHBRIDGE_API_TOKEN";
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a connection is kept that nothing goes over: what stands between may drop it without a word, and the API
/// itself ends it after a while.
const IDLE: Duration = Duration::from_secs(5);
/// How long an answer that is no stream may take.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest token, in bytes.
const TOKEN_BYTES: u64 = 4096;
/// Largest file of certificates, in bytes.
const CERTIFICATE_BYTES: u64 = 1 << 20;
/// Largest answer about one thing, in bytes.
const ANSWER_BYTES: usize = limits::CHANNEL_ENTRY_BYTES + 4096;
/// Most hosts on a page, and the largest page in bytes.
const HOSTS_A_PAGE: &str = "1000";
const FLEET_BYTES: usize = 16 << 20;
/// Most servers behind one name that are asked.
const MOST_SERVERS: usize = 64;
/// How often what may pass is tried, and the pause after the first time.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(250);

/// How an API is asked.
#[derive(Clone, Default)]
pub struct Options {
    /// The token itself.
    pub token: Option<String>,
    /// A file that holds it, which is read anew for each request.
    pub token_file: Option<PathBuf>,
    /// Certificates in PEM by one of which the server's has to be signed; else those that this machine trusts.
    pub ca: Option<PathBuf>,
    /// This client's certificate and key in PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Whether a token may go over plain http to another machine.
    pub allow_http: bool,
}

impl Options {
    /// With the token that stands in the variable `WEIGHBRIDGE_API_TOKEN`, where one does.
    #[must_use]
    pub fn from_environment() -> Self {
        let token = outside::variable(TOKEN_VARIABLE).filter(|token| !token.trim().is_empty());
        Self { token, ..Self::default() }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("token_file", &self.token_file).finish_non_exhaustive()
    }
}

/// What requests go over, and the token that they carry.
pub(crate) struct Line {
    pub(crate) http: reqwest::Client,
    token: Option<String>,
    token_file: Option<PathBuf>,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}

impl Line {
    /// What tells who asks.
    pub(crate) fn authorization(&self) -> Option<HeaderValue> {
        // A file that was named and cannot be read is no reason to ask as somebody else.
        let read = match &self.token_file {
            Some(path) => match text(path, TOKEN_BYTES) {
                Ok(text) => Some(text),
                Err(error) => {
                    tracing::warn!(%error, "the token cannot be read");
                    return None;
                }
            },
            None => None,
        };
        let token = read.as_deref().or(self.token.as_deref())?.trim();
        let mut header = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
        header.set_sensitive(true);
        Some(header)
    }
}

/// An API.
#[derive(Debug)]
pub struct Api {
    /// It ends in `/v1/`.
    base: Url,
    line: Arc<Line>,
    /// Which of those that its name stands for.
    server: Option<SocketAddr>,
}

/// What an API says that a channel or an id points at.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The channel and the bytes of its entry, where a channel was asked for.
    pub entry: Option<(ChannelName, Bytes)>,
}

#[derive(Deserialize)]
struct ResolvedAnswer {
    snapshot: SnapshotId,
    #[serde(default)]
    channel: Option<ChannelName>,
    #[serde(default)]
    entry: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: ErrorText,
}

#[derive(Deserialize)]
struct ErrorText {
    message: String,
}

impl Api {
    /// The API at `address`, `https://HOST:PORT`. Nothing is asked of it.
    ///
    /// # Errors
    /// [`Class::BadLocation`] where the address is none, a token would go over the wire as it is, or a file of
    /// certificates or the token cannot be read.
    pub fn new(address: &str, options: &Options) -> Result<Self> {
        Self::at(address, options, None)
    }

    /// The API at `address`, once for each address that its name has: of several servers behind one name each knows but
    /// what it was told itself. A name that is not found is left to whoever asks.
    ///
    /// # Errors
    /// As [`Api::new`].
    pub async fn each(address: &str, options: &Options) -> Result<Vec<Self>> {
        let one = Self::new(address, options)?;
        let named = match (one.base.host(), one.base.port_or_known_default()) {
            (Some(url::Host::Domain(name)), Some(port)) => (name, port),
            _ => return Ok(vec![one]),
        };
        let mut found: Vec<_> = lookup_host(named).await.map(Iterator::collect).unwrap_or_default();
        found.sort_unstable();
        found.dedup();
        found.truncate(MOST_SERVERS);
        if found.len() < 2 {
            return Ok(vec![one]);
        }
        found.into_iter().map(|server| Self::at(address, options, Some(server))).collect()
    }

    /// The API at `address`, whose name stands for this `server` alone.
    fn at(address: &str, options: &Options, server: Option<SocketAddr>) -> Result<Self> {
        check_endpoint(address).map_err(|_| {
            let why = "an API's address is https://HOST:PORT (http:// on this machine), without credentials, path or \
                       query";
            StoreError::new(Class::BadLocation, "--api", why)
        })?;
        let bad = |why: String| StoreError::new(Class::BadLocation, address, why);
        let url = Url::parse(address).map_err(|error| bad(error.to_string()))?;
        let has_token = options.token.is_some() || options.token_file.is_some();
        if url.scheme() == "http" && has_token && !options.allow_http && !is_this_machine(&url) {
            return Err(bad(
                "the token would go over the wire as it is; use https://, or allow it with --allow-http"
                    .to_owned(),
            ));
        }
        if let Some(path) = &options.token_file {
            text(path, TOKEN_BYTES)?;
        }
        let named = url.host_str().zip(server);
        let http = http(options, url.scheme() == "http", named)?;
        let base = url.join("/v1/").map_err(|error| bad(error.to_string()))?;
        let line = Line { http, token: options.token.clone(), token_file: options.token_file.clone() };
        Ok(Self { base, line: Arc::new(line), server })
    }

    /// A client of the objects.
    pub(crate) fn client(&self) -> Result<Client> {
        bucket::api_client(&self.base, Arc::clone(&self.line))
    }

    /// Its address, for people.
    #[must_use]
    pub fn shown(&self) -> String {
        let origin = self.base.origin().ascii_serialization();
        self.server.map_or(origin.clone(), |server| format!("{origin} ({})", server.ip()))
    }

    /// What `at`, a channel, an id or its first digits, points at.
    ///
    /// # Errors
    /// [`Class::NotFound`] where it points at nothing; else as the API fails.
    pub async fn resolve(&self, model: &ModelName, at: &str) -> Result<Resolved> {
        let object = format!("{model}@{at}");
        let mut url = self.url(&["models", model.as_str(), "resolve"])?;
        url.query_pairs_mut().append_pair("at", at);
        let bytes = self.asked(&object, ANSWER_BYTES, || self.line.http.get(url.clone())).await?;
        let answer: ResolvedAnswer = serde_json::from_slice(&bytes).map_err(|error| {
            StoreError::new(
                Class::Integrity,
                &object,
                format!("the API's answer is none of its own: {error}"),
            )
        })?;
        let entry = answer.channel.zip(answer.entry.map(|entry| Bytes::from(entry.to_string())));
        Ok(Resolved { snapshot: answer.snapshot, entry })
    }

    /// A channel as a stream of lines.
    pub(crate) async fn watch(
        &self,
        model: &ModelName,
        channel: &ChannelName,
        after: u64,
    ) -> Result<Response> {
        let mut url = self.url(&["models", model.as_str(), "channels", channel.as_str(), "watch"])?;
        url.query_pairs_mut().append_pair("after", &after.to_string());
        let object = format!("{model}@{channel}");
        let sent = tokio::time::timeout(ANSWER, self.dressed(self.line.http.get(url)).send()).await;
        let response =
            sent.map_err(|_| self.silent(&object))?.map_err(|error| self.broken(&object, &error))?;
        if response.status().is_success() { Ok(response) } else { Err(refused(&object, response).await.0) }
    }

    /// Tells how this host is.
    ///
    /// # Errors
    /// As the API fails.
    pub async fn report(&self, status: &HostStatus) -> Result<()> {
        let url = self.url(&["fleet", "hosts"])?;
        let body = status.to_json();
        let post =
            || self.line.http.post(url.clone()).header("content-type", "application/json").body(body.clone());
        self.asked("fleet/hosts", ANSWER_BYTES, post).await.map(drop)
    }

    /// The hosts that told how they are, a page of them: a JSON document, with the `token` of the next page.
    ///
    /// # Errors
    /// As the API fails.
    pub async fn hosts(&self, token: &str) -> Result<Bytes> {
        let mut url = self.url(&["fleet", "hosts"])?;
        url.query_pairs_mut().append_pair("page_size", HOSTS_A_PAGE).append_pair("page_token", token);
        self.asked("fleet/hosts", FLEET_BYTES, || self.line.http.get(url.clone())).await
    }

    fn url(&self, parts: &[&str]) -> Result<Url> {
        let mut url = self.base.clone();
        // An address with a host has a path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        Ok(url)
    }

    fn dressed(&self, request: RequestBuilder) -> RequestBuilder {
        match self.line.authorization() {
            Some(header) => request.header(AUTHORIZATION, header),
            None => request,
        }
    }

    /// Asks, some times where that may help, and gives the answer's body.
    async fn asked(&self, object: &str, most: usize, request: impl Fn() -> RequestBuilder) -> Result<Bytes> {
        let mut pause = PAUSE;
        for tries in 1.. {
            let (error, wait) = match self.once(object, most, request()).await {
                Ok(bytes) => return Ok(bytes),
                Err(failed) => failed,
            };
            if tries >= TRIES || error.class() != Class::Unreachable {
                return Err(error);
            }
            let least = wait.unwrap_or_default().min(ANSWER);
            tokio::time::sleep(least.max(pause.mul_f64(0.5 + fastrand::f64()))).await;
            pause *= 2;
        }
        Err(self.silent(object))
    }

    async fn once(
        &self,
        object: &str,
        most: usize,
        request: RequestBuilder,
    ) -> std::result::Result<Bytes, (StoreError, Option<Duration>)> {
        let request = self.dressed(request).timeout(ANSWER);
        let response = request.send().await.map_err(|error| (self.broken(object, &error), None))?;
        if !response.status().is_success() {
            return Err(refused(object, response).await);
        }
        body(response, most).await.map_err(|why| (StoreError::new(Class::Unreachable, object, why), None))
    }

    fn silent(&self, object: &str) -> StoreError {
        let why = format!("the API at {} does not answer", self.shown());
        StoreError::new(Class::Unreachable, object, why)
    }

    fn broken(&self, object: &str, error: &reqwest::Error) -> StoreError {
        // The innermost error says what happened; those around it repeat the address.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        let mut why = format!("the API at {} cannot be asked: {cause}", self.shown());
        // What answers a request in the clear with an alert of TLS says so.
        if self.base.scheme() == "http" && why.contains("invalid HTTP") {
            why.push_str("; does it speak TLS? Then use https://");
        }
        StoreError::new(Class::Unreachable, object, why)
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

/// What an answer that is a failure means, and how long it asks to wait.
async fn refused(object: &str, response: Response) -> (StoreError, Option<Duration>) {
    let status = response.status().as_u16();
    let wait = response.headers().get(RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse().ok());
    let said = body(response, ANSWER_BYTES).await.ok();
    let said = said.and_then(|bytes| serde_json::from_slice::<ErrorAnswer>(&bytes).ok());
    let message = said.map_or_else(|| format!("the API answered {status}"), |said| said.error.message);
    let message: String = message.chars().filter(|c| !c.is_control()).take(1000).collect();
    // The server may have named it too.
    let message = message.strip_prefix(&format!("{object}: ")).map_or(message.clone(), ToOwned::to_owned);
    let (class, message) = match status {
        401 | 403 => (
            Class::AccessDenied,
            format!("{message}; is the token right (--api-token-file, or WEIGHBRIDGE_API_TOKEN)?"),
        ),
        404 | 405 => (Class::NotFound, message),
        400 | 409 | 413 => (Class::Refused, message),
        _ => (Class::Unreachable, message),
    };
    (StoreError::new(class, object, message), wait.map(Duration::from_secs))
}

/// An answer's body, of at most `most` bytes.
async fn body(mut response: Response, most: usize) -> std::result::Result<Bytes, String> {
    let mut bytes = BytesMut::new();
    while let Some(run) = response.chunk().await.map_err(|error| format!("the answer broke: {error}"))? {
        if bytes.len() + run.len() > most {
            return Err(format!("the API's answer has more than {most} bytes"));
        }
        bytes.extend_from_slice(&run);
    }
    Ok(bytes.freeze())
}

fn is_this_machine(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// What requests go over. Proxies of the environment are for https alone: by plain http they would read the token,
/// which is to stay on this machine, or in a network that was said to be safe.
fn http(options: &Options, is_plain: bool, named: Option<(&str, SocketAddr)>) -> Result<reqwest::Client> {
    bucket::install_cryptography();
    let mut builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
        .tcp_keepalive(Duration::from_secs(15))
        .http1_only()
        .user_agent(concat!("weighbridge/", env!("CARGO_PKG_VERSION")));
    if is_plain {
        builder = builder.no_proxy();
    }
    if let Some((name, server)) = named {
        builder = builder.resolve(name, server);
    }
    if let Some(path) = &options.ca {
        let bad = |why: String| StoreError::new(Class::BadLocation, path.display(), why);
        let certificates = Certificate::from_pem_bundle(text(path, CERTIFICATE_BYTES)?.as_bytes());
        let certificates = certificates.map_err(|error| bad(format!("it holds no certificates: {error}")))?;
        if certificates.is_empty() {
            return Err(bad("it holds no certificate in PEM".to_owned()));
        }
        builder = builder.tls_certs_only(certificates);
    }
    if let Some((certificate, key)) = &options.identity {
        let both = text(certificate, CERTIFICATE_BYTES)? + "\n" + &text(key, CERTIFICATE_BYTES)?;
        let identity = Identity::from_pem(both.as_bytes()).map_err(|error| {
            let why = format!("certificate and key do not parse: {error}");
            StoreError::new(Class::BadLocation, certificate.display(), why)
        })?;
        builder = builder.identity(identity);
    }
    builder.build().map_err(|error| {
        StoreError::new(Class::BadLocation, "the API", format!("no client can be built: {error}"))
    })
}

/// A small file that a person wrote.
fn text(path: &std::path::Path, most: u64) -> Result<String> {
    use std::io::Read;
    let bad = |why: String| StoreError::new(Class::BadLocation, path.display(), why);
    let read = || {
        let file = crate::disk::open_regular(path, std::fs::File::options().read(true))?;
        let mut text = String::new();
        file.take(most + 1).read_to_string(&mut text)?;
        Ok::<_, std::io::Error>(text)
    };
    let text = read().map_err(|error| bad(format!("it cannot be read: {error}")))?;
    if text.len() as u64 > most {
        return Err(bad(format!("it has more than {most} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_server_behind_a_name_can_be_asked() {
        use std::io::{Read, Write};
        let answering = |ip: &str, port: u16, host: &'static str| {
            let listener = std::net::TcpListener::bind(format!("{ip}:{port}"))?;
            let address = listener.local_addr()?;
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{host}", host.len());
                stream.write_all(answer.as_bytes()).unwrap();
            });
            Ok::<_, std::io::Error>(address)
        };
        let one = answering("127.0.0.1", 0, "one").unwrap();
        // Another test may have this port of the other address.
        let Ok(other) = answering("127.0.0.2", one.port(), "other") else { return };
        let address = format!("http://localhost:{}", one.port());
        for (server, told) in [(one, "one"), (other, "other")] {
            let api = Api::at(&address, &Options::default(), Some(server)).unwrap();
            assert_eq!(api.hosts("").await.unwrap(), told.as_bytes());
            assert!(api.shown().contains(&server.ip().to_string()));
        }
        let found = Api::each(&address, &Options::default()).await.unwrap();
        assert!(!found.is_empty(), "this machine's own name");
        let absent = Api::each("https://absent.invalid:1", &Options::default()).await.unwrap();
        assert_eq!(absent.len(), 1, "whoever asks it is told that the name is not known");
    }

    /// Answers one request with these bytes; its address.
    fn answering_once(answer: Vec<u8>) -> SocketAddr {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(&answer).unwrap();
        });
        address
    }

    #[tokio::test]
    async fn what_fails_is_told_once_and_with_the_way_out() {
        let body =
            r#"{"error": {"class": "not_found", "message": "m@canry: the model has no such channel"}}"#;
        let head = format!("HTTP/1.1 404 Not Found\r\nContent-Length: {}\r\n\r\n", body.len());
        let address = format!("http://{}", answering_once((head + body).into_bytes()));
        let api = Api::new(&address, &Options::default()).unwrap();
        let error = api.resolve(&"m".parse().unwrap(), "canry").await.unwrap_err();
        assert_eq!(error.to_string(), "m@canry: the model has no such channel");

        // An alert of TLS, which is no HTTP.
        let address = format!("http://{}", answering_once(vec![21, 3, 3, 0, 2, 2, 70]));
        let api = Api::new(&address, &Options::default()).unwrap();
        let request = api.line.http.get(&address);
        let (error, _) = api.once("m", ANSWER_BYTES, request).await.unwrap_err();
        assert!(error.to_string().contains("Then use https://"), "{error}");
    }

    #[test]
    fn tokens_do_not_go_over_the_wire_as_they_are() {
        let options = Options { token: Some("t".into()), ..Options::default() };
        for address in ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://example.org"] {
            Api::new(address, &options).unwrap();
        }
        let error = Api::new("http://example.org", &options).unwrap_err();
        assert!(error.class() == Class::BadLocation && error.to_string().contains("--allow-http"), "{error}");
        Api::new("http://example.org", &Options { allow_http: true, ..options.clone() }).unwrap();
        Api::new("http://example.org", &Options::default()).unwrap();
        for address in ["", "example.org", "ftp://x", "https://user:secret@x", "https://x/?token=secret"] {
            let error = Api::new(address, &options).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(!format!("{options:?}").contains("\"t\""));
    }
}
