//! The whole house, attacked: the built binary, run on real checkpoints, killed for real.
//!
//! The checkpoints lie in `tests/data/`. With the variable `WEIGHBRIDGE_FIXTURES` set to a folder of the same form,
//! the table-driven tests run over everything in there too.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod artifacts;
#[allow(dead_code, reason = "shared with other tests")]
mod binary;
mod bug_log;
mod commands;
mod crash;
mod damage;
mod digests;
mod encodings;
mod fetched;
mod fixtures;
mod gates;
mod golden;
mod hostile;
mod large;
mod odd;
mod operator;
mod outside;
mod queued;
mod races;
mod remote;
mod signing;
mod store;
mod synthetic;
mod tensors;
mod torch_save;
mod transforms;
mod upkeep;
mod volume;
mod watched;
