//! Publishes and fetches synthetic checkpoints, and prints what that takes beside what this machine does with the same
//! bytes in the same run: copies of memory, reads, hashes, encodings, writes that last.
//!
//! ```text
//! cargo build --release --workspace && ./target/release/load --help
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `checkpoints` | the checkpoints: formats and sizes |
//! | `rates` | what the machine does |
//! | `runs` | what publish and fetch take, and their parts beside them |
//! | `report` | the tables |
//! | `broker` | messages through a broker, beside a bare client of it |
//! | `scale` | one checkpoint by several workers, into a slow store |
//! | `serving` | hosts: how soon they swap, how fast they fetch, what look-ups take |
//! | `check` | ratios beside those of a stored baseline |
//!
//! Figures differ from machine to machine and run to run; the ratios say more. Nothing here asserts a time.

mod broker;
mod check;
mod checkpoints;
mod rates;
mod report;
mod runs;
mod scale;
mod serving;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use weighbridge_schemas::encoding::Encoding;

use crate::checkpoints::{Format, Size, Tensors};
use crate::runs::{Case, Threads};

/// Whatever went wrong, told to a developer.
type Failure = Box<dyn Error>;

/// Publish and fetch synthetic checkpoints, and print Markdown tables of what that takes beside what this machine does
/// with the same bytes in the same run.
///
/// Every combination of what is listed is one row. Checkpoints are made and measured one after the other; with each,
/// every round measures every row once, and a row shows medians over the rounds. The folder needs room for three times
/// the largest checkpoint.
#[derive(Debug, Parser)]
#[command(name = "load", after_help = EXAMPLES)]
struct Options {
    /// Formats of the checkpoints
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Format::ALL)]
    formats: Vec<Format>,
    /// Few large tables, or many small ones (256 B to 64 KiB)
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Tensors::Large])]
    tensors: Vec<Tensors>,
    /// Sizes of the checkpoints
    #[arg(long, value_delimiter = ',', default_value = "256MiB")]
    sizes: Vec<Size>,
    /// What the tables become, by the names that policies use
    #[arg(long, value_delimiter = ',', value_parser = encoding, default_value = "int8")]
    encodings: Vec<Encoding>,
    /// Threads of publish and fetch: numbers, or `all`
    #[arg(long, value_delimiter = ',', default_value = "1,all")]
    threads: Vec<Threads>,
    /// Durability on, and off (`--no-sync`, where the binary knows it)
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Sync::On, Sync::Off])]
    sync: Vec<Sync>,
    /// Rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// A folder on the disk that is to be measured [default: the current one]
    #[arg(long, default_value = ".", hide_default_value = true)]
    folder: PathBuf,
    /// The binary to measure [default: weighbridge beside this program]
    #[arg(long)]
    binary: Option<PathBuf>,
    /// Only write the checkpoints, each into a folder of its own in this one, for other programs
    #[arg(long, value_name = "FOLDER")]
    make: Option<PathBuf>,
    /// Instead: publish one checkpoint by 1, 2 and 4 workers into a slow store
    #[arg(long)]
    scale: bool,
    /// Instead: have 20 hosts follow a channel, fetch, and look up rows
    #[arg(long)]
    serving: bool,
    /// Instead: send and take messages through a RabbitMQ of its own
    #[arg(long)]
    broker: bool,
    /// Compare the ratios with those of this baseline; exit code 1 where one has grown beyond the tolerance
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// How many times its baseline a ratio may be
    #[arg(long, default_value_t = 1.5)]
    tolerance: f64,
    /// Write the ratios as a baseline
    #[arg(long, value_name = "FILE")]
    write_baseline: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  load                                                         every format at 256 MiB
  load --formats safetensors --sizes 64MiB,256MiB,1GiB,4GiB    growth with size
  load --formats safetensors --encodings keep,f16,int8,int4    encodings
  load --formats safetensors --tensors small --sizes 1GiB      many small tensors
  load --check tests/load/baseline.json                        ratios beside the stored ones";

/// Whether a write counts only once it lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Sync {
    On,
    Off,
}

fn encoding(name: &str) -> Result<Encoding, String> {
    Encoding::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Encoding::ALL.iter().map(|encoding| encoding.as_str()).collect();
        format!("there are {}", names.join(", "))
    })
}

