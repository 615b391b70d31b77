//! From what a person writes for a checkpoint to where it lies: a path, or a URL.
//!
//! | URL | store | variables |
//! |---|---|---|
//! | `s3://BUCKET/KEY` | Amazon S3, and what speaks like it | `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ... |
//! | `gs://BUCKET/KEY` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, `GOOGLE_APPLICATION_CREDENTIALS`, ... |
//! | `az://CONTAINER/KEY` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, ... |
//! | `file:///PATH` | this machine | none |
//!
//! For S3 these are `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
//! `AWS_ENDPOINT_URL` or `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`, `AWS_SKIP_SIGNATURE`. `object_store` documents all variables
//! at its builders. Credentials come from the environment alone, never from a
//! URL, which ends up in logs. Certificates are judged by the system's own store of roots.

use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use weighbridge_converter::source::{Location, RemoteLocation};
use weighbridge_schemas::error::{Kind, shorten};

use crate::error::{Exit, Failure, Result};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// Where `text` points: a URL, or else a path.
///
/// # Errors
/// A usage failure for a URL of an unknown scheme, one that holds credentials, or one that its store cannot be built
/// from.
pub fn locate(text: &std::ffi::OsStr) -> Result<Location> {
    let url = text.to_str().filter(|text| text.contains("://"));
    let Some(text) = url else { return Ok(Location::Local(PathBuf::from(text))) };
    let url = Url::parse(text).map_err(|error| bad("the URL", format!("cannot be read: {error}")))?;
    let shown = shown(&url);
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        let why = "holds credentials or a query; credentials belong into the environment";
        return Err(bad(&shown, why));
    }
    if url.fragment().is_some() {
        return Err(bad(&shown, "has a fragment; write # as %23"));
    }
    match url.scheme() {
        "file" => {
            let path = url.to_file_path().map_err(|()| bad(&shown, "is no path; write file:///PATH"))?;
            Ok(Location::Local(path))
        }
        "s3" | "gs" | "az" => {
            if url.host_str().is_none_or(str::is_empty) {
                return Err(bad(&shown, "names no bucket"));
            }
            let path = Path::from_url_path(url.path())
                .map_err(|error| bad(&shown, format!("is no place: {error}")))?;
            let store = store(&url).map_err(|error| bad(&shown, unopened(&url, &error)))?;
            let hint = access_hint(url.scheme());
            Ok(Location::Remote(RemoteLocation::new(store, path, shown).with_access_hint(hint)))
        }
        scheme => {
            let why = format!("has the scheme {:?}; known are s3, gs, az and file", shorten(scheme));
            Err(bad(&shown, why))
        }
    }
}

/// The variables that say who reads.
fn access_hint(scheme: &str) -> &'static str {
    match scheme {
        "s3" => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN with temporary ones) to \
             credentials that may read and list this place, or AWS_SKIP_SIGNATURE=true for a public bucket; and \
             AWS_REGION to the bucket's region"
        }
        "gs" => {
            "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to the file of a key that may read and \
             list this place, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        _ => {
            "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, to what may \
             read and list this place, or AZURE_SKIP_SIGNATURE=true for a public container"
        }
    }
}

fn unopened(url: &Url, error: &object_store::Error) -> String {
    format!("cannot be opened: {error}; {}", access_hint(url.scheme()))
}

/// The URL without what may be secret.
fn shown(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    shorten(&format!("{}://{host}{}", url.scheme(), url.path()))
}

fn bad(shown: &str, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("checkpoint {shown}: it {why}"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "a store's variables are read where its builder reads the others"
)]
fn store(url: &Url) -> object_store::Result<Arc<dyn ObjectStore>> {
    install_cryptography();
    // The reader tries again by itself, and bounds how long a store may be silent: a whole request may take longer.
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let client = |allow_http: bool| {
        ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT).with_allow_http(allow_http)
    };
    let allow = |name: &str| {
        std::env::var(name)
            .is_ok_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
    };
    Ok(match url.scheme() {
        "s3" => {
            let builder = AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(retry);
            Arc::new(builder.with_client_options(client(allow("AWS_ALLOW_HTTP"))).build()?)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str()).with_retry(retry);
            Arc::new(builder.with_client_options(client(allow("GOOGLE_ALLOW_HTTP"))).build()?)
        }
        _ => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str()).with_retry(retry);
            let emulated = allow("AZURE_STORAGE_USE_EMULATOR");
            Arc::new(builder.with_client_options(client(emulated || allow("AZURE_ALLOW_HTTP"))).build()?)
        }
    })
}

/// TLS by `ring`, for the whole process: the client is built without a library of its own.
fn install_cryptography() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Only a second call in one process fails, and the first one counts then.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Where checkpoints may lie that are dropped on the queue: whoever may write to it could otherwise have a worker read
/// whatever it can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed(Vec<String>);

