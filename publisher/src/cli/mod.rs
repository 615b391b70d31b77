//! The command line, a file a command.
//!
//! What a command finds out goes to standard output (with `--json` as one JSON document); what it tells on the way,
//! logs and progress go to standard error. A failure is one line `error: ...` there, and with `--json` an object
//! `{"error": {"kind", "class", "message"}}` on standard output.

mod bar;
mod channels;
mod completions;
mod config;
mod fetch;
mod inspect;
mod moves;
mod output;
mod publish;
mod report;
mod snapshots;
mod verify;
mod version;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};
use serde_json::json;

use weighbridge_schemas::names::ChannelName;
use weighbridge_snapshots::channel::Operation;
use weighbridge_snapshots::root::{Absent, Root};

use crate::clock;
use crate::config::{Config, DEFAULT_MEMORY, DEFAULT_STORE, LEAST_MEMORY, parse_bytes};
use crate::error::{Exit, Failure, Result};
use crate::job::Budget;
use output::Output;

/// Weighbridge: training checkpoints in, verified serving snapshots out.
///
/// `publish` reads a checkpoint, quantizes its embedding tables, validates the result and stores an immutable,
/// content-addressed snapshot; then a channel moves to it. `fetch` brings a snapshot out, verified to the last byte.
#[derive(Debug, Parser)]
#[command(name = "weighbridge", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 rejected by a gate, 4 bad or unsupported checkpoint,\n\
    5 store unreachable or read-only, 6 not found, 7 integrity failure.\n\n\
    Example:\n  weighbridge publish checkpoints/step-100 --model dlrm --step 100\n  \
    weighbridge fetch dlrm --into /srv/dlrm")]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Where snapshots are kept: a path, or a file:// URL [default: weighbridge-data/store].
    #[arg(long, global = true, env = "WEIGHBRIDGE_STORE", value_name = "URL")]
    store: Option<String>,
    /// The configuration file [default: weighbridge.toml, where there is one].
    #[arg(long, global = true, env = "WEIGHBRIDGE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON document on standard output, and nothing else there.
    #[arg(long, global = true)]
    json: bool,
    /// What is logged to standard error: error, warn, info, debug, or a filter such as weighbridge=debug.
    #[arg(long, global = true, env = "WEIGHBRIDGE_LOG", default_value = "warn", value_name = "FILTER")]
    log: String,
    /// Who does it, for the channel's log.
    #[arg(long, global = true, env = "USER", default_value = "unknown", value_name = "NAME", hide_env = true)]
    who: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Publish a checkpoint here and now, and move a channel to it.
    Publish(publish::Publish),
    /// Fetch a snapshot into a folder, verify it, and swap to it.
    Fetch(fetch::Fetch),
    /// Look into a checkpoint or a snapshot: tensors, dtypes, shapes, encodings.
    Inspect(inspect::Inspect),
    /// Show a snapshot's validation report.
    Report(report::Show),
    /// List snapshots.
    Snapshots(snapshots::List),
    /// List channels, or show a channel's log.
    Channels(channels::Channels),
    /// Move a channel to a snapshot; a hold ends.
    Promote(moves::Promote),
    /// Move a channel back, and hold it there.
    Rollback(moves::Rollback),
    /// Keep a channel where it is, whatever is published.
    Hold(moves::Hold),
    /// End a hold: the next publish moves the channel again.
    Release(moves::Release),
    /// Read and check a snapshot, a model, or the whole store.
    Verify(verify::Verify),
    /// Check configuration and policy files.
    #[command(subcommand)]
    Config(config::Command),
    /// Write a completion script for a shell.
    Completions(completions::Completions),
    /// Show versions.
    Version,
}

/// What a command works with: options, configuration, output.
pub struct Context {
    global: Global,
    config: Config,
    output: Output,
}

impl Context {
    /// The store's root.
    fn root(&self, absent: Absent) -> Result<Root> {
        let named = self.global.store.as_deref().or(self.config.store.as_deref());
        Ok(Root::open(named.unwrap_or(DEFAULT_STORE), absent)?)
    }

    /// One operation on channels, by whoever runs this.
    fn operation(&self) -> Operation {
        Operation { id: clock::operation_id(), who: self.global.who.clone(), when: clock::now() }
    }

