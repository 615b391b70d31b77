//! What a follower shows: `status.json` in its folder, and whoever listens.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::timeout;

use weighbridge_schemas::channel::ChannelEntry;
use weighbridge_schemas::host::{HostState, HostStatus, Target};
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::job::Why;
use weighbridge_schemas::limits;
use weighbridge_schemas::time::Timestamp;

use super::{Event, Listener};
use crate::disk::Durability;
use crate::error::StoreError;
use crate::fetch::Folder;
use crate::outside;
use crate::root::apart;

/// The status' name in the folder.
const NAME: &str = "status.json";
/// How old the file becomes before it is written anew.
const FRESH: Duration = Duration::from_secs(5);
/// Longest message of a failure that is shown, in characters.
const MESSAGE: usize = 4000;
/// How often the same failure is logged.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// What a follower shows.
pub(super) struct Board {
    folder: Folder,
    listener: Listener,
    shown: Mutex<Shown>,
    /// There is something new to write.
    changed: Notify,
}

struct Shown {
    status: HostStatus,
    /// What is wrong with the source of snapshots.
    source: Trouble,
    /// What is wrong with what is wanted.
    work: Trouble,
    /// A swap is not over.
    is_swapping: bool,
    /// The command that is run after it has not said anything yet.
    is_trying: bool,
}

/// Failures since the last success.
#[derive(Default)]
struct Trouble {
    count: u64,
    last: Option<(Why, Timestamp)>,
    said: Option<Said>,
}

/// A failure that was logged.
struct Said {
    class: &'static str,
    at: Instant,
    /// How many there were since.
    more: u64,
}

/// Where something fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Hearing of the channel.
    Source,
    /// Getting and serving what is wanted.
    Work,
}

