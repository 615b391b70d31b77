//! `keys`: key pairs to sign with. `sign`: a signature on a snapshot that is there.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;

use weighbridge_snapshots::manifest;
use weighbridge_snapshots::reference::{Located, Reference};
use weighbridge_snapshots::root::{Absent, Put};
use weighbridge_snapshots::sign::{self, KeyError, PublicKey, Signer};

use super::output::lines;
use super::signing::{SigningOptions, TrustOptions};
use super::{Context, default_channel};
use crate::error::{Failure, Result};

/// Make and show keys of Ed25519 for signatures.
#[derive(Debug, Subcommand)]
pub(super) enum Keys {
    /// Make a key pair: FILE, the private key, which only you may read, and FILE.pub, the public one.
    Generate {
        /// Where the private key goes. Nothing is overwritten.
        file: PathBuf,
    },
    /// Show the public key of a key file, private or public, and its id.
    Show {
        /// The key file.
        file: PathBuf,
    },
}

impl Keys {
    pub(super) fn run(self, context: &Context) -> Result<()> {
        match self {
            Self::Generate { file } => {
                let made = sign::generate(&file)?;
                tell(context, &made.key, Some((&file, &made.public_file)));
            }
            Self::Show { file } => tell(context, &public_key(file)?, None),
        }
        Ok(())
    }
}

/// The public key in a file, or the one that belongs to the private key in it.
fn public_key(file: PathBuf) -> std::result::Result<PublicKey, KeyError> {
    match PublicKey::read(&file) {
        Err(KeyError::NoKey { .. }) => match Signer::read(&file) {
            Ok(signer) => Ok(signer.public()),
            Err(KeyError::NoKey { path, .. }) => {
                Err(KeyError::NoKey { path, wanted: "key of Ed25519, private or public, in PEM" })
            }
            Err(error) => Err(error),
        },
        read => read,
    }
}

fn tell(context: &Context, key: &PublicKey, made: Option<(&PathBuf, &PathBuf)>) {
    let mut document = json!({ "id": key.id().to_string(), "key": key.to_string() });
    let mut known = vec![("id", key.id().to_string()), ("key", key.to_string())];
    if let Some((private, public)) = made {
        for (what, file) in [("private", private), ("public", public)] {
            document[what] = json!(file.display().to_string());
            known.push((what, file.display().to_string()));
        }
    }
    context.output.listing(&document, || lines(&known));
}

/// Sign a snapshot that is in the store: with a new key, or because signing began after it was published.
///
/// What is signed is its manifest's hash, where it comes from, and its ruling validation report; `verify` it first. A
/// channel's entry is signed when it is written: `promote`, `rollback`, `hold` and `release` with --signing-key write
/// a new one. Signing again with the same keys changes nothing.
///
/// With --require-signed-by, only what is signed as demanded already is signed anew, as when a key follows another;
/// the channel's entry too, where one is named. Here [signing] require of the configuration does not count.
#[derive(Debug, Args)]
pub(super) struct Sign {
    /// MODEL, MODEL@CHANNEL or MODEL@SNAPSHOT; without @, channel prod.
    #[arg(value_name = "MODEL[@CHANNEL|@SNAPSHOT]")]
    reference: String,
    #[command(flatten)]
    signing: SigningOptions,
    #[command(flatten)]
    trust: TrustOptions,
}

impl Sign {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let Some(signers) = self.signing.signers(context)? else {
            return Err(Failure::usage("sign with which key? Give --signing-key FILE"));
        };
        let root = self.trust.given_on(context.root(Absent::Refuse)?)?;
        let Located { model, snapshot: id, .. } =
            Reference::locate(&self.reference, &root, &default_channel()).await?;
        let found = manifest::get(&root, &model, &id).await?;
        let judged = manifest::judged(&root, &model, &id).await?;
        let signed = sign::put(&root, &found, &judged.report, judged.digest, &signers).await?;
        let ids: Vec<_> = signers.public().map(|key| key.id().to_string()).collect();
        let written = signed.put == Put::Written;
        let document = json!({
            "snapshot": id,
            "model": model,
            "signed_by": ids,
            "envelope": signed.number,
            "written": written,
            "gates": judged.report.outcome,
        });
        context.output.done(&document, || {
            let what = if written { "signed" } else { "was signed already" };
            format!("{model}@{id} {what} by {}\n", ids.join(" and "))
        });
        Ok(())
    }
}