    fn budget(&self, options: &BudgetOptions) -> Result<Budget> {
        let memory = match options.memory.as_deref().or(self.config.memory.as_deref()) {
            Some(text) => parse_bytes(text).map_err(|why| Failure::usage(format!("--memory: {why}")))?,
            None => DEFAULT_MEMORY,
        };
        if memory < LEAST_MEMORY {
            let least = LEAST_MEMORY >> 20;
            return Err(Failure::usage(format!("--memory: {memory} bytes are too few; at least {least}MiB")));
        }
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.or(self.config.threads).unwrap_or_else(cores);
        if !(1..=1024).contains(&threads) {
            return Err(Failure::usage(format!("--threads: {threads} is not 1 to 1024")));
        }
        Ok(Budget { memory, threads })
    }
}

/// How much of the machine a command may use.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Budget")]
pub struct BudgetOptions {
    /// Memory that the process may use, such as 512MiB [default: 512MiB].
    #[arg(long, env = "WEIGHBRIDGE_MEMORY", value_name = "SIZE")]
    memory: Option<String>,
    /// Threads that read and encode [default: all cores].
    #[arg(long, env = "WEIGHBRIDGE_THREADS", value_name = "N")]
    threads: Option<usize>,
}

/// The channel that is meant where none is named.
#[expect(clippy::unwrap_used, reason = "the literal is a valid name")]
fn default_channel() -> ChannelName {
    "prod".parse().unwrap()
}

/// The command line's definition, for completions and the test of `--help`.
#[must_use]
pub fn definition() -> clap::Command {
    Cli::command()
}

/// Runs the process's command line.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error, &arguments),
    };
    let output = Output::new(cli.global.json);
    match start(cli, output) {
        Ok(code) => code,
        Err(failure) => {
            output.failure(&failure);
            ExitCode::from(failure.exit as u8)
        }
    }
}

/// `--help` and `--version` go to standard output, mistakes to standard error; with `--json` both ways.
fn refuse(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    // A closed pipe is no reason to fail.
    let _ = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if arguments.iter().any(|argument| argument == "--json") {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let failure = Failure::usage(first);
        Output::new(true).document(&json!({ "error": output::error_object(&failure) }));
    }
    ExitCode::from(Exit::Usage as u8)
}

fn start(cli: Cli, output: Output) -> Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_new(&cli.global.log)
        .map_err(|error| Failure::usage(format!("--log {:?}: {error}", cli.global.log)))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::internal("starting", error))?;
    let command = cli.command;
    let done = runtime.block_on(async move {
        let config = Config::load(cli.global.config.as_deref())?;
        let context = Context { global: cli.global, config, output };
        tokio::select! {
            done = run(command, &context) => done,
            () = interrupted() => Err(Failure {
                message: "interrupted; what was published before stays, run it again to finish".to_owned(),
                exit: Exit::Interrupted,
                class: "interrupted",
                kind: weighbridge_schemas::error::Kind::Transient,
            }),
        }
    });
    // Work on other threads that nobody waits for any more must not hold up the exit.
    runtime.shutdown_timeout(Duration::from_millis(100));
    done
}

async fn run(command: Command, context: &Context) -> Result<ExitCode> {
    match command {
        Command::Publish(publish) => return publish.run(context).await,
        Command::Fetch(fetch) => fetch.run(context).await?,
        Command::Inspect(inspect) => inspect.run(context).await?,
        Command::Report(show) => show.run(context).await?,
        Command::Snapshots(list) => list.run(context).await?,
        Command::Channels(channels) => channels.run(context).await?,
        Command::Promote(promote) => promote.run(context).await?,
        Command::Rollback(rollback) => rollback.run(context).await?,
        Command::Hold(hold) => hold.run(context).await?,
        Command::Release(release) => release.run(context).await?,
        Command::Verify(verify) => return verify.run(context).await,
        Command::Config(command) => command.run(context)?,
        Command::Completions(completions) => completions.run(),
        Command::Version => version::run(context),
    }
    Ok(ExitCode::SUCCESS)
}

/// Comes back on Ctrl-C or SIGTERM.
async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => if pressed.is_err() { std::future::pending().await },
        _ = terminate.recv() => {}
    }
}
