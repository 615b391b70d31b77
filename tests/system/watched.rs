//! What a worker shows of itself: over HTTP, to systemd, in its logs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};

use crate::binary::{self, Store, ended};
use crate::fixtures::torchrec;

/// How long something may take to happen before a test fails.
const PATIENCE: Duration = Duration::from_secs(60);
const JOB: &str = "5b0c8a52-6a1e-4a57-9d0e-0d3c0f4b7a11";
const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn queue_url(store: &Store) -> String {
    format!("embedded:{}", store.folder.path().join("queue").display())
}

/// The binary with `arguments`, a store, a queue, and nothing of the environment that it looks at.
fn command(store: &Store, arguments: &[&str]) -> Command {
    let mut command = store.command(arguments);
    command.arg("--queue").arg(queue_url(store));
    for variable in
        ["WEIGHBRIDGE_QUEUE", "WEIGHBRIDGE_LOG_FORMAT", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"]
    {
        command.env_remove(variable);
    }
    command
}

/// Puts the manifest of a checkpoint on the queue, as a trainer does.
fn drop_checkpoint(store: &Store) {
    let manifest = json!({
        "schema": "weighbridge.checkpoint/v1",
        "id": JOB,
        "model": "dlrm", "run": "r", "step": 1,
        "created_at": "2026-11-29T12:00:00Z",
        "location": torchrec(),
        "traceparent": TRACE,
    });
    let message = Message {
        id: JOB.to_owned(),
        kind: Kind::Checkpoint,
        body: manifest.to_string().into_bytes(),
        priority: Priority::Normal,
        device: Device::Any,
    };
    let queue = weighbridge_queue::url::open(&queue_url(store), Arc::new(SystemClock::new())).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(queue.send(&message)).unwrap();
}

/// A worker that serves on a port, ended when it goes out of sight.
struct Served {
    child: Child,
    address: SocketAddr,
}

impl Served {
    fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let said = lines.find_map(|line| Some(line.unwrap().strip_prefix("listening on ")?.to_owned()));
        // What else it says is read, so that it never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address: said.unwrap().parse().unwrap() }
    }

    /// The status and the body of an answer.
    fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Asks until the answer has this status; its body.
    fn until(&self, path: &str, status: u16) -> String {
        let started = Instant::now();
        loop {
            let (found, body) = self.get(path);
            if found == status {
                return body;
            }
            assert!(started.elapsed() < PATIENCE, "{path} stays {found}: {body}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads what systemd is told until `wanted` has come; all of it.
fn told(socket: &UnixDatagram, wanted: &str) -> Vec<String> {
    let mut told = Vec::new();
    let mut buffer = [0; 4096];
    while told.iter().all(|line| line != wanted) {
        let size =
            socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}, after {told:?}"));
        told.extend(str::from_utf8(&buffer[..size]).unwrap().lines().map(str::to_owned));
    }
    told
}

#[test]
fn systemd_is_told_that_a_worker_is_ready_alive_and_stops() {
    let store = Store::new();
    let path = store.folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = command(&store, &["worker"]);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let before = told(&socket, "READY=1");
    assert!(before.iter().all(|line| line == "READY=1" || line == "WATCHDOG=1"), "{before:?}");
    told(&socket, "WATCHDOG=1");
    told(&socket, "WATCHDOG=1");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    told(&socket, "STOPPING=1");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_worker_shows_what_it_has_done_and_whether_its_queue_answers() {
    let store = Store::new();
    drop_checkpoint(&store);
    let mut served = Served::start(command(&store, &["worker", "--listen", "127.0.0.1:0"]));
    assert_eq!(served.get("/live"), (200, "alive\n".to_owned()));
    assert_eq!(served.until("/ready", 200), "ready\n");
    assert_eq!(served.get("/nothing").0, 404);
    let started = Instant::now();
    let metrics = loop {
        let (status, metrics) = served.get("/metrics");
        assert_eq!(status, 200);
        if metrics.contains("weighbridge_jobs_ended_total{outcome=\"published\"} 1\n") {
            break metrics;
        }
        assert!(started.elapsed() < PATIENCE, "{metrics}");
        std::thread::sleep(Duration::from_millis(50));
    };
    for line in [
        "weighbridge_ready 1",
        "weighbridge_step_seconds_count{step=\"plan\"} 1",
        "weighbridge_dead_letters_total 0",
        "weighbridge_queue_messages{class=\"normal\",state=\"ready\"} 0",
    ] {
        assert!(metrics.lines().any(|shown| shown == line), "{line} is not in\n{metrics}");
    }
    let read = metrics.lines().find_map(|line| line.strip_prefix("weighbridge_checkpoint_read_bytes_total "));
    assert!(read.unwrap().parse::<u64>().unwrap() > 0, "{metrics}");

    // The queue goes away, and comes back.
    let (queue, away) = (store.folder.path().join("queue"), store.folder.path().join("away"));
    std::fs::rename(&queue, &away).unwrap();
    let why = served.until("/ready", 503);
    assert!(why.starts_with("since 20") && why.contains("the queue fails: "), "{why}");
    assert_eq!(why.lines().count(), 1);
    assert!(served.get("/metrics").1.contains("\nweighbridge_ready 0\n"));
    assert_eq!(served.get("/live").0, 200, "it goes on trying");
    std::fs::rename(&away, &queue).unwrap();
    served.until("/ready", 200);
    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0));
}

#[test]
fn serve_answers_where_it_is_told_to_and_a_taken_port_is_refused() {
    let store = Store::new();
    let config = store.folder.path().join("weighbridge.toml");
    std::fs::write(&config, "[worker]\nlisten = '127.0.0.1:0'\n").unwrap();
    let served = Served::start(command(&store, &["serve"]));
    served.until("/ready", 200);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let run = ended(command(&store, &["worker", "--listen", &address]).output().unwrap());
    assert_eq!(run.failed(5), "cannot_listen");
    assert!(run.stderr.contains(&address) && run.stderr.contains("another port"), "{run:?}");
}

/// What a run logged, as JSON; every line is.
fn logged(stderr: &str) -> Vec<Value> {
    stderr
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

#[test]
fn json_logs_carry_the_job_the_part_and_the_trainers_trace() {
    let store = Store::new();
    drop_checkpoint(&store);
    let arguments =
        ["worker", "--until-empty", "--log", "info", "--log-format", "json", "--listen", "127.0.0.1:0"];
    let run = ended(command(&store, &arguments).output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    let lines = logged(&run.stderr);
    let of_steps: Vec<_> = lines.iter().filter(|line| line["span"]["name"] == "step").collect();
    for line in &of_steps {
        let span = &line["span"];
        assert_eq!((&span["job"], &span["model"]), (&json!(JOB), &json!("dlrm")), "{line}");
        assert_eq!(span["traceparent"], TRACE, "{line}");
        assert_eq!(span["part"].is_number(), span["step"] == "part", "{line}");
    }
    let done =
        |step: &str| of_steps.iter().any(|line| line["span"]["step"] == step && line["message"] == "done");
    assert!(done("plan") && done("part") && done("finish"), "{run:?}");
    let accepted = lines.iter().find(|line| line["message"] == "accepted").unwrap();
    assert_eq!((&accepted["job"], &accepted["traceparent"]), (&json!(JOB), &json!(TRACE)));
    let listening =
        |line: &&Value| line["message"].as_str().unwrap_or_default().starts_with("listening on 127.");
    assert_eq!(lines.iter().filter(listening).count(), 1, "{run:?}");
}

#[test]
fn a_port_is_told_in_json_whatever_is_logged_and_other_formats_are_refused() {
    let store = Store::new();
    let mut quiet = command(&store, &["worker", "--until-empty", "--listen", "127.0.0.1:0"]);
    let run = ended(quiet.env("WEIGHBRIDGE_LOG_FORMAT", "json").output().unwrap());
    assert_eq!((run.code, logged(&run.stderr).len()), (0, 1), "{run:?}");
    let run = ended(command(&store, &["worker", "--until-empty", "--log-format", "xml"]).output().unwrap());
    assert_eq!(run.failed(2), "usage");
}

#[test]
fn systemd_takes_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("passed over: systemd-analyze is not installed");
        return;
    }
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd");
    let folder = tempfile::tempdir().unwrap();
    for unit in ["weighbridge-worker@.service", "weighbridge-serve.service", "weighbridge-spool.service"] {
        let text = std::fs::read_to_string(units.join(unit)).unwrap();
        assert!(text.contains("ExecStart=/usr/bin/weighbridge "), "{unit}");
        let path = folder.path().join(unit);
        let here = binary::path().to_str().unwrap();
        std::fs::write(&path, text.replace("=/usr/bin/weighbridge ", &format!("={here} "))).unwrap();
        let verified =
            ended(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap());
        assert_eq!((verified.code, verified.stderr.contains("weighbridge")), (0, false), "{verified:?}");
    }
}

/// A broker that takes connections and says nothing: whoever is told to stop meanwhile does.
#[test]
fn told_to_stop_while_a_broker_is_waited_for_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    for (command, signal, code) in [
        (&["worker"][..], rustix::process::Signal::TERM, 0),
        (&["queue", "status"], rustix::process::Signal::INT, 130),
    ] {
        // One of its own: a worker connects more than once.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("amqp://somebody:secret@{}/v", silent.local_addr().unwrap());
        let mut child = Command::new(binary::path())
            .args(command)
            .env("WEIGHBRIDGE_QUEUE", &url)
            .current_dir(folder.path())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // It is connecting by then.
        let _ = silent.accept().unwrap();
        let id = rustix::process::Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        rustix::process::kill_process(id, signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{command:?}");
    }
}
