//! What trainers and operators ask of publishes, checked.

use bytes::Bytes;

use weighbridge_schemas::checkpoint::{CheckpointManifest, PolicyChoice};
use weighbridge_schemas::job::{Ended, JobId};
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::policy::Policy;

use crate::api::answers::Refusal;
use crate::api::proto;
use crate::api::requests::{digits, field, model, optional, page_size, page_token, parsed, request_id};
use crate::operations::jobs::{Accepted, Filter};
use crate::operations::republish::{Wanted, What};
use crate::operations::submit;

/// Jobs on a page: usually, and at most.
const PAGE: (usize, usize) = (20, 100);

/// A manifest to hand over.
#[derive(Debug)]
pub struct Submit {
    /// The manifest.
    pub manifest: CheckpointManifest,
    /// Its bytes.
    pub written: Bytes,
}

impl TryFrom<proto::SubmitRequest> for Submit {
    type Error = Refusal;

    fn try_from(request: proto::SubmitRequest) -> Result<Self, Refusal> {
        let checked = submit::check(&request.manifest).map_err(|failure| failure.to_string());
        Ok(Self { manifest: field("manifest", checked)?, written: request.manifest })
    }
}

/// A job that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The model.
    pub model: ModelName,
    /// The job.
    pub job: JobId,
}

impl Named {
    fn new(named: &str, job: &str) -> Result<Self, Refusal> {
        Ok(Self { model: model(named)?, job: parsed("job", job)? })
    }
}

impl TryFrom<proto::GetJobRequest> for Named {
    type Error = Refusal;

    fn try_from(request: proto::GetJobRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.job)
    }
}

impl TryFrom<proto::WatchJobRequest> for Named {
    type Error = Refusal;

    fn try_from(request: proto::WatchJobRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.job)
    }
}

impl TryFrom<proto::CancelRequest> for Named {
    type Error = Refusal;

    fn try_from(request: proto::CancelRequest) -> Result<Self, Refusal> {
        Self::new(&request.model, &request.job)
    }
}

/// A page of jobs.
#[derive(Debug)]
pub struct List {
    /// The model.
    pub model: ModelName,
    /// How many.
    pub most: usize,
    /// Behind which.
    pub after: Option<Accepted>,
    /// Which.
    pub filter: Filter,
}

impl TryFrom<proto::ListJobsRequest> for List {
    type Error = Refusal;

    fn try_from(request: proto::ListJobsRequest) -> Result<Self, Refusal> {
        let model = model(&request.model)?;
        let outcome = match request.outcome.as_str() {
            "" => None,
            text => Some(Ended::ALL.into_iter().find(|ended| ended.as_str() == text).ok_or_else(|| {
                let known = Ended::ALL.map(Ended::as_str).join(", ");
                Refusal::bad_field("outcome", format!("it is one of {known}"))
            })?),
        };
        if request.open && outcome.is_some() {
            return Err(Refusal::bad_field(
                "outcome",
                "a job that is open has none; leave one of the two out",
            ));
        }
        let after: Option<Accepted> = page_token(&request.page_token)?;
        if after.as_ref().is_some_and(|after| after.model != model) {
            return Err(Refusal::bad_field("page_token", "it is of another model's list"));
        }
        let most = page_size(request.page_size, PAGE.0, PAGE.1)?;
        Ok(Self { model, most, after, filter: Filter { open: request.open, outcome } })
    }
}

/// A checkpoint to publish again.
#[derive(Debug)]
pub struct Again {
    /// Which, and how.
    pub wanted: Wanted,
    /// The caller's id of the request.
    pub request_id: Option<String>,
}

impl TryFrom<proto::RepublishRequest> for Again {
    type Error = Refusal;

