//! Changes that callers ask for: carried out to their end, also where the caller has gone meanwhile, and written to the
//! audit log, done or refused.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tonic::Request;

use weighbridge_snapshots::channel::Operation;

use super::answers::Refusal;
use super::audit::Deed;
use super::shared::{self, Shared};
use super::shares::Shares;
use super::tokens::Caller;
use super::turns::Turns;
use crate::clock;
use crate::error::Failure;

/// Changes at once; most take a few requests to the store. What is handed over has places of its own: a queue that does
/// not take it must not keep operators from moving channels.
const AT_ONCE: u32 = 64;
/// Changes of one caller at once.
const OF_ONE: usize = 16;
/// What is handed over to workers.
const HANDED_OVER: [&str; 3] = ["submit", "republish", "requeue"];
/// When to ask again where there are more.
const AGAIN: Duration = Duration::from_secs(1);
/// Refusals to one caller that are written down: a second, and after a quiet time.
const REFUSALS: (NonZeroU32, NonZeroU32) = (NonZeroU32::MIN, NonZeroU32::MIN.saturating_add(99));
/// Where a caller may say on whose behalf they ask.
const WHO: &str = "weighbridge-who";
/// Longest text there, in bytes.
const WHO_BYTES: usize = 100;

/// Who asks, and from where.
#[derive(Debug, Clone)]
pub struct Asker {
    /// The caller.
    pub caller: Caller,
    /// Whence.
    pub from: SocketAddr,
    /// What they say of themselves.
    pub said: Option<String>,
}

impl Asker {
    /// Who sent `request`.
    ///
    /// # Errors
    /// Where nobody knows, or what they say of themselves is no good.
    pub fn of<T>(request: &Request<T>) -> Result<Self, Refusal> {
        let caller = shared::caller(request.extensions())?;
        let from = shared::connection(request.extensions()).map(|connection| connection.peer);
        let from = from.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
        let said = match request.metadata().get(WHO).map(|said| said.to_str()) {
            None => None,
            Some(Ok(said)) if (1..=WHO_BYTES).contains(&said.len()) => Some(said.to_owned()),
            Some(_) => {
                let why = format!("{WHO}: it has 1 to {WHO_BYTES} printable characters of ASCII");
                return Err(Refusal::bad_request(why));
            }
        };
        Ok(Self { caller, from, said })
    }

    /// The caller, and what they say of themselves: for documents.
    #[must_use]
    pub fn who(&self) -> String {
        let name = self.caller.name();
        self.said.as_ref().map_or_else(|| name.to_owned(), |said| format!("{name} ({said})"))
    }

    /// The operation that this is. The same caller's request of the same id is the same operation.
    #[must_use]
    pub fn operation(&self, action: &str, request_id: Option<&str>) -> Operation {
        let id = match request_id {
            Some(id) => format!("{action} {id} of {}", self.caller.name()),
            None => clock::operation_id(),
        };
        Operation { id, who: self.who(), when: clock::now() }
    }
}

/// What is to be done, for the audit log.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// The method, such as `promote`.
    pub action: &'static str,
    /// The model.
    pub model: Option<String>,
    /// The channel, job, snapshot or letter that it is about.
    pub object: String,
    /// The caller's id of the request.
    pub request_id: String,
}

/// What was done.
#[derive(Debug)]
pub struct Done<T> {
    /// The answer.
    pub answer: T,
    /// What the object was before.
    pub before: Option<String>,
    /// What it is now.
    pub after: Option<String>,
    /// What came of it.
    pub came: Came,
}

/// What came of a request that was not refused, as the audit log has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// It was done.
    Done,
    /// It was so already.
    Unchanged,
    /// It was done for an earlier request of the same id.
    Repeated,
}

impl Came {
    /// Whether anything changed.
    #[must_use]
    pub const fn of(changed: bool) -> Self {
        if changed { Self::Done } else { Self::Unchanged }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Unchanged => "unchanged",
            Self::Repeated => "repeated",
        }
    }
}

/// Carries out what callers ask for.
#[derive(Debug)]
pub struct Deeds {
    shared: Arc<Shared>,
    changes: Arc<Semaphore>,
    handed_over: Arc<Semaphore>,
    shares: Shares,
    /// Refusals that are written down: what somebody is refused again and again must not fill the disk.
    refusals: Turns<String>,
}

