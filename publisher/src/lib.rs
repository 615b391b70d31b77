//! Who conducts: jobs, gates and the command line of the one binary, `weighbridge`.
//!
//! | room | holds |
//! |---|---|
//! | [`job`] | one publish of one checkpoint, a file a stage, in reading order |
//! | [`steps`] | a queued publish: what a worker does with a message, a file a step |
//! | [`worker`] | takes messages, and keeps them while they are worked on |
//! | [`metrics`] | figures of what is done |
//! | [`operations`] | what operators and trainers ask for: what the command line and the API have in common |
//! | [`host`] | what a host that follows a channel shows of itself |
//! | [`http`] | answers those who watch a process |
//! | [`systemd`] | tells systemd how a process is |
//! | [`gates`] | validation rules, a file each |
//! | [`api`] | what is asked over the network |
//! | [`cli`] | the command line, a file a command |
//! | [`policies`] | which policy a publish goes by |
//! | [`process`] | which processes of this machine are there |
//! | [`soak`] | from one channel to another, after a while |
//! | [`sources`] | from a path or URL of a checkpoint to where it lies |
//! | [`config`] | `weighbridge.toml` |
//! | [`clock`] | the one door to time and randomness |
//! | [`error`] | from every crate's errors to a kind, a class and an exit code |

pub mod api;
pub mod cli;
pub mod clock;
pub mod config;
pub mod error;
pub mod gates;
pub mod host;
pub mod http;
pub mod job;
pub mod metrics;
pub mod operations;
pub mod policies;
pub mod process;
pub mod soak;
pub mod sources;
pub mod steps;
pub mod systemd;
pub mod worker;
