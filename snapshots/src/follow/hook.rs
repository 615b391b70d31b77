//! Commands that a host runs around a swap. Each has a time limit, at whose end its process group is killed, but not
//! what left that by `setsid`; what it says is kept, up to a bound.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use weighbridge_schemas::host::Target;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};

use crate::error::{Class, Result, StoreError};
use crate::outside;

/// What a command is not told, by what variables' names begin with and have in them: what its follower asks the API and
/// the store with. The names are many, and clients of clouds come to know of more.
const SECRETS: [(&str, &[&str]); 4] =
    [("WEIGHBRIDGE_", &["TOKEN"]), ("AWS_", OF_CLOUDS), ("AZURE_", OF_CLOUDS), ("GOOGLE_", OF_CLOUDS)];
const OF_CLOUDS: &[&str] = &["KEY", "SECRET", "TOKEN", "SAS", "PASSWORD", "CREDENTIAL"];
/// How much of what a command says is kept: the end.
const SAID_BYTES: usize = 4 << 10;
/// How long what a command's own children still say is waited for once it has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The commands, which `sh -c` runs. Their exit codes count.
#[derive(Debug, Clone)]
pub struct Hooks {
    /// Run before `current` is flipped, once the version is complete and verified: where it fails, nothing changes.
    pub before: Option<String>,
    /// Run after `current` was flipped: where it fails, `current` goes back, and it is run again for what was served
    /// before.
    pub after: Option<String>,
    /// How long each may take.
    pub limit: Duration,
}

/// When a command is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Before `current` is flipped.
    Before,
    /// After it was.
    After,
    /// After it was flipped back.
    Restore,
}

impl Phase {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
            Self::Restore => "restore",
        }
    }

    /// What it is asked for by.
    const fn option(self) -> &'static str {
        match self {
            Self::Before => "--exec-before",
            Self::After => "--exec",
            Self::Restore => "--exec, run for what is served again,",
        }
    }
}

/// What a command is told, in its environment.
#[derive(Debug)]
pub(super) struct About<'a> {
    pub(super) phase: Phase,
    pub(super) model: &'a ModelName,
    pub(super) channel: &'a ChannelName,
    /// What is, or is to be, served.
    pub(super) target: &'a Target,
    /// What was served before.
    pub(super) previous: Option<SnapshotId>,
    /// Where the version lies.
    pub(super) version: PathBuf,
    /// The link to it.
    pub(super) current: PathBuf,
}

impl About<'_> {
    fn command(&self, text: &str) -> Command {
        let Target { snapshot, sequence, run, step, .. } = self.target;
        let mut command = Command::new("sh");
        command.arg("-c").arg(text).process_group(0).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in outside::variables().filter(|name| name.to_str().is_some_and(is_secret)) {
            command.env_remove(name);
        }
        command.env("WEIGHBRIDGE_PHASE", self.phase.as_str());
        command.env("WEIGHBRIDGE_MODEL", self.model.as_str());
        command.env("WEIGHBRIDGE_CHANNEL", self.channel.as_str());
        command.env("WEIGHBRIDGE_SNAPSHOT", snapshot.to_string());
        command.env("WEIGHBRIDGE_PREVIOUS", self.previous.map_or(String::new(), |id| id.to_string()));
        command.env("WEIGHBRIDGE_RUN", run.as_str());
        command.env("WEIGHBRIDGE_STEP", step.to_string());
        command.env("WEIGHBRIDGE_SEQUENCE", sequence.to_string());
        command.env("WEIGHBRIDGE_VERSION", &self.version);
        command.env("WEIGHBRIDGE_CURRENT", &self.current);
        command
    }
}

/// Whether a variable of this name may hold what is secret.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let is_so = |(start, parts): &(&str, &[&str])| {
        name.strip_prefix(start).is_some_and(|rest| parts.iter().any(|part| rest.contains(part)))
    };
    SECRETS.iter().any(is_so)
}

/// A process group that is killed when this goes out of sight.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The end of what a command said.
#[derive(Debug, Default)]
struct Said(Mutex<Vec<u8>>);

