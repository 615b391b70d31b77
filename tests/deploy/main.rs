//! What `deploy/` holds is checked as far as it can be without a container engine or a cluster: against the documents
//! that it has to agree with, against the schemas of those who read it, and against a real broker.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints what it measured, and looks at the environment"
)]

mod broker;
mod compose;
mod container;
mod documents;
mod kubernetes;
mod prometheus;
mod promql;
mod rights;
mod tools;
mod topology;
mod units;
