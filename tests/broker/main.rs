//! What needs a real RabbitMQ.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod access;
#[path = "../chaos/accounts.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod accounts;
#[path = "../system/binary.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod binary;
mod contract;
mod fixture;
#[path = "../chaos/house.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod house;
mod long;
mod network;
mod others;
mod site;
mod stops;
mod timeouts;
mod tls;
