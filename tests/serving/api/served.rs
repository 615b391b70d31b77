//! An API in front of a store, in a process of its own, and how tests look at it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use weighbridge::api::proto::snapshots_client::SnapshotsClient;

use crate::binary::{Run, Store};
use crate::numbered;
use crate::site::http;

/// How long something may take to happen before a test fails.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// `serve --roles api`. It is killed when it goes out of sight.
pub(super) struct Served {
    child: Child,
    /// `http://ADDRESS:PORT`, or https.
    pub(super) url: String,
    pub(super) address: SocketAddr,
    /// Where its figures are.
    figures: SocketAddr,
    said: Arc<Mutex<String>>,
}

impl Served {
    /// An API over `store` with `config` below `[api]`, and more options.
    pub(super) fn start(store: &Store, config: &str, more: &[&str]) -> Self {
        Self::run(Self::command(store, config, more)).unwrap_or_else(|run| panic!("it ended: {run:?}"))
    }

    /// An API on a port of this machine.
    pub(super) fn command(store: &Store, config: &str, more: &[&str]) -> Command {
        let mut command = Self::command_at(store, config, "127.0.0.1:0");
        command.args(more);
        command
    }

    /// An API at this address.
    pub(super) fn command_at(store: &Store, config: &str, address: &str) -> Command {
        let path = tempfile::Builder::new().suffix(".toml").tempfile_in(store.folder.path()).unwrap();
        let (_, path) = path.keep().unwrap();
        std::fs::write(&path, format!("[api]\n{config}\n")).unwrap();
        let mut command = store.command(["serve", "--roles", "api", "--listen", "127.0.0.1:0"]);
        command.args(["--api-listen", address, "--config"]).arg(path);
        command
    }

    /// Runs it; gives what it said, where it ends.
    pub(super) fn run(mut command: Command) -> Result<Self, Run> {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let (mut told, mut figures, mut url) = (String::new(), None, None);
        while figures.is_none() || url.is_none() {
            let Some(line) = lines.next() else {
                let code = child.wait().unwrap().code().unwrap_or(-1);
                return Err(Run { code, stdout: String::new(), stderr: told });
            };
            if let Some(at) = line.strip_prefix("API on ") {
                url = at.split(' ').next().map(str::to_owned);
            } else if let Some(at) = line.strip_prefix("listening on ") {
                figures = Some(at.parse().unwrap());
            }
            told += &format!("{line}\n");
        }
        let said = Arc::new(Mutex::new(told));
        let heard = Arc::clone(&said);
        std::thread::spawn(move || lines.for_each(|line| *heard.lock().unwrap() += &format!("{line}\n")));
        let url = url.unwrap();
        let (_, address) = url.split_once("://").unwrap();
        let address = address.replace("0.0.0.0", "127.0.0.1").parse().unwrap();
        Ok(Self { child, address, figures: figures.unwrap(), said, url })
    }

