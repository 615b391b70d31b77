//! Serving hosts: the fetch API, followers, readers, and what happens to them when something breaks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

#[path = "../system/binary.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod binary;
mod example;
#[path = "../system/fixtures.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod fixtures;
mod grpcio;
mod numbered;
mod reading;
mod recipes;
mod reference;
mod swaps;
