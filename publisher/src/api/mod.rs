//! The API: what serving hosts, trainers and operators ask over the network, by gRPC and by plain HTTP, on one port.
//!
//! | room | holds |
//! |---|---|
//! | [`proto`] | what the build makes of the protobuf |
//! | [`listen`], [`tls`] | connections, and what secures them |
//! | [`guard`], [`tokens`], `turns` | who may ask, and how much |
//! | `turns`, `shares`, `strangers` | how much one may ask, have at once, and before they are known |
//! | [`answers`] | from failures to statuses |
//! | [`audit`] | who did what |
//! | [`requests`] | what requests say, read and checked |
//! | [`shared`] | what all services work with |
//! | [`objects`] | the store's immutable objects, read for many at once |
//! | [`hub`], [`events`] | channels that are followed |
//! | [`snapshots`], [`rows`] | the service `Snapshots` |
//! | [`deeds`] | changes that callers ask for, carried out to their end |
//! | [`publishing`], [`operating`], [`fleet`] | the services `Publishing`, `Operating`, `Fleet` |
//! | `fuzzing` | what must hold of requests (for fuzz targets and tests) |
//! | [`web`] | the same over plain HTTP |

pub mod answers;
pub mod audit;
pub mod deeds;
pub mod events;
pub mod fleet;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod guard;
pub mod hub;
pub mod listen;
pub mod objects;
pub mod operating;
pub mod proto;
pub mod publishing;
pub mod requests;
pub mod rows;
pub mod shared;
mod shares;
pub mod snapshots;
mod strangers;
pub mod tls;
pub mod tokens;
mod turns;
pub mod web;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderMap, Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use tonic::service::Routes;

use answers::Refusal;
use deeds::Deeds;
use proto::fleet_server::FleetServer;
use proto::operating_server::OperatingServer;
use proto::publishing_server::PublishingServer;
use proto::snapshots_server::SnapshotsServer;
use shared::Shared;

/// The gRPC methods, for figures: `PACKAGE.SERVICE/METHOD`.
pub const METHODS: [&str; 28] = [
    "weighbridge.v1.Snapshots/Resolve",
    "weighbridge.v1.Snapshots/GetManifest",
    "weighbridge.v1.Snapshots/ListModels",
    "weighbridge.v1.Snapshots/ListSnapshots",
    "weighbridge.v1.Snapshots/ListChannels",
    "weighbridge.v1.Snapshots/WatchChannel",
    "weighbridge.v1.Snapshots/ReadChunks",
    "weighbridge.v1.Snapshots/LookUpRows",
    "weighbridge.v1.Publishing/Submit",
    "weighbridge.v1.Publishing/GetJob",
    "weighbridge.v1.Publishing/ListJobs",
    "weighbridge.v1.Publishing/WatchJob",
    "weighbridge.v1.Publishing/Republish",
    "weighbridge.v1.Publishing/Cancel",
    "weighbridge.v1.Operating/Promote",
    "weighbridge.v1.Operating/Rollback",
    "weighbridge.v1.Operating/Hold",
    "weighbridge.v1.Operating/Release",
    "weighbridge.v1.Operating/ListEntries",
    "weighbridge.v1.Operating/Pin",
    "weighbridge.v1.Operating/Unpin",
    "weighbridge.v1.Operating/ListPins",
    "weighbridge.v1.Operating/ListDeadLetters",
    "weighbridge.v1.Operating/GetDeadLetter",
    "weighbridge.v1.Operating/RequeueDeadLetter",
    "weighbridge.v1.Operating/DiscardDeadLetter",
    "weighbridge.v1.Fleet/Report",
    "weighbridge.v1.Fleet/ListHosts",
];
/// Largest message of a request that may be large, in bytes: a checkpoint manifest, ten thousand chunks, a hundred
/// thousand rows.
const MESSAGE_BYTES: usize = 5 << 18;
/// Largest message of any other request, in bytes: names, and a policy or a host's status.
const SMALL_MESSAGE_BYTES: usize = 128 << 10;
/// Largest message of what is asked about the server itself, in bytes: anybody may send it.
const OPEN_MESSAGE_BYTES: usize = 4 << 10;
/// Largest body of a plain HTTP request, in bytes.
const BODY_BYTES: usize = 64 << 10;

/// Everything that is answered.
///
/// # Errors
/// Where the description of the protobuf, which reflection answers from, cannot be read.
pub fn router(shared: &Arc<Shared>, deeds: &Arc<Deeds>) -> crate::error::Result<Router> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTOR_SET)
        .build_v1()
        .map_err(|error| crate::error::Failure::internal("the API's description", error))?;
    let (_, health) = tonic_health::server::health_reporter();
    let hosts = Arc::default();
    let snapshots = SnapshotsServer::new(snapshots::Service(Arc::clone(shared)));
    let publishing = PublishingServer::new(publishing::Service::new(Arc::clone(shared), Arc::clone(deeds)));
    let operating = OperatingServer::new(operating::Service::new(Arc::clone(shared), Arc::clone(deeds)));
    let fleet = FleetServer::new(fleet::Service(Arc::clone(&hosts)));
    let rpc = Routes::new(snapshots.max_decoding_message_size(MESSAGE_BYTES))
        .add_service(publishing.max_decoding_message_size(MESSAGE_BYTES))
        .add_service(operating.max_decoding_message_size(SMALL_MESSAGE_BYTES))
        .add_service(fleet.max_decoding_message_size(SMALL_MESSAGE_BYTES))
        .add_service(health.max_decoding_message_size(OPEN_MESSAGE_BYTES))
        .add_service(reflection.max_decoding_message_size(OPEN_MESSAGE_BYTES));
    let web = web::routes(Arc::clone(shared)).merge(fleet::routes(hosts));
    Ok(rpc
        .into_axum_router()
        .merge(web.layer(DefaultBodyLimit::max(BODY_BYTES)))
        .fallback(nothing)
        .layer(from_fn_with_state(Arc::clone(&shared.gate), guard::guard)))
}

/// Whatever is asked of a path behind which there is nothing.
async fn nothing(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    if guard::is_rpc(&method, &uri, &headers) {
        return tonic::Status::unimplemented("there is no such method").into_http::<axum::body::Body>();
    }
    Refusal::nothing("there is nothing at this path").into_response()
}
