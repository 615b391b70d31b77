//! `weighbridge.v1.Operating`: channels moved and kept, snapshots pinned, dead letters looked after.

pub mod requests;

use std::sync::Arc;

use tonic::{Request, Response, Status};

use weighbridge_schemas::channel::Reason;
use weighbridge_schemas::dead::DeadLetter;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::SnapshotId;
use weighbridge_schemas::names::{ChannelName, ModelName};
use weighbridge_snapshots::channel::{Channel, Operation};
use weighbridge_snapshots::dead as letters;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::reference::Reference;
use weighbridge_snapshots::root::Root;

use super::answers::Refusal;
use super::deeds::{Asked, Asker, Came, Deeds, Done};
use super::proto;
use super::proto::operating_server;
use super::requests::{channel as channel_named, digits};
use super::shared::{Shared, caller, operates_any, permitted};
use super::snapshots::{entry_of, moment};
use super::tokens::{Caller, Role};
use crate::error::{Exit, Failure};
use crate::operations::Page;
use crate::operations::moves::{self, Moved, Roots};
use crate::operations::{channels, dead, pins};
use requests::{Entries, Letters, Named, Pin, Pins, Promote, Rollback, letter};

/// How far back a channel's log is searched for the entry of a request that is made again.
const OWN_ENTRY: usize = 50;
/// Most pins or dead letters that are read for one page of a list.
const READS: usize = 200;
/// Most bytes of entries on a page of a log: callers take messages of 4 MiB.
const PAGE_BYTES: usize = 2 << 20;
/// Most bytes of a dead letter that are told.
const BODY_BYTES: usize = 1 << 20;

/// The service.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    roots: Arc<Roots>,
    deeds: Arc<Deeds>,
}

/// A change of a channel.
enum Change {
    Promote(Promote),
    Rollback(Rollback),
    Hold(Named),
    Release(Named),
}

impl Change {
    fn named(&self) -> &Named {
        match self {
            Self::Promote(promote) => &promote.named,
            Self::Rollback(rollback) => &rollback.named,
            Self::Hold(named) | Self::Release(named) => named,
        }
    }

    const fn reason(&self) -> Reason {
        match self {
            Self::Promote(_) => Reason::Promote,
            Self::Rollback(_) => Reason::Rollback,
            Self::Hold(_) => Reason::Hold,
            Self::Release(_) => Reason::Release,
        }
    }

    /// What was asked for, where it was asked for by an id or digits of it.
    fn digits(&self) -> Option<&str> {
        match self {
            Self::Promote(promote) => promote.to.at.as_deref().filter(|to| digits("to", to).is_ok()),
            Self::Rollback(rollback) => rollback.to.as_deref(),
            Self::Hold(_) | Self::Release(_) => None,
        }
    }

    async fn carry_out(&self, roots: &Roots, operation: &Operation) -> Result<Moved, Refusal> {
        let root = &roots.demanding;
        let Named { model, channel, .. } = self.named();
        Ok(match self {
            Self::Promote(Promote { to, force, .. }) => {
                let id = located(root, to).await?;
                moves::promote(roots, model, id, channel, *force, operation).await?
            }
            Self::Rollback(Rollback { to, .. }) => {
                moves::rollback(root, model, channel, to.as_deref(), operation).await?
            }
            Self::Hold(_) => moves::hold(root, model, channel, operation).await?,
            Self::Release(_) => moves::release(root, model, channel, operation).await?,
        })
    }

    /// What an earlier request of the same id wrote.
    async fn own(&self, root: &Root, operation: &Operation) -> Result<Option<Moved>, Refusal> {
        let Named { model, channel, .. } = self.named();
        let Some(entry) = Channel::new(root, model, channel).entry_of(operation, OWN_ENTRY).await? else {
            return Ok(None);
        };
        let is_another = |digits: &&str| !entry.snapshot.to_string().starts_with(digits);
        let Some(another) = self.digits().filter(is_another) else {
            return Ok(Some(Moved { entry, changed: true }));
        };
        // A channel may be called so, and point elsewhere by now.
        if let Ok(named) = channel_named(another)
            && Channel::new(root, model, &named).latest().await?.is_some()
        {
            return Ok(Some(Moved { entry, changed: true }));
        }
        let message = format!(
            "request_id: it was used before, to {} {model}@{channel} to {}; give another request an id of its own",
            entry.reason.as_str(),
            entry.snapshot
        );
        let failure = Failure { kind: Kind::Conflict, class: "id_used", message, exit: Exit::Failed };
        Err(Refusal::as_things_stand(failure))
    }
}

impl Service {
    /// The service.
    #[must_use]
    pub fn new(shared: Arc<Shared>, deeds: Arc<Deeds>) -> Self {
        let roots = Arc::new(Roots::of(&shared.root));
        Self { shared, roots, deeds }
    }

