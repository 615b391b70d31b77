//! Queue-driven publishing under attack: workers killed at every request that they make, stores and queues that fail in
//! every way, many at once. Whatever happens, every manifest has one outcome, and the store alone tells it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod accounts;
mod bug_log;
mod crashes;
mod damage;
mod failures;
mod faults;
mod house;
mod many;
mod order;
mod plain;
mod ready;
mod retention;
