//! `weighbridge.v1.Fleet`: which serving host wants, holds and serves what; and the same over plain HTTP.

pub mod hosts;
mod http;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use weighbridge_schemas::host::HostStatus;
use weighbridge_schemas::names::{ChannelName, ModelName};

use super::answers::Refusal;
use super::proto;
use super::proto::fleet_server;
use super::requests::{field, optional, page_size, page_token};
use super::shared::{caller, operates_any, permitted};
use super::tokens::{Caller, Role};
use hosts::{Heard, Hosts, Listed, Place};

pub use http::routes;

/// Hosts on a page: usually, and at most.
const PAGE: (usize, usize) = (100, 1000);

/// The service.
#[derive(Debug)]
pub struct Service(pub Arc<Hosts>);

/// A status that a host tells.
#[derive(Debug)]
pub struct Report {
    /// The status.
    pub status: HostStatus,
    /// The document.
    pub written: Bytes,
}

impl TryFrom<Bytes> for Report {
    type Error = Refusal;

    fn try_from(written: Bytes) -> Result<Self, Refusal> {
        Ok(Self { status: field("status", HostStatus::parse(&written))?, written })
    }
}

/// A page of hosts that is asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct List {
    /// Those that follow this model.
    pub model: Option<ModelName>,
    /// Those that follow this channel.
    pub channel: Option<ChannelName>,
    /// How many.
    pub most: usize,
    /// Behind which.
    pub after: Option<Place>,
}

impl TryFrom<proto::ListHostsRequest> for List {
    type Error = Refusal;

    fn try_from(request: proto::ListHostsRequest) -> Result<Self, Refusal> {
        Ok(Self {
            model: optional("model", &request.model)?,
            channel: optional("channel", &request.channel)?,
            most: page_size(request.page_size, PAGE.0, PAGE.1)?,
            after: page_token(&request.page_token)?,
        })
    }
}

/// Notes what a host tells, if its token is for the model.
fn hear(hosts: &Hosts, caller: &Caller, report: Report) -> Result<(), Refusal> {
    permitted(caller, &[Role::Fetch], &report.status.model)?;
    if hosts.hear(caller.name(), &report.status, report.written, Instant::now()) {
        return Ok(());
    }
    let why = "another token tells of this host, or this token tells of too many; give each fleet a token, and each \
               host a name, of its own";
    Err(Refusal::over_limit(why, Duration::from_secs(60)))
}

/// The hosts of models that the caller operates.
fn list(hosts: &Hosts, caller: &Caller, list: &List) -> Result<Listed, Refusal> {
    match &list.model {
        Some(model) => permitted(caller, &[Role::Operate], model)?,
        None => operates_any(caller)?,
    }
    let wanted = |model: &ModelName, channel: &ChannelName| {
        list.model.as_ref().is_none_or(|wanted| wanted == model)
            && list.channel.as_ref().is_none_or(|wanted| wanted == channel)
            && caller.may(Role::Operate, model)
    };
    Ok(hosts.list(wanted, list.after.as_ref(), list.most, Instant::now()))
}

fn host(heard: Heard) -> proto::Host {
    let Heard { written, status, silent } = heard;
    let (wanted, serving) = (status.wanted.as_ref(), status.serving.as_ref());
    proto::Host {
        status: written,
        silent_seconds: silent.as_secs(),
        host: status.host,
        model: status.model.to_string(),
        channel: status.channel.to_string(),
        state: status.state.as_str().to_owned(),
        serving: serving.map(|serving| serving.snapshot.to_string()).unwrap_or_default(),
        serving_sequence: serving.map(|serving| serving.sequence).unwrap_or_default(),
        wanted_sequence: wanted.map(|wanted| wanted.sequence).unwrap_or_default(),
        age_seconds: status.age_seconds,
        last_error: status.last_error.map(|why| why.message).unwrap_or_default(),
    }
}

#[tonic::async_trait]
impl fleet_server::Fleet for Service {
    async fn report(
        &self,
        request: Request<proto::ReportRequest>,
    ) -> Result<Response<proto::ReportResponse>, Status> {
        let caller = caller(request.extensions())?;
        hear(&self.0, &caller, request.into_inner().status.try_into()?)?;
        Ok(Response::new(proto::ReportResponse {}))
    }

    async fn list_hosts(
        &self,
        request: Request<proto::ListHostsRequest>,
    ) -> Result<Response<proto::ListHostsResponse>, Status> {
        let caller = caller(request.extensions())?;
        let listed = list(&self.0, &caller, &request.into_inner().try_into()?)?;
        Ok(Response::new(proto::ListHostsResponse {
            hosts: listed.hosts.into_iter().map(host).collect(),
            next_page_token: listed.next.map(|next| next.to_string()).unwrap_or_default(),
        }))
    }
}
