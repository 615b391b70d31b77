//! Trainers and operators ask for publishes over the API.

use std::time::Duration;

use futures::StreamExt;
use tokio::time::timeout;
use tonic::{Code, Streaming};

use weighbridge::api::proto::republish_request::What;
use weighbridge::api::proto::{
    CancelRequest, GetJobRequest, Job, ListJobsRequest, RepublishRequest, SubmitRequest, WatchJobRequest,
    WatchJobResponse,
};

use crate::site::{PATIENCE, Site, by, class, field, manifest, refused};

/// The states that a stream tells until it ends; signs of life are left out.
async fn states(stream: Streaming<WatchJobResponse>) -> Vec<Job> {
    let told = stream.map(|told| told.unwrap().job).filter_map(std::future::ready).collect();
    timeout(PATIENCE, told).await.unwrap()
}

fn named(job: &str) -> (String, String) {
    ("m".to_owned(), job.to_owned())
}

fn watch(job: &str) -> WatchJobRequest {
    let (model, job) = named(job);
    WatchJobRequest { model, job }
}

fn get(job: &str) -> GetJobRequest {
    let (model, job) = named(job);
    GetJobRequest { model, job }
}

fn cancel(job: &str) -> CancelRequest {
    let (model, job) = named(job);
    CancelRequest { model, job }
}

#[tokio::test]
async fn a_checkpoint_is_handed_over_followed_and_published_again() {
    let site = Site::start("api,worker");
    let mut client = site.publishing();
    let (id, written) = manifest("m", 7, &site.checkpoint(7));
    // Followed before any worker knows it.
    let stream = client.watch_job(by(&site.drop, watch(&id))).await.unwrap().into_inner();
    for _ in 0..2 {
        let submit = SubmitRequest { manifest: written.clone().into() };
        assert_eq!(client.submit(by(&site.drop, submit)).await.unwrap().into_inner().job, id);
    }
    let told = states(stream).await;
    let last = told.last().unwrap();
    assert_eq!((last.state.as_str(), last.ended, last.step), ("published", true, 7), "{told:?}");
    assert!(told.iter().rev().skip(1).all(|job| !job.ended && job.id == id), "{told:?}");
    assert_eq!((last.channel.as_str(), last.sequence, last.snapshot.len()), ("prod", 1, 64));
    assert!(last.accepted_at.is_some() && last.ended_at.is_some() && last.created_at.is_some());

    // Who comes late is told the end at once.
    let late = client.watch_job(by(&site.fetch, watch(&id))).await.unwrap().into_inner();
    assert_eq!(states(late).await, std::slice::from_ref(last));
    let shown = client.get_job(by(&site.operate, get(&id))).await.unwrap().into_inner();
    assert_eq!(shown.job.as_ref(), Some(last));

    let again = |request_id: &str| RepublishRequest {
        model: "m".into(),
        what: Some(What::Step(7)),
        channel: "canary".into(),
        request_id: request_id.into(),
        ..Default::default()
    };
    let mut jobs = Vec::new();
    for request_id in ["deploy-1", "deploy-1", "deploy-2"] {
        let request = by(&site.operate, again(request_id));
        jobs.push(client.republish(request).await.unwrap().into_inner().job);
        let stream = client.watch_job(by(&site.operate, watch(jobs.last().unwrap()))).await.unwrap();
        let last = states(stream.into_inner()).await.pop().unwrap();
        assert!(["published", "unchanged"].contains(&last.state.as_str()), "{last:?}");
        assert_eq!((last.channel.as_str(), last.requested_by.as_str()), ("canary", "ops"));
    }
    assert!(jobs[0] == jobs[1] && jobs[1] != jobs[2] && !jobs.contains(&id), "{jobs:?}");

    let status = refused(client.cancel(by(&site.operate, cancel(&id))).await, Code::FailedPrecondition);
    assert_eq!(class(&status), "already_decided");
    let deeds: Vec<_> = site
        .audit()
        .iter()
        .map(|deed| {
            let text = |name: &str| deed[name].as_str().unwrap_or_default().to_owned();
            (text("action"), text("caller"), text("object"), text("outcome"))
        })
        .collect();
    let deed = |action: &str, caller: &str, object: &str, outcome: &str| {
        (action.to_owned(), caller.to_owned(), object.to_owned(), outcome.to_owned())
    };
    assert_eq!(
        deeds,
        [
            deed("submit", "trainer", &id, "done"),
            deed("submit", "trainer", &id, "done"),
            deed("republish", "ops", &jobs[0], "done"),
            deed("republish", "ops", &jobs[0], "repeated"),
            deed("republish", "ops", &jobs[2], "done"),
            deed("cancel", "ops", &id, "already_decided"),
        ]
    );
}

