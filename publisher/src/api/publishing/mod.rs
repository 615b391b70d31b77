//! `weighbridge.v1.Publishing`: what trainers and operators ask of publishes.

pub mod requests;
mod watched;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until};
use tonic::{Request, Response, Status};

use weighbridge_schemas::checkpoint::{CheckpointManifest, PolicyChoice};
use weighbridge_schemas::job::JobId;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::jobs::Job;

use super::answers::Refusal;
use super::deeds::{Asked, Asker, Came, Deeds, Done};
use super::guard::Gate;
use super::proto;
use super::proto::publishing_server;
use super::shared::{Shared, caller, connection, permitted};
use super::shares::Shares;
use super::snapshots::moment;
use super::tokens::{Caller, Role};
use crate::operations::Page;
use crate::operations::jobs::{self, Ages, Progress};
use crate::operations::{republish, submit};
use requests::{Again, List, Named, Submit};
use watched::{Look, Watched};

/// Who may look at jobs.
const LOOKERS: [Role; 3] = [Role::Drop, Role::Fetch, Role::Operate];
/// Most jobs that are looked at for one page of a list.
const READS: usize = 200;
/// Jobs that one token may follow at the same time: others follow some too.
const FOLLOWED: usize = 200;
/// How often a sign of life is given.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The service.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    deeds: Arc<Deeds>,
    ages: Arc<Ages>,
    watched: Watched,
    /// Jobs that one token follows.
    shares: Shares,
}

impl Service {
    /// The service.
    #[must_use]
    pub fn new(shared: Arc<Shared>, deeds: Arc<Deeds>) -> Self {
        let (ages, watched) = (Arc::default(), Watched::new(shared.root.clone()));
        Self { shared, deeds, ages, watched, shares: Shares::new(FOLLOWED) }
    }

    async fn submitted(
        &self,
        request: Request<proto::SubmitRequest>,
    ) -> Result<proto::SubmitResponse, Refusal> {
        let asker = Asker::of(&request)?;
        let mut asked = Asked { action: "submit", ..Asked::default() };
        if !asker.caller.has(Role::Drop) {
            // Before anything that they sent is read.
            let refusal = Refusal::forbidden("the token may not: it takes role drop");
            return Err(self.deeds.refused(&asker, &asked, refusal));
        }
        let Submit { manifest, written } = match Submit::try_from(request.into_inner()) {
            Ok(submit) => submit,
            Err(refusal) => return Err(self.deeds.refused(&asker, &asked, refusal)),
        };
        (asked.model, asked.object) = (Some(manifest.model.to_string()), manifest.id.clone());
        let (shared, is_local) = (Arc::clone(&self.shared), asker.caller.is_local());
        let allowed = permitted(&asker.caller, &[Role::Drop], &manifest.model)
            .and_then(|()| confined(&self.shared, &asker.caller, &manifest));
        self.deeds
            .run(asker, asked, allowed, async move {
                if let Some(sources) = shared.sources.as_ref().filter(|_| !is_local) {
                    sources.checked(&manifest.location).await?;
                }
                submit::unused(&shared.root, &manifest).await.map_err(Refusal::as_things_stand)?;
                submit::send(&*shared.queue, &manifest, written.to_vec()).await?;
                let answer = proto::SubmitResponse { job: manifest.id };
                Ok(Done { answer, before: None, after: None, came: Came::Done })
            })
            .await
    }

    async fn job(&self, request: Request<proto::GetJobRequest>) -> Result<proto::GetJobResponse, Refusal> {
        let caller = caller(request.extensions())?;
        let Named { model, job } = request.into_inner().try_into()?;
        permitted(&caller, &LOOKERS, &model)?;
        let progress = Progress::of(&self.shared.root, &model, &job).await?;
        let progress = progress.ok_or_else(|| unknown(&job))?;
        Ok(proto::GetJobResponse { job: Some(answer(&progress)) })
    }

    async fn jobs(
        &self,
        request: Request<proto::ListJobsRequest>,
    ) -> Result<proto::ListJobsResponse, Refusal> {
        let caller = caller(request.extensions())?;
        let List { model, most, after, filter } = request.into_inner().try_into()?;
        permitted(&caller, &LOOKERS, &model)?;
        let page = Page { most, reads: READS, after: after.as_ref() };
        let listed = jobs::list(&self.shared.root, &self.ages, &[model], filter, page).await?;
        if let Some(error) = &listed.damage {
            tracing::warn!(%error, "a job is left out of a list");
        }
        Ok(proto::ListJobsResponse {
            jobs: listed.jobs.iter().map(answer).collect(),
            next_page_token: listed.next.map(|next| next.to_string()).unwrap_or_default(),
        })
    }