    async fn change<R>(
        &self,
        action: &'static str,
        request: Request<R>,
        read: impl FnOnce(R) -> Result<Change, Refusal>,
    ) -> Result<Response<proto::MoveResponse>, Status> {
        let asker = Asker::of(&request)?;
        let mut asked = Asked { action, ..Asked::default() };
        let change = match read(request.into_inner()) {
            Ok(change) => change,
            Err(refusal) => return Err(self.deeds.refused(&asker, &asked, refusal).into()),
        };
        let Named { model, channel, request_id } = change.named().clone();
        (asked.model, asked.object) = (Some(model.to_string()), channel.to_string());
        asked.request_id = request_id.clone().unwrap_or_default();
        let operation = asker.operation(change.reason().as_str(), request_id.as_deref());
        let (shared, roots) = (Arc::clone(&self.shared), Arc::clone(&self.roots));
        let allowed = permitted(&asker.caller, &[Role::Operate], &model);
        let done = self.deeds.run(asker, asked, allowed, async move {
            let own = match request_id {
                Some(_) => change.own(&roots.demanding, &operation).await?,
                None => None,
            };
            let (moved, came) = match own {
                Some(own) => (own, Came::Repeated),
                None => {
                    let moved = change.carry_out(&roots, &operation).await?;
                    shared.hub.nudge(&model, &channel);
                    let came = Came::of(moved.changed);
                    (moved, came)
                }
            };
            let (before, after) = (moved.entry.previous, moved.entry.snapshot);
            let answer = answer(&roots.appending, &model, &channel, moved).await;
            let (before, after) = (before.map(|id| id.to_string()), Some(after.to_string()));
            Ok(Done { answer, before, after, came })
        });
        Ok(Response::new(done.await?))
    }

