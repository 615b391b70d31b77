//! From a URL to a client of its store.
//!
//! | URL | store | variables |
//! |---|---|---|
//! | `s3://BUCKET/PREFIX` | Amazon S3, and what speaks like it | `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ... |
//! | `gs://BUCKET/PREFIX` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, `GOOGLE_APPLICATION_CREDENTIALS` ... |
//! | `az://CONTAINER/PREFIX` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY` ... |
//!
//! For S3 these are `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
//! `AWS_ENDPOINT_URL` or `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`, `AWS_SKIP_SIGNATURE`; without keys there, a web identity's
//! token (`AWS_WEB_IDENTITY_TOKEN_FILE`, `AWS_ROLE_ARN`), a container's role, the keys of a profile in the files of
//! Amazon's own tools (`AWS_PROFILE`, see `profile`), or a machine's role. `object_store` documents all variables at
//! its builders. Credentials come from there alone, never from a URL, which ends up in logs. Certificates are judged
//! by the system's own store of roots.

use std::fmt;
use std::sync::{Arc, Once};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use weighbridge_schemas::error::shorten;

use super::answers::{Answers, Watching};
use super::profile;
use super::uploads::Uploads;
use crate::api::Line;
use crate::error::{Class, Result, StoreError};
use crate::outside;

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// Most requests on their way at once, unless told otherwise.
pub const REQUESTS: usize = 64;
/// For how long what may pass is tried again, unless told otherwise.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How a bucket is spoken to. What is not set here comes from the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The endpoint's URL, of what is not Amazon's, Google's or Microsoft's own.
    pub endpoint: Option<String>,
    /// The bucket's region (S3).
    pub region: Option<String>,
    /// Whether the bucket stands in the path (`https://host/bucket`) or in the host's name (S3).
    pub path_style: Option<bool>,
    /// Whether the endpoint may be plain `http://`.
    pub allow_http: bool,
    /// Most requests on their way at once.
    pub requests: usize,
    /// For how long what may pass is tried again.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            path_style: None,
            allow_http: false,
            requests: REQUESTS,
            patience: PATIENCE,
        }
    }
}

/// A client of a bucket.
#[derive(Clone)]
pub struct Client {
    /// Its objects, by their keys below the URL's prefix. Nothing is tried again by itself.
    pub store: Arc<dyn ObjectStore>,
    /// The URL, for people.
    pub shown: String,
    /// How the store is told who asks, for people.
    pub access: &'static str,
    pub(super) answers: Arc<Answers>,
    scheme: &'static str,
    /// Where requests go, where that is told.
    endpoint: Option<String>,
    region: Option<String>,
    uploads: Option<Uploads>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the store, which holds credentials.
        f.debug_tuple("Client").field(&self.shown).finish()
    }
}

impl Client {
    /// Where requests go, for people.
    pub(super) fn endpoint_hint(&self) -> String {
        self.endpoint.clone().unwrap_or_else(|| "the store's endpoint".to_owned())
    }

    /// What to look at where the bucket is not found in its region.
    pub(super) fn region_hint(&self) -> String {
        match (self.scheme, &self.region) {
            ("s3", Some(region)) => {
                format!(
                    "the region is {region} by the configuration; set AWS_REGION (or region under [bucket]) to the \
                     bucket's"
                )
            }
            ("s3", None) => "set AWS_REGION (or region under [bucket]) to the bucket's".to_owned(),
            ("az", _) => "check AZURE_STORAGE_ACCOUNT_NAME and the container's name".to_owned(),
            _ => "check the bucket's name".to_owned(),
        }
    }

    /// Where requests go and the bucket's region, where these are said.
    pub(super) fn destination(&self) -> (Option<&str>, Option<&str>) {
        (self.endpoint.as_deref(), self.region.as_deref())
    }

    /// The bucket's uploads, where it is one of S3's.
    pub(super) fn uploads(&self) -> Option<&Uploads> {
        self.uploads.as_ref()
    }

    /// What tells this store from others: where requests go, and the URL.
    #[must_use]
    pub fn identity(&self) -> String {
        format!("{} {}", self.endpoint.as_deref().unwrap_or_default(), self.shown)
    }

    #[cfg(test)]
    pub(super) fn of_tests() -> Self {
        Self {
            store: Arc::new(object_store::memory::InMemory::new()),
            shown: "s3://bucket/p".to_owned(),
            access: access_hint("s3"),
            answers: Answers::new(),
            scheme: "s3",
            endpoint: None,
            region: None,
            uploads: None,
        }
    }
}

