//! `fetch --follow`: a folder that goes with a channel, until told to stop.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;

use weighbridge_schemas::host::{HostState, HostStatus, Target};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ChannelName;
use weighbridge_snapshots::api::Api;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::fetch::Limits;
use weighbridge_snapshots::follow::{Event, Follower, Following, Hooks, Listener, Opener, Source};
use weighbridge_snapshots::reference::Reference;
use weighbridge_snapshots::root::{Absent, Durability, Root};
use weighbridge_snapshots::sign::Trust;
use weighbridge_snapshots::watch::{ApiWatch, StoreWatch, Watch};

use super::output::{Output, between, plain, short};
use super::reports::Reports;
use super::shown::Shown;
use super::worker::told_to_stop;
use super::{Context, default_channel, given};
use crate::clock;
use crate::config::{check_interval, check_keep, check_seconds};
use crate::error::{Failure, Result};
use crate::host::Host;

/// Versions that are kept, when nothing else is said.
const KEEP: usize = 2;
/// How long a command may take, when nothing else is said, in seconds.
const EXEC_SECONDS: u64 = 60;
/// How often a store is asked, when nothing else is said.
const INTERVAL: Duration = Duration::from_secs(2);
/// For how long a look at the channel is tried again before it counts as failed: then it shows.
const LOOK: Duration = Duration::from_secs(5);
/// For how long what a fetch reads is tried again, when nothing else is said: what has come by then is kept.
const READ: Duration = Duration::from_secs(30);

/// How a channel is followed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Following")]
pub(super) struct FollowOptions {
    /// Follow the channel: fetch what it points at whenever that changes, and swap to it, until told to stop. What is
    /// served stays whatever fails; DIR/status.json says how it is.
    #[arg(long)]
    follow: bool,
    /// A command for `sh -c` that is run after each swap, such as one that has a server load DIR/current anew, or looks
    /// whether it does well. Where it fails, DIR/current goes back to what was served before (away, where nothing was),
    /// it is run again for that, and the new version is tried again later [default: none].
    #[arg(long, value_name = "COMMAND", requires = "follow")]
    exec: Option<String>,
    /// A command that is run before each swap, once the version is complete and verified. Where it fails nothing is
    /// swapped, and it is tried again later [default: none].
    #[arg(long, value_name = "COMMAND", requires = "follow")]
    exec_before: Option<String>,
    /// How long a command may take before it is killed with its process group, in seconds [default: 60].
    #[arg(long, value_name = "SECONDS", requires = "follow")]
    exec_seconds: Option<u64>,
    /// How many versions stay in DIR/versions: what is served, and what was before [default: 2].
    #[arg(long, value_name = "N", requires = "follow")]
    keep: Option<usize>,
    /// How often the store is asked for the channel's next entry, such as 500ms, 2s or 1m [default: 2s].
    #[arg(long, value_name = "TIME", requires = "follow")]
    interval: Option<String>,
    /// The address where health and metrics are served: /live, /ready, /metrics [default: none].
    #[arg(long, value_name = "ADDRESS:PORT", requires = "follow")]
    listen: Option<SocketAddr>,
    /// This host's name, for those who look at many [default: the machine's].
    #[arg(long, value_name = "NAME", requires = "follow")]
    host_name: Option<String>,
}

/// What is followed, from where and into which folder.
pub(super) struct Task {
    pub(super) reference: String,
    pub(super) into: PathBuf,
    pub(super) forget: bool,
    pub(super) durability: Durability,
    pub(super) trust: Option<Trust>,
    /// The API that is asked in the store's place.
    pub(super) api: Option<Arc<Api>>,
    /// How much a fetch out of this store may use.
    pub(super) limits: Box<dyn Fn(&Root) -> Limits + Send>,
}

impl FollowOptions {
    pub(super) fn follows(&self) -> bool {
        self.follow
    }