    async fn pinned<R>(&self, action: &'static str, request: Request<R>) -> Result<String, Refusal>
    where
        R: TryInto<Pin, Error = Refusal>,
    {
        let asker = Asker::of(&request)?;
        let mut asked = Asked { action, ..Asked::default() };
        let Pin { snapshot, why } = match request.into_inner().try_into() {
            Ok(pin) => pin,
            Err(refusal) => return Err(self.deeds.refused(&asker, &asked, refusal)),
        };
        let (model, pinned) = (snapshot.model.clone(), action == "pin");
        asked.model = Some(model.to_string());
        asked.object = snapshot.at.clone().unwrap_or_default();
        let (roots, operation) = (Arc::clone(&self.roots), asker.operation(action, None));
        let allowed = permitted(&asker.caller, &[Role::Operate], &model);
        self.deeds
            .run(asker, asked, allowed, async move {
                let root = &roots.demanding;
                let id = located(root, &snapshot).await?;
                let changed = pins::set(root, &model, &id, pinned, &why, &operation).await?;
                let state = |pinned: bool| Some(if pinned { "pinned" } else { "not pinned" }.to_owned());
                let (before, after) = (state(pinned != changed), state(pinned));
                Ok(Done { answer: id.to_string(), before, after, came: Came::of(changed) })
            })
            .await
    }

    async fn pins(
        &self,
        request: Request<proto::ListPinsRequest>,
    ) -> Result<proto::ListPinsResponse, Refusal> {
        let caller = caller(request.extensions())?;
        let Pins { model, most, after } = request.into_inner().try_into()?;
        permitted(&caller, &[Role::Operate], &model)?;
        let page = Page { most, reads: READS, after: after.as_ref() };
        let listed = pins::list(&self.roots.demanding, &model, page).await?;
        let pins = listed.pins.into_iter().map(|(id, pin)| proto::SnapshotPin {
            snapshot: id.to_string(),
            why: pin.why,
            who: pin.who,
            when: Some(moment(pin.when)),
        });
        Ok(proto::ListPinsResponse {
            pins: pins.collect(),
            next_page_token: listed.next.map(|next| next.to_string()).unwrap_or_default(),
        })
    }

    async fn letters(
        &self,
        request: Request<proto::ListDeadLettersRequest>,
    ) -> Result<proto::ListDeadLettersResponse, Refusal> {
        let caller = caller(request.extensions())?;
        let Letters { model, most, after } = request.into_inner().try_into()?;
        match &model {
            Some(model) => permitted(&caller, &[Role::Operate], model)?,
            None => operates_any(&caller)?,
        }
        let wanted = |of: Option<&ModelName>| {
            model.as_ref().is_none_or(|wanted| Some(wanted) == of) && operates(&caller, of)
        };
        let page = Page { most, reads: READS, after: after.as_ref() };
        let listed = dead::list(&self.roots.demanding, false, wanted, page).await?;
        if let Some(error) = &listed.damage {
            tracing::warn!(%error, "a dead letter is left out of a list");
        }
        let letters = listed.letters.into_iter();
        Ok(proto::ListDeadLettersResponse {
            letters: letters.map(|letter| told(letter.id, letter.letter)).collect(),
            next_page_token: listed.next.unwrap_or_default(),
        })
    }

    async fn letter(
        &self,
        request: Request<proto::GetDeadLetterRequest>,
    ) -> Result<proto::DeadLetter, Refusal> {
        let caller = caller(request.extensions())?;
        let id = letter(&request.into_inner().id)?;
        let letter = seen(&self.roots.demanding, &caller, &id).await?;
        Ok(told(id, letter))
    }

    /// Who asks for a change of which dead letter.
    fn letter_asked<R>(
        &self,
        action: &'static str,
        request: Request<R>,
        id: impl FnOnce(R) -> String,
    ) -> Result<(Asker, Asked, String), Refusal> {
        let asker = Asker::of(&request)?;
        let asked = Asked { action, ..Asked::default() };
        match letter(&id(request.into_inner())) {
            Ok(id) => Ok((asker, Asked { object: id.clone(), ..asked }, id)),
            Err(refusal) => Err(self.deeds.refused(&asker, &asked, refusal)),
        }
    }

    async fn requeued(
        &self,
        request: Request<proto::RequeueDeadLetterRequest>,
    ) -> Result<proto::RequeueDeadLetterResponse, Refusal> {
        let (asker, asked, id) = self.letter_asked("requeue", request, |asked| asked.id)?;
        let (shared, who, caller) = (Arc::clone(&self.shared), asker.who(), asker.caller.clone());
        let allowed = operates_any(&caller);
        self.deeds
            .run(asker, asked, allowed, async move {
                let root = &shared.root;
                seen(root, &caller, &id).await?;
                let again =
                    dead::again(root, &[id], false, &who).await.map_err(|failure| match failure.kind {
                        Kind::Conflict => Refusal::as_things_stand(failure),
                        _ => failure.into(),
                    })?;
                dead::send(root, &*shared.queue, &again, &who).await?;
                let job = again.into_iter().map(|again| again.message.id).next().unwrap_or_default();
                let after = Some(format!("job {job}"));
                let answer = proto::RequeueDeadLetterResponse { job };
                Ok(Done { answer, before: None, after, came: Came::Done })
            })
            .await
    }

    async fn discarded(&self, request: Request<proto::DiscardDeadLetterRequest>) -> Result<(), Refusal> {
        let (asker, asked, id) = self.letter_asked("discard", request, |asked| asked.id)?;
        let (shared, who, caller) = (Arc::clone(&self.shared), asker.who(), asker.caller.clone());
        let allowed = operates_any(&caller);
        self.deeds
            .run(asker, asked, allowed, async move {
                seen(&shared.root, &caller, &id).await?;
                dead::discard(&shared.root, &[id], &who).await?;
                Ok(Done { answer: (), before: None, after: Some("discarded".to_owned()), came: Came::Done })
            })
            .await
    }

    async fn entries(
        &self,
        request: Request<proto::ListEntriesRequest>,
    ) -> Result<proto::ListEntriesResponse, Refusal> {
        let caller = caller(request.extensions())?;
        let Entries { model, channel, most, before } = request.into_inner().try_into()?;
        permitted(&caller, &[Role::Operate], &model)?;
        let part = channels::log(&self.roots.demanding, &model, &channel, before, most).await?;
        let (mut entries, mut rest, mut bytes) = (Vec::new(), part.rest, 0);
        for (entry, written) in part.entries {
            if bytes > PAGE_BYTES {
                break;
            }
            bytes += written.len();
            rest = (entry.sequence > 1).then_some(entry.sequence);
            entries.push(entry_of(&channel, &entry, written));
        }
        let next_page_token = rest.map(|rest| rest.to_string()).unwrap_or_default();
        Ok(proto::ListEntriesResponse { entries, next_page_token })
    }
}

/// What a reference points at, of which nothing is told but that it is not there: other models are nobody's business.
async fn located(root: &Root, reference: &Reference) -> Result<SnapshotId, Refusal> {
    match reference.resolve(root, &channel_named("")?).await {
        Ok(located) => Ok(located.snapshot),
        Err(error) if error.class() == Class::NotFound => {
            let why = "the model has no such channel or snapshot, or there is no such model";
            Err(StoreError::new(Class::NotFound, reference, why).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the caller operates the model of a letter; of one without a model, all models.
fn operates(caller: &Caller, model: Option<&ModelName>) -> bool {
    match model {
        Some(model) => caller.may(Role::Operate, model),
        None => caller.has(Role::Operate) && caller.sees_all(),
    }
}

/// A dead letter that the caller may see. Others are not there.
async fn seen(root: &Root, caller: &Caller, id: &str) -> Result<DeadLetter, Refusal> {
    operates_any(caller)?;
    match letters::get(root, id).await {
        Ok(letter) if operates(caller, letter.model.as_ref()) => return Ok(letter),
        Ok(_) => {}
        Err(error) if error.class() == Class::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let why = "there is no such dead letter of a model that the token operates";
    Err(StoreError::new(Class::NotFound, id, why).into())
}

fn told(id: String, letter: DeadLetter) -> proto::DeadLetter {
    let mut body = letter.body.0;
    let body_size = body.len() as u64;
    body.truncate(BODY_BYTES);
    proto::DeadLetter {
        id,
        model: letter.model.map(|model| model.to_string()).unwrap_or_default(),
        job: letter.job.map(|job| job.to_string()).unwrap_or_default(),
        class: letter.error.class,
        message: letter.error.message,
        who: letter.who,
        when: Some(moment(letter.when)),
        body: body.into(),
        body_size,
    }
}

/// The channel has moved: that its log cannot be read just now does not undo it.
async fn answer(root: &Root, model: &ModelName, channel: &ChannelName, moved: Moved) -> proto::MoveResponse {
    let Moved { entry, changed } = moved;
    // What others wrote may say more than this version reads.
    let part = Channel::new(root, model, channel).log_before(entry.sequence.saturating_add(1), 1).await;
    let entries = part.map(|part| part.entries).unwrap_or_default();
    let stored = entries.into_iter().find(|(stored, _)| *stored == entry).map(|(_, bytes)| bytes);
    let document = stored.unwrap_or_else(|| entry.to_bytes().into());
    proto::MoveResponse { entry: Some(entry_of(channel, &entry, document)), changed }
}

#[tonic::async_trait]
impl operating_server::Operating for Service {
    async fn promote(
        &self,
        request: Request<proto::PromoteRequest>,
    ) -> Result<Response<proto::MoveResponse>, Status> {
        self.change("promote", request, |asked| asked.try_into().map(Change::Promote)).await
    }

    async fn rollback(
        &self,
        request: Request<proto::RollbackRequest>,
    ) -> Result<Response<proto::MoveResponse>, Status> {
        self.change("rollback", request, |asked| asked.try_into().map(Change::Rollback)).await
    }

    async fn hold(
        &self,
        request: Request<proto::HoldRequest>,
    ) -> Result<Response<proto::MoveResponse>, Status> {
        self.change("hold", request, |asked| asked.try_into().map(Change::Hold)).await
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::MoveResponse>, Status> {
        self.change("release", request, |asked| asked.try_into().map(Change::Release)).await
    }

    async fn list_entries(
        &self,
        request: Request<proto::ListEntriesRequest>,
    ) -> Result<Response<proto::ListEntriesResponse>, Status> {
        Ok(Response::new(self.entries(request).await?))
    }

    async fn pin(&self, request: Request<proto::PinRequest>) -> Result<Response<proto::PinResponse>, Status> {
        let snapshot = self.pinned("pin", request).await?;
        Ok(Response::new(proto::PinResponse { snapshot }))
    }

    async fn unpin(
        &self,
        request: Request<proto::UnpinRequest>,
    ) -> Result<Response<proto::UnpinResponse>, Status> {
        let snapshot = self.pinned("unpin", request).await?;
        Ok(Response::new(proto::UnpinResponse { snapshot }))
    }

    async fn list_pins(
        &self,
        request: Request<proto::ListPinsRequest>,
    ) -> Result<Response<proto::ListPinsResponse>, Status> {
        Ok(Response::new(self.pins(request).await?))
    }

    async fn list_dead_letters(
        &self,
        request: Request<proto::ListDeadLettersRequest>,
    ) -> Result<Response<proto::ListDeadLettersResponse>, Status> {
        Ok(Response::new(self.letters(request).await?))
    }

    async fn get_dead_letter(
        &self,
        request: Request<proto::GetDeadLetterRequest>,
    ) -> Result<Response<proto::GetDeadLetterResponse>, Status> {
        let letter = Some(self.letter(request).await?);
        Ok(Response::new(proto::GetDeadLetterResponse { letter }))
    }

    async fn requeue_dead_letter(
        &self,
        request: Request<proto::RequeueDeadLetterRequest>,
    ) -> Result<Response<proto::RequeueDeadLetterResponse>, Status> {
        Ok(Response::new(self.requeued(request).await?))
    }

    async fn discard_dead_letter(
        &self,
        request: Request<proto::DiscardDeadLetterRequest>,
    ) -> Result<Response<proto::DiscardDeadLetterResponse>, Status> {
        self.discarded(request).await?;
        Ok(Response::new(proto::DiscardDeadLetterResponse {}))
    }
}
