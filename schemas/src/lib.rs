//! What is said: Weighbridge's documents, ids, names, limits and encodings.
//!
//! Every type here is valid once it exists: parse, don't re-check. The crate does no IO, reads no clock and no
//! environment, and knows nothing of stores or queues.
//!
//! | room | holds |
//! |---|---|
//! | [`ids`] | content-addressed ids: BLAKE3 digests with a type each |
//! | [`names`] | names of models, runs, channels, policies; of tensors |
//! | [`limits`] | every bound on input, in one place |
//! | [`dtype`] | element types, by safetensors' names |
//! | [`encoding`] | how a row's bytes are laid out for serving, and how one row is decoded |
//! | [`checkpoint`] | the checkpoint manifest: what a trainer drops |
//! | [`policy`] | the policy: what to keep, rename and encode, and what must hold |
//! | [`snapshot`] | the snapshot manifest, whose hash is the snapshot's id |
//! | [`channel`] | channel entries, and the rule that says which publish may move a channel |
//! | [`job`] | a queued publish: its record, plan, part results, decision, outcome, events, and the steps on the
//! queue |
//! | [`dead`] | dead letters: what cannot be published, and why |
//! | [`report`] | the validation report: statistics and verdicts of the gates |
//! | [`host`] | what a serving host wants, holds and serves |
//! | [`retention`] | what is kept from gc, and what a run of gc is about to delete |
//! | [`signature`] | signature envelopes, and the statement about a snapshot that they hold |
//! | [`digests`] | what a reader of a part of a checkpoint knows of the digests that are declared of it |
//! | [`canonical`] | canonical bytes of a document |
//! | [`schema`] | JSON Schemas generated from the types |
//! | [`time`] | time stamps |
//! | [`error`] | what goes wrong when a document is parsed, and the kinds of failure |

pub mod canonical;
pub mod channel;
pub mod checkpoint;
pub mod dead;
pub mod digests;
pub mod dtype;
pub mod encoding;
pub mod error;
pub mod host;
pub mod ids;
pub mod job;
mod json;
pub mod limits;
pub mod names;
mod pattern;
pub mod policy;
pub mod report;
pub mod retention;
pub mod schema;
pub mod signature;
pub mod snapshot;
pub mod time;
