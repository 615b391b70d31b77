//! The serving side: how soon hosts have what a channel says, how fast they fetch, and what look-ups take meanwhile.
//!
//! | file | what it holds |
//! |---|---|
//! | `swaps` | from a channel's entry to the flipped link, of many followers |
//! | `fetches` | a fetch out of the store and by an API, beside a copy |
//! | `rows` | look-ups at rest, and while versions are swapped |

mod fetches;
mod rows;
mod swaps;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use weighbridge_schemas::ids::SnapshotId;

use crate::checkpoints::{self, Format, Size, Tensors};
use crate::{Failure, report};

/// The model of everything here.
const MODEL: &str = "m";

/// A store, and the binary that works on it.
struct House<'b> {
    binary: &'b Path,
    folder: PathBuf,
}

impl House<'_> {
    fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    /// The binary with a command, this store, and nothing of the environment's.
    fn command(&self, command: &[&str]) -> Command {
        let mut ran = Command::new(self.binary);
        ran.args(command).arg("--store").arg(self.store()).current_dir(&self.folder);
        for variable in ["WEIGHBRIDGE_STORE", "WEIGHBRIDGE_QUEUE", "WEIGHBRIDGE_CONFIG", "WEIGHBRIDGE_API"] {
            ran.env_remove(variable);
        }
        ran.stdin(Stdio::null());
        ran
    }

    /// Runs it to its end; gives its document.
    fn run(&self, command: &[&str]) -> Result<Value, Failure> {
        let output = self.command(command).arg("--json").output()?;
        if !output.status.success() {
            return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stdout)).into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Publishes a checkpoint as this step; gives the snapshot.
    fn publish(&self, checkpoint: &Path, step: u64, more: &[&str]) -> Result<SnapshotId, Failure> {
        let checkpoint = checkpoint.to_str().ok_or("the folder's name is not UTF-8")?;
        let step = step.to_string();
        let command = ["publish", checkpoint, "--model", MODEL, "--run", "r", "--step", &step, "--no-sync"];
        let published = self.run(&[&command, more].concat())?;
        Ok(published["snapshot"].as_str().unwrap_or_default().parse()?)
    }

    /// Answers for the store, on a port of its own.
    fn serve(&self) -> Result<Server, Failure> {
        let mut command = self.command(&["serve", "--roles", "api", "--listen", "127.0.0.1:0"]);
        command.args(["--api-listen", "127.0.0.1:0", "--queue"]);
        command.arg(format!("embedded:{}", self.folder.join("queue").display()));
        let mut child = Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?);
        let said = child.0.stderr.take().ok_or("nobody hears it")?;
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        let url = lines.find_map(|line| Some(line.strip_prefix("API on ")?.split(' ').next()?.to_owned()));
        // What it says further has to go somewhere.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Server { url: url.ok_or("the API did not start")?, running: child })
    }
}

/// An API.
struct Server {
    url: String,
    running: Running,
}

/// A process that is killed in the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where a host takes snapshots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Store,
    Api,
}

impl From {
    const BOTH: [Self; 2] = [Self::Store, Self::Api];

    fn label(self) -> &'static str {
        match self {
            Self::Store => "the store",
            Self::Api => "the API",
        }
    }

    /// The binary with a command that asks there.
    fn command(self, house: &House<'_>, server: &Server, command: &[&str]) -> Command {
        let mut asked = house.command(command);
        if self == Self::Api {
            asked.args(["--api", &server.url]);
        }
        asked
    }
}

/// Measures all three with checkpoints of this size, and gives Markdown tables.
pub(crate) fn measure(binary: &Path, folder: &Path, size: Size, runs: u32) -> Result<String, Failure> {
    let house = |name: &str| {
        let folder = folder.join(name);
        std::fs::create_dir(&folder)?;
        Ok::<_, std::io::Error>(House { binary, folder })
    };
    let checkpoint = checkpoints::make(folder, Format::Safetensors, Tensors::Large, size)?;
    let mut text = format!("{}; {runs} rounds\n\n", report::machine());
    report::note("look-ups");
    let rows = rows::measure(&house("rows")?, &checkpoint)?;
    report::note("fetches");
    let fetches = fetches::measure(&house("fetches")?, &checkpoint, runs)?;
    checkpoint.remove()?;
    report::note("swaps");
    let swaps = swaps::measure(&house("swaps")?, runs)?;
    for table in [swaps, fetches, rows] {
        text.push_str(&table);
        text.push('\n');
    }
    Ok(text.trim_end().to_owned())
}
