//! What publish and fetch take as whole processes, with their parts measured beside them in the same round.

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_tests::process::{self, Taken};

use crate::checkpoints::{Checkpoint, files_below};
use crate::rates::{Machine, Rate};
use crate::{Failure, Sync};

/// Threads of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Threads(Option<NonZero<usize>>);

impl Threads {
    fn count(self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, NonZero::get);
        self.0.map_or_else(all, NonZero::get)
    }

    pub(crate) fn label(self) -> String {
        self.0.map_or_else(|| "all".to_owned(), |count| count.to_string())
    }
}

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self(None)),
            _ => Ok(Self(Some(text.parse().map_err(|_| format!("{text:?} is neither a number nor `all`"))?))),
        }
    }
}

/// How a checkpoint is published and fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) encoding: Encoding,
    pub(crate) threads: Threads,
    pub(crate) sync: Sync,
}

/// One round of a case. Times are in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    pub(crate) reading: f64,
    pub(crate) encoding: f64,
    pub(crate) writing: f64,
    pub(crate) publish: Taken,
    pub(crate) copying: f64,
    pub(crate) fetch: Taken,
}

impl Round {
    /// Publish, in times of its slowest part.
    pub(crate) fn publish_ratio(&self) -> f64 {
        self.publish.time.as_secs_f64() / self.reading.max(self.encoding).max(self.writing)
    }

    /// Fetch, in times of a copy by `cp`.
    pub(crate) fn fetch_ratio(&self) -> f64 {
        self.fetch.time.as_secs_f64() / self.copying
    }
}

/// A checkpoint, how it was published and fetched, and every round.
pub(crate) struct Row {
    pub(crate) checkpoint: String,
    pub(crate) case: Case,
    /// Bytes of the checkpoint's tables.
    pub(crate) bytes: u64,
    /// Bytes of the snapshot's files.
    pub(crate) fetched: u64,
    pub(crate) rounds: Vec<Round>,
}

/// All that was measured.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) rows: Vec<Row>,
    /// What the machine does, by what was measured; in the order of the first round.
    pub(crate) machine: Vec<(String, Vec<f64>)>,
}

impl Measured {
    fn machine(&mut self, what: String, rate: Rate) {
        let figure = rate.gigabytes_a_second();
        match self.machine.iter_mut().find(|(known, _)| *known == what) {
            Some((_, figures)) => figures.push(figure),
            None => self.machine.push((what, vec![figure])),
        }
    }
}

/// Whether the binary can leave syncing out.
pub(crate) fn knows_no_sync(binary: &Path) -> Result<bool, Failure> {
    let help = Command::new(binary).args(["publish", "--help"]).output()?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--no-sync"))
}

/// Measures every case of a checkpoint in `runs` rounds.
pub(crate) fn measure(
    binary: &Path,
    checkpoint: &Checkpoint,
    cases: &[Case],
    runs: u32,
    machine: &mut Machine,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let bench = Bench::new(binary, checkpoint)?;
    let mut rows: Vec<_> = cases
        .iter()
        .map(|&case| Row {
            checkpoint: checkpoint.label.clone(),
            case,
            bytes: checkpoint.bytes,
            fetched: 0,
            rounds: Vec::new(),
        })
        .collect();
    for _ in 0..runs {
        measure_machine(checkpoint, machine, measured)?;
        for row in &mut rows {
            let (round, fetched) = bench.round(row.case, machine)?;
            row.rounds.push(round);
            row.fetched = fetched;
        }
    }
    measured.rows.extend(rows);
    Ok(())
}

fn measure_machine(
    checkpoint: &Checkpoint,
    machine: &mut Machine,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let mut counts = vec![1, Threads(None).count()];
    counts.dedup();
    for threads in counts {
        let named = |what: &str| format!("{what}, threads: {threads}");
        measured.machine(named("memcpy, bytes copied"), machine.memcpy(threads)?);
        measured.machine(named("sum of memory"), machine.sum(threads)?);
        measured.machine(named("read of a file in the page cache"), machine.read(checkpoint, threads)?);
        measured.machine(named("BLAKE3"), machine.blake3(threads)?);
    }
    let bytes = 256 << 20;
    for (sync, how) in [(Sync::On, "synced"), (Sync::Off, "not synced")] {
        measured.machine(format!("write of one large file, {how}"), machine.write_files(1, bytes, sync)?);
        measured.machine(format!("4 writers of files of 8 MiB, {how}"), machine.write_files(4, bytes, sync)?);
    }
    Ok(())
}

