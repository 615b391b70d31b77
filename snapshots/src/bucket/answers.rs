//! What a store's answers say beside their bodies. Every answer passes here: its date tells the store's clock, and one
//! that is a failure becomes an [`Answer`], which keeps the status, the code and what the store asks for.
//!
//! Absence (404), "not modified" (304) and a failed precondition (412) go on as they came: they are answers to
//! questions. That 409 is none is the reason for all this: a store that answers so has stored nothing, and the request
//! is sent again.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use serde::Deserialize;

use weighbridge_schemas::time::Timestamp;

use crate::api::Line;
use crate::outside;

/// Longest text of a failure that is looked at, in bytes.
const TEXT_BYTES: usize = 64 << 10;
/// Longest message of a store's that is shown, in characters.
const SHOWN: usize = 300;
/// Longest page of a listing, in bytes: a thousand keys.
const LISTING_BYTES: usize = 16 << 20;
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// No answer has told the time yet.
const UNKNOWN: i64 = i64::MIN;
/// The longest pause that a store may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// What the answers so far have told.
#[derive(Debug)]
pub(crate) struct Answers {
    /// How far the store's clock is ahead of this machine's, in seconds.
    ahead: AtomicI64,
}

impl Answers {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { ahead: AtomicI64::new(UNKNOWN) })
    }

    /// How far the store's clock is ahead of this machine's, in seconds; `None` before the first answer.
    pub(super) fn ahead(&self) -> Option<i64> {
        Some(self.ahead.load(Ordering::Relaxed)).filter(|&ahead| ahead != UNKNOWN)
    }

    fn note(&self, response: &HttpResponse) {
        let date = response.headers().get("date").and_then(|date| date.to_str().ok());
        let Some(theirs) = date.and_then(Timestamp::of_http_date) else { return };
        let theirs = i64::try_from(theirs.nanoseconds() / 1_000_000_000).unwrap_or(0);
        let ours = i64::try_from(outside::nanoseconds() / 1_000_000_000).unwrap_or(0);
        self.ahead.store(theirs.saturating_sub(ours), Ordering::Relaxed);
    }
}

/// An answer that is a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    /// The status.
    pub(super) status: u16,
    /// The store's own word for it, where it says one.
    pub(super) code: String,
    /// What it says to people.
    pub(super) message: String,
    /// How long it asks to wait.
    pub(super) wait: Option<Duration>,
    /// The region in which the bucket lies, where the store tells.
    pub(super) region: Option<String>,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store answered {}", self.status)?;
        match (self.code.as_str(), self.message.as_str()) {
            ("", "") => Ok(()),
            (code, "") => write!(f, " {code}"),
            ("", message) => write!(f, ": {message}"),
            (code, message) => write!(f, " {code}: {message}"),
        }
    }
}

impl std::error::Error for Answer {}

/// Connects, and looks at every answer. Redirects are not followed: they would take credentials along.
#[derive(Debug)]
pub(super) struct Watching {
    pub(super) answers: Arc<Answers>,
    /// The API that is asked, where it is one: it has a client of its own.
    pub(super) api: Option<Arc<Line>>,
}

impl HttpConnector for Watching {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        if let Some(line) = &self.api {
            let (inner, answers) = (HttpClient::new(line.http.clone()), Arc::clone(&self.answers));
            return Ok(HttpClient::new(Watched { inner, answers, api: Some(Arc::clone(line)) }));
        }
        let allow_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .https_only(allow_http.is_none_or(|allow| allow != "true"))
            .http1_only()
            .user_agent(concat!("weighbridge/", env!("CARGO_PKG_VERSION")))
            .build();
        let client = client
            .map_err(|error| object_store::Error::Generic { store: "HTTP", source: Box::new(error) })?;
        let (inner, answers) = (HttpClient::new(client), Arc::clone(&self.answers));
        Ok(HttpClient::new(Watched { inner, answers, api: None }))
    }
}