    pub(super) async fn run(&self, context: &Context, task: Task) -> Result<()> {
        let mut stop = told_to_stop(context);
        let (reference, channel) = channel(&task.reference)?;
        let following = self.following(context, &reference, &channel, task.forget)?;
        let configured = &context.config.fetch;
        let interval = match given(self.interval.as_ref()).or(configured.interval.as_deref()) {
            Some(text) => check_interval(text).map_err(|why| Failure::usage(format!("--interval: {why}")))?,
            None => INTERVAL,
        };
        let listen = self.listen.or(configured.listen);
        let reports = task.api.clone().map(Reports::to);
        let roots = Roots::of(context, task.trust, task.api);
        let (model, of) = (following.model.clone(), channel.clone());
        let shown = Shown::on(context, listen).await?;
        let host = Arc::new(Host::new(&model, &channel));
        let listener = listener(&host, reports, context.output);
        let root = roots.first(&task.into)?;
        let limits = task.limits;
        let opener: Opener = Box::new(move || {
            let root = roots.open(roots.read).map_err(away)?;
            let looked = roots.open(roots.look).map_err(away)?;
            let (model, channel) = (model.clone(), of.clone());
            let watch = match looked.api() {
                Some(_) => Watch::Api(ApiWatch::new(&looked, model, channel, None)),
                None => Watch::Store(StoreWatch::new(&looked, model, channel, None, interval)),
            };
            Ok(Source { watch, limits: limits(&root), root })
        });
        let follower = Follower::new(&task.into, task.durability, following, opener, listener).await?;
        shown.show(host);
        let run = async {
            follower.run(stop.wait()).await.map_err(|error| Some(Failure::from(error)))?;
            Err(None)
        };
        let looked = async { look(root, &reference, &channel, context.output).await.map_err(Some) };
        match tokio::try_join!(run, looked) {
            Err(Some(failure)) => Err(failure),
            Err(None) | Ok(((), ())) => Ok(()),
        }
    }

    fn following(
        &self,
        context: &Context,
        reference: &Reference,
        channel: &ChannelName,
        forget: bool,
    ) -> Result<Following> {
        let configured = &context.config.fetch;
        let usage = |option: &str, why: String| Failure::usage(format!("--{option}: {why}"));
        let keep = check_keep(self.keep.or(configured.keep).unwrap_or(KEEP));
        let seconds = check_seconds(self.exec_seconds.or(configured.exec_seconds).unwrap_or(EXEC_SECONDS));
        let command = |option: &str, given: &Option<String>, configured: &Option<String>| {
            let command = given.as_ref().or(configured.as_ref()).cloned();
            match command {
                Some(text) if text.trim().is_empty() => Err(usage(option, "it is no command".to_owned())),
                command => Ok(command),
            }
        };
        Ok(Following {
            model: reference.model.clone(),
            channel: channel.clone(),
            host: self.host(configured.host_name.as_ref())?,
            keep: keep.map_err(|why| usage("keep", why))?,
            hooks: Hooks {
                before: command("exec-before", &self.exec_before, &configured.exec_before)?,
                after: command("exec", &self.exec, &configured.exec)?,
                limit: Duration::from_secs(seconds.map_err(|why| usage("exec-seconds", why))?),
            },
            forget,
        })
    }

    /// What this host is called.
    fn host(&self, configured: Option<&String>) -> Result<String> {
        if let Some(name) = given(self.host_name.as_ref()).or(configured.map(String::as_str)) {
            if name.len() > limits::HOST_BYTES || name.chars().any(char::is_control) {
                let why = format!("at most {} bytes, without control characters", limits::HOST_BYTES);
                return Err(Failure::usage(format!("--host-name: {why}")));
            }
            return Ok(name.to_owned());
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name: String = name.chars().filter(|c| !c.is_control()).take(limits::HOST_BYTES / 4).collect();
        Ok(if name.is_empty() { "unknown".to_owned() } else { name })
    }
}

/// The channel that is meant; a snapshot does not move.
fn channel(text: &str) -> Result<(Reference, ChannelName)> {
    let reference: Reference = text.parse()?;
    let at = reference.at.as_deref().unwrap_or(reference.model.as_str());
    if at.parse::<SnapshotId>().is_ok() {
        return Err(not_moving(text));
    }
    let channel = match &reference.at {
        Some(at) => at.parse()?,
        None => default_channel(),
    };
    Ok((reference, channel))
}

fn not_moving(text: &str) -> Failure {
    Failure::usage(format!("{text} is a snapshot, which does not move; fetch it without --follow"))
}

/// The store, opened again and again until it is there.
struct Roots {
    location: String,
    bucket: weighbridge_snapshots::bucket::Options,
    trust: Option<Trust>,
    api: Option<Arc<Api>>,
    /// How patient whoever looks at the channel is, and whoever reads chunks.
    look: Duration,
    read: Duration,
}

impl Roots {
    fn of(context: &Context, trust: Option<Trust>, api: Option<Arc<Api>>) -> Self {
        let bucket = context.config.bucket.options();
        let read = context.config.bucket.retry_seconds.map_or(READ, Duration::from_secs);
        let location = context.location().to_owned();
        Self { location, bucket, trust, api, look: LOOK.min(read), read }
    }

