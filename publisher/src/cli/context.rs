//! What a command works with: options, configuration, output; and from them the store, the queue, and how much of the
//! machine it may use.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::sync::watch;

use weighbridge_queue::clock::{Clock, SystemClock};
use weighbridge_queue::error::Error as QueueError;
use weighbridge_queue::{Queue, url};
use weighbridge_snapshots::channel::{Operation, WHO_BYTES};
use weighbridge_snapshots::root::{Absent, Durability, Root};

use super::Global;
use super::output::Output;
use crate::clock;
use crate::config::{Config, DEFAULT_MEMORY, DEFAULT_QUEUE, DEFAULT_STORE, check_memory, check_threads};
use crate::error::{Exit, Failure, Result};
use crate::job::Budget;

/// What a command works with.
pub(super) struct Context {
    pub(super) global: Global,
    pub(super) config: Config,
    pub(super) output: Output,
    /// How many signals asked this process to end.
    pub(super) signals: watch::Receiver<u32>,
}

impl Context {
    /// The store's root.
    pub(super) fn root(&self, absent: Absent) -> Result<Root> {
        self.root_with(absent, Durability::Synced)
    }

    pub(super) fn root_with(&self, absent: Absent, durability: Durability) -> Result<Root> {
        let opened = Root::open_as(self.location(), absent, durability, &self.config.bucket.options());
        opened.map_err(|error| {
            let mut failure = Failure::from(error);
            if failure.exit == Exit::NotFound && self.names_api() {
                failure.message.push_str(
                    "; this command asks the store itself, and not the API that is configured: what that is asked for, \
                     and moves of channels by gRPC, are in docs/api.md",
                );
            }
            failure
        })
    }

    /// The store's root, for whoever looks at jobs.
    pub(super) fn root_of_jobs(&self) -> Result<Root> {
        self.root(Absent::Refuse).map_err(|mut failure| {
            if failure.exit == Exit::NotFound {
                let why = "; or nothing has been taken from the queue yet: the first worker makes the store \
                           (`weighbridge queue status` shows what waits)";
                failure.message.push_str(why);
            }
            failure
        })
    }

    /// Whether an API is named for those commands that ask one.
    fn names_api(&self) -> bool {
        let variable = std::env::var_os("WEIGHBRIDGE_API").is_some_and(|url| !url.is_empty());
        variable || self.config.client.url.is_some()
    }

    /// Where the store is.
    pub(super) fn location(&self) -> &str {
        let named = given(self.global.store.as_ref()).or(self.config.store.as_deref());
        named.unwrap_or(DEFAULT_STORE)
    }

    /// Whether logs are JSON.
    pub(super) fn logs_json(&self) -> bool {
        self.global.logs_json().unwrap_or(false)
    }

    /// The queue's URL.
    pub(super) fn queue_url(&self) -> &str {
        given(self.global.queue.as_ref()).or(self.config.queue.as_deref()).unwrap_or(DEFAULT_QUEUE)
    }

    /// The queue's URL, without a password.
    pub(super) fn queue_shown(&self) -> String {
        url::shown(self.queue_url())
    }

    /// The queue.
    pub(super) async fn queue(&self) -> Result<Arc<dyn Queue>> {
        self.open_queue(url::open).await
    }

    /// The queue; no call waits longer than `patience` for other processes.
    pub(super) async fn queue_within(&self, patience: Duration) -> Result<Arc<dyn Queue>> {
        self.open_queue(move |url, clock| url::open_with(url, clock, patience)).await
    }

    /// The queue, which need not be there yet: for those who go on and on.
    pub(super) async fn queue_patiently(&self, patience: Duration) -> Result<Arc<dyn Queue>> {
        self.open_queue(move |url, clock| url::open_patiently(url, clock, patience)).await
    }

