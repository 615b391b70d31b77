//! Who signs and who is trusted: options, variables and configuration, and the store's root with them.

use std::path::PathBuf;

use clap::Args;

use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::sign::{KeyError, PublicKey, Signer, Signers, Trust};

use super::Context;
use crate::error::Result;

/// Who signs what a command writes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Signatures")]
pub(super) struct SigningOptions {
    /// Sign what is written with this private key of Ed25519 (PEM, as `weighbridge keys generate` or openssl make it).
    /// Several keys all sign: give it more than once, or put `:` between them [default: [signing] keys].
    #[arg(long, env = "WEIGHBRIDGE_SIGNING_KEYS", value_delimiter = ':', value_name = "FILE")]
    signing_key: Vec<PathBuf>,
}

/// Whose signature a command demands.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Signatures")]
pub(super) struct TrustOptions {
    /// Refuse what is not signed by this public key: a file, or the text ed25519:BASE64. Of several, one is enough:
    /// give it more than once, or put `,` between them [default: [signing] require].
    #[arg(long, env = "WEIGHBRIDGE_REQUIRE_SIGNED_BY", value_delimiter = ',', value_name = "KEY")]
    require_signed_by: Vec<String>,
}

impl SigningOptions {
    /// `root`, through which what is written is signed where somebody is to sign.
    pub(super) fn on(&self, context: &Context, root: Root) -> Result<Root> {
        Ok(match self.signers(context)? {
            Some(signers) => root.signing(signers),
            None => root,
        })
    }

    /// Who signs; `None` where nobody does.
    pub(super) fn signers(&self, context: &Context) -> Result<Option<Signers>> {
        let given: Vec<_> = self.signing_key.iter().filter(|file| !file.as_os_str().is_empty()).collect();
        let configured = context.config.signing.keys.iter().flatten();
        let files: Vec<_> = if given.is_empty() { configured.collect() } else { given };
        if files.is_empty() {
            return Ok(None);
        }
        let signers =
            files.into_iter().map(|file| Signer::read(file)).collect::<std::result::Result<_, _>>()?;
        Ok(Some(Signers::new(signers)?))
    }
}

impl TrustOptions {
    /// `root`, which refuses what is not signed where somebody's signature is demanded.
    pub(super) fn on(&self, context: &Context, root: Root) -> Result<Root> {
        let given: Vec<_> = self.require_signed_by.iter().filter(|key| !key.is_empty()).collect();
        let configured = context.config.signing.require.iter().flatten();
        let named: Vec<_> = if given.is_empty() { configured.collect() } else { given };
        if named.is_empty() {
            return Ok(root);
        }
        let keys = named.into_iter().map(|text| PublicKey::named(text));
        let keys = keys.collect::<std::result::Result<Vec<_>, KeyError>>()?;
        Ok(root.trusting(Trust::new(keys)?))
    }
}
