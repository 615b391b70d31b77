//! What is kept: content-addressed chunks, immutable snapshots and movable channels in an object store; and how a
//! serving host fetches, verifies and swaps them.
//!
//! | room | holds |
//! |---|---|
//! | [`layout`] | the one file that spells object keys |
//! | [`root`] | from a URL to a store |
//! | [`bucket`] | a store in a bucket: S3, Google's, Azure's |
//! | [`api`] | an API that answers in a store's place |
//! | [`probe`] | a store tried out: whether it does what is relied on |
//! | [`pace`] | how fast bytes may come in |
//! | [`unfinished`] | what writes that came to no end left behind |
//! | `local`, `disk` | how objects get into a folder, and onto the disk |
//! | `left` | folders that gc has emptied |
//! | [`chunk`] | where tables are cut; chunks written and read, always verified |
//! | [`files`] | how tensors are laid out in a snapshot's safetensors files |
//! | [`manifest`] | snapshot manifests and validation reports in the store |
//! | [`channel`] | the channel log |
//! | [`jobs`] | the documents of queued publishes |
//! | [`dead`] | dead letters |
//! | [`policies`] | named policies |
//! | [`catalog`] | what a store holds: models, snapshots, channels |
//! | [`reference`](mod@reference) | `MODEL[@CHANNEL or @SNAPSHOT]`, and what it points at |
//! | [`retain`] | what is kept, and the only place that deletes |
//! | [`fetch`] | plan, download, materialise, swap |
//! | [`watch`] | a channel's newest entry, told soon after it was written |
//! | [`follow`] | a host that serves what a channel points at, and goes with it |
//! | [`reader`] | a fetched version, mapped: rows looked up, and the next version taken when it is there |
//! | [`verify`] | the whole store, or one snapshot, read and checked |
//! | [`sign`] | keys and signatures: of snapshots, and of channel entries |
//! | `outside` | the door to the environment and the clock |
//! | [`error`] | what goes wrong, by stable class names |
//!
//! Publishing never overwrites and never deletes. Nothing rests on rename or on read-modify-write in the store: only
//! put, put-if-absent, get, list. A reader verifies every chunk and every manifest before a byte is used.

pub mod api;
pub mod bucket;
pub mod catalog;
pub mod channel;
pub mod chunk;
pub mod dead;
mod disk;
pub mod error;
pub mod fetch;
pub mod files;
pub mod follow;
pub mod jobs;
pub mod layout;
mod left;
mod local;
pub mod manifest;
mod outside;
pub mod pace;
pub mod policies;
pub mod probe;
pub mod reader;
pub mod reference;
pub mod retain;
pub mod root;
pub mod sign;
pub mod unfinished;
pub mod verify;
pub mod watch;