#[tokio::test]
async fn a_job_that_waits_is_cancelled_and_lists_have_pages() {
    let site = Site::start("api,worker");
    let mut client = site.publishing();
    let mut ids = Vec::new();
    for step in 0..5 {
        let absent = site.store.folder.path().join(format!("absent-{step}"));
        let (id, written) = manifest("m", step, &absent);
        client.submit(by(&site.drop, SubmitRequest { manifest: written.into() })).await.unwrap();
        // One after another, so that it is known which is newer.
        let mut stream = client.watch_job(by(&site.drop, watch(&id))).await.unwrap().into_inner();
        let accepted = async { while stream.next().await.unwrap().unwrap().job.is_none() {} };
        timeout(PATIENCE, accepted).await.unwrap();
        ids.push(id);
    }
    ids.reverse();
    let list = async |token: &str, change: fn(&mut ListJobsRequest)| {
        let mut request =
            ListJobsRequest { model: "m".into(), page_token: token.into(), ..Default::default() };
        change(&mut request);
        site.publishing().list_jobs(by(&site.fetch, request)).await.unwrap().into_inner()
    };
    let (mut seen, mut token) = (Vec::new(), String::new());
    loop {
        let page = list(&token, |request| request.page_size = 2).await;
        assert!(page.jobs.len() <= 2);
        seen.extend(page.jobs.into_iter().map(|job| job.id));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, ids, "the newest first, each once");
    assert_eq!(list("", |request| request.open = true).await.jobs.len(), 5);

    let stream = client.watch_job(by(&site.drop, watch(&ids[0]))).await.unwrap().into_inner();
    let cancelled = client.cancel(by(&site.operate, cancel(&ids[0]))).await.unwrap().into_inner();
    let job = cancelled.job.unwrap();
    assert_eq!((job.state.as_str(), job.ended), ("cancelled", true));
    assert_eq!(states(stream).await.last().unwrap().state, "cancelled");
    let again = client.cancel(by(&site.operate, cancel(&ids[0]))).await.unwrap().into_inner();
    assert_eq!(again.job.unwrap().state, "cancelled", "a second time is no failure");
    let ended = list("", |request| request.outcome = "cancelled".into()).await;
    assert_eq!(ended.jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), [ids[0].as_str()]);
}