    /// Opens the queue where that may take a while, so that signals are heeded meanwhile.
    pub(super) async fn open_queue<T: Send + 'static>(
        &self,
        open: impl FnOnce(&str, Arc<dyn Clock>) -> std::result::Result<T, QueueError> + Send + 'static,
    ) -> Result<T> {
        let url = self.queue_url().to_owned();
        let opening = tokio::task::spawn_blocking(move || open(&url, Arc::new(SystemClock::new())));
        Ok(opening.await.map_err(|error| Failure::internal("opening the queue", error))??)
    }

    pub(super) fn durability(&self, option: &SyncOption) -> Result<Durability> {
        let no_sync = match given(option.no_sync.as_ref()) {
            Some(text) => match text {
                "true" | "1" | "yes" => true,
                "false" | "0" | "no" => false,
                _ => {
                    let why =
                        format!("--no-sync (or WEIGHBRIDGE_NO_SYNC): {text:?} is neither true nor false");
                    return Err(Failure::usage(why));
                }
            },
            None => self.config.no_sync.unwrap_or(false),
        };
        Ok(if no_sync { Durability::Unsynced } else { Durability::Synced })
    }

    /// One operation on channels, by whoever runs this.
    pub(super) fn operation(&self) -> Result<Operation> {
        let who = match &self.global.who {
            Some(who) if who.len() > WHO_BYTES => {
                return Err(Failure::usage(format!("--who: at most {WHO_BYTES} bytes")));
            }
            Some(who) => who.clone(),
            None => user(),
        };
        Ok(Operation { id: clock::operation_id(), who, when: clock::now() })
    }

    pub(super) fn memory(&self, option: &MemoryOption) -> Result<u64> {
        match given(option.memory.as_ref()).or(self.config.memory.as_deref()) {
            Some(text) => check_memory(text).map_err(|why| Failure::usage(format!("--memory: {why}"))),
            None => Ok(DEFAULT_MEMORY),
        }
    }

    pub(super) fn budget(&self, options: &BudgetOptions) -> Result<Budget> {
        let memory = self.memory(&options.memory)?;
        let threads = match given(options.threads.as_ref()) {
            Some(text) => text.parse().map_err(|_| format!("{text:?} is no number")).and_then(check_threads),
            None => {
                let cores = || std::thread::available_parallelism().map_or(1, usize::from);
                Ok(self.config.threads.unwrap_or_else(cores))
            }
        };
        let threads = threads.map_err(|why| Failure::usage(format!("--threads: {why}")))?;
        Ok(Budget { memory, threads })
    }
}

/// How much of the machine a command may use.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Budget")]
pub(super) struct BudgetOptions {
    #[command(flatten)]
    memory: MemoryOption,
    /// Threads that work beside each other [default: all cores].
    #[arg(long, env = "WEIGHBRIDGE_THREADS", value_name = "N")]
    threads: Option<String>,
}

/// How much memory a command may use.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Budget")]
pub(super) struct MemoryOption {
    /// Memory that the process may use, from 128MiB on [default: 512MiB].
    #[arg(long, env = "WEIGHBRIDGE_MEMORY", value_name = "SIZE")]
    memory: Option<String>,
}

/// Whether a command waits for the disk.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Disk")]
pub(super) struct SyncOption {
    /// Do not wait until what is written is on the disk. It is faster, and safe from a crash of this process; but if
    /// the machine crashes or loses power before a command that does wait, what was written last may be lost or
    /// damaged: `verify` names it, and once that has been moved away it can be made again [default: false].
    #[arg(long, env = "WEIGHBRIDGE_NO_SYNC", value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    no_sync: Option<String>,
}

/// An option's value. A variable that is set to nothing counts as not set.
pub(super) fn given(option: Option<&String>) -> Option<&str> {
    option.map(String::as_str).filter(|text| !text.is_empty())
}

/// The user's name, for logs.
fn user() -> String {
    let named = |variable: &&str| {
        let user = std::env::var_os(variable).unwrap_or_default();
        let user: String = user.to_string_lossy().chars().filter(|c| !c.is_control()).take(64).collect();
        (!user.is_empty()).then_some(user)
    };
    let named = ["USER", "LOGNAME"].iter().find_map(named);
    named.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}
