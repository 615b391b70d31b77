//! Following a channel: a folder whose `current` points at what the channel does, soon after it does, for as long as
//! this runs. What is served before a new version is complete, verified and swapped to is served on, whatever fails.
//!
//! ```text
//! DIR/current                 what is served: as a fetch leaves it
//! DIR/versions/SNAPSHOT/      the versions that were served last, and one that is about to be
//! DIR/status.json             how it is: a `weighbridge.host/v1` document, written anew every few seconds
//! DIR/.followed.json          what is remembered: what is served, a swap that is not over, what was verified
//! DIR/.follow                 held by the one follower that works here; gone with its process
//! DIR/.removed/               versions on their way out
//! ```
//!
//! | room | holds |
//! |---|---|
//! | `work` | one attempt after the other: fetch, verify, swap; and back, where a command says no |
//! | `hook` | the commands that are run around a swap |
//! | `note` | what is remembered |
//! | `orders` | what is to be done, and when something else is |
//! | `refusals` | what a command said no to, and when it is tried again |
//! | `versions` | which versions are known to be right, and which are kept |
//! | `board` | what is shown, and logged |
//!
//! Order of a swap: the version is complete and verified; the command that is run before succeeds; the note says that a
//! swap is under way; `current` flips; the command that is run after succeeds; the note says what is served; versions
//! that are too many go. Where that command fails `current` goes back to what was served before, or away where nothing
//! was, and the command is run for that; where it fails for that too, it is run again until it succeeds. A crash
//! anywhere leaves a note from which the next follower goes on: a command that was not seen to succeed is run again.
//!
//! A version that was verified to the last byte in this folder, and whose files have the same sizes, numbers and times
//! as then, is used again without reading it: a restart costs nothing, and going back to what is still held needs
//! nothing of the store but the channel's entry. A version of which that is not known is read and hashed first.

mod board;
mod hook;
mod note;
mod orders;
mod refusals;
#[cfg(test)]
mod tests;
mod versions;
mod work;

use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::{self, Sender};
use tokio::time::{sleep, timeout};

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::host::{HostSchema, HostState, HostStatus};
use weighbridge_schemas::names::{ChannelName, ModelName};

use crate::disk::Durability;
use crate::error::{Class, Result, StoreError};
use crate::fetch::{self, FOLLOW, Fetched, Folder, Limits};
use crate::root::Root;
use crate::watch::{Told, Watch};

use board::{Board, Part, now};
pub use hook::Hooks;
use note::Note;
use orders::{Orders, Wanted, orders};
use work::Work;

/// The shortest and the longest pause before something that failed is tried again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// After how many failures the source is opened anew: a folder may be another one by then, and credentials too.
const OPENED_ANEW: u32 = 3;
/// How long a follower that has just been stopped may take to let the folder go.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is followed, and into which folder.
#[derive(Debug, Clone)]
pub struct Following {
    /// The model.
    pub model: ModelName,
    /// The channel.
    pub channel: ChannelName,
    /// This host's name, for those who look at many.
    pub host: String,
    /// How many versions stay in the folder: what is served, and what was before. At least 1.
    pub keep: usize,
    /// The commands that are run around a swap.
    pub hooks: Hooks,
    /// Whether the channel is taken as it is at first, whatever was seen of it before.
    pub forget: bool,
}

/// Where snapshots come from.
#[derive(Debug)]
pub struct Source {
    /// The channel, watched.
    pub watch: Watch,
    /// Where manifests and chunks are read.
    pub root: Root,
    /// How much a fetch may use.
    pub limits: Limits,
}

/// Opens the source, as often as it takes: it may be away when following begins, and another one later.
pub type Opener = Box<dyn FnMut() -> Result<Source> + Send>;

/// What whoever listens is told.
#[derive(Debug)]
pub enum Event<'e> {
    /// How it is.
    Status {
        /// The status.
        status: &'e HostStatus,
        /// Whether something changed beside times and counts; else it is a sign of life, every few seconds.
        is_news: bool,
    },
    /// A version was brought into the folder.
    Fetched(Fetched),
    /// `current` points at another version, and the command that is run after a swap, if there is one, succeeded.
    Swapped,
    /// Something failed, and is tried again.
    Failed {
        /// The failure's stable class.
        class: &'static str,
    },
}

/// Whoever is told what happens, at once: it may not take long.
pub type Listener = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Follows a channel.
pub struct Follower {
    work: Work,
    board: Arc<Board>,
    opener: Opener,
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower").finish_non_exhaustive()
    }
}

