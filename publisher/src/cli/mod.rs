//! The command line, a file a command.
//!
//! What a command finds out goes to standard output (with `--json` as one JSON document); what it tells on the way,
//! logs and progress go to standard error. A failure is one line `error: ...` there, and with `--json` an object
//! `{"error": {"kind", "class", "message"}}` on standard output.

mod api;
mod bar;
mod channels;
mod completions;
mod config;
mod context;
mod dead;
mod drop;
mod fetch;
mod fleet;
mod follow;
mod gc;
mod inspect;
mod jobs;
mod keys;
mod manifest;
mod moves;
mod output;
mod policy;
mod publish;
mod queue;
mod report;
mod reports;
mod republish;
mod serve;
mod shown;
mod signals;
mod signing;
mod snapshots;
mod store;
mod token;
mod verify;
mod version;
mod worker;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use weighbridge_schemas::names::ChannelName;

use crate::config::Config;
use crate::error::{Exit, Failure, Result};
use context::{BudgetOptions, Context, MemoryOption, SyncOption, given};
use output::Output;

/// Weighbridge: training checkpoints in, verified serving snapshots out.
///
/// `publish` reads a checkpoint, quantizes its embedding tables, validates the result and stores an immutable,
/// content-addressed snapshot; then a channel moves to it. `fetch` brings a snapshot out, verified to the last byte.
#[derive(Debug, Parser)]
#[command(name = "weighbridge", version, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 rejected by a gate, 4 bad or unsupported checkpoint,\n\
    5 store unreachable, read-only or closed to you, 6 not found, 7 integrity failure, 130 interrupted.\n\n\
    Example:\n  weighbridge publish checkpoints/step-100 --model dlrm --step 100\n  \
    weighbridge fetch dlrm --into /srv/dlrm"
)]
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
    /// Where snapshots are kept: a path, or a URL: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or
    /// file://. Buckets take credentials from the usual variables (AWS_*, GOOGLE_*, AZURE_*), s3:// also from
    /// ~/.aws [default: weighbridge-data/store].
    #[arg(long, global = true, env = "WEIGHBRIDGE_STORE", value_name = "URL")]
    store: Option<String>,
    /// Where manifests wait for workers: embedded:PATH, a folder of this machine; or a RabbitMQ broker,
    /// amqp://USER:PASSWORD@HOST/VHOST or amqps://. A URL with a password belongs into the variable: others see command
    /// lines [default: embedded:weighbridge-data/queue].
    #[arg(long, global = true, env = "WEIGHBRIDGE_QUEUE", value_name = "URL", hide_env_values = true)]
    queue: Option<String>,
    /// The configuration file [default: weighbridge.toml, where there is one].
    #[arg(long, global = true, env = "WEIGHBRIDGE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON document on standard output, and nothing else there.
    #[arg(long, global = true)]
    json: bool,
    /// What is logged to standard error: error, warn, info, debug, or a filter such as weighbridge=debug.
    #[arg(long, global = true, env = "WEIGHBRIDGE_LOG", default_value = "warn", value_name = "FILTER")]
    log: String,
    /// How it is logged: text, or json (one object a line, with the job and the part that it is about) [default: text].
    #[arg(long, global = true, env = "WEIGHBRIDGE_LOG_FORMAT", value_name = "FORMAT")]
    log_format: Option<String>,
    /// Who does it, for the channel's log [default: the user, by USER or LOGNAME, else by number].
    #[arg(long, global = true, value_name = "NAME")]
    who: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Publish(publish::Publish),
    Drop(drop::Drop),
    Spool(drop::SpoolCommand),
    Worker(worker::Worker),
    Serve(serve::Serve),
    Jobs(jobs::Jobs),
    Republish(republish::Republish),
    Dead(dead::Dead),
    #[command(subcommand)]
    Queue(queue::Queue),
    Policy(policy::Policy),
    Fetch(fetch::Fetch),
    Fleet(fleet::Fleet),
    Inspect(inspect::Inspect),
    Report(report::Show),
    Snapshots(snapshots::List),
    Channels(channels::Channels),
    Promote(moves::Promote),
    Rollback(moves::Rollback),
    Hold(moves::Hold),
    Release(moves::Release),
    Pin(gc::Pin),
    Unpin(gc::Unpin),
    Gc(gc::Gc),
    Verify(verify::Verify),
    Sign(keys::Sign),
    #[command(subcommand)]
    Keys(keys::Keys),
    #[command(subcommand)]
    Token(token::Token),
    #[command(subcommand)]
    Store(store::Store),
    /// Check configuration and policy files.
    #[command(subcommand)]
    Config(config::Command),
    Completions(completions::Completions),
    /// Show versions.
    Version,
}

impl Global {
    /// Whether logs are JSON.
    fn logs_json(&self) -> Result<bool> {
        match given(self.log_format.as_ref()) {
            None | Some("text") => Ok(false),
            Some("json") => Ok(true),
            Some(other) => {
                let why = "it is neither text nor json";
                Err(Failure::usage(format!("--log-format (or WEIGHBRIDGE_LOG_FORMAT) {other:?}: {why}")))
            }
        }
    }
}

impl Command {
    /// Whether it runs until it is told to stop.
    fn runs_on(&self) -> bool {
        match self {
            Self::Worker(_) | Self::Serve(_) => true,
            Self::Spool(spool) => spool.follows(),
            Self::Fetch(fetch) => fetch.follows(),
            _ => false,
        }
    }