impl Said {
    async fn listen(&self, from: Option<impl AsyncRead + Unpin>) {
        let Some(mut from) = from else { return };
        let mut buffer = [0; 1024];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            said.extend_from_slice(buffer.get(..read).unwrap_or_default());
            let beyond = said.len().saturating_sub(SAID_BYTES);
            said.drain(..beyond);
        }
    }

    /// As one line that steers no terminal.
    fn text(&self) -> String {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text: String = String::from_utf8_lossy(&said)
            .chars()
            .map(|c| if c.is_whitespace() { ' ' } else { c })
            .filter(|c| !c.is_control())
            .collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Runs a command.
///
/// # Errors
/// [`Class::Hook`] where it cannot be run, fails, or takes too long.
pub(super) async fn run(text: &str, about: &About<'_>, limit: Duration) -> Result<()> {
    let phase = about.phase.as_str();
    // Not its text, which may hold what is secret, and would be told to whoever looks at the fleet.
    let failed =
        |why: String| StoreError::new(Class::Hook, format!("the command of {}", about.phase.option()), why);
    let mut child = about.command(text).spawn().map_err(|error| failed(format!("it is not run: {error}")))?;
    let mut group = Group(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
    let said = Said::default();
    let ended = timeout(limit, end(&mut child, &said)).await;
    let status = match ended {
        Ok(Ok(status)) => {
            group.0 = None;
            status
        }
        Ok(Err(error)) => return Err(failed(format!("it cannot be waited for: {error}"))),
        Err(_) => {
            drop(group);
            // It was killed: it ends at once.
            let _ = timeout(LAST_WORDS, child.wait()).await;
            let why = format!("it took longer than {} s, and was killed", limit.as_secs_f64());
            return Err(failed(and_said(why, &said.text())));
        }
    };
    let said = said.text();
    if status.success() {
        tracing::info!(command = text, phase, %said, "a command was run");
        return Ok(());
    }
    Err(failed(and_said(status.to_string(), &said)))
}

/// Waits for the command, and hears what it says until then.
async fn end(child: &mut Child, said: &Said) -> std::io::Result<ExitStatus> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let listen = async { tokio::join!(said.listen(stdout), said.listen(stderr)) };
    tokio::pin!(listen);
    let (status, has_heard) = tokio::select! {
        status = child.wait() => (status, false),
        _ = &mut listen => (child.wait().await, true),
    };
    if !has_heard {
        // A child of its own that goes on may keep its output open.
        let _ = timeout(LAST_WORDS, listen).await;
    }
    status
}

fn and_said(why: String, said: &str) -> String {
    if said.is_empty() { why } else { format!("{why}; it said: {said}") }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use weighbridge_schemas::time::Timestamp;

    use super::*;

    async fn ran(text: &str, limit: Duration) -> Result<()> {
        let (model, channel) = ("m".parse().unwrap(), "prod".parse().unwrap());
        let time = Timestamp::from_nanoseconds(0);
        let target = Target {
            snapshot: SnapshotId::of(b"s"),
            sequence: 7,
            run: "r".parse().unwrap(),
            step: 5,
            created_at: time,
            when: time,
        };
        let about = About {
            phase: Phase::After,
            model: &model,
            channel: &channel,
            target: &target,
            previous: None,
            version: "/v".into(),
            current: "/c".into(),
        };
        run(text, &about, limit).await
    }

    #[test]
    fn what_a_follower_asks_with_is_told_to_no_command() {
        let secret = "WEIGHBRIDGE_API_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_TOKEN aws_secret_access_key \
                      AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ACCESS_KEY AZURE_STORAGE_MASTER_KEY \
                      AZURE_STORAGE_SAS_KEY AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_TOKEN AZURE_CLIENT_SECRET \
                      AZURE_STORAGE_CLIENT_SECRET AZURE_STORAGE_ENCRYPTION_KEY AZURE_FABRIC_SESSION_TOKEN \
                      GOOGLE_SERVICE_ACCOUNT_KEY GOOGLE_BEARER_TOKEN GOOGLE_APPLICATION_CREDENTIALS";
        for name in secret.split_whitespace() {
            assert!(is_secret(name), "{name}");
        }
        let told = "PATH HOME KEY AWS_REGION AWS_ENDPOINT_URL AZURE_STORAGE_ACCOUNT_NAME WEIGHBRIDGE_STORE \
                    WEIGHBRIDGE_API RANKING_TOKEN";
        for name in told.split_whitespace() {
            assert!(!is_secret(name), "{name}");
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_command_is_told_what_it_is_about_and_its_exit_code_counts() {
        let told = "test $WEIGHBRIDGE_MODEL/$WEIGHBRIDGE_CHANNEL/$WEIGHBRIDGE_RUN = m/prod/r && \
                    test $WEIGHBRIDGE_PHASE/$WEIGHBRIDGE_STEP/$WEIGHBRIDGE_SEQUENCE = after/5/7 && \
                    test $WEIGHBRIDGE_VERSION-$WEIGHBRIDGE_PREVIOUS-$WEIGHBRIDGE_CURRENT = /v--/c && \
                    test ${#WEIGHBRIDGE_SNAPSHOT} = 64";
        ran(told, LONG).await.unwrap();
        let error = ran("echo out; printf 'a\\033[2Jb\\n' >&2; exit 3", LONG).await.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.class(), Class::Hook);
        assert!(text.contains("3") && text.contains("out") && text.contains("a[2Jb"), "{text}");
    }

    #[tokio::test]
    async fn what_a_command_says_is_bounded_and_the_end_of_it_kept() {
        let error = ran("yes 0123456789 | head -c 3000000; echo last; false", LONG).await.unwrap_err();
        let text = error.to_string();
        assert!(text.ends_with("last") && text.len() < 2 * SAID_BYTES, "{}", text.len());
    }

    #[tokio::test]
    async fn one_that_hangs_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let text = format!("(sleep 1; touch {}) & wait; sleep 600", mark.display());
        let error = ran(&text, Duration::from_millis(100)).await.unwrap_err();
        assert!(error.to_string().contains("longer than 0.1 s"), "{error}");
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!mark.try_exists().unwrap(), "its child goes on");
    }

    #[tokio::test]
    async fn one_that_leaves_a_process_behind_is_not_waited_for() {
        let began = Instant::now();
        ran("sleep 30 & exit 0", LONG).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}