impl Follower {
    /// Whoever follows a channel into the folder at `path`.
    ///
    /// # Errors
    /// [`Class::Conflict`] where somebody else follows into it; [`Class::Refused`] where it is another model's;
    /// else as the folder fails.
    pub async fn new(
        path: &Path,
        durability: Durability,
        following: Following,
        opener: Opener,
        listener: Listener,
    ) -> Result<Self> {
        // Commands may run elsewhere.
        let path = std::path::absolute(path).map_err(|error| StoreError::own(path.display(), &error))?;
        let folder = Folder::open(&path, durability)?;
        let alone = timeout(PATIENCE, folder.lock_named(FOLLOW, "another follower of this folder")).await;
        let Ok(alone) = alone else {
            let why = "another process follows a channel into this folder; stop it, or name another folder";
            return Err(StoreError::new(Class::Conflict, path.display(), why));
        };
        let alone = alone?;
        let note = Note::read(&folder, &following.model, &following.channel)?;
        fetch::check_model(&folder, &following.model)?;
        versions::clear_removed(&folder);
        let board = Arc::new(Board::new(folder.clone(), blank(&path, &following), listener));
        let work = Work::new((folder, alone), following, note, Arc::clone(&board));
        work.show();
        Ok(Self { work, board, opener })
    }

    /// Follows until `stop` comes. What is being fetched then is given up, and goes on when following is begun again; a
    /// swap that has begun ends first, which takes as long as its commands may. Whoever gives this up half way loses
    /// nothing either: the next follower goes on.
    ///
    /// # Errors
    /// [`Class::Refused`] where the folder was removed, or another one was put in its place: it may be another model's
    /// now, and another one may follow into it. Whatever else fails is tried again.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<()> {
        let Self { mut work, board, opener } = self;
        let (wants, wanted) = watch::channel(None);
        let (stops, stopping) = watch::channel(false);
        let told = async {
            stop.await;
            stops.send_replace(true);
            pending::<Infallible>().await
        };
        tokio::select! {
            worked = Box::pin(work.run(Orders::new(wanted, stopping))) => worked?,
            never = Box::pin(hear(opener, &wants, &board)) => match never {},
            never = Arc::clone(&board).keep_written() => match never {},
            never = told => match never {},
        }
        board.write().await;
        Ok(())
    }
}

/// Hears of the channel, and says what is wanted.
async fn hear(mut opener: Opener, wants: &Sender<Option<Wanted>>, board: &Board) -> Infallible {
    let mut source = None;
    let mut failures: u32 = 0;
    loop {
        let told = async {
            let Source { watch, .. } = match &mut source {
                Some(source) => source,
                none => none.insert(opener()?),
            };
            watch.next().await
        };
        match told.await {
            Ok(told) => {
                failures = 0;
                board.heard();
                if let (Told::Entry { entry, publishes_after, .. }, Some(source)) = (told, &source) {
                    want((*entry, publishes_after), source, wants, board);
                }
            }
            Err(error) => {
                failures += 1;
                // A source that answers, if only that it knows of nothing new for certain, is the right one.
                let answers = source.as_ref().is_some_and(|source: &Source| source.watch.is_connected());
                if failures.is_multiple_of(OPENED_ANEW) && !answers {
                    source = None;
                }
                // It says itself when it knows more.
                let pause = if answers { PAUSES.0 } else { pause(failures) };
                board.failed(Part::Source, &error, pause);
                sleep(pause).await;
            }
        }
    }
}

fn want(
    (entry, publishes_after): (ChannelEntry, u64),
    source: &Source,
    wants: &Sender<Option<Wanted>>,
    board: &Board,
) {
    tracing::info!(
        sequence = entry.sequence, snapshot = %entry.snapshot, step = entry.step, reason = entry.reason.as_str(),
        "the channel has moved"
    );
    board.came(&entry);
    let (root, limits) = (source.root.clone(), source.limits.clone());
    wants.send_modify(|wanted| {
        let orders = orders(wanted.as_ref(), &entry, publishes_after);
        *wanted = Some(Wanted { root, limits, entry: Arc::new(entry), orders });
    });
}

/// How long to wait after so many failures: up to twice as long each time, and how long within that by chance, so that
/// many who failed together do not come back together.
fn pause(failures: u32) -> Duration {
    let (least, most) = PAUSES;
    let bound = least.saturating_mul(1 << failures.min(16)).min(most);
    least + (bound - least).mul_f64(fastrand::f64())
}

/// What is known before anything is.
fn blank(folder: &Path, following: &Following) -> HostStatus {
    let shown = folder.display().to_string();
    HostStatus {
        schema: HostSchema::V1,
        host: following.host.clone(),
        folder: shown.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
        model: following.model.clone(),
        channel: following.channel.clone(),
        state: HostState::Starting,
        wanted: None,
        serving: None,
        serving_since: None,
        age_seconds: None,
        held: Vec::new(),
        attempts: 0,
        last_error: None,
        last_error_at: None,
        heard_at: None,
        updated_at: now(),
    }
}
