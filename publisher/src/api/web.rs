//! The same over plain HTTP: immutable objects for hosts and whatever cache stands before them, and a channel as a
//! stream of lines. `docs/api.md` tells of each path.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json};
use bytes::Bytes;
use futures::StreamExt;
use serde::Deserialize;
use serde_json::json;

use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::layout;

use super::answers::Refusal;
use super::events::{Event, Follower};
use super::guard::Connection;
use super::objects::Object;
use super::requests;
use super::shared::{Shared, allowed};
use super::snapshots::Reading;
use super::tokens::{Caller, Role};
use crate::clock;

/// What may be kept for ever by whoever reads it.
const FOR_EVER: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");
/// What may not be kept.
const NOT_KEPT: HeaderValue = HeaderValue::from_static("no-store");

/// The paths.
pub fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/objects/{*key}", get(object))
        .route("/v1/models/{model}/resolve", get(resolve))
        .route("/v1/models/{model}/channels/{channel}/watch", get(watch))
        .with_state(shared)
}

/// An object by its key in the store.
async fn object(
    State(shared): State<Arc<Shared>>,
    Path(key): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let absent =
        || StoreError::new(Class::NotFound, "object", "there is no such object, or none that hosts read");
    let fetched = layout::fetched(&key).ok_or_else(absent)?;
    let caller = allowed(request.extensions(), &[Role::Fetch], &fetched.model)?;
    let (key, content, share) = (fetched.key, fetched.content, shared.objects.share(caller.name()));
    let size = shared.objects.size(&key, content, &share).await?.ok_or_else(absent)?;
    // The key names the content: nothing else will ever be there.
    let tag = format!("\"{}\"", key.filename().unwrap_or_default());
    let headers = request.headers();
    let condition = conditions(headers, &tag, size);
    let outside = condition == Condition::Outside;
    let answer = match condition {
        Condition::Known => Response::builder().status(StatusCode::NOT_MODIFIED).body(Body::empty()),
        Condition::Other => {
            let unkept = [(header::CACHE_CONTROL, NOT_KEPT)];
            return Ok((StatusCode::PRECONDITION_FAILED, unkept).into_response());
        }
        Condition::Outside => Response::builder()
            .status(StatusCode::RANGE_NOT_SATISFIABLE)
            .header(header::CONTENT_RANGE, format!("bytes */{size}"))
            .body(Body::empty()),
        Condition::Whole | Condition::Part(..) => {
            let (from, end) =
                if let Condition::Part(from, end) = condition { (from, end) } else { (0, size) };
            let mut answer = Response::builder().header(header::CONTENT_LENGTH, end - from);
            if condition != Condition::Whole {
                let range = format!("bytes {from}-{}/{size}", end.saturating_sub(1));
                answer = answer.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
            }
            let body = if request.method() == Method::HEAD {
                Body::empty()
            } else {
                let object = Object { key, content, size, end, share };
                let pieces = Reading::of(&shared, object, from).pieces();
                Body::from_stream(pieces.map(|piece| piece.map(|(_, bytes)| bytes)))
            };
            answer.body(body)
        }
    };
    let mut answer = answer.map_err(|error| crate::error::Failure::internal("an answer", error))?;
    let headers = answer.headers_mut();
    headers.insert(header::CACHE_CONTROL, if outside { NOT_KEPT } else { FOR_EVER });
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Ok(tag) = tag.parse() {
        headers.insert(header::ETAG, tag);
    }
    Ok(answer)
}

/// What a request's headers ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    /// The caller has it.
    Known,
    /// The caller wants it only if it is something else.
    Other,
    /// Bytes that it has not.
    Outside,
    /// All of it.
    Whole,
    /// The bytes from one place up to another.
    Part(u64, u64),
}

/// What `headers` ask for of an object of this tag and size.
pub(super) fn conditions(headers: &HeaderMap, tag: &str, size: u64) -> Condition {
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let names = |list: &str| {
        list.split(',').map(str::trim).any(|one| one == "*" || one.trim_start_matches("W/") == tag)
    };
    if text(header::IF_MATCH).is_some_and(|list| !names(list)) {
        return Condition::Other;
    }
    if text(header::IF_NONE_MATCH).is_some_and(names) {
        return Condition::Known;
    }
    let fits = text(header::IF_RANGE).is_none_or(|wanted| wanted == tag);
    let range = text(header::RANGE).filter(|_| fits).and_then(|text| text.strip_prefix("bytes="));
    // Several ranges at once, and what cannot be read, are answered by the whole.
    let Some((from, to)) = range.filter(|range| !range.contains(',')).and_then(|range| range.split_once('-'))
    else {
        return Condition::Whole;
    };
    let (from, end) = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) if to >= from => (from, to.saturating_add(1).min(size)),
        (Ok(from), _) if to.is_empty() => (from, size),
        (_, Ok(last)) if from.is_empty() => (size.saturating_sub(last), size),
        _ => return Condition::Whole,
    };
    if from >= end { Condition::Outside } else { Condition::Part(from, end) }
}