#[derive(Debug)]
struct Watched {
    inner: HttpClient,
    answers: Arc<Answers>,
    api: Option<Arc<Line>>,
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if let Some(header) = self.api.as_ref().and_then(|line| line.authorization()) {
            request.headers_mut().insert(reqwest::header::AUTHORIZATION, header);
        }
        let query = request.uri().query().unwrap_or_default();
        // S3 and Google's; Azure's.
        let listing = [("list-type=2", "<ListBucketResult"), ("comp=list", "<EnumerationResults")];
        let root = listing.iter().find(|(asked, _)| query.contains(asked)).map(|(_, root)| *root);
        let response = self.inner.execute(request).await?;
        self.answers.note(&response);
        let status = response.status();
        if let Some(root) = root.filter(|_| status.is_success()) {
            return listed(response, root).await;
        }
        if status.is_success() || matches!(status.as_u16(), 304 | 404 | 412) {
            return Ok(response);
        }
        Err(HttpError::new(HttpErrorKind::Unknown, answer(response).await))
    }
}

/// A listing that is one. Whatever else comes with a good status (a gateway's page, an error) would count as an empty
/// listing, and what is not listed is not there: `gc` would delete what it protects.
async fn listed(response: HttpResponse, root: &str) -> Result<HttpResponse, HttpError> {
    let (parts, body) = response.into_parts();
    let mut bytes = Vec::new();
    let mut body = body.bytes_stream();
    while let Some(run) = body.next().await {
        bytes.extend_from_slice(&run?);
        if bytes.len() > LISTING_BYTES {
            return Err(broken("its listing is larger than a listing can be"));
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let cut = text.contains("<IsTruncated>true</IsTruncated>") && !text.contains("<NextContinuationToken>");
    if !text.contains(root) || cut {
        return Err(broken("what it sent is no listing, or not the whole of one"));
    }
    Ok(HttpResponse::from_parts(parts, bytes.into()))
}

fn broken(why: &str) -> HttpError {
    HttpError::new(HttpErrorKind::Decode, std::io::Error::new(std::io::ErrorKind::InvalidData, why))
}

async fn answer(response: HttpResponse) -> Answer {
    let header = |name: &str| {
        let value = response.headers().get(name)?.to_str().ok()?;
        Some(value.to_owned())
    };
    let seconds = header("retry-after").and_then(|wait| wait.trim().parse().ok());
    let wait = seconds.map(|seconds| Duration::from_secs(seconds).min(LONGEST_WAIT));
    let region = header("x-amz-bucket-region");
    // Azure tells its code in a header too, also where there is no body.
    let coded = header("x-ms-error-code").unwrap_or_default();
    let status = response.status().as_u16();
    let text = text(response).await;
    let (code, message) = match serde_json::from_str::<ErrorAnswer>(&text) {
        Ok(ErrorAnswer { error }) => (error.class, error.message),
        Err(_) => {
            let code = element(&text, "Code").map_or(coded, ToOwned::to_owned);
            (code, element(&text, "Message").unwrap_or_default().to_owned())
        }
    };
    Answer { status, code: line(&code), message: line(&message), wait, region }
}

/// What an API says of a failure.
#[derive(Deserialize)]
struct ErrorAnswer {
    error: ErrorText,
}

#[derive(Deserialize)]
struct ErrorText {
    class: String,
    message: String,
}

/// The front of an answer's body; what cannot be read of it says nothing.
async fn text(response: HttpResponse) -> String {
    let mut text = Vec::new();
    let mut body = response.into_body().bytes_stream();
    while let Some(Ok(run)) = body.next().await {
        let room = TEXT_BYTES.saturating_sub(text.len());
        text.extend_from_slice(run.get(..room.min(run.len())).unwrap_or_default());
        if text.len() >= TEXT_BYTES {
            break;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The text of the first element `name`.
fn element<'t>(xml: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once('<').map(|(text, _)| text)
}

/// One line of bounded length.
pub(super) fn line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line: String = line.chars().filter(|character| !character.is_control()).collect();
    match line.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}...", line.get(..cut).unwrap_or_default()),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stores_own_words_are_found() {
        let text =
            "<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce\n your rate</Message></Error>";
        assert_eq!(element(text, "Code"), Some("SlowDown"));
        assert_eq!(line(element(text, "Message").unwrap()), "Reduce your rate");
        assert_eq!(element(text, "Resource"), None);
        assert_eq!(line(&"x".repeat(1000)).len(), SHOWN + 3);
    }
}
