//! Signs requests as `object_store` does: those that have no method there, and those that the proxy changes.

use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HOST};
use hyper::{HeaderMap, Method};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};

use super::{ACCOUNT, ACCOUNT_KEY, KEY, Kind, REGION, SECRET};

/// Signs as the one who may do everything.
#[derive(Debug)]
pub(super) enum Signer {
    S3(AwsCredential),
    Azure(AzureCredential),
}

impl Signer {
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub(super) fn new(kind: Kind) -> Self {
        match kind {
            Kind::SeaweedFs | Kind::Moto => {
                Self::S3(AwsCredential { key_id: KEY.into(), secret_key: SECRET.into(), token: None })
            }
            Kind::Azurite => {
                Self::Azure(AzureCredential::AccessKey(AzureAccessKey::try_new(ACCOUNT_KEY).unwrap()))
            }
        }
    }

    /// Puts another signature in the place of the one that is there, if any; the hash of the body stays. Whether that
    /// could be done.
    pub(super) fn sign(&self, method: &Method, url: &str, headers: &mut HeaderMap) -> bool {
        let Ok(mut request) =
            hyper::Request::builder().method(method).uri(url).body(HttpRequestBody::empty())
        else {
            return false;
        };
        let host = headers.get(HOST).cloned();
        headers.remove(AUTHORIZATION);
        std::mem::swap(request.headers_mut(), headers);
        let signed = match self {
            Self::S3(credential) => sign_s3(credential, &mut request),
            Self::Azure(credential) => {
                request.headers_mut().entry(CONTENT_LENGTH).or_insert(0.into());
                AzureAuthorizer::new(credential, ACCOUNT).try_authorize(&mut request).is_ok()
            }
        };
        std::mem::swap(request.headers_mut(), headers);
        // The one takes it away.
        if let Some(host) = host {
            headers.insert(HOST, host);
        }
        signed
    }
}

fn sign_s3(credential: &AwsCredential, request: &mut HttpRequest) -> bool {
    let hash = request.headers().get("x-amz-content-sha256").cloned();
    let hash = hash.as_ref().and_then(|hash| hash.to_str().ok());
    let digest = hash.and_then(bytes_of_hexadecimal);
    let is_unsigned = hash.is_some() && digest.is_none();
    let authorizer = AwsAuthorizer::new(credential, "s3", REGION).with_sign_payload(!is_unsigned);
    authorizer.try_authorize(request, digest.as_deref()).is_ok()
}

fn bytes_of_hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digits = |at: usize| text.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    (0..text.len()).step_by(2).map(digits).collect()
}