    fn follower(&self, request: Request<proto::WatchJobRequest>) -> Result<Follower, Refusal> {
        let caller = caller(request.extensions())?;
        let closing = connection(request.extensions()).map(|connection| connection.closing.clone());
        let named: Named = request.into_inner().try_into()?;
        permitted(&caller, &LOOKERS, &named.model)?;
        let share = self.shares.take(caller.name(), "jobs followed")?;
        let look = self.watched.follow(&named.model, &named.job)?;
        let (gate, due) = (Arc::clone(&self.shared.gate), Instant::now() + HEARTBEAT);
        Ok(Follower { look, named, caller, gate, closing, due, told: false, ended: false, _share: share })
    }

    async fn again(
        &self,
        request: Request<proto::RepublishRequest>,
    ) -> Result<proto::RepublishResponse, Refusal> {
        let asker = Asker::of(&request)?;
        let mut asked = Asked { action: "republish", ..Asked::default() };
        let Again { wanted, request_id } = match Again::try_from(request.into_inner()) {
            Ok(again) => again,
            Err(refusal) => return Err(self.deeds.refused(&asker, &asked, refusal)),
        };
        let model = wanted.model.clone();
        asked.model = Some(model.to_string());
        asked.request_id = request_id.clone().unwrap_or_default();
        // The same request is the same job.
        let operation = asker.operation(&format!("republish of {model}"), request_id.as_deref());
        let job = match request_id {
            Some(_) => JobId::of(operation.id.as_bytes()),
            None => operation.id.parse()?,
        };
        asked.object = job.to_string();
        let (shared, ages) = (Arc::clone(&self.shared), Arc::clone(&self.ages));
        let allowed = permitted(&asker.caller, &[Role::Operate], &model);
        self.deeds
            .run(asker, asked, allowed, async move {
                let root = &shared.root;
                let done = |job: String, came: Came| {
                    Ok(Done { answer: proto::RepublishResponse { job }, before: None, after: None, came })
                };
                if Job::new(root, &model, &job).record().await?.is_some() {
                    return done(job.to_string(), Came::Repeated);
                }
                let request = republish::request(root, &ages, wanted, job.to_string(), operation.who).await?;
                republish::send(&*shared.queue, &request).await?;
                done(request.manifest.id, Came::Done)
            })
            .await
    }

    async fn cancelled(
        &self,
        request: Request<proto::CancelRequest>,
    ) -> Result<proto::CancelResponse, Refusal> {
        let asker = Asker::of(&request)?;
        let mut asked = Asked { action: "cancel", ..Asked::default() };
        let Named { model, job } = match Named::try_from(request.into_inner()) {
            Ok(named) => named,
            Err(refusal) => return Err(self.deeds.refused(&asker, &asked, refusal)),
        };
        (asked.model, asked.object) = (Some(model.to_string()), job.to_string());
        let (shared, who) = (Arc::clone(&self.shared), asker.who());
        let allowed = permitted(&asker.caller, &[Role::Operate], &model);
        self.deeds
            .run(asker, asked, allowed, async move {
                let root = &shared.root;
                let before = Progress::of(root, &model, &job).await?.ok_or_else(|| unknown(&job))?;
                let cancelled = jobs::cancel(root, &*shared.queue, &before.record, &who).await?;
                if let Some(failure) = cancelled.too_late {
                    return Err(Refusal::as_things_stand(failure));
                }
                // It is cancelled: that it cannot be looked at just now does not undo that.
                let after = Progress::of(root, &model, &job).await.ok().flatten();
                let name = |progress: &Progress| progress.standing.name().to_owned();
                let answer = proto::CancelResponse { job: after.as_ref().map(answer) };
                let now = after.as_ref().map_or_else(|| "cancelled".to_owned(), name);
                Ok(Done { answer, before: Some(name(&before)), after: Some(now), came: Came::Done })
            })
            .await
    }
}

/// Refuses what a token's bearer could reach by it beyond their model: any file that workers may read, where nobody has
/// said which are for trainers, and a policy of their own in the place of the model's. Whoever operates the model may
/// bring one; without tokens everybody is on this machine, and may do everything.
fn confined(shared: &Shared, caller: &Caller, manifest: &CheckpointManifest) -> Result<(), Refusal> {
    if caller.is_local() {
        return Ok(());
    }
    if shared.sources.is_none() {
        let why = "this API has not been told where checkpoints may lie, and so takes none: set `allow` under \
                   [sources] in its configuration, and in the workers'";
        return Err(Refusal::unprepared(why));
    }
    if matches!(manifest.policy, Some(PolicyChoice::Toml(_))) && !caller.may(Role::Operate, &manifest.model) {
        let why =
            "a policy within the manifest takes the role operate; name one that the store keeps, or none";
        return Err(Refusal::forbidden(why));
    }
    Ok(())
}

fn unknown(job: &JobId) -> Refusal {
    let why = "no worker has accepted such a job of this model: it still waits on the queue, or could not be read and \
               is a dead letter, or there never was one";
    StoreError::new(Class::NotFound, job, why).into()
}

