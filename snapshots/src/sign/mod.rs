//! Signatures by Ed25519: who vouches for a snapshot, and for where a channel points.
//!
//! | room | holds |
//! |---|---|
//! | [`keys`] | public keys, and the [`Trust`] in some of them |
//! | [`signer`] | private keys: read, made, and signed with |
//! | [`snapshot`] | the envelopes beside a snapshot's manifest |
//! | [`entry`](mod@entry) | the signatures inside a channel entry |
//! | `part` | the signatures inside the result of a job's part |
//! | [`audit`] | whether all that a store holds of a model is signed |
//!
//! A [`Root`](crate::root::Root) that has [`Signers`] signs what is written through it; one that has a [`Trust`]
//! refuses what no trusted key has signed, wherever it is read: there is no way around it that somebody could forget.
//! `docs/signing.md` has the formats, byte for byte, and what a signature proves.

pub mod audit;
pub mod entry;
pub mod keys;
pub(crate) mod part;
pub mod signer;
pub mod snapshot;

pub use entry::{check_entry, sign_entry};
pub use keys::{KeyError, KeyId, PublicKey, Trust};
pub use signer::{Generated, Signer, Signers, generate};
pub use snapshot::{Signed, check, put};