    /// How things stand once it was interrupted.
    fn after_interruption(&self) -> &'static str {
        match self {
            Self::Jobs(_) | Self::Republish(_) => "jobs go on, whoever waits for them",
            Self::Fetch(_) => "what has come stays, run it again to finish",
            _ => "what was published before stays, run it again to finish",
        }
    }
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
    let (cli, emptied) = match parse(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error, &arguments),
    };
    let output = Output::new(cli.global.json);
    if let Some(failure) = emptied {
        output.failure(&failure);
        return ExitCode::from(failure.exit as u8);
    }
    // A bug, or a machine that gives no more threads: one line and an exit code, like any other failure.
    std::panic::set_hook(Box::new(|_| {}));
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| start(cli, output))).unwrap_or_else(|panic| {
        let text =
            panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(Failure::internal("something went wrong inside", text.unwrap_or("no more is known")))
    });
    let code = match done {
        Ok(code) => code,
        Err(failure) => {
            output.failure(&failure);
            ExitCode::from(failure.exit as u8)
        }
    };
    if output::lost() { ExitCode::from(Exit::Failed as u8) } else { code }
}

/// The command line, and what is wrong with it that its definition cannot say.
fn parse(arguments: &[OsString]) -> std::result::Result<(Cli, Option<Failure>), clap::Error> {
    let mut definition = definition();
    let mut matches = definition.try_get_matches_from_mut(arguments)?;
    let emptied = signing::emptied(&matches);
    let cli = Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut definition))?;
    Ok((cli, emptied))
}

/// `--help` and `--version` go to standard output; a mistake is one line on standard error, and with `--json` an
/// object.
fn refuse(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    let help = error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || help {
        // A closed pipe is no reason to fail.
        let _ = error.print();
        return ExitCode::from(if help { Exit::Usage as u8 } else { 0 });
    }
    let text = error.to_string();
    let said: Vec<_> = text.lines().take_while(|line| !line.starts_with("Usage:")).collect();
    let said = said.join(" ").replace("For more information, try '--help'.", "");
    let message = format!("{}; see --help", said.trim_start_matches("error: ").trim());
    let json = arguments.iter().any(|argument| argument == "--json");
    Output::new(json).failure(&Failure::usage(message));
    ExitCode::from(Exit::Usage as u8)
}

fn start(cli: Cli, output: Output) -> Result<ExitCode> {
    log(&cli.global)?;
    // One thread conducts; what takes long (reading, encoding, hashing, files) goes to threads of its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::internal("starting", error))?;
    let command = cli.command;
    let done = runtime.block_on(async move {
        // Before any work begins.
        let mut signals = signals::counted();
        let config = Config::load(cli.global.config.as_deref())?;
        let context = Context { global: cli.global, config, output, signals: signals.clone() };
        // One that runs on and on is told to stop by the first signal, and stopped by the second.
        let (enough, after) = (if command.runs_on() { 2 } else { 1 }, command.after_interruption());
        tokio::select! {
            biased;
            _ = signals.wait_for(|count| *count >= enough) => Err(Failure {
                message: format!("interrupted; {after}"),
                exit: Exit::Interrupted,
                class: "interrupted",
                kind: weighbridge_schemas::error::Kind::Transient,
            }),
            done = run(command, &context) => done,
        }
    });
    // Work on other threads that nobody waits for any more must not hold up the exit.
    runtime.shutdown_timeout(Duration::from_millis(100));
    done
}

/// Where a process tells which port it listens on.
const LISTENING: &str = "weighbridge::listening";

/// Sends what is logged to standard error.
fn log(global: &Global) -> Result<()> {
    let json = global.logs_json()?;
    // An untrusted certificate, or what a broker refused, is told once, in the error; what the filter says of it comes
    // behind and counts.
    let always = if json { format!("{LISTENING}=info,") } else { String::new() };
    let filter = format!("rustls_platform_verifier=off,lapin=off,{always}{}", global.log);
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|error| Failure::usage(format!("--log {:?}: {error}", global.log)))?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        logs.json().flatten_event(true).with_current_span(true).with_span_list(false).init();
    } else {
        logs.with_ansi(std::io::stderr().is_terminal()).init();
    }
    Ok(())
}

async fn run(command: Command, context: &Context) -> Result<ExitCode> {
    match command {
        Command::Publish(publish) => return publish.run(context).await,
        Command::Drop(drop) => drop.run(context).await?,
        Command::Spool(spool) => spool.run(context).await?,
        Command::Worker(worker) => worker.run(context).await?,
        Command::Serve(serve) => serve.run(context).await?,
        Command::Jobs(jobs) => return jobs.run(context).await,
        Command::Republish(republish) => return republish.run(context).await,
        Command::Dead(dead) => return dead.run(context).await,
        Command::Queue(queue) => queue.run(context).await?,
        Command::Policy(policy) => policy.run(context).await?,
        Command::Fleet(fleet) => return fleet.run(context).await,
        Command::Fetch(fetch) => fetch.run(context).await?,
        Command::Inspect(inspect) => inspect.run(context).await?,
        Command::Report(show) => show.run(context).await?,
        Command::Snapshots(list) => return list.run(context).await,
        Command::Channels(channels) => return channels.run(context).await,
        Command::Promote(promote) => promote.run(context).await?,
        Command::Rollback(rollback) => rollback.run(context).await?,
        Command::Hold(hold) => hold.run(context).await?,
        Command::Release(release) => release.run(context).await?,
        Command::Pin(pin) => pin.run(context).await?,
        Command::Unpin(unpin) => unpin.run(context).await?,
        Command::Gc(gc) => gc.run(context).await?,
        Command::Verify(verify) => return verify.run(context).await,
        Command::Sign(sign) => sign.run(context).await?,
        Command::Keys(keys) => keys.run(context)?,
        Command::Token(token) => token.run(context)?,
        Command::Store(store) => return store.run(context).await,
        Command::Config(command) => command.run(context)?,
        Command::Completions(completions) => completions.run(context),
        Command::Version => version::run(context),
    }
    Ok(ExitCode::SUCCESS)
}
