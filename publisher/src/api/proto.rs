//! What the build makes of `schemas/proto/weighbridge/v1`: messages, servers, clients.

#![allow(
    clippy::pedantic,
    clippy::cast_possible_truncation,
    clippy::wildcard_imports,
    clippy::large_futures,
    clippy::large_enum_variant,
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    reason = "generated"
)]

tonic::include_proto!("weighbridge.v1");

/// The protobuf files themselves, encoded, with their comments.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/weighbridge.bin"));
