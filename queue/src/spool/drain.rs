//! Sending what waits in a spool: in order, each until the queue has it for certain, one drainer at a time.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Deserialize;
use tokio::time::Instant;

use super::names::{self, Name};
use super::{REFUSED, Spool, Unreadable};
use crate::Queue;
use crate::error::Error;
use crate::faulty::mix;
use crate::message::{Device, Kind, Message, Priority};

const LOCK: &str = ".lock";
/// How often a folder is looked at again.
const INTERVAL: Duration = Duration::from_millis(200);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How often an item is tried that fails for other reasons than that the queue is unreachable.
const MOST_FAILURES: u32 = 10;
/// How old a temporary file is that nobody writes any more.
const LEFT_OVER: Duration = Duration::from_secs(3600);
/// The class of what says none.
const MIDDLE: u8 = 5;

/// What a drainer did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drained {
    /// Manifests that are on the queue now.
    pub sent: u64,
    /// Manifests that were put aside.
    pub refused: u64,
    /// Manifests that still wait.
    pub left: u64,
}

/// Whether one manifest was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sent {
    /// It is on the queue, or somebody else has taken it there.
    Yes,
    /// It waits in the spool, for this reason.
    Waits(String),
}

/// What became of one try.
enum Tried {
    Gone,
    Refused,
    Failed(Error),
    /// It may not be read by this user: others can be.
    Closed,
}

/// The right to drain, until it is dropped.
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough where a forked child still has the file.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// Longer and longer pauses, each a little different, so that many who wait do not come back at once.
struct Pauses {
    next: Duration,
    longest: Duration,
    seed: u64,
}

impl Pauses {
    fn new(spool: &Spool) -> Self {
        let now = spool.clock.now();
        let longest = spool.longest_pause;
        Self { next: FIRST_PAUSE.min(longest), longest, seed: now.since_boot.subsec_nanos().into() }
    }

    /// From half of the next pause to all of it.
    fn next(&mut self) -> Duration {
        self.seed = mix(self.seed ^ u64::from(std::process::id()));
        let share = u32::try_from(self.seed % 512).unwrap_or(0);
        let pause = self.next / 1024 * (512 + share);
        self.next = (self.next * 2).min(self.longest);
        pause
    }
}

/// The little of a manifest that a drainer needs. Everything else is the publisher's.
#[derive(Deserialize)]
struct Peeked {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    priority: Option<u8>,
}

impl Spool {
    /// Sends what waits, in the order of dropping, until nothing is left or `deadline`. While the queue is unreachable
    /// it is tried again, with longer and longer pauses; another drainer is waited for. May be dropped at any time.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the spool cannot be read or written.
    pub async fn drain(&self, queue: &dyn Queue, deadline: Instant) -> Result<Drained, Error> {
        let mut drained = Drained::default();
        let work = async {
            loop {
                match self.lock()? {
                    Some(_lock) => return self.drain_locked(queue, &mut drained).await,
                    None if self.count()?.is_empty() => return Ok(()),
                    None => tokio::time::sleep(INTERVAL).await,
                }
            }
        };
        match tokio::time::timeout_at(deadline, work).await {
            Ok(result) => result?,
            Err(_) => tracing::info!(spool = %self.folder.display(), "the time to drain is over"),
        }
        drained.left = self.count()?.len() as u64;
        Ok(drained)
    }

    /// Sends what waits and whatever comes, until `stop` is ready.
    ///
    /// # Errors
    /// As [`Spool::drain`], where the spool could not be read at first; later it is waited for.
    pub async fn follow(&self, queue: &dyn Queue, stop: impl Future<Output = ()>) -> Result<Drained, Error> {
        let mut drained = Drained::default();
        self.count()?;
        let work = async {
            loop {
                let result = match self.lock() {
                    Ok(Some(_lock)) => self.drain_locked(queue, &mut drained).await,
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                };
                if let Err(error) = result {
                    tracing::warn!(%error, "the spool cannot be drained");
                    tokio::time::sleep(self.longest_pause).await;
                }
                tokio::time::sleep(INTERVAL).await;
            }
        };
        tokio::select! {
            () = work => {}
            () = stop => {}
        }
        drained.left = self.count()?.len() as u64;
        Ok(drained)
    }

    /// Tries once, for at most `limit`, to send the manifest `id`, without waiting for another drainer: sent twice, it
    /// is the same message.
    ///
    /// # Errors
    /// [`Error::Unreachable`] where the spool cannot be read or written.
    pub async fn send_one(&self, queue: &dyn Queue, id: &str, limit: Duration) -> Result<Sent, Error> {
        let refused = || Ok(Sent::Waits(format!("it was refused; the reason lies in {REFUSED}")));
        let find = |folder: &Path| Ok::<_, Error>(self.names(folder)?.into_iter().find(|name| name.id == id));
        let Some(name) = find(&self.folder)? else {
            return find(&self.folder.join(REFUSED))?.map_or(Ok(Sent::Yes), |_| refused());
        };
        match tokio::time::timeout(limit, self.try_one(queue, &name)).await {
            Ok(tried) => match tried? {
                Tried::Gone => Ok(Sent::Yes),
                Tried::Refused => refused(),
                Tried::Closed => Ok(Sent::Waits("this user may not read it".to_owned())),
                Tried::Failed(error) => Ok(Sent::Waits(error.to_string())),
            },
            Err(_) => Ok(Sent::Waits(format!("the queue did not take it within {limit:?}"))),
        }
    }

