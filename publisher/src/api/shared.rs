//! What all services work with.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Extensions;
use tokio::time::timeout;

use weighbridge_queue::Queue;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::reference::{PREFIX_DIGITS, Reference};
use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::watch;

use super::answers::Refusal;
use super::audit::Audit;
use super::guard::{Connection, Gate};
use super::hub::{Entry, Hub};
use super::objects::Objects;
use super::tokens::{Caller, Role};
use crate::metrics::api::Api as Figures;
use crate::sources::Allowed;

/// How long the first look at a channel is waited for.
const FIRST_LOOK: Duration = Duration::from_secs(20);

/// What all services work with.
#[derive(Debug)]
pub struct Shared {
    /// The store's immutable objects.
    pub objects: Objects,
    /// The store, through which channels are moved: what is written is signed, and what it is made of as demanded.
    pub root: Root,
    /// Channels that are followed.
    pub hub: Hub,
    /// Where manifests wait for workers.
    pub queue: Arc<dyn Queue>,
    /// Who may ask.
    pub gate: Arc<Gate>,
    /// Where operations are written down.
    pub audit: Audit,
    /// Where checkpoints may lie that are handed over; `None` where nobody said so.
    pub sources: Option<Allowed>,
    /// What is counted.
    pub figures: Arc<Figures>,
}

/// What a reference points at.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The channel and its entry, where a channel was asked for.
    pub entry: Option<(ChannelName, Arc<Entry>)>,
}

/// Who asks.
///
/// # Errors
/// Where they did not come through the gate.
pub fn caller(extensions: &Extensions) -> Result<Caller, Refusal> {
    extensions.get::<Caller>().cloned().ok_or_else(Refusal::unknown_caller)
}

/// Who asks, if they have one of `roles` for `model`. Nothing is looked up before this.
///
/// # Errors
/// Where they have not.
pub fn allowed(extensions: &Extensions, roles: &[Role], model: &ModelName) -> Result<Caller, Refusal> {
    let caller = caller(extensions)?;
    permitted(&caller, roles, model)?;
    Ok(caller)
}

/// Refuses a caller who has none of `roles` for `model`.
///
/// # Errors
/// `PERMISSION_DENIED`.
pub fn permitted(caller: &Caller, roles: &[Role], model: &ModelName) -> Result<(), Refusal> {
    if roles.iter().any(|&role| caller.may(role, model)) {
        return Ok(());
    }
    let roles: Vec<_> = roles.iter().map(|role| role.as_str()).collect();
    Err(Refusal::forbidden(format!(
        "the token may not: it takes role {} for model {model}",
        roles.join(" or ")
    )))
}

/// Refuses a caller who operates no model at all.
///
/// # Errors
/// `PERMISSION_DENIED`.
pub fn operates_any(caller: &Caller) -> Result<(), Refusal> {
    if caller.has(Role::Operate) {
        return Ok(());
    }
    Err(Refusal::forbidden("the token may not: it takes role operate"))
}

/// The connection that a request came over.
#[must_use]
pub fn connection(extensions: &Extensions) -> Option<&Connection> {
    extensions.get::<Connection>()
}

impl Shared {
    /// The channel's newest entry, as the store has it now; `None` where it has none. The log is not listed again while
    /// somebody follows the channel.
    ///
    /// # Errors
    /// As the store fails.
    pub async fn newest(&self, model: &ModelName, name: &ChannelName) -> Result<Option<Arc<Entry>>, Refusal> {
        let mut state = self.hub.follow(model, name)?;
        let looked = state.wait_for(|state| state.looked || state.stale.is_some());
        // What is waited for must not be kept: it is a lock.
        let answered = timeout(FIRST_LOOK, looked).await.is_ok_and(|looked| looked.is_ok());
        let known = state.borrow().clone();
        if !answered || !known.looked {
            // One that is damaged is so for whoever asks again, too.
            let damage = known.stale.filter(|error| error.class() == Class::Integrity);
            return Err(damage.map_or_else(|| unanswered(model, name), |error| (*error).clone().into()));
        }
        let last = known.entry.as_ref().map_or(0, |entry| entry.entry.sequence);
        let newer = watch::newest(self.objects.root(), model, name, last).await?;
        let newer = newer.map(|(entry, bytes)| {
            // What came before was passed over.
            let publishes_after = entry.sequence;
            Arc::new(Entry { entry, bytes, publishes_after })
        });
        Ok(newer.or(known.entry))
    }

    /// What `reference` points at.
    ///
    /// # Errors
    /// Where it points at nothing, or at several things; else as the store fails. It tells of no other models.
    pub async fn resolve(&self, reference: &Reference) -> Result<Resolved, Refusal> {
        let (model, at) = (&reference.model, reference.at.as_deref().unwrap_or("prod"));
        if at.parse::<SnapshotId>().is_err()
            && let Ok(name) = at.parse::<ChannelName>()
            && let Some(entry) = self.newest(model, &name).await?
        {
            return Ok(Resolved { snapshot: entry.entry.snapshot, entry: Some((name, entry)) });
        }
        let missing = || {
            let why = "the model has no such channel or snapshot, or there is no such model";
            Refusal::from(StoreError::new(Class::NotFound, format!("{model}@{at}"), why))
        };
        let digits = at.len() >= PREFIX_DIGITS && at.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !digits {
            return Err(missing());
        }
        let root = self.objects.root();
        let default = at.parse().map_err(Refusal::from)?;
        match reference.resolve(root, &default).await {
            Ok(located) => Ok(Resolved { snapshot: located.snapshot, entry: None }),
            Err(error) if error.class() == Class::NotFound => Err(missing()),
            Err(error) => Err(error.into()),
        }
    }
}

fn unanswered(model: &ModelName, name: &ChannelName) -> Refusal {
    let why = "the store does not tell where the channel points; it is tried again";
    StoreError::new(Class::Unreachable, format!("{model}@{name}"), why).into()
}
