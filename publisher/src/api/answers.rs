//! From failures to what callers are told: gRPC statuses with details, and their like over HTTP.
//!
//! A status's message says what happened, to what, and the way out. Its details hold a `google.rpc.ErrorInfo` (the
//! stable class as its reason, the domain `weighbridge`, the kind) and, where trying again may help, a
//! `google.rpc.RetryInfo`.

use std::collections::HashMap;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use weighbridge_schemas::error::Kind;

use crate::error::{Exit, Failure};

/// The domain of error details.
pub const DOMAIN: &str = "weighbridge";
/// When trying again may help, where nothing better is known.
const AGAIN: Duration = Duration::from_secs(1);

/// Why a request is not done.
#[derive(Debug, Clone)]
pub struct Refusal {
    code: Code,
    kind: Kind,
    class: &'static str,
    message: String,
    again: Option<Duration>,
    /// The field of the request that is at fault.
    field: Option<&'static str>,
}

impl Refusal {
    fn new(code: Code, kind: Kind, class: &'static str, message: impl Into<String>) -> Self {
        Self { code, kind, class, message: message.into(), again: None, field: None }
    }

    /// Whoever asks is not known. It says nothing of what is here.
    #[must_use]
    pub fn unknown_caller() -> Self {
        let message = "a valid token is needed: `authorization: Bearer TOKEN`";
        Self::new(Code::Unauthenticated, Kind::Permanent, "unauthenticated", message)
    }

    /// Whoever asks is known, and may not.
    #[must_use]
    pub fn forbidden(what: impl Into<String>) -> Self {
        Self::new(Code::PermissionDenied, Kind::Permanent, "forbidden", what)
    }

    /// The server is not set up for it.
    #[must_use]
    pub fn unprepared(what: impl Into<String>) -> Self {
        Self::new(Code::FailedPrecondition, Kind::Permanent, "not_set_up", what)
    }

    /// The request makes no sense.
    #[must_use]
    pub fn bad_request(what: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, Kind::Permanent, "bad_request", what)
    }

    /// There is no such thing.
    #[must_use]
    pub fn nothing(what: impl Into<String>) -> Self {
        Self::new(Code::NotFound, Kind::Permanent, "not_found", what)
    }

    /// A field of the request makes no sense.
    #[must_use]
    pub fn bad_field(field: &'static str, why: impl std::fmt::Display) -> Self {
        Self { field: Some(field), ..Self::bad_request(format!("{field}: {why}")) }
    }

    /// It is not done as things stand: asking again changes nothing.
    #[must_use]
    pub fn as_things_stand(failure: Failure) -> Self {
        Self { code: Code::FailedPrecondition, ..failure.into() }
    }

    /// Too much at once, or too fast.
    #[must_use]
    pub fn over_limit(what: impl Into<String>, again: Duration) -> Self {
        Self { again: Some(again), ..Self::new(Code::ResourceExhausted, Kind::Transient, "over_limit", what) }
    }

    /// The caller's own deadline has passed.
    #[must_use]
    pub fn too_late() -> Self {
        let message = "the deadline passed before the answer was there; allow more time, or ask for less";
        Self::new(Code::DeadlineExceeded, Kind::Transient, "deadline_exceeded", message)
    }

    /// The stable class.
    #[must_use]
    pub const fn class(&self) -> &'static str {
        self.class
    }

    /// Whether something in the store is not what it has to be.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        self.code == Code::DataLoss
    }

    /// The gRPC status.
    #[must_use]
    pub fn status(&self) -> Status {
        let kind = HashMap::from([("kind".to_owned(), self.kind.as_str().to_owned())]);
        let mut details = ErrorDetails::with_error_info(self.class, DOMAIN, kind);
        if let Some(again) = self.again {
            details.set_retry_info(Some(again));
        }
        if let Some(field) = self.field {
            details.add_bad_request_violation(field, self.message.clone());
        }
        Status::with_error_details(self.code, self.message.clone(), details)
    }

    fn http_status(&self) -> StatusCode {
        match self.code {
            Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::Aborted | Code::AlreadyExists | Code::FailedPrecondition => StatusCode::CONFLICT,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let code = match (failure.exit, failure.kind) {
            (Exit::NotFound, _) => Code::NotFound,
            (Exit::Usage, _) => Code::InvalidArgument,
            (Exit::Rejected | Exit::BadCheckpoint, _) => Code::FailedPrecondition,
            (Exit::Unreachable, _) => Code::Unavailable,
            (Exit::Integrity, _) => Code::DataLoss,
            (Exit::Interrupted, _) => Code::Cancelled,
            (Exit::Failed, Kind::Conflict) => Code::Aborted,
            (Exit::Failed, Kind::Permanent) => Code::FailedPrecondition,
            (Exit::Failed, Kind::Transient) => Code::Unavailable,
            (Exit::Failed, Kind::UnknownOutcome) => Code::Unknown,
        };
        let again = (failure.kind == Kind::Transient).then_some(AGAIN);
        let message = failure.to_string();
        Self { code, kind: failure.kind, class: failure.class, message, again, field: None }
    }
}

impl From<weighbridge_snapshots::error::StoreError> for Refusal {
    fn from(error: weighbridge_snapshots::error::StoreError) -> Self {
        Failure::from(error).into()
    }
}

impl From<weighbridge_schemas::error::DocumentError> for Refusal {
    fn from(error: weighbridge_schemas::error::DocumentError) -> Self {
        Failure::from(error).into()
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        refusal.status()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error = json!({ "kind": self.kind.as_str(), "class": self.class, "message": self.message });
        let mut response = (self.http_status(), Json(json!({ "error": error }))).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.code == Code::Unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(again) = self.again {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(again.as_secs().max(1)));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_what_happened_of_which_class_and_when_to_try_again() {
        let failure = Failure {
            kind: Kind::Transient,
            class: "store_unreachable",
            message: "chunks: it does not answer".into(),
            exit: Exit::Unreachable,
        };
        let refusal = Refusal::from(failure);
        let status = refusal.status();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "chunks: it does not answer"));
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("store_unreachable", DOMAIN));
        assert_eq!(info.metadata["kind"], "transient");
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(AGAIN));
        let response = refusal.into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }

    #[test]
    fn who_is_not_known_is_told_nothing_else() {
        let response = Refusal::unknown_caller().into_response();
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer");
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
    }
}
