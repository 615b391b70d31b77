//! Serving hosts: the fetch API, followers, readers, and what happens to them when something breaks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod api;
#[path = "../system/binary.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod binary;
mod example;
#[path = "../system/fixtures.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod fixtures;
mod fleet;
mod follower;
mod grpcio;
mod hooks;
mod kills;
mod moving;
mod numbered;
mod operating;
mod outages;
#[path = "../store/places.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod places;
mod publishing;
#[path = "../system/queued.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod queued;
mod reading;
mod recipes;
mod reference;
mod sharing;
mod shown;
mod site;
mod swaps;
mod together;
#[path = "../system/volume.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod volume;
