//! From what a person writes for a checkpoint to where it lies: a path, or a URL.
//!
//! | URL | store | variables |
//! |---|---|---|
//! | `s3://BUCKET/KEY` | Amazon S3, and what speaks like it | `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ... |
//! | `gs://BUCKET/KEY` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, `GOOGLE_APPLICATION_CREDENTIALS`, ... |
//! | `az://CONTAINER/KEY` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, ... |
//! | `file:///PATH` | this machine | none |
//!
//! The client is the one that stores in buckets have: [`weighbridge_snapshots::bucket::address`] names all variables.

use std::path::PathBuf;
use url::Url;

use weighbridge_converter::source::{Location, RemoteLocation};
use weighbridge_schemas::error::{Kind, shorten};
use weighbridge_snapshots::bucket;

use crate::error::{Exit, Failure, Result};

/// Where `text` points: a URL, or else a path.
///
/// # Errors
/// A usage failure for a URL of an unknown scheme, one that holds credentials, or one that its store cannot be built
/// from.
pub fn locate(text: &std::ffi::OsStr) -> Result<Location> {
    let url = text.to_str().filter(|text| text.contains("://"));
    let Some(text) = url else { return Ok(Location::Local(PathBuf::from(text))) };
    let url = Url::parse(text).map_err(|error| bad("the URL", format!("cannot be read: {error}")))?;
    match url.scheme() {
        "file" => {
            let shown = shown(&url);
            if url.query().is_some() || url.fragment().is_some() {
                return Err(bad(&shown, "has a query or a fragment; write ? as %3F, # as %23"));
            }
            let path = url.to_file_path().map_err(|()| bad(&shown, "is no path; write file:///PATH"))?;
            Ok(Location::Local(path))
        }
        "s3" | "gs" | "az" => {
            let made = bucket::plain_client(text, &bucket::Options::default());
            let (client, path) = made.map_err(|error| Failure::usage(format!("checkpoint {error}")))?;
            Ok(Location::Remote(
                RemoteLocation::new(client.store, path, client.shown).with_access_hint(client.access),
            ))
        }
        scheme => {
            let why = format!("has the scheme {:?}; known are s3, gs, az and file", shorten(scheme));
            Err(bad(&shown(&url), why))
        }
    }
}

/// The URL without what may be secret.
fn shown(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    shorten(&format!("{}://{host}{}", url.scheme(), url.path()))
}

fn bad(shown: &str, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("checkpoint {shown}: it {why}"))
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

    /// As [`Allowed::check`], off the threads that nothing may hold up: a folder of a server that is away can.
    ///
    /// # Errors
    /// As [`Allowed::check`].
    pub async fn checked(&self, location: &str) -> Result<()> {
        let (allowed, location) = (self.clone(), location.to_owned());
        let checked = tokio::task::spawn_blocking(move || allowed.check(&location)).await;
        checked.unwrap_or_else(|error| Err(Failure::internal("a checkpoint's location", error)))
    }

    /// Refuses a checkpoint's location that is not below one of the prefixes. Links count as what they point at. Which
    /// prefixes there are is not told: whoever hands over may not be who may know.
    ///
    /// # Errors
    /// A permanent failure.
    pub fn check(&self, location: &str) -> Result<()> {
        if bucket::is_bucket(location) {
            bucket::check(location).map_err(|error| Failure::usage(format!("checkpoint {error}")))?;
            let is_below = |prefix: &&String| bucket::is_below(location, prefix).unwrap_or(false);
            return self.0.iter().find(is_below).map(drop).ok_or_else(|| elsewhere(location));
        }
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
                // What is not below by its name is not looked at: that may take as long as somebody's server likes.
                let named = |prefix: &&String| PathBuf::from(&written).starts_with(prefix);
                let really = |prefix: &String| {
                    let real_prefix = std::fs::canonicalize(prefix).unwrap_or_else(|_| prefix.into());
                    std::fs::canonicalize(&path).map_or(true, |real| real.starts_with(&real_prefix))
                };
                self.0.iter().filter(named).any(really)
            }
            Location::Remote(_) => false,
        };
        if within { Ok(()) } else { Err(elsewhere(location)) }
    }
}

fn elsewhere(location: &str) -> Failure {
    let why = "it is not below any place that workers may read from; whoever runs them can add it to sources.allow in \
               weighbridge.toml; hand the checkpoint over again then, or requeue its dead letter where there is one";
    forbidden(location, why)
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
    fn only_what_lies_below_an_allowed_place_may_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for name in ["mine/step-1", "others/step-9"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        std::os::unix::fs::symlink(at("others"), at("mine/link")).unwrap();
        let allowed = Allowed::new(&[at("mine"), "s3://ckpt/team-a".to_owned()]).unwrap();
        for right in [at("mine/step-1"), at("mine/not-there-yet"), "s3://ckpt/team-a/step-1".to_owned()] {
            allowed.check(&right).unwrap();
        }
        for wrong in [
            at("others/step-9"),
            at("mine/link/step-9"),
            at("mine/../others/step-9"),
            "step-1".to_owned(),
            "s3://ckpt/team-ab/step-1".to_owned(),
            "s3://other/team-a/step-1".to_owned(),
            "s3://ckpt/team-a/../team-b/step-9".to_owned(),
            "s3://ckpt/team-a/%2e%2e/team-b/step-9".to_owned(),
            "s3://ckpt/team-a/.%2E/team-b/step-9".to_owned(),
        ] {
            let failure = allowed.check(&wrong).unwrap_err();
            let told = failure.message.replace(&wrong, "");
            assert!(!told.contains("team-a") && !told.contains(&at("mine")), "{told}");
            assert!(!told.contains("weighbridge dead"), "who asked by the API has no such command: {told}");
        }
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