impl Default for Allowed {
    /// All folders of this machine, and no object store.
    fn default() -> Self {
        Self(vec!["/".to_owned()])
    }
}

impl Allowed {
    /// These prefixes: absolute paths, or URLs.
    ///
    /// # Errors
    /// A usage failure for a prefix that is neither.
    pub fn new(prefixes: &[String]) -> Result<Self> {
        let read = |prefix: &String| match locate(prefix.as_ref())? {
            Location::Local(path) if path.is_relative() => Err(Failure::usage(format!(
                "sources.allow: {prefix:?} is neither an absolute path nor a URL"
            ))),
            Location::Local(path) => plain(&path).ok_or_else(|| {
                Failure::usage(format!("sources.allow: {prefix:?} has a .. in it, or is not UTF-8"))
            }),
            Location::Remote(_) => Ok(prefix.clone()),
        };
        prefixes.iter().map(read).collect::<Result<_>>().map(Self)
    }

    /// Refuses a checkpoint's location that is not below one of the prefixes. Links count as what they point at.
    ///
    /// # Errors
    /// A permanent failure.
    pub fn check(&self, location: &str) -> Result<()> {
        let within = match locate(location.as_ref())? {
            Location::Local(path) if path.is_relative() => {
                return Err(forbidden(
                    location,
                    "a worker cannot know what it is relative to; give an absolute path",
                ));
            }
            Location::Local(path) => {
                let Some(written) = plain(&path) else {
                    return Err(forbidden(
                        location,
                        "it has a .. in it, or is not UTF-8; give the plain path",
                    ));
                };
                let real = std::fs::canonicalize(&path).ok();
                self.0.iter().any(|prefix| {
                    let real_prefix = std::fs::canonicalize(prefix).unwrap_or_else(|_| prefix.into());
                    PathBuf::from(&written).starts_with(prefix)
                        && real.as_ref().is_none_or(|real| real.starts_with(&real_prefix))
                })
            }
            Location::Remote(_) => self.0.iter().any(|prefix| {
                let prefix = prefix.trim_end_matches('/');
                location.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                    && !location.split('/').any(|part| part == "..")
            }),
        };
        if within {
            return Ok(());
        }
        let why = format!(
            "it is not below any place that workers may read from ({}); add it to sources.allow in weighbridge.toml, \
             and `weighbridge dead requeue` the job",
            self.0.join(", ")
        );
        Err(forbidden(location, &why))
    }
}

fn forbidden(location: &str, why: &str) -> Failure {
    Failure {
        kind: Kind::Permanent,
        class: "source_not_allowed",
        message: format!("{}: {why}", shorten(location)),
        exit: Exit::Usage,
    }
}

/// A path without `.` and `..`, as text.
fn plain(path: &std::path::Path) -> Option<String> {
    let plain: PathBuf = path.components().collect();
    let up = plain.components().any(|part| part == std::path::Component::ParentDir);
    plain.to_str().filter(|_| !up).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(text: &str) -> String {
        let failure = locate(text.as_ref()).unwrap_err();
        assert_eq!(failure.class, "usage");
        failure.message
    }

    #[test]
    fn paths_and_urls_are_told_apart() {
        for text in ["checkpoints/step-100", "s3:/x", "./s3", ""] {
            assert!(
                matches!(locate(text.as_ref()).unwrap(), Location::Local(path) if path == *text),
                "{text}"
            );
        }
        assert!(matches!(locate("file:///a/b%20c".as_ref()).unwrap(),
            Location::Local(path) if path == *"/a/b c"));
        let remote = locate("s3://bucket/a/b".as_ref()).unwrap();
        assert_eq!(remote.to_string(), "s3://bucket/a/b");
        assert!(!format!("{remote:?}").contains("AmazonS3"));
    }

    #[test]
    fn a_store_that_cannot_be_opened_names_its_variables() {
        let url = Url::parse("gs://bucket/a").unwrap();
        let error = object_store::Error::Generic { store: "GCS", source: "no items found".into() };
        let text = unopened(&url, &error);
        assert!(text.contains("no items found; set GOOGLE_SERVICE_ACCOUNT"), "{text}");
    }

    #[test]
    fn what_is_wrong_with_a_url_is_said_without_its_secrets() {
        let message = usage("hdfs://a/b");
        assert!(message.contains("hdfs") && message.contains("s3, gs, az and file"), "{message}");
        for text in
            ["s3://key:hidden@bucket/a", "s3://bucket/a?X-Amz-Signature=hidden", "https://h/a?sig=hidden"]
        {
            assert!(!usage(text).contains("hidden"), "{text}");
        }
        assert!(usage("s3:///a").contains("bucket"));
    }
}