/// A binary and a checkpoint, and the folder of both.
struct Bench<'a> {
    binary: &'a Path,
    checkpoint: &'a Checkpoint,
    folder: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(binary: &'a Path, checkpoint: &'a Checkpoint) -> Result<Self, Failure> {
        let folder = checkpoint.path.parent().ok_or("the checkpoint has no folder")?.to_owned();
        Ok(Self { binary, checkpoint, folder })
    }

    /// One round, and the bytes of the snapshot's files.
    fn round(&self, case: Case, machine: &Machine) -> Result<(Round, u64), Failure> {
        let threads = case.threads.count();
        let reading = machine.read(self.checkpoint, threads)?.seconds(self.checkpoint.bytes);
        let (mut encoding, mut stored) = (0.0, 0);
        for &(width, bytes) in self.checkpoint.by_width.iter().filter(|(_, bytes)| *bytes > 0) {
            encoding += machine.encode_and_hash(case.encoding, width, threads)?.seconds(bytes);
            let row = Form::plain(case.encoding).row_bytes(width, Dtype::F32).ok_or("rows of no size")?;
            stored += bytes / (width * 4) * row;
        }
        let writing = machine.write(stored, case.sync)?.seconds(stored);
        let (store, served) = (self.folder.join("store"), self.folder.join("served"));
        let publish = self.run(case, &store, |command| {
            command.arg("publish").arg(&self.checkpoint.path).args(["--model", "m"]);
            command.arg("--policy").arg(self.policy(case.encoding)?);
            Ok(())
        })?;
        rustix::fs::syncfs(fs::File::open(&self.folder)?)?;
        let fetch = self.run(case, &store, |command| {
            command.args(["fetch", "m", "--into"]).arg(&served);
            Ok(())
        })?;
        rustix::fs::syncfs(fs::File::open(&self.folder)?)?;
        let versions = served.join("versions");
        let lengths = files_below(&versions)?.into_iter().map(|file| Ok(fs::metadata(file)?.len()));
        let fetched: u64 = lengths.sum::<std::io::Result<_>>()?;
        let copying = machine.copy(&versions, case.sync)?.seconds(fetched);
        machine.clear(&store)?;
        machine.clear(&served)?;
        Ok((Round { reading, encoding, writing, publish, copying, fetch }, fetched))
    }

    fn policy(&self, encoding: Encoding) -> Result<PathBuf, Failure> {
        let path = self.folder.join("policy.toml");
        let rule = format!(
            "schema = \"weighbridge.policy/v1\"\n[[rule]]\nmatch = \"**.weight\"\nencode = \"{}\"\n",
            encoding.as_str()
        );
        fs::write(&path, rule)?;
        Ok(path)
    }

    fn run(
        &self,
        case: Case,
        store: &Path,
        arguments: impl Fn(&mut Command) -> Result<(), Failure>,
    ) -> Result<Taken, Failure> {
        let mut command = Command::new(self.binary);
        arguments(&mut command)?;
        command.arg("--json").arg("--store").arg(store).args(["--log", "error"]);
        if case.threads.0.is_some() {
            command.args(["--threads", &case.threads.label()]);
        }
        if case.sync == Sync::Off {
            command.arg("--no-sync");
        }
        // No configuration of the current folder, and none of the environment.
        command.current_dir(&self.folder).stdin(Stdio::null());
        for variable in ["STORE", "CONFIG", "LOG", "MEMORY", "THREADS", "NO_SYNC"] {
            command.env_remove(format!("WEIGHBRIDGE_{variable}"));
        }
        let (status, taken) = process::measure(&mut command)?;
        if status.success() { Ok(taken) } else { Err(format!("{command:?}: {status}").into()) }
    }
}