    /// The right to drain, where nobody has it.
    pub(super) fn lock(&self) -> Result<Option<Lock>, Error> {
        let path = self.folder.join(LOCK);
        let mut options = File::options();
        let opened = options.create(true).truncate(false).write(true).mode(0o660).open(&path);
        // Another user's, which may be read: enough to lock it.
        let opened = opened.or_else(|error| File::open(&path).map_err(|_| error));
        let file = opened.map_err(|error| self.io("cannot open its .lock", &error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock(file))),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(error) => Err(self.io("cannot lock it", &error.into())),
        }
    }

    /// Sends what waits, and what is put there meanwhile.
    async fn drain_locked(&self, queue: &dyn Queue, drained: &mut Drained) -> Result<(), Error> {
        self.tidy();
        let mut pauses = Pauses::new(self);
        loop {
            let names = self.count()?;
            let (all, mut closed) = (names.len(), 0);
            for name in names {
                loop {
                    match self.try_one(queue, &name).await? {
                        Tried::Gone => drained.sent += 1,
                        Tried::Refused => drained.refused += 1,
                        Tried::Closed => closed += 1,
                        Tried::Failed(error) => {
                            let pause = pauses.next();
                            tracing::warn!(id = name.id, %error, ?pause, "a manifest could not be sent; it waits");
                            tokio::time::sleep(pause).await;
                            continue;
                        }
                    }
                    pauses = Pauses::new(self);
                    break;
                }
            }
            if closed == all {
                return Ok(());
            }
        }
    }

    /// Tries to send one item, and takes it out of the spool when it is on the queue.
    async fn try_one(&self, queue: &dyn Queue, name: &Name) -> Result<Tried, Error> {
        if self.memory().closed.contains(name) {
            return Ok(Tried::Closed);
        }
        let manifest = match self.read(name) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => return Ok(Tried::Gone),
            Err(Unreadable::Never(why)) => return Ok(self.put_aside(name, &why)),
            Err(Unreadable::Now(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(self.close(name, &self.io("cannot read it", &error)));
            }
            Err(Unreadable::Now(error)) => {
                let error = self.io("cannot read it", &error);
                if self.try_again(name, &error) {
                    return Ok(Tried::Failed(error));
                }
                return Ok(self.put_aside(name, &error.to_string()));
            }
        };
        let bytes = manifest.len() as u64;
        let Err(error) = queue.send(&message(name, manifest)).await else {
            return Ok(match self.remove(name, bytes) {
                Ok(()) => Tried::Gone,
                Err(error) => self.close(name, &error),
            });
        };
        if matches!(error, Error::Unreachable { .. }) || self.try_again(name, &error) {
            return Ok(Tried::Failed(error));
        }
        // Is it the manifest that is refused, or is it the queue that is broken, and refuses everything?
        match queue.depth().await {
            Ok(_) => Ok(self.put_aside(name, &error.to_string())),
            Err(_) => Ok(Tried::Failed(error)),
        }
    }

    /// Puts an item aside, if this user may.
    fn put_aside(&self, name: &Name, why: &str) -> Tried {
        match self.refuse(name, why) {
            Ok(()) => Tried::Refused,
            Err(error) => self.close(name, &error),
        }
    }

    /// Leaves an item to who may read, move or remove it: it says something about who drains, and nothing about the
    /// others.
    fn close(&self, name: &Name, error: &Error) -> Tried {
        tracing::warn!(id = name.id, %error, "a manifest stays in the spool, for a user who may take it out");
        self.memory().closed.insert(name.clone());
        Tried::Closed
    }

    /// Whether an item that failed with `error` is worth another try.
    fn try_again(&self, name: &Name, error: &Error) -> bool {
        let mut memory = self.memory();
        let failures = memory.failures.entry(name.clone()).or_default();
        *failures += 1;
        !matches!(error, Error::Refused { .. }) && *failures < MOST_FAILURES
    }

    /// Removes what crashes have left over, and warns once of files that are not the spool's.
    fn tidy(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let file = entry.file_name();
            let text = file.to_str().unwrap_or_default();
            if names::is_temporary(text) {
                if entry.metadata().is_ok_and(|metadata| self.is_left_over(&metadata)) {
                    let _ = fs::remove_file(entry.path());
                }
            } else if Name::parse(text).is_none() && ![LOCK, REFUSED].contains(&text) {
                let mut memory = self.memory();
                // Bounded, whatever lies there.
                if memory.foreign.len() < 100 && memory.foreign.insert(file.clone()) {
                    let spool = self.folder.display();
                    tracing::warn!(%spool, ?file, "a file that is not the spool's; it is left alone");
                }
            }
        }
    }

    fn is_left_over(&self, metadata: &fs::Metadata) -> bool {
        let modified = metadata
            .modified()
            .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).map_err(io::Error::other));
        modified.is_ok_and(|modified| self.clock.now().wall.saturating_sub(modified) > LEFT_OVER)
    }
}

/// A manifest as a message. It may be anything: whoever takes it from the queue judges it.
fn message(name: &Name, body: Vec<u8>) -> Message {
    let peeked = serde_json::from_slice::<Peeked>(&body).ok();
    let (id, priority) = peeked.map_or((None, None), |peeked| (peeked.id, peeked.priority));
    Message {
        id: id.filter(|id| names::is_id(id)).unwrap_or_else(|| name.id.clone()),
        kind: Kind::Checkpoint,
        body,
        priority: Priority::of(priority.unwrap_or(MIDDLE)),
        device: Device::Any,
    }
}