    fn open(&self, patience: Duration) -> std::result::Result<Root, StoreError> {
        let options = weighbridge_snapshots::bucket::Options { patience, ..self.bucket.clone() };
        let root = match &self.api {
            Some(api) => Root::behind_api(api, &options)?,
            None => Root::open_as(&self.location, Absent::Refuse, Durability::Synced, &options)?,
        };
        Ok(match &self.trust {
            Some(trust) => root.trusting(trust.clone()),
            None => root,
        })
    }

    /// The store, where it is there; `None` where it is away and something is served already, which goes on.
    fn first(&self, into: &Path) -> Result<Option<Root>> {
        match self.open(self.look) {
            Ok(root) => Ok(Some(root)),
            Err(_) if into.join("current").is_dir() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A store that is not there is away: whoever follows waits for it.
fn away(error: StoreError) -> StoreError {
    match error.class() {
        Class::NotFound => StoreError::new(Class::Unreachable, "the store", error.to_string()),
        _ => error,
    }
}

/// Looks whether there is such a channel. What is not there yet is waited for; but whoever mistyped a name would wait
/// for ever, and is told.
async fn look(
    root: Option<Root>,
    reference: &Reference,
    channel: &ChannelName,
    output: Output,
) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    // An API is asked for no lists.
    if root.api().is_none() {
        // Where that cannot be found out, the follower itself will say so.
        let Ok(channels) = catalog::channels(&root, &reference.model).await else { return Ok(()) };
        if channels.contains(channel) {
            return Ok(());
        }
    }
    match reference.resolve(&root, channel).await {
        Ok(located) if located.followed.is_none() => Err(not_moving(&reference.to_string())),
        Err(error) if error.class() == Class::NotFound => {
            let (what, why) = (reference.to_string(), error.to_string());
            // The error may begin with the channel itself.
            let why = why.strip_prefix(&format!("{what}: ")).unwrap_or(&why);
            output.tell(&format!("waiting for {what}: {}\n", plain(why)));
            Ok(())
        }
        Err(error) if error.class() == Class::Refused => Err(error.into()),
        _ => Ok(()),
    }
}

/// Tells the host's figures what happens, and people or programs what is new.
fn listener(host: &Arc<Host>, reports: Option<Reports>, output: Output) -> Listener {
    let host = Arc::clone(host);
    let said = Mutex::new(None);
    Arc::new(move |event| {
        host.note(event);
        if let Some(reports) = &reports {
            reports.note(event);
        }
        let Event::Status { status, is_news: true } = event else { return };
        if output.is_json() {
            return output.line(status);
        }
        let news = Some(news(status));
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != news {
            output.tell(&line(status));
            *said = news;
        }
    })
}

/// What of a status is news for people: of what fails again and again they hear once.
fn news(status: &HostStatus) -> (HostState, Option<u64>, Option<u64>, Option<String>) {
    let sequence = |target: &Option<Target>| target.as_ref().map(|target| target.sequence);
    let serving = sequence(&status.serving).filter(|_| status.state == HostState::Current);
    let class = status.last_error.as_ref().map(|why| why.class.clone());
    (status.state, sequence(&status.wanted), serving, class)
}

/// How a host is, for people.
fn line(status: &HostStatus) -> String {
    let what = format!("{}@{}", status.model, status.channel);
    let shown = |target: &Target| {
        let entry = if target.sequence == 0 { "?".to_owned() } else { target.sequence.to_string() };
        format!("entry {entry}, step {}, {}", target.step, short(&target.snapshot))
    };
    let serving = status.serving.as_ref().map_or_else(
        || "nothing".to_owned(),
        |serving| {
            let age = between(serving.created_at, clock::now()).as_secs();
            // Without an entry nothing tells when the checkpoint was written.
            let age = if serving.sequence == 0 { "of unknown age".into() } else { format!("{age} s old") };
            format!("{}, {age}", shown(serving))
        },
    );
    let wanted = status
        .wanted
        .as_ref()
        .filter(|wanted| status.serving.as_ref().is_none_or(|serving| serving.snapshot != wanted.snapshot));
    let wanted = wanted.map_or(String::new(), |wanted| format!("; wanted is {}", shown(wanted)));
    let class = status.last_error.as_ref().map_or(String::new(), |why| format!("; {}", plain(&why.class)));
    format!("{:>12}  {what}: serving {serving}{wanted}{class}\n", status.state.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_is_a_channel() {
        let of = |text: &str| channel(text).map(|(_, channel)| channel.to_string());
        assert_eq!(of("dlrm").unwrap(), "prod");
        assert_eq!(of("dlrm@canary").unwrap(), "canary");
        for text in [format!("dlrm@{}", "ab".repeat(32)), "ab".repeat(32)] {
            assert!(of(&text).unwrap_err().message.contains("does not move"), "{text}");
        }
        assert!(of("dlrm@").is_err());
    }
}