/// Whether `location` names a bucket.
#[must_use]
pub fn is_bucket(location: &str) -> bool {
    let is =
        |scheme: &&str| location.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme));
    ["s3://", "gs://", "az://"].iter().any(is)
}

/// Checks that `url` can name a bucket, without building a client.
///
/// # Errors
/// [`Class::BadLocation`].
pub fn check(url: &str) -> Result<()> {
    read(url).map(drop)
}

/// Whether `url` names `place`, or what lies below it: in the same bucket, part by part. Both are URLs of buckets.
///
/// # Errors
/// [`Class::BadLocation`] where one of them is none.
pub fn is_below(url: &str, place: &str) -> Result<bool> {
    let (found, place) = (read(url)?, read(place)?);
    Ok(found.scheme == place.scheme
        && found.url.host_str() == place.url.host_str()
        && found.url.port() == place.url.port()
        && found.prefix.prefix_matches(&place.prefix))
}

/// Checks that `endpoint` can be one: `https://HOST` or `http://HOST`, and nothing that is secret.
///
/// # Errors
/// [`Class::BadLocation`].
pub fn check_endpoint(endpoint: &str) -> Result<()> {
    let bad = |why: String| StoreError::new(Class::BadLocation, "endpoint", why);
    plain("the endpoint", Some(endpoint.to_owned())).map_err(bad)?;
    let url = Url::parse(endpoint)
        .map_err(|error| bad(format!("it is no URL ({error}); write it like https://s3.example.org")))?;
    if !url.username().is_empty()
        || url.password().is_some()
        || url.query().is_some()
        || url.fragment().is_some()
    {
        return Err(bad(
            "it holds credentials, a query or a fragment; write it like https://s3.example.org".into()
        ));
    }
    match url.scheme() {
        "http" | "https" => Ok(()),
        other => Err(bad(format!("{other}:// is not supported; write it like https://s3.example.org"))),
    }
}

/// What a URL says.
struct Place {
    url: Url,
    scheme: &'static str,
    shown: String,
    prefix: Path,
}

fn read(text: &str) -> Result<Place> {
    let bad = |shown: &str, why: String| StoreError::new(Class::BadLocation, shown, why);
    if text.split('/').any(is_step) || text.contains(|c: char| c.is_control() || c == '\\') {
        let why = "it has a . or .. as a part, a backslash or a control character in it";
        return Err(bad(&shorten(text), why.to_owned()));
    }
    let url = Url::parse(text).map_err(|error| bad(&shorten(text), format!("it is no URL: {error}")))?;
    let host = url.host_str().unwrap_or_default();
    let shown = shorten(&format!("{}://{host}{}", url.scheme(), url.path().trim_end_matches('/')));
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        let why = "it holds credentials or a query; credentials belong into the environment";
        return Err(bad(&shown, why.to_owned()));
    }
    if url.fragment().is_some() {
        return Err(bad(&shown, "it has a fragment; write # as %23".to_owned()));
    }
    if host.is_empty() {
        return Err(bad(&shown, "it names no bucket".to_owned()));
    }
    let prefix = Path::from_url_path(url.path());
    let prefix = prefix.map_err(|error| bad(&shown, format!("it is no place: {error}")))?;
    let scheme = match url.scheme() {
        "s3" => "s3",
        "gs" => "gs",
        "az" => "az",
        other => return Err(bad(&shown, format!("{other}:// is not supported; known are s3, gs and az"))),
    };
    Ok(Place { url, scheme, shown, prefix })
}