#[derive(Debug, Deserialize)]
struct At {
    #[serde(default)]
    at: String,
}

/// What a channel, an id or its first digits point at.
async fn resolve(
    State(shared): State<Arc<Shared>>,
    Path(model): Path<String>,
    Query(At { at }): Query<At>,
    request: Request,
) -> Result<Response, Refusal> {
    let reference = requests::reference(&model, &at)?;
    allowed(request.extensions(), &[Role::Fetch], &reference.model)?;
    let resolved = shared.resolve(&reference).await?;
    let mut answer = json!({ "model": reference.model, "snapshot": resolved.snapshot });
    if let Some((channel, entry)) = &resolved.entry {
        answer["channel"] = json!(channel);
        answer["entry"] = serde_json::from_slice(&entry.bytes).unwrap_or_default();
    }
    Ok(([(header::CACHE_CONTROL, NOT_KEPT)], Json(answer)).into_response())
}

#[derive(Debug, Deserialize)]
struct After {
    #[serde(default)]
    after: u64,
}

/// A channel, as lines of JSON that come as it moves.
async fn watch(
    State(shared): State<Arc<Shared>>,
    Path((model, channel)): Path<(String, String)>,
    Query(After { after }): Query<After>,
    connection: Option<Extension<Connection>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, Refusal> {
    let (model, name) = (requests::model(&model)?, requests::channel(&channel)?);
    if !caller.may(Role::Fetch, &model) {
        return Err(Refusal::forbidden(format!("the token may not: it takes role fetch for model {model}")));
    }
    let state = shared.hub.follow_anew(&model, &name)?;
    let known = (caller, Arc::clone(&shared.gate));
    let connection = connection.as_ref().map(|Extension(known)| known);
    let follower = Follower::new(state, model, known, connection, after, shared.figures.watch());
    let lines = follower.events().map(|event| match event {
        Ok(event) => Ok(line(&event)),
        Err(refusal) => Err(refusal.status()),
    });
    let headers = [
        (header::CACHE_CONTROL, NOT_KEPT),
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

fn line(event: &Event) -> Bytes {
    let mut line = Vec::new();
    match event {
        Event::Entry(entry) => {
            line.extend_from_slice(b"{\"entry\":");
            // A document's line ends lie between its parts, never within a string.
            line.extend(
                entry.bytes.iter().map(|&byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }),
            );
            line.extend(format!(",\"publishes_after\":{}}}", entry.publishes_after).into_bytes());
        }
        Event::Heartbeat(stale) => {
            let mut beat = json!({ "heartbeat": clock::now() });
            if let Some(why) = stale {
                beat["stale"] = json!(why.to_string());
                beat["class"] = json!(why.class().as_str());
            }
            line = beat.to_string().into_bytes();
        }
    }
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(pairs: &[(&str, &str)]) -> Condition {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(header::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        conditions(&headers, "\"t\"", 100)
    }

    #[test]
    fn ranges_are_read_as_http_has_them() {
        assert_eq!(asked(&[]), Condition::Whole);
        for (range, from, end) in [
            ("bytes=0-", 0, 100),
            ("bytes=10-19", 10, 20),
            ("bytes=90-200", 90, 100),
            ("bytes=-5", 95, 100),
            ("bytes=-500", 0, 100),
        ] {
            assert_eq!(asked(&[("range", range)]), Condition::Part(from, end), "{range}");
        }
        for range in ["bytes=5-4", "bytes=--5", "bytes=0-1,3-4", "lines=0-1", "bytes=x"] {
            assert_eq!(asked(&[("range", range)]), Condition::Whole, "{range}");
        }
        for range in ["bytes=100-", "bytes=200-300", "bytes=-0"] {
            assert_eq!(asked(&[("range", range)]), Condition::Outside, "{range}");
        }
    }

    #[test]
    fn who_has_it_is_told_so_and_who_wants_another_too() {
        assert_eq!(asked(&[("if-none-match", "\"x\", W/\"t\"")]), Condition::Known);
        assert_eq!(asked(&[("if-none-match", "\"x\"")]), Condition::Whole);
        assert_eq!(asked(&[("if-match", "\"x\"")]), Condition::Other);
        assert_eq!(asked(&[("if-match", "\"t\""), ("range", "bytes=5-")]), Condition::Part(5, 100));
        assert_eq!(asked(&[("if-range", "\"x\""), ("range", "bytes=5-")]), Condition::Whole);
    }
}
