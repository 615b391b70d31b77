//! Stores in buckets: what needs a real server of objects.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod again;
#[path = "../system/binary.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod binary;
mod chance;
mod channels;
mod costs;
mod damage;
#[path = "../system/fixtures.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod fixtures;
mod golden;
mod kills;
mod parts;
mod places;
#[path = "../system/queued.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod queued;
mod races;
mod refusals;
mod room;
mod signed;
mod support;
#[path = "../system/tensors.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod tensors;
mod told;
#[path = "../system/volume.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod volume;
mod work;
