//! A host that follows a channel, looked at from outside; checkpoints that change from step to step; and servers that
//! load what is served while it changes.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::binary::Store;

/// How long something may take to happen before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// The bytes of a table that has a chunk of its own, but not a file.
pub(crate) const TABLE: usize = 5 << 18;

/// A host that follows channel `prod` of model `m`. It is killed when it goes out of sight.
pub(crate) struct Host {
    pub(crate) into: PathBuf,
    child: Child,
    /// What it wrote, line by line.
    lines: Arc<Mutex<Vec<Value>>>,
    said: Arc<Mutex<String>>,
}

impl Host {
    /// Follows into the store's own folder for it.
    pub(crate) fn start(store: &Store, more: &[&str]) -> Self {
        Self::start_into(store, &store.served(), more)
    }

    pub(crate) fn start_into(store: &Store, into: &Path, more: &[&str]) -> Self {
        Self::spawn(Self::command(store, into, more), into)
    }

    pub(crate) fn command(store: &Store, into: &Path, more: &[&str]) -> Command {
        let mut command = store.command(["fetch", "m", "--follow"]);
        command.arg("--into").arg(into).args(more);
        if !more.contains(&"--interval") {
            command.args(["--interval", "200ms"]);
        }
        for variable in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        command
    }

    pub(crate) fn spawn(mut command: Command, into: &Path) -> Self {
        // What is seen there from now on is this one's.
        let _ = std::fs::remove_file(into.join("status.json"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (lines, said) = (Arc::<Mutex<Vec<Value>>>::default(), Arc::<Mutex<String>>::default());
        let (stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let written = Arc::clone(&lines);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let line = line.unwrap();
                let document = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                written.lock().unwrap().push(document);
            }
        });
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stderr.read(&mut buffer) {
                heard.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        });
        Self { into: into.to_path_buf(), child, lines, said }
    }

    /// `status.json`, where there is one. It is never seen half written.
    pub(crate) fn status(&self) -> Option<Value> {
        let text = std::fs::read_to_string(self.into.join("status.json")).ok()?;
        Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    /// Waits until the status is as it is wanted.
    #[track_caller]
    pub(crate) fn until(&mut self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if let Some(status) = status.as_ref().filter(|status| is_so(status)) {
                return status.clone();
            }
            assert!(Instant::now() < deadline, "{what}: {status:#?}\n{}", self.said());
            assert!(self.child.try_wait().unwrap().is_none(), "{what}: it has ended\n{}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until this snapshot is served, and wanted.
    #[track_caller]
    pub(crate) fn until_current(&mut self, snapshot: &str) -> Value {
        let status = self.until(&format!("{snapshot} is served"), |status| {
            status["state"] == "current" && status["serving"]["snapshot"] == *snapshot
        });
        assert_eq!(serves(&self.into).as_deref(), Some(snapshot));
        status
    }

    /// Waits until it holds so many versions, and no more.
    #[track_caller]
    pub(crate) fn until_held(&mut self, count: usize) {
        self.until("what is too much has gone", |status| {
            status["held"].as_array().is_some_and(|held| held.len() == count)
        });
        assert_eq!(versions(&self.into).len(), count);
    }

    /// Waits until it is behind, for a reason of this class.
    #[track_caller]
    pub(crate) fn until_behind(&mut self, class: &str) -> Value {
        self.until(&format!("it is behind: {class}"), |status| {
            status["state"] == "behind" && status["last_error"]["class"] == *class
        })
    }

    /// The changes that it told.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.lines.lock().unwrap().clone()
    }

    /// What it wrote to standard error.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Tells it to stop, and waits for that; its exit code.
    pub(crate) fn terminate(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }

    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The snapshot that a folder serves.
pub(crate) fn serves(into: &Path) -> Option<String> {
    let target = std::fs::read_link(into.join("current")).ok()?;
    Some(target.file_name().unwrap().to_str().unwrap().to_owned())
}

/// The versions that a folder holds.
pub(crate) fn versions(into: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(into.join("versions")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Reads a version as a server does, and checks every byte of it; its step. Whoever loads resolves the link once.
pub(crate) fn load(current: &Path) -> Result<u64, String> {
    let version =
        std::fs::canonicalize(current).map_err(|error| format!("{}: {error}", current.display()))?;
    let read = |name: &str| {
        std::fs::read(version.join(name)).map_err(|error| format!("{}: {name}: {error}", version.display()))
    };
    let bytes = read("snapshot.json")?;
    if blake3::hash(&bytes).to_hex().as_str() != version.file_name().unwrap().to_str().unwrap() {
        return Err(format!("{}: its manifest is another one's", version.display()));
    }
    let manifest: Value = serde_json::from_slice(&bytes).unwrap();
    for file in manifest["files"].as_array().unwrap() {
        let name = file["name"].as_str().unwrap();
        let bytes = read(name)?;
        let mut rest = &bytes[..];
        for chunk in file["chunks"].as_array().unwrap() {
            let size = usize::try_from(chunk["size"].as_u64().unwrap()).unwrap();
            if rest.len() < size || blake3::hash(&rest[..size]).to_hex().as_str() != chunk["id"] {
                return Err(format!("{}: {name} has other bytes", version.display()));
            }
            rest = &rest[size..];
        }
        if !rest.is_empty() {
            return Err(format!("{}: {name} is too long", version.display()));
        }
    }
    Ok(manifest["step"].as_u64().unwrap())
}

/// A server that loads what is served, again and again.
pub(crate) struct Server {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Result<u64, String>>>,
}

impl Server {
    pub(crate) fn start(into: &Path) -> Self {
        let (current, is_over) = (into.join("current"), Arc::new(AtomicBool::new(false)));
        let over = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let mut loads = Vec::new();
            loop {
                // What is served when it is over is loaded too.
                let is_last = over.load(Ordering::Relaxed);
                loads.push(load(&current));
                if is_last {
                    return loads;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { is_over, thread }
    }

    /// The steps that were loaded, none of which failed; without repetitions.
    #[track_caller]
    pub(crate) fn steps(self) -> Vec<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        let loads = self.thread.join().unwrap();
        println!("{} loads", loads.len());
        let mut steps = loads.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        steps.dedup();
        steps
    }
}

/// A checkpoint of some tables, of which every byte is kept; some change from step to step.
pub(crate) struct Checkpoint {
    path: PathBuf,
    policy: String,
    tables: Vec<Vec<u8>>,
    random: fastrand::Rng,
    step: u64,
}

impl Checkpoint {
    /// Tables of so many bytes each: one that has more than 8 MiB has a file of its own.
    pub(crate) fn new(store: &Store, tables: &[usize]) -> Self {
        let random = fastrand::Rng::with_seed(7);
        let path = store.folder.path().join("checkpoint.safetensors");
        let policy = store.policy("[[rule]]\nmatch = '**'\n").to_str().unwrap().to_owned();
        let tables = tables.iter().map(|size| vec![0; *size]).collect();
        let mut checkpoint = Self { path, policy, tables, random, step: 0 };
        checkpoint.change(..);
        checkpoint
    }

    /// Makes these tables others.
    pub(crate) fn change(&mut self, which: impl std::slice::SliceIndex<[Vec<u8>], Output = [Vec<u8>]>) {
        for table in &mut self.tables[which] {
            for value in table.chunks_exact_mut(4) {
                value.copy_from_slice(&self.random.f32().to_le_bytes());
            }
        }
    }

    /// Publishes it as the next step; the snapshot.
    #[track_caller]
    pub(crate) fn publish(&mut self, store: &Store) -> String {
        self.publish_with(store, &[])
    }

    #[track_caller]
    pub(crate) fn publish_with(&mut self, store: &Store, more: &[&str]) -> String {
        self.step += 1;
        let views = self.tables.iter().enumerate().map(|(number, table)| {
            let shape = vec![table.len() / 1024, 256];
            (format!("t{number:02}"), TensorView::new(Dtype::F32, shape, table).unwrap())
        });
        safetensors::serialize_to_file(views, None, &self.path).unwrap();
        let step = self.step.to_string();
        let published =
            store.publish(&self.path, &[&["--step", &step, "--policy", &self.policy], more].concat());
        let published = published.succeeded();
        assert_eq!(published["outcome"], "published");
        published["snapshot"].as_str().unwrap().to_owned()
    }
}