impl Deeds {
    /// Writes down what is done in the audit log.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        let refusals = Turns::new(REFUSALS.0, REFUSALS.1, Duration::ZERO);
        let places = || Arc::new(Semaphore::new(AT_ONCE as usize));
        Self { shared, changes: places(), handed_over: places(), shares: Shares::new(OF_ONE), refusals }
    }

    /// Waits until what was begun has come to its end, for `patience` at most; nothing is begun any more.
    pub async fn end(&self, patience: Duration) {
        let ended = async {
            for places in [&self.changes, &self.handed_over] {
                if let Ok(all) = places.acquire_many(AT_ONCE).await {
                    all.forget();
                }
            }
        };
        if timeout(patience, ended).await.is_err() {
            tracing::warn!("changes that were asked for are cut off; the audit log says which");
        }
    }

    /// Does it where it is `allowed`, to the end: whoever stops waiting for the answer does not stop it.
    ///
    /// # Errors
    /// As `allowed` and `doing` say; `RESOURCE_EXHAUSTED` where too much is being done.
    pub async fn run<T: Send + 'static>(
        &self,
        asker: Asker,
        asked: Asked,
        allowed: Result<(), Refusal>,
        doing: impl Future<Output = Result<Done<T>, Refusal>> + Send + 'static,
    ) -> Result<T, Refusal> {
        let places = if HANDED_OVER.contains(&asked.action) { &self.handed_over } else { &self.changes };
        // Who may not do it takes nobody's place.
        let place = allowed.and_then(|()| {
            let share = self.shares.take(asker.caller.name(), "changes")?;
            let full = |_| Refusal::over_limit(format!("{AT_ONCE} changes are being made already"), AGAIN);
            Ok((Arc::clone(places).try_acquire_owned().map_err(full)?, share))
        });
        let place = match place {
            Ok(place) => place,
            Err(refusal) => return Err(self.refused(&asker, &asked, refusal)),
        };
        let mut open = Open { shared: Arc::clone(&self.shared), asker, asked, is_noted: false };
        let task = tokio::spawn(async move {
            let _place = place;
            let done = doing.await;
            match &done {
                Ok(done) => open.note(done.before.clone(), done.after.clone(), done.came.as_str()),
                Err(refusal) => open.note(None, None, refusal.class()),
            }
            done.map(|done| done.answer)
        });
        task.await.unwrap_or_else(|error| Err(Failure::internal("what was asked for", error).into()))
    }

    /// Writes down that it was refused, unless too much was refused to this caller lately; gives the refusal back.
    pub fn refused(&self, asker: &Asker, asked: &Asked, refusal: Refusal) -> Refusal {
        if self.refusals.take(asker.caller.name().to_owned(), Instant::now()).is_err() {
            self.shared.figures.operated();
            return refusal;
        }
        note(&self.shared, &deed(asker, asked, None, None, refusal.class()));
        refusal
    }
}

/// A change that is under way: also where it is cut off, that it was begun is written down.
struct Open {
    shared: Arc<Shared>,
    asker: Asker,
    asked: Asked,
    is_noted: bool,
}

impl Open {
    fn note(&mut self, before: Option<String>, after: Option<String>, outcome: &str) {
        self.is_noted = true;
        note(&self.shared, &deed(&self.asker, &self.asked, before, after, outcome));
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.is_noted {
            self.note(None, None, "interrupted");
        }
    }
}

fn note(shared: &Shared, deed: &Deed<'_>) {
    shared.figures.operated();
    shared.audit.note(deed);
}

fn deed<'a>(
    asker: &'a Asker,
    asked: &'a Asked,
    before: Option<String>,
    after: Option<String>,
    outcome: &'a str,
) -> Deed<'a> {
    Deed {
        action: asked.action,
        caller: asker.caller.name(),
        said: asker.said.as_deref(),
        from: asker.from,
        model: asked.model.as_deref(),
        object: &asked.object,
        before,
        after,
        request_id: &asked.request_id,
        outcome,
    }
}
