//! Uploads in parts that were begun and not ended (S3): what a killed process leaves is seen by no reader, and costs.
//!
//! `object_store` ends uploads, but does not list them: the listing is asked for by a URL that it signs.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use object_store::aws::AmazonS3;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::signer::{SignedUrlOptions, Signer};
use serde::Deserialize;

use weighbridge_schemas::time::Timestamp;

use crate::unfinished::Unfinished;

/// Uploads that are listed at a time.
const PAGE: &str = "1000";
/// Largest listing of so many: keys have up to 1 KiB, ids less, and each character may be written as several.
const PAGE_BYTES: usize = 16 << 20;
/// How long a signed URL holds.
const HOLDS: Duration = Duration::from_secs(600);

/// The uploads of a bucket, below a prefix.
#[derive(Clone)]
pub(super) struct Uploads {
    store: Arc<AmazonS3>,
    http: HttpClient,
    prefix: Key,
}

/// A part of a listing.
pub(super) struct Page {
    pub(super) uploads: Vec<Unfinished>,
    /// Behind what the next part begins; `None` at the end.
    pub(super) next: Option<Marker>,
}

/// A place in a listing: a key, and the upload of it. It is given back as it came: some stores tell one of them alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marker {
    key: String,
    upload: String,
}

/// The listing as it comes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listing {
    #[serde(default)]
    is_truncated: bool,
    next_key_marker: Option<String>,
    next_upload_id_marker: Option<String>,
    #[serde(default, rename = "Upload")]
    uploads: Vec<Upload>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Upload {
    key: String,
    upload_id: String,
    initiated: String,
}

impl Uploads {
    pub(super) fn new(store: Arc<AmazonS3>, http: HttpClient) -> Self {
        Self { store, http, prefix: Key::default() }
    }

    /// The same, below `prefix` alone.
    pub(super) fn below(mut self, prefix: &Key) -> Self {
        self.prefix = prefix.clone();
        self
    }

    /// The uploads behind `after`, as many as come at once.
    pub(super) async fn page(&self, after: Option<&Marker>) -> object_store::Result<Page> {
        let mut query = vec![("uploads", String::new()), ("max-uploads", PAGE.to_owned())];
        if !self.prefix.as_ref().is_empty() {
            query.push(("prefix", format!("{}/", self.prefix)));
        }
        if let Some(marker) = after {
            let places = [("key-marker", &marker.key), ("upload-id-marker", &marker.upload)];
            let told = places.into_iter().filter(|(_, place)| !place.is_empty());
            query.extend(told.map(|(name, place)| (name, place.clone())));
        }
        let options = SignedUrlOptions::new().with_query(query);
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        let url =
            self.store.signed_url_opts(request.method().clone(), &Key::default(), HOLDS, &options).await?;
        *request.uri_mut() =
            url.as_str().parse().map_err(|error| failed(format!("a URL that is none: {error}")))?;
        let response = self.http.execute(request).await.map_err(generic)?;
        let status = response.status();
        let mut body = response.into_body().bytes_stream();
        let mut bytes = Vec::new();
        while let Some(run) = body.next().await {
            let run = run.map_err(generic)?;
            if bytes.len() + run.len() > PAGE_BYTES {
                return Err(failed(format!("a listing of more than {PAGE_BYTES} bytes")));
            }
            bytes.extend_from_slice(&run);
        }
        if !status.is_success() {
            return Err(failed(format!("the store answered {} to a listing of uploads", status.as_u16())));
        }
        self.read(&bytes).map_err(failed)
    }

    fn read(&self, xml: &[u8]) -> Result<Page, String> {
        let listing: Listing = quick_xml::de::from_reader(xml)
            .map_err(|error| format!("a listing of uploads that is none: {error}"))?;
        let next = Marker {
            key: listing.next_key_marker.unwrap_or_default(),
            upload: listing.next_upload_id_marker.unwrap_or_default(),
        };
        let next = Some(next).filter(|next| listing.is_truncated && *next != Marker::default());
        let uploads = listing.uploads.into_iter().filter_map(|upload| self.one(upload)).collect();
        Ok(Page { uploads, next })
    }

    /// One of ours; what no key of ours can be is passed over.
    fn one(&self, upload: Upload) -> Option<Unfinished> {
        let key = Key::parse(&upload.key).ok()?;
        let key: Key = key.prefix_match(&self.prefix)?.collect();
        let begun: Timestamp = upload.initiated.parse().ok()?;
        (!key.as_ref().is_empty()).then_some(Unfinished { key, id: upload.upload_id, bytes: None, begun })
    }

    /// Ends an upload for good; one that has ended already is right too.
    pub(super) async fn abort(&self, one: &Unfinished) -> object_store::Result<()> {
        let key = self.prefix.parts().chain(one.key.parts()).collect();
        match self.store.abort_multipart(&key, &one.id).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            ended => ended,
        }
    }
}

fn failed(why: String) -> object_store::Error {
    generic(std::io::Error::other(why))
}

fn generic(error: impl std::error::Error + Send + Sync + 'static) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{Options, client};

    fn uploads(url: &str) -> Uploads {
        let (client, prefix) = client(url, &Options::default()).unwrap();
        client.below(&prefix).uploads().unwrap().clone()
    }

    #[test]
    fn a_listing_is_read_and_what_is_not_ours_is_passed_over() {
        let xml = "<?xml version=\"1.0\"?><ListMultipartUploadsResult xmlns=\"http://s3.amazonaws.com/\">\
                   <Bucket>b</Bucket><IsTruncated>true</IsTruncated><NextKeyMarker>p/a&amp;b</NextKeyMarker>\
                   <NextUploadIdMarker>id2</NextUploadIdMarker><Prefix>p/</Prefix>\
                   <Upload><Key>p/models/m</Key><UploadId>id1</UploadId><Owner><ID>o</ID></Owner>\
                   <Initiated>2026-11-30T08:00:00.000Z</Initiated></Upload>\
                   <Upload><Key>other/x</Key><UploadId>id3</UploadId>\
                   <Initiated>2026-11-30T08:00:00Z</Initiated></Upload>\
                   <Upload><Key>p/y</Key><UploadId>id4</UploadId><Initiated>yesterday</Initiated></Upload>\
                   <Upload><Key>p//z</Key><UploadId>id5</UploadId><Initiated>2026-11-30T08:00:00Z</Initiated></Upload>\
                   </ListMultipartUploadsResult>";
        let page = uploads("s3://bucket/p").read(xml.as_bytes()).unwrap();
        let [one] = page.uploads.as_slice() else { panic!("{:?}", page.uploads) };
        assert_eq!((one.key.as_ref(), one.id.as_str(), one.bytes), ("models/m", "id1", None));
        assert_eq!(one.begun.to_string(), "2026-11-30T08:00:00Z");
        assert_eq!(page.next, Some(Marker { key: "p/a&b".into(), upload: "id2".into() }));
        let half = "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>\
                    <NextUploadIdMarker>id2</NextUploadIdMarker></ListMultipartUploadsResult>";
        let next = uploads("s3://bucket").read(half.as_bytes()).unwrap().next;
        assert_eq!(next, Some(Marker { key: String::new(), upload: "id2".into() }));
        let none =
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>";
        let page = uploads("s3://bucket").read(none.as_bytes()).unwrap();
        assert!(page.uploads.is_empty() && page.next.is_none());
        assert!(uploads("s3://bucket").read(b"<html>").is_err());
    }
}