impl Board {
    pub(super) fn new(folder: Folder, status: HostStatus, listener: Listener) -> Self {
        let (source, work) = (Trouble::default(), Trouble::default());
        let shown = Shown { status, source, work, is_swapping: false, is_trying: false };
        Self { folder, listener, shown: Mutex::new(shown), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells `event` to whoever listens.
    pub(super) fn tell(&self, event: &Event<'_>) {
        (self.listener)(event);
    }

    /// Changes what is shown, and tells it where it is news.
    fn change(&self, change: impl FnOnce(&mut Shown)) {
        let (status, is_news) = {
            let mut shown = self.lock();
            let before = shown.status.clone();
            change(&mut shown);
            shown.settle();
            let is_news = said(&shown.status) != said(&before);
            if !is_news && shown.status.attempts == before.attempts {
                return;
            }
            (shown.status.clone(), is_news)
        };
        self.tell(&Event::Status { status: &status, is_news });
        self.changed.notify_one();
    }

    /// The source answered.
    pub(super) fn heard(&self) {
        self.change(|shown| {
            if shown.source.count > 0 {
                tracing::info!(failures = shown.source.count, "the channel is heard of again");
            }
            shown.source = Trouble::default();
            shown.status.heard_at = Some(now());
        });
    }

    /// A newer entry than what is wanted came meanwhile.
    pub(super) fn came(&self, entry: &ChannelEntry) {
        self.change(|shown| {
            if shown.status.wanted.is_some() {
                shown.want(entry);
            }
        });
    }

    /// An entry is believed.
    pub(super) fn wants(&self, entry: &ChannelEntry) {
        self.change(|shown| shown.want(entry));
    }

    /// `current` points there; and whether the swap to it is over.
    pub(super) fn serves(&self, serving: Option<(Target, Timestamp)>, held: Vec<SnapshotId>, is_over: bool) {
        self.change(|shown| {
            (shown.is_swapping, shown.is_trying) = (!is_over, false);
            let status = &mut shown.status;
            (status.serving, status.serving_since) = serving.unzip();
            status.held = held;
            status.held.truncate(limits::HOST_VERSIONS);
        });
    }

    /// `current` points at what is wanted, and a command says whether it stays: until then what was served before
    /// counts.
    pub(super) fn tries(&self, held: Vec<SnapshotId>) {
        self.change(|shown| {
            shown.is_trying = true;
            shown.status.held = held;
            shown.status.held.truncate(limits::HOST_VERSIONS);
        });
    }

    /// What is wanted is served.
    pub(super) fn well(&self) {
        self.change(|shown| {
            if shown.work.count > 0 {
                tracing::info!(failures = shown.work.count, "what is wanted is served at last");
            }
            shown.work = Trouble::default();
        });
    }

    /// Something failed.
    pub(super) fn failed(&self, part: Part, error: &StoreError, again_in: Duration) {
        self.tell(&Event::Failed { class: error.class().as_str() });
        self.change(|shown| shown.trouble(part).note(error, again_in));
    }

    /// Writes the file whenever there is something new, and before it gets old.
    pub(super) async fn keep_written(self: Arc<Self>) -> Infallible {
        loop {
            self.write().await;
            if timeout(FRESH, self.changed.notified()).await.is_err() {
                let status = self.status();
                self.tell(&Event::Status { status: &status, is_news: false });
            }
        }
    }

    /// What is shown now.
    fn status(&self) -> HostStatus {
        let mut shown = self.lock();
        shown.settle();
        shown.status.clone()
    }

    /// Writes the file. One that cannot be written is old, and shows by its time that it is.
    pub(super) async fn write(&self) {
        let (folder, status) = (self.folder.clone(), self.status());
        let written = apart(NAME, move || {
            let written = folder.replace(NAME, &status.to_json(), Durability::Unsynced);
            written.map_err(|error| StoreError::own(folder.path().join(NAME).display(), &error))
        });
        if let Err(error) = written.await {
            tracing::debug!(%error, "the status is not written");
        }
    }
}

impl Shown {
    /// Notes what is wanted, unless that is older than what was.
    fn want(&mut self, entry: &ChannelEntry) {
        let before = self.status.wanted.as_ref().map_or(0, |wanted| wanted.sequence);
        if before < entry.sequence {
            self.status.wanted = Some(target(entry));
        }
    }

    fn trouble(&mut self, part: Part) -> &mut Trouble {
        match part {
            Part::Source => &mut self.source,
            Part::Work => &mut self.work,
        }
    }

    /// Makes the rest of the status follow from what is known.
    fn settle(&mut self) {
        let now = now();
        let troubles = [&self.source, &self.work];
        let last = troubles.iter().filter_map(|trouble| trouble.last.clone()).max_by_key(|(_, at)| *at);
        let status = &mut self.status;
        status.attempts = troubles.iter().map(|trouble| trouble.count).sum();
        (status.last_error, status.last_error_at) = last.unzip();
        status.updated_at = now;
        // Without an entry nothing tells when the checkpoint was written.
        let known = status.serving.as_ref().filter(|serving| serving.sequence > 0);
        status.age_seconds = known.map(|serving| {
            now.nanoseconds().saturating_sub(serving.created_at.nanoseconds()) / 1_000_000_000
        });
        status.state = match (&status.wanted, &status.serving) {
            (None, None) => HostState::Starting,
            _ if status.last_error.is_some() => HostState::Behind,
            _ if self.is_trying => HostState::Trying,
            _ if self.is_swapping => HostState::Fetching,
            (Some(wanted), Some(serving)) if wanted.snapshot == serving.snapshot => HostState::Current,
            (None, Some(_)) => HostState::Starting,
            _ => HostState::Fetching,
        };
    }
}

impl Trouble {
    /// Counts a failure, and logs it, unless the same was logged a moment ago.
    fn note(&mut self, error: &StoreError, again_in: Duration) {
        self.count = self.count.saturating_add(1);
        let (kind, class) = (error.kind().as_str().to_owned(), error.class().as_str());
        let message = error.to_string().chars().take(MESSAGE).collect();
        let why = Why { kind, class: class.to_owned(), message };
        self.last = Some((why, now()));
        if let Some(said) = &mut self.said
            && said.class == class
            && said.at.elapsed() < SAID_AGAIN
        {
            said.more += 1;
            return;
        }
        let more = self.said.as_ref().map_or(0, |said| said.more);
        tracing::warn!(%error, class, failures = self.count, unsaid = more, ?again_in, "it is tried again");
        self.said = Some(Said { class, at: Instant::now(), more: 0 });
    }
}

/// What of a status is news when it changes: not times, nor how often something was tried, nor how a failure was put.
fn said(status: &HostStatus) -> impl PartialEq {
    let target = |target: &Option<Target>| target.as_ref().map(|target| (target.snapshot, target.sequence));
    let (wanted, serving) = (target(&status.wanted), target(&status.serving));
    let error = status.last_error.as_ref().map(|error| error.class.clone());
    (status.state, wanted, serving, status.held.clone(), error)
}

/// This moment.
pub(super) fn now() -> Timestamp {
    Timestamp::from_nanoseconds(outside::nanoseconds())
}

/// What an entry points at.
pub(super) fn target(entry: &ChannelEntry) -> Target {
    Target {
        snapshot: entry.snapshot,
        sequence: entry.sequence,
        run: entry.run.clone(),
        step: entry.step,
        created_at: entry.created_at,
        when: entry.when,
    }
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::channel::{ChannelSchema, Reason, entry_id};
    use weighbridge_schemas::host::HostSchema;

    use super::*;
    use crate::error::Class;

    fn entry(sequence: u64) -> ChannelEntry {
        let time = Timestamp::from_nanoseconds(0);
        ChannelEntry {
            schema: ChannelSchema::V1,
            sequence,
            id: entry_id(&sequence.to_string(), &"prod".parse().unwrap()),
            snapshot: SnapshotId::of(&sequence.to_le_bytes()),
            previous: None,
            run: "r".parse().unwrap(),
            step: sequence,
            created_at: time,
            reason: Reason::Publish,
            who: "test".into(),
            when: time,
            signatures: Vec::new(),
        }
    }

    #[test]
    fn what_is_known_makes_a_state_and_only_news_are_told() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::open(at.path(), Durability::Synced).unwrap();
        let told: Arc<Mutex<Vec<(HostState, bool)>>> = Arc::default();
        let heard = Arc::clone(&told);
        let listener: Listener = Arc::new(move |event| {
            if let Event::Status { status, is_news } = event {
                heard.lock().unwrap().push((status.state, *is_news));
            }
        });
        let status = HostStatus {
            schema: HostSchema::V1,
            host: "h".into(),
            folder: "/f".into(),
            model: "m".parse().unwrap(),
            channel: "prod".parse().unwrap(),
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
        };
        let board = Board::new(folder, status, listener);
        let shown = || std::mem::take(&mut *told.lock().unwrap());
        let fails = |part| board.failed(part, &StoreError::new(Class::Unreachable, "a", "b"), FRESH);
        board.heard();
        assert_eq!((shown(), board.status().state), (vec![], HostState::Starting));
        board.wants(&entry(1));
        assert_eq!(shown(), [(HostState::Fetching, true)]);
        board.wants(&entry(1));
        board.serves(Some((target(&entry(1)), now())), vec![], false);
        board.serves(Some((target(&entry(1)), now())), vec![], true);
        assert_eq!(shown(), [(HostState::Fetching, true), (HostState::Current, true)]);
        board.tries(vec![]);
        assert_eq!(board.status().serving, Some(target(&entry(1))), "what is on trial does not count yet");
        board.serves(Some((target(&entry(1)), now())), vec![], true);
        assert_eq!(shown(), [(HostState::Trying, true), (HostState::Current, true)]);
        fails(Part::Source);
        fails(Part::Source);
        assert_eq!(shown(), [(HostState::Behind, true), (HostState::Behind, false)]);
        assert_eq!(board.status().attempts, 2);
        board.came(&entry(2));
        board.came(&entry(1));
        fails(Part::Work);
        board.heard();
        assert_eq!(board.status().wanted, Some(target(&entry(2))));
        assert_eq!((board.status().state, board.status().attempts), (HostState::Behind, 1));
        board.came(&entry(3));
        fails(Part::Work);
        assert_eq!(
            board.status().attempts,
            2,
            "failures are counted since the last success, whatever was wanted"
        );
        let unknown = Target { sequence: 0, ..target(&entry(2)) };
        board.serves(Some((unknown, now())), vec![], true);
        assert_eq!(board.status().age_seconds, None, "nobody knows when its checkpoint was written");
        board.serves(Some((target(&entry(3)), now())), vec![], true);
        assert!(board.status().age_seconds.is_some());
        board.well();
        assert_eq!((board.status().state, board.status().last_error), (HostState::Current, None));
    }
}
