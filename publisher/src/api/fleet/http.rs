//! Hosts over plain HTTP: what the follower tells and `weighbridge fleet` asks.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::hosts::Hosts;
use super::{List, Report};
use crate::api::answers::Refusal;
use crate::api::proto;
use crate::api::tokens::Caller;

/// The paths.
pub fn routes(hosts: Arc<Hosts>) -> Router {
    Router::new().route("/v1/fleet/hosts", get(list).post(report)).with_state(hosts)
}

/// A host tells how it stands.
async fn report(
    State(hosts): State<Arc<Hosts>>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Result<StatusCode, Refusal> {
    super::hear(&hosts, &caller, Report::try_from(body)?)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Asked {
    model: String,
    channel: String,
    page_size: u32,
    page_token: String,
}

/// The hosts that are known.
async fn list(
    State(hosts): State<Arc<Hosts>>,
    Extension(caller): Extension<Caller>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, Refusal> {
    let Query(Asked { model, channel, page_size, page_token }) =
        asked.map_err(|error| Refusal::bad_request(error.body_text()))?;
    let asked = List::try_from(proto::ListHostsRequest { model, channel, page_size, page_token })?;
    let listed = super::list(&hosts, &caller, &asked)?;
    let documents: Vec<_> = listed
        .hosts
        .iter()
        .map(|heard| json!({ "status": heard.status, "silent_seconds": heard.silent.as_secs() }))
        .collect();
    let mut answer = json!({ "hosts": documents });
    if let Some(next) = &listed.next {
        answer["next_page_token"] = json!(next.to_string());
    }
    Ok(([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], Json(answer)).into_response())
}