/// How a job stands, as it is told.
fn answer(progress: &Progress) -> proto::Job {
    let Progress { record, standing } = progress;
    let (manifest, outcome) = (&record.manifest, standing.outcome.as_ref());
    let (parts_done, parts) = standing.parts.unwrap_or_default();
    proto::Job {
        id: manifest.id.clone(),
        model: manifest.model.to_string(),
        run: manifest.run.to_string(),
        step: manifest.step,
        channel: record.channel.to_string(),
        state: standing.name().to_owned(),
        ended: outcome.is_some(),
        parts_done,
        parts,
        snapshot: outcome.and_then(|outcome| outcome.snapshot).map(|id| id.to_string()).unwrap_or_default(),
        sequence: outcome.and_then(|outcome| outcome.sequence).unwrap_or_default(),
        by: outcome.and_then(|outcome| outcome.by.as_ref()).map(ToString::to_string).unwrap_or_default(),
        error: standing.error.as_ref().map(|why| proto::JobError {
            kind: why.kind.clone(),
            class: why.class.clone(),
            message: why.message.clone(),
        }),
        accepted_at: Some(moment(record.accepted_at)),
        ended_at: outcome.map(|outcome| moment(outcome.when)),
        requested_by: record.requested_by.clone().unwrap_or_default(),
        created_at: Some(moment(manifest.created_at)),
    }
}

/// A stream that follows a job.
struct Follower {
    look: watch::Receiver<Look>,
    named: Named,
    caller: Caller,
    gate: Arc<Gate>,
    closing: Option<watch::Receiver<bool>>,
    /// When the next sign of life is due.
    due: Instant,
    /// Whether what is known now was told.
    told: bool,
    ended: bool,
    _share: OwnedSemaphorePermit,
}

impl Follower {
    fn answers(self) -> impl Stream<Item = Result<proto::WatchJobResponse, Status>> + Send {
        unfold(self, |mut follower| async move {
            if follower.ended {
                return None;
            }
            let answer = follower.next().await?;
            follower.ended |= answer.is_err();
            Some((answer.map_err(Status::from), follower))
        })
    }

    /// What is to be told next; `None` where the connection closes.
    async fn next(&mut self) -> Option<Result<proto::WatchJobResponse, Refusal>> {
        loop {
            let look = self.look.borrow_and_update().clone();
            if !self.told {
                self.told = true;
                self.ended = look.is_last();
                match look {
                    Look::Unknown => {}
                    Look::Failed(refusal) => return Some(Err(refusal)),
                    Look::Stands(job) => {
                        self.due = Instant::now() + HEARTBEAT;
                        return Some(Ok(proto::WatchJobResponse { job: Some((*job).clone()) }));
                    }
                }
            }
            tokio::select! {
                changed = self.look.changed() => {
                    changed.ok()?;
                    self.told = false;
                }
                () = sleep_until(self.due) => {
                    let still = self.gate.again(&self.caller);
                    let may = |role: &Role| still.as_ref().is_some_and(|who| who.may(*role, &self.named.model));
                    if !LOOKERS.iter().any(may) {
                        return Some(Err(Refusal::unknown_caller()));
                    }
                    self.due = Instant::now() + HEARTBEAT;
                    return Some(Ok(proto::WatchJobResponse { job: None }));
                }
                () = closes(&mut self.closing) => return None,
            }
        }
    }
}

/// Returns when the connection is to be closed.
async fn closes(closing: &mut Option<watch::Receiver<bool>>) {
    if let Some(closing) = closing
        && closing.wait_for(|closing| *closing).await.is_ok()
    {
        return;
    }
    // Whoever could close it has gone, or never was: it goes on.
    std::future::pending::<()>().await;
}

#[tonic::async_trait]
impl publishing_server::Publishing for Service {
    async fn submit(
        &self,
        request: Request<proto::SubmitRequest>,
    ) -> Result<Response<proto::SubmitResponse>, Status> {
        Ok(Response::new(self.submitted(request).await?))
    }

    async fn get_job(
        &self,
        request: Request<proto::GetJobRequest>,
    ) -> Result<Response<proto::GetJobResponse>, Status> {
        Ok(Response::new(self.job(request).await?))
    }

    async fn list_jobs(
        &self,
        request: Request<proto::ListJobsRequest>,
    ) -> Result<Response<proto::ListJobsResponse>, Status> {
        Ok(Response::new(self.jobs(request).await?))
    }

    type WatchJobStream = Pin<Box<dyn Stream<Item = Result<proto::WatchJobResponse, Status>> + Send>>;

    async fn watch_job(
        &self,
        request: Request<proto::WatchJobRequest>,
    ) -> Result<Response<Self::WatchJobStream>, Status> {
        Ok(Response::new(Box::pin(self.follower(request)?.answers())))
    }

    async fn republish(
        &self,
        request: Request<proto::RepublishRequest>,
    ) -> Result<Response<proto::RepublishResponse>, Status> {
        Ok(Response::new(self.again(request).await?))
    }

    async fn cancel(
        &self,
        request: Request<proto::CancelRequest>,
    ) -> Result<Response<proto::CancelResponse>, Status> {
        Ok(Response::new(self.cancelled(request).await?))
    }
}
