//! A server's process, its folder and its port.
//!
//! The process is in a group that a small shell leads. The shell holds the reading end of a pipe whose other end is
//! this process's alone: when this process ends, by whatever signal, the pipe ends, and the shell kills the group and
//! removes what the server leaves. (A signal at the parent's death would not do: the kernel sends it when the *thread*
//! ends that started the child.)

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::packages::skipped;

use super::{KEY, READER_KEY, READER_SECRET, SECRET};

/// Arguments: what is removed in the end. Who removes it has left the group.
const SUPERVISOR: &str = r#"
cat >/dev/null
setsid sh -c 'kill -KILL -"$0"; sleep 0.2; rm -rf "$@" || { sleep 2; rm -rf "$@"; }' $$ "$@" >/dev/null 2>&1
"#;

/// A server that runs.
#[derive(Debug)]
pub(super) struct Running {
    port: u16,
    folder: PathBuf,
    supervisor: Child,
    server: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

impl Running {
    /// Starts `command` in `folder`, which goes with it, and so do the files of `left`.
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    fn start(mut command: Command, port: u16, folder: PathBuf, left: &[String]) -> Self {
        let mut supervisor = Command::new("sh");
        supervisor.args(["-c", SUPERVISOR, "-"]).arg(&folder).args(left).process_group(0);
        supervisor.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let supervisor = supervisor.spawn().unwrap();
        let output = File::create(folder.join("output")).unwrap();
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        command.current_dir(&folder).env("TMPDIR", &folder);
        let server = command.process_group(i32::try_from(supervisor.id()).unwrap()).spawn().unwrap();
        Self { port, folder, supervisor, server }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Whether it has ended by itself.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.server.try_wait(), Ok(None))
    }

    /// The last that it wrote.
    pub(super) fn said(&self) -> String {
        let output = std::fs::read(self.folder.join("output")).unwrap_or_default();
        let last = output.get(output.len().saturating_sub(8 << 10)..).unwrap_or_default();
        String::from_utf8_lossy(last).into_owned()
    }
}

#[expect(clippy::unwrap_used, reason = "only tests use it")]
fn folder() -> PathBuf {
    tempfile::Builder::new().prefix("bucket").tempdir().unwrap().keep()
}

/// `package` is the folder of the installed package, here and below.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
pub(super) fn seaweedfs(package: &Path) -> Running {
    let folder = folder();
    let identity = |name, key, secret, actions: &[&str]| {
        serde_json::json!({
            "name": name,
            "credentials": [{ "accessKey": key, "secretKey": secret }],
            "actions": actions,
        })
    };
    let identities = serde_json::json!({ "identities": [
        identity("writer", KEY, SECRET, &["Admin", "Read", "Write", "List", "Tagging"]),
        identity("reader", READER_KEY, READER_SECRET, &["Read", "List"]),
    ]});
    std::fs::write(folder.join("identities"), identities.to_string()).unwrap();
    let mut command = Command::new(package.join("bin/weed"));
    command.args([
        "-logtostderr",
        "server",
        "-dir=.",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        "-filer",
    ]);
    command.args(["-volume.max=100", "-master.volumeSizeLimitMB=64", "-master.volumePreallocate=false"]);
    command.args([
        "-s3.config=identities",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
    ]);
    let ports: [u16; 8] = crate::ports::free();
    let (plain, remote) = ports.split_at(4);
    let names = ["s3", "filer", "master", "volume"];
    let mut left = Vec::new();
    for ((name, plain), remote) in names.iter().zip(plain).zip(remote) {
        command.arg(format!("-{name}.port={plain}")).arg(format!("-{name}.port.grpc={remote}"));
        // This one's place cannot be chosen.
        left.push(format!("/tmp/seaweedfs-{name}-grpc-{remote}.sock"));
    }
    command.args(["-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"]);
    Running::start(command, ports[0], folder, &left)
}

/// Moto looks whether an object is there, and puts it then; on threads, so that two who create it at once may both win.
/// No real store does that: here it is one step.
const MOTO: &str = r"
import sys, threading
from moto import server
from moto.s3.responses import S3Response
put, lock = S3Response.put_object, threading.Lock()
def put_one_at_a_time(self):
    with lock:
        return put(self)
S3Response.put_object = put_one_at_a_time
server.main(sys.argv[1:])
";

pub(super) fn moto(package: &Path) -> Running {
    let [port] = crate::ports::free();
    let mut command = Command::new("python3");
    command.args(["-c", MOTO, "-H", "127.0.0.1", "-p", &port.to_string()]).env("PYTHONPATH", package);
    Running::start(command, port, folder(), &[])
}

/// Whether there is a Node.js that can run Azurite; a line says so where there is none.
pub(super) fn has_node() -> bool {
    let mut node = Command::new("node");
    node.args(["-e", "process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)"]);
    let has = node.status().is_ok_and(|status| status.success());
    if !has {
        skipped("no Azurite without Node.js 20 or newer: install the packages nodejs and npm");
    }
    has
}

pub(super) fn azurite(package: &Path) -> Running {
    let [port] = crate::ports::free();
    let mut command = Command::new("node");
    command.arg(package.join("node_modules/azurite/dist/src/blob/main.js"));
    command.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string(), "--location", "."]);
    command.args(["--silent", "--skipApiVersionCheck", "--disableTelemetry"]);
    Running::start(command, port, folder(), &[])
}
