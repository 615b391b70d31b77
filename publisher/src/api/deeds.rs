//! Changes that callers ask for: carried out to their end, also where the caller has gone meanwhile, and written to the
//! audit log, done or refused.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::Request;

use weighbridge_snapshots::channel::Operation;

use super::answers::Refusal;
use super::audit::Deed;
use super::shared::{self, Shared};
use super::tokens::Caller;
use super::turns::Turns;
use crate::clock;
use crate::error::Failure;

/// Changes at once; most take a few requests to the store.
const AT_ONCE: usize = 64;
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
}

/// Carries out what callers ask for.
#[derive(Debug)]
pub struct Deeds {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    /// Refusals that are written down: what somebody is refused again and again must not fill the disk.
    refusals: Turns<String>,
}

impl Deeds {
    /// Writes down what is done in the audit log.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        let refusals = Turns::new(REFUSALS.0, REFUSALS.1, Duration::ZERO);
        Self { shared, places: Arc::new(Semaphore::new(AT_ONCE)), refusals }
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
        // Who may not do it takes nobody's place.
        let place = allowed.and_then(|()| {
            let full = |_| Refusal::over_limit(format!("{AT_ONCE} changes are being made already"), AGAIN);
            Arc::clone(&self.places).try_acquire_owned().map_err(full)
        });
        let place = match place {
            Ok(place) => place,
            Err(refusal) => return Err(self.refused(&asker, &asked, refusal)),
        };
        let shared = Arc::clone(&self.shared);
        let task = tokio::spawn(async move {
            let done = doing.await;
            drop(place);
            let (before, after, outcome) = match &done {
                Ok(done) => (done.before.clone(), done.after.clone(), "done"),
                Err(refusal) => (None, None, refusal.class()),
            };
            note(&shared, &deed(&asker, &asked, before, after, outcome));
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