#[tokio::test]
async fn who_may_not_ask_for_a_publish_is_refused() {
    let site = Site::start("api");
    let mut client = site.publishing();
    let (id, written) = manifest("m", 1, &site.checkpoint(1));
    let submit = || SubmitRequest { manifest: written.clone().into() };
    for token in [&site.fetch, &site.operate, &site.other] {
        refused(client.submit(by(token, submit())).await, Code::PermissionDenied);
    }
    refused(client.get_job(by(&site.other, get(&id))).await, Code::PermissionDenied);
    let list = || ListJobsRequest { model: "m".into(), ..Default::default() };
    refused(client.list_jobs(by(&site.other, list())).await, Code::PermissionDenied);
    refused(client.watch_job(by(&site.other, watch(&id))).await, Code::PermissionDenied);
    let again = || RepublishRequest { model: "m".into(), what: Some(What::Step(1)), ..Default::default() };
    for token in [&site.drop, &site.fetch, &site.other] {
        refused(client.republish(by(token, again())).await, Code::PermissionDenied);
        refused(client.cancel(by(token, cancel(&id))).await, Code::PermissionDenied);
    }
    refused(client.submit(by("wb_nobody", submit())).await, Code::Unauthenticated);
    refused(client.get_job(tonic::Request::new(get(&id))).await, Code::Unauthenticated);
    let audit = site.audit();
    assert!(audit.iter().all(|deed| deed["outcome"] == "forbidden"), "{audit:?}");
    assert_eq!(audit.len(), 9, "what was refused stands there too: {audit:?}");

    // And who may, hands it over though no worker is there.
    assert_eq!(client.submit(by(&site.drop, submit())).await.unwrap().into_inner().job, id);
    refused(client.get_job(by(&site.drop, get(&id))).await, Code::NotFound);
    refused(client.cancel(by(&site.operate, cancel(&id))).await, Code::NotFound);
    refused(client.republish(by(&site.operate, again())).await, Code::NotFound);
    let none = client.list_jobs(by(&site.drop, list())).await.unwrap().into_inner();
    assert!(none.jobs.is_empty() && none.next_page_token.is_empty());
    // Its stream gives signs of life until there is something to tell.
    let mut stream = client.watch_job(by(&site.drop, watch(&id))).await.unwrap().into_inner();
    let sign = timeout(Duration::from_secs(10), stream.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(sign.job, None);
}

#[tokio::test]
async fn what_makes_no_sense_is_told_by_its_field() {
    let site = Site::start("api");
    let mut client = site.publishing();
    let bad = |status: tonic::Status| (status.code(), field(&status));
    let wrong = |name: &str| (Code::InvalidArgument, name.to_owned());
    let submit = async |manifest: Vec<u8>| {
        let submit = SubmitRequest { manifest: manifest.into() };
        site.publishing().submit(by(&site.all, submit)).await.unwrap_err()
    };
    assert_eq!(bad(submit(Vec::new()).await), wrong("manifest"));
    assert_eq!(bad(submit(b"{\"schema\": 1}".to_vec()).await), wrong("manifest"));
    let (_, relative) = manifest("m", 1, "here".as_ref());
    let status = submit(relative).await;
    assert!(status.message().contains("absolute path"), "{status:?}");
    assert_eq!(bad(status), wrong("manifest"));
    let (_, escaping) = manifest("../m", 1, "/x".as_ref());
    assert_eq!(bad(submit(escaping).await), wrong("manifest"));
    let status = submit(vec![b' '; (1 << 20) + 1]).await;
    assert!(status.message().contains("at most 1048576"), "{status:?}");
    assert_eq!(submit(vec![b' '; 3 << 20]).await.code(), Code::OutOfRange);

    let short = client.get_job(by(&site.all, get("0f8fad"))).await.unwrap_err();
    assert_eq!(bad(short), wrong("job"));
    let list = ListJobsRequest { model: "m".into(), page_size: 1000, ..Default::default() };
    assert_eq!(bad(client.list_jobs(by(&site.all, list)).await.unwrap_err()), wrong("page_size"));
    let again = RepublishRequest { model: "m".into(), ..Default::default() };
    assert_eq!(bad(client.republish(by(&site.all, again)).await.unwrap_err()), wrong("what"));
    let mut said = by(&site.all, cancel("0f8fad5b-d9cb-469f-a165-70867728950e"));
    said.metadata_mut().insert("weighbridge-who", "x".repeat(101).parse().unwrap());
    let status = client.cancel(said).await.unwrap_err();
    assert!(status.code() == Code::InvalidArgument && status.message().contains("weighbridge-who"));
}

#[tokio::test]
async fn many_follow_one_job_until_the_server_stops() {
    let mut site = Site::start("api,worker");
    let mut client = site.publishing();
    let (id, written) = manifest("m", 1, &site.store.folder.path().join("absent"));
    client.submit(by(&site.drop, SubmitRequest { manifest: written.into() })).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(client.watch_job(by(&site.drop, watch(&id))).await.unwrap().into_inner());
    }
    for stream in &mut streams {
        let waits = async {
            while stream.next().await.unwrap().unwrap().job.is_none_or(|job| job.state != "waiting") {}
        };
        timeout(PATIENCE, waits).await.unwrap();
    }
    let stopping = tokio::task::spawn_blocking(move || site.stop());
    for stream in streams {
        assert!(states(stream).await.iter().all(|job| !job.ended), "it ends without an end of the job");
    }
    stopping.await.unwrap();
}

#[tokio::test]
async fn an_id_that_another_manifest_has_is_refused_at_once() {
    let site = Site::start("api,worker");
    let mut client = site.publishing();
    let (id, written) = manifest("m", 1, &site.checkpoint(1));
    client.submit(by(&site.drop, SubmitRequest { manifest: written.clone().into() })).await.unwrap();
    let stream = client.watch_job(by(&site.drop, watch(&id))).await.unwrap().into_inner();
    assert_eq!(states(stream).await.last().unwrap().state, "published");
    let mut other: serde_json::Value = serde_json::from_slice(&written).unwrap();
    other["step"] = 2.into();
    let submit = SubmitRequest { manifest: other.to_string().into_bytes().into() };
    let status = refused(client.submit(by(&site.drop, submit)).await, Code::FailedPrecondition);
    assert_eq!(class(&status), "id_used");
}