    fn try_from(request: proto::RepublishRequest) -> Result<Self, Refusal> {
        use proto::republish_request::What as Said;
        let model = model(&request.model)?;
        let run = optional("run", &request.run)?;
        if run.is_some() && !matches!(request.what, Some(Said::Step(_))) {
            return Err(Refusal::bad_field("run", "it goes with a step alone"));
        }
        let what = match request.what {
            Some(Said::Step(step)) => What::Step(step, run),
            Some(Said::Job(job)) => What::Job(parsed::<JobId>("job", &job)?.to_string()),
            Some(Said::Snapshot(id)) => What::Snapshot(digits("snapshot", &id)?),
            None => return Err(Refusal::bad_field("what", "name a job, a step or a snapshot")),
        };
        let policy = match (request.policy.as_str(), request.policy_name.as_str()) {
            ("", "") => None,
            ("", name) => Some(PolicyChoice::Name(parsed("policy_name", name)?)),
            (text, "") => {
                field("policy", Policy::parse(text))?;
                Some(PolicyChoice::Toml(request.policy))
            }
            _ => {
                return Err(Refusal::bad_field(
                    "policy",
                    "there is a policy_name too; leave one of the two out",
                ));
            }
        };
        let channel = optional("channel", &request.channel)?;
        let request_id = request_id(&request.request_id)?.map(ToOwned::to_owned);
        let wanted = Wanted { model, what, channel, policy, promote: request.promote };
        Ok(Self { wanted, request_id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn told<T>(result: Result<T, Refusal>) -> String {
        result.err().map(|refusal| refusal.status().message().to_owned()).unwrap_or_default()
    }

    #[test]
    fn a_job_has_a_model_and_a_whole_id() {
        let named = |model: &str, job: &str| {
            Named::try_from(proto::GetJobRequest { model: model.into(), job: job.into() })
        };
        assert_eq!(named("m", JOB).unwrap().job.as_str(), JOB);
        assert!(told(named("", JOB)).starts_with("model: "));
        assert!(told(named("m", "0f8fad")).starts_with("job: "));
    }

    #[test]
    fn a_list_goes_on_where_it_was() {
        let list = |change: fn(&mut proto::ListJobsRequest)| {
            let mut request = proto::ListJobsRequest { model: "m".into(), ..Default::default() };
            change(&mut request);
            List::try_from(request)
        };
        assert_eq!(list(|_| {}).unwrap().most, PAGE.0);
        let dead = list(|request| request.outcome = "dead".into()).unwrap();
        assert_eq!(dead.filter.outcome, Some(Ended::Dead));
        assert!(told(list(|request| request.outcome = "gone".into())).contains("published, "));
        assert!(
            told(list(|request| (request.open, request.outcome) = (true, "dead".into()))).contains("open")
        );
        assert!(told(list(|request| request.page_size = 101)).contains("1 to 100"));
        let place = format!("7/m/{JOB}");
        let after = List::try_from(proto::ListJobsRequest {
            model: "m".into(),
            page_token: place.clone(),
            ..Default::default()
        });
        assert_eq!(after.unwrap().after.unwrap().to_string(), place);
        assert!(
            told(list(|request| request.page_token = format!("7/other/{JOB}"))).contains("another model")
        );
        assert!(told(list(|request| request.page_token = "x".into())).starts_with("page_token: "));
    }

    #[test]
    fn what_is_published_again_is_said_in_one_way() {
        use proto::republish_request::What as Said;
        let again = |change: fn(&mut proto::RepublishRequest)| {
            let mut request = proto::RepublishRequest {
                model: "m".into(),
                what: Some(Said::Step(7)),
                ..Default::default()
            };
            change(&mut request);
            Again::try_from(request)
        };
        assert_eq!(again(|_| {}).unwrap().wanted.what, What::Step(7, None));
        assert!(told(again(|request| request.what = None)).contains("a job, a step or a snapshot"));
        assert!(told(again(|request| request.what = Some(Said::Job("x".into())))).starts_with("job: "));
        assert!(
            told(again(|request| request.what = Some(Said::Snapshot("xyz".into())))).contains("snapshot")
        );
        let run_of_a_job = again(|request| {
            (request.run, request.what) = ("r".into(), Some(Said::Job(JOB.into())));
        });
        assert!(told(run_of_a_job).starts_with("run: "));
        assert!(told(again(|request| request.policy = "rules = 1".into())).starts_with("policy: "));
        let both = again(|request| {
            (request.policy, request.policy_name) = ("schema = 'weighbridge.policy/v1'".into(), "p".into());
        });
        assert!(told(both).contains("policy_name"));
        assert!(told(again(|request| request.channel = "a b".into())).starts_with("channel: "));
        assert!(told(again(|request| request.request_id = "\n".into())).starts_with("request_id: "));
    }
}