/// Whether a part of a path means another one, as URLs are read: `.` and `..`, however they are written.
fn is_step(part: &str) -> bool {
    matches!(part.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..")
}

/// A client of the bucket that `url` names, and the prefix in it. Nothing is asked of the store.
///
/// # Errors
/// [`Class::BadLocation`] where the URL names no bucket, holds what does not belong there, or no client can be built.
pub fn client(url: &str, options: &Options) -> Result<(Client, Path)> {
    let answers = Answers::new();
    made(url, options, &answers, Some(Watching { answers: Arc::clone(&answers), api: None }))
}

/// A client of the objects that an API answers for, at `url`. Nothing is asked of it.
///
/// # Errors
/// [`Class::BadLocation`] where no client can be built.
pub(crate) fn api_client(url: &Url, line: Arc<Line>) -> Result<Client> {
    let answers = Answers::new();
    let watching = Watching { answers: Arc::clone(&answers), api: Some(line) };
    let options = ClientOptions::new().with_timeout_disabled().with_allow_http(true);
    let shown = url.origin().ascii_serialization();
    let built = HttpBuilder::new()
        .with_url(format!("{url}objects"))
        .with_retry(no_retries())
        .with_client_options(options)
        .with_http_connector(watching)
        .build();
    let store = built.map_err(|error| StoreError::new(Class::BadLocation, &shown, error.to_string()))?;
    Ok(Client {
        store: Arc::new(store),
        shown,
        access: access_hint("api"),
        answers,
        scheme: "api",
        endpoint: None,
        region: None,
        uploads: None,
    })
}

/// As [`client`], for those who look at `object_store`'s own errors.
///
/// # Errors
/// As [`client`].
pub fn plain_client(url: &str, options: &Options) -> Result<(Client, Path)> {
    made(url, options, &Answers::new(), None)
}

fn made(
    url: &str,
    options: &Options,
    answers: &Arc<Answers>,
    watching: Option<Watching>,
) -> Result<(Client, Path)> {
    let Place { url, scheme, shown, prefix } = read(url)?;
    let access = access_hint(scheme);
    let answers = Arc::clone(answers);
    let built = build(scheme, &url, options, watching);
    let (store, endpoint, region, uploads) = built.map_err(|error| {
        StoreError::new(Class::BadLocation, &shown, format!("no client can be built: {error}; {access}"))
    })?;
    Ok((Client { store, shown, access, answers, scheme, endpoint, region, uploads }, prefix))
}

impl Client {
    /// The same, of what lies below `prefix` alone.
    #[must_use]
    pub fn below(mut self, prefix: &Path) -> Self {
        if prefix.as_ref().is_empty() {
            return self;
        }
        self.store = Arc::new(PrefixStore::new(self.store, prefix.clone()));
        self.uploads = self.uploads.map(|uploads| uploads.below(prefix));
        self
    }
}

/// The variables that say who asks.
fn access_hint(scheme: &str) -> &'static str {
    match scheme {
        "s3" => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN with temporary ones) to \
             credentials that may do this here, or AWS_PROFILE to a profile that has such, or \
             AWS_SKIP_SIGNATURE=true for a public bucket; and AWS_REGION to the bucket's region"
        }
        "gs" => {
            "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to the file of a key that may do this here, \
             or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        "api" => {
            "give a token that has the role fetch for the model: in the variable WEIGHBRIDGE_API_TOKEN, or \
             --api-token-file"
        }
        _ => {
            "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, to what may do \
             this here, or AZURE_SKIP_SIGNATURE=true for a public container"
        }
    }
}

type Built = (Arc<dyn ObjectStore>, Option<String>, Option<String>, Option<Uploads>);

fn build(
    scheme: &str,
    url: &Url,
    options: &Options,
    watching: Option<Watching>,
) -> std::result::Result<Built, Box<dyn std::error::Error>> {
    install_cryptography();
    let retry = no_retries();
    let client = |allow_http: bool| {
        let allow_http = allow_http || options.allow_http;
        ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT).with_allow_http(allow_http)
    };
    let allow = |name: &str| {
        outside::variable(name)
            .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
    };
    Ok(match scheme {
        "s3" => s3(url, options, watching, client(allow("AWS_ALLOW_HTTP")))?,
        "gs" => {
            let mut builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str()).with_retry(retry);
            if let Some(endpoint) = &options.endpoint {
                builder = builder.with_base_url(endpoint);
            }
            if let Some(watching) = watching {
                builder = builder.with_http_connector(watching);
            }
            let client = client(allow("GOOGLE_ALLOW_HTTP"));
            (Arc::new(builder.with_client_options(client).build()?), options.endpoint.clone(), None, None)
        }
        _ => {
            let mut builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str()).with_retry(retry);
            if let Some(endpoint) = &options.endpoint {
                builder = builder.with_endpoint(endpoint.clone());
            }
            let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
            endpoint.as_deref().map_or(Ok(()), check_endpoint)?;
            plain("AZURE_STORAGE_ACCOUNT_NAME", builder.get_config_value(&AzureConfigKey::AccountName))?;
            let emulated = allow("AZURE_STORAGE_USE_EMULATOR");
            if let Some(watching) = watching {
                builder = builder.with_http_connector(watching);
            }
            let client = client(emulated || allow("AZURE_ALLOW_HTTP"));
            (Arc::new(builder.with_client_options(client).build()?), options.endpoint.clone(), None, None)
        }
    })
}