    /// What it wrote to standard error.
    pub(super) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Waits until it has said this.
    #[track_caller]
    pub(super) fn until_said(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.said().contains(text) {
            assert!(Instant::now() < deadline, "{text:?} is not said:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A connection of a gRPC client with its defaults.
    pub(super) fn channel(&self) -> Channel {
        Endpoint::from_shared(self.url.clone()).unwrap().connect_lazy()
    }

    /// A client on a connection of its own.
    pub(super) fn snapshots(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel())
    }

    /// The URL of a path.
    pub(super) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// The text of its figures.
    pub(super) async fn metrics(&self) -> String {
        http().get(format!("http://{}/metrics", self.figures)).send().await.unwrap().text().await.unwrap()
    }

    /// The sum of all series of a figure.
    pub(super) async fn figure(&self, name: &str) -> u64 {
        let text = self.metrics().await;
        let series = text
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
        series.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    }

    /// Waits until a figure is as it is wanted.
    pub(super) async fn until_figure(&self, name: &str, is_so: impl Fn(u64) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.figure(name).await;
            if is_so(now) {
                return;
            }
            assert!(Instant::now() < deadline, "{name} is {now}\n{}", self.said());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The peak of its resident memory so far, in MiB.
    pub(super) fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// Tells it to stop; gives how long that took.
    #[track_caller]
    pub(super) fn stop(mut self) -> Duration {
        let began = Instant::now();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}\n{}", self.said());
        assert!(!self.said().contains("panicked"), "{}", self.said());
        began.elapsed()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A token with these roles for models of this pattern (all, where it is empty), in the store's `tokens.toml`.
pub(super) fn token(store: &Store, name: &str, roles: &[&str], model: &str, more: &[&str]) -> String {
    let mut arguments = vec!["token", "new", name, "--file", "tokens.toml"];
    roles.iter().for_each(|role| arguments.extend(["--role", role]));
    if !model.is_empty() {
        arguments.extend(["--model", model]);
    }
    arguments.extend(more);
    store.run(arguments).succeeded()["token"].as_str().unwrap().to_owned()
}

/// Publishes the checkpoint of this number as the newest step of `model`; gives the snapshot's id.
pub(super) fn publish(store: &Store, model: &str, number: u16) -> String {
    let policy = numbered::policy(store);
    let checkpoint = numbered::checkpoint(store.folder.path(), number);
    let mut arguments = vec!["publish".as_ref(), checkpoint.as_os_str()];
    let step = number.to_string();
    arguments.extend(["--model", model, "--step", &step, "--no-sync", "--policy"].map(std::ffi::OsStr::new));
    arguments.push(policy.as_os_str());
    store.run(arguments).succeeded()["snapshot"].as_str().unwrap().to_owned()
}

/// The chunks of a snapshot, in the order of its files, with their sizes.
pub(super) fn chunks(store: &Store, model: &str, snapshot: &str) -> Vec<(String, u64)> {
    let path = store.root().join("models").join(model).join("snapshots").join(snapshot);
    let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let files = manifest["files"].as_array().unwrap().iter();
    let chunks = files.flat_map(|file| file["chunks"].as_array().unwrap());
    chunks.map(|chunk| (chunk["id"].as_str().unwrap().to_owned(), chunk["size"].as_u64().unwrap())).collect()
}

/// The path of a chunk over HTTP.
pub(super) fn chunk_path(model: &str, chunk: &str) -> String {
    format!("/v1/objects/models/{model}/chunks/{}/{chunk}", &chunk[..2])
}

/// Moves channel `prod` of model `m` by appending an entry that points at `snapshot`; gives the entry's number.
pub(super) async fn move_channel(store: &Store, snapshot: &str, step: u64) -> u64 {
    use weighbridge_schemas::channel::Reason;
    use weighbridge_schemas::time::Timestamp;
    use weighbridge_snapshots::channel::{Channel, Move, Operation};
    use weighbridge_snapshots::root::{Absent, Root};

    let root = Root::open(store.root().to_str().unwrap(), Absent::Refuse).unwrap();
    let (model, name) = ("m".parse().unwrap(), "prod".parse().unwrap());
    let when = Timestamp::from_nanoseconds(0);
    let operation = Operation { id: format!("move-{step}-{snapshot}"), who: "test".into(), when };
    let to = Move {
        snapshot: snapshot.parse().unwrap(),
        run: "default".parse().unwrap(),
        step,
        created_at: when,
        reason: Reason::Promote,
    };
    let channel = Channel::new(&root, &model, &name);
    channel.append(&operation, |_| Ok::<_, std::convert::Infallible>(to.clone())).await.unwrap();
    channel.latest().await.unwrap().unwrap().sequence
}

/// A file with this text in the store's folder, which nobody else may read.
pub(super) fn secret_file(store: &Store, name: &str, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = store.folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// What counts in an HTTP answer: status, the headers named, and the body.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error}: {} {:?}", self.status, String::from_utf8_lossy(&self.body))
        })
    }

    /// The class of a failure.
    pub(super) fn class(&self) -> String {
        self.json()["error"]["class"].as_str().unwrap().to_owned()
    }
}

/// A `GET` of a path, by the bearer of `token`, with these headers.
pub(super) async fn get(
    served: &Served,
    path: &str,
    token: Option<&str>,
    headers: &[(&str, &str)],
) -> Answer {
    answer(served, reqwest::Method::GET, path, token, headers).await
}

pub(super) async fn answer(
    served: &Served,
    method: reqwest::Method,
    path: &str,
    token: Option<&str>,
    headers: &[(&str, &str)],
) -> Answer {
    let mut request = http().request(method, served.at(path));
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.unwrap();
    let text = |value: &reqwest::header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let headers = answer.headers().iter().map(|(name, value)| (name.to_string(), text(value))).collect();
    let (status, body) = (answer.status().as_u16(), answer.bytes().await.unwrap().into());
    Answer { status, headers, body }
}