fn main() -> Result<ExitCode, Failure> {
    let options = Options::parse();
    if let Some(folder) = &options.make {
        return make(folder, &options);
    }
    if options.broker {
        return through_a_broker(&options);
    }
    if options.scale {
        return scale(&options);
    }
    let binary = binary(&options)?;
    if options.serving {
        return serve(&binary, &options);
    }
    let mut syncs = options.sync.clone();
    if syncs.contains(&Sync::Off) && !runs::knows_no_sync(&binary)? {
        syncs.retain(|&sync| sync == Sync::On);
        report::note("this weighbridge has no --no-sync: rows without durability are left out");
    }
    let mut cases = Vec::new();
    for &encoding in &options.encodings {
        for &threads in &options.threads {
            cases.extend(syncs.iter().map(|&sync| Case { encoding, threads, sync }));
        }
    }
    let folder = tempfile::Builder::new().prefix("load-").tempdir_in(&options.folder)?;
    let mut machine = rates::Machine::new(folder.path())?;
    let mut measured = runs::Measured::default();
    for (format, tensors, size) in checkpoints(&options) {
        let checkpoint = checkpoints::make(folder.path(), format, tensors, size)?;
        report::note(&format!("{}: {} rounds", checkpoint.label, options.runs));
        runs::measure(&binary, &checkpoint, &cases, options.runs, &mut machine, &mut measured)?;
        checkpoint.remove()?;
    }
    report::print(&measured);
    let ratios = report::ratios(&measured);
    if let Some(path) = &options.write_baseline {
        check::write(path, &ratios)?;
    }
    match &options.check {
        Some(path) if !check::compare(path, &ratios, options.tolerance)? => Ok(ExitCode::FAILURE),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Every combination of format, tensors and size.
fn checkpoints(options: &Options) -> Vec<(Format, Tensors, Size)> {
    let mut combinations = Vec::new();
    for &tensors in &options.tensors {
        for &size in &options.sizes {
            combinations.extend(options.formats.iter().map(|&format| (format, tensors, size)));
        }
    }
    combinations
}

/// Writes the checkpoints, and says where each is.
fn make(folder: &Path, options: &Options) -> Result<ExitCode, Failure> {
    for (number, (format, tensors, size)) in checkpoints(options).into_iter().enumerate() {
        let folder = folder.join(number.to_string());
        std::fs::create_dir_all(&folder)?;
        let checkpoint = checkpoints::make(&folder, format, tensors, size)?;
        report::note(&format!("{}: {}", checkpoint.path.display(), checkpoint.label));
    }
    Ok(ExitCode::SUCCESS)
}

/// Sends and takes messages.
#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn through_a_broker(options: &Options) -> Result<ExitCode, Failure> {
    let folder = tempfile::Builder::new().prefix("load-").tempdir_in(&options.folder)?;
    println!("{}", broker::measure(folder.path())?);
    Ok(ExitCode::SUCCESS)
}

/// Publishes each checkpoint by several workers.
#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn scale(options: &Options) -> Result<ExitCode, Failure> {
    let folder = tempfile::Builder::new().prefix("load-").tempdir_in(&options.folder)?;
    for (format, tensors, size) in checkpoints(options) {
        let checkpoint = checkpoints::make(folder.path(), format, tensors, size)?;
        println!("{}", scale::measure(folder.path(), &checkpoint.path, &checkpoint.label, options.runs)?);
        checkpoint.remove()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures the serving side with checkpoints of each size.
#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn serve(binary: &Path, options: &Options) -> Result<ExitCode, Failure> {
    for &size in &options.sizes {
        let folder = tempfile::Builder::new().prefix("load-").tempdir_in(&options.folder)?;
        let path = std::path::absolute(folder.path())?;
        println!("{}", serving::measure(binary, &path, size, options.runs)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn binary(options: &Options) -> Result<PathBuf, Failure> {
    let beside = std::env::current_exe()?.with_file_name("weighbridge");
    let binary = options.binary.clone().unwrap_or(beside);
    // Runs start in another folder.
    let found = std::path::absolute(&binary)?;
    if found.is_file() {
        return Ok(found);
    }
    Err(format!("{} is not there; run `cargo build --release --workspace` first", found.display()).into())
}