/// A client of S3, or of what speaks like it.
fn s3(
    url: &Url,
    options: &Options,
    watching: Option<Watching>,
    client: ClientOptions,
) -> std::result::Result<Built, Box<dyn std::error::Error>> {
    let mut builder = AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(no_retries());
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    builder = profile::add(builder, outside::variable)?;
    if let Some(path_style) = options.path_style {
        builder = builder.with_virtual_hosted_style_request(!path_style);
    }
    use AmazonS3ConfigKey as Config;
    for (name, key) in [
        ("AWS_ACCESS_KEY_ID", Config::AccessKeyId),
        ("AWS_SECRET_ACCESS_KEY", Config::SecretAccessKey),
        ("AWS_SESSION_TOKEN", Config::Token),
        ("the region (AWS_REGION)", Config::Region),
    ] {
        plain(name, builder.get_config_value(&key))?;
    }
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    endpoint.as_deref().map_or(Ok(()), check_endpoint)?;
    let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
    let unsigned = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
    // The store compares what came with what was sent.
    builder = builder.with_checksum_algorithm(Checksum::SHA256);
    let mut http = None;
    if let Some(watching) = watching {
        http = Some(watching.connect(&client)?);
        builder = builder.with_http_connector(watching);
    }
    let store = Arc::new(builder.with_client_options(client).build()?);
    // Who is nobody signs no URL.
    let signed = unsigned.is_none_or(|unsigned| unsigned == "false");
    let uploads = http.filter(|_| signed).map(|http| Uploads::new(Arc::clone(&store), http));
    Ok((store, endpoint, region, uploads))
}

/// Refuses what cannot stand in a request: an end of a line, as files of secrets have one.
fn plain(name: &str, value: Option<String>) -> std::result::Result<(), String> {
    match value {
        Some(value) if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Err(format!("{name} is empty, or has a space, an end of a line or the like in it"))
        }
        _ => Ok(()),
    }
}

/// Who asks tries again, and bounds how long a store may be silent: a whole request may take longer.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// TLS by `ring`, for the whole process: the client is built without a library of its own.
pub(crate) fn install_cryptography() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Only a second call in one process fails, and the first one counts then.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_url_is_said_without_its_secrets() {
        let refused = |url: &str| {
            let error = client(url, &Options::default()).unwrap_err();
            assert_eq!(error.class(), Class::BadLocation, "{url}");
            error.to_string()
        };
        for url in
            ["s3://key:hidden@bucket/a", "s3://bucket/a?X-Amz-Signature=hidden", "s3://bucket/a#hidden"]
        {
            assert!(!refused(url).contains("hidden"), "{url}");
        }
        assert!(refused("s3:///a").contains("bucket"));
        assert!(refused("hdfs://a/b").contains("s3, gs and az"));
    }

    #[test]
    fn what_lies_below_a_place_is_told_by_whole_parts() {
        for (url, place, expected) in [
            ("s3://b/team-a/step-1", "s3://b/team-a", true),
            ("s3://b/team-a", "s3://b/team-a/", true),
            ("S3://b/x", "s3://b", true),
            ("s3://b/team-a%20x/1", "s3://b/team-a x", true),
            ("s3://b/team-another/1", "s3://b/team-a", false),
            ("s3://b", "s3://b/team-a", false),
            ("s3://other/team-a/1", "s3://b/team-a", false),
            ("gs://b/team-a/1", "s3://b/team-a", false),
        ] {
            assert_eq!(is_below(url, place).unwrap(), expected, "{url} {place}");
        }
        for up in ["..", "%2e%2e", ".%2E", "%2E.", ".", "%2e"] {
            let url = format!("s3://b/team-a/{up}/team-b/step-9");
            assert_eq!(is_below(&url, "s3://b/team-a").unwrap_err().class(), Class::BadLocation, "{url}");
        }
    }

    #[test]
    fn a_client_shows_no_credentials() {
        let (client, prefix) = client("s3://bucket/a/b/", &Options::default()).unwrap();
        assert_eq!((client.shown.as_str(), prefix.as_ref()), ("s3://bucket/a/b", "a/b"));
        assert_eq!(format!("{client:?}"), "Client(\"s3://bucket/a/b\")");
    }
}
