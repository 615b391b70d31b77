//! Who signs and who is trusted: options, variables and configuration, and the store's root with them.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};

use weighbridge_snapshots::root::Root;
use weighbridge_snapshots::sign::{KeyError, PublicKey, Signer, Signers, Trust};

use super::Context;
use crate::error::{Failure, Result};

/// Who signs what a command writes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Signatures")]
pub(super) struct SigningOptions {
    /// Sign what is written with this private key of Ed25519 (PEM, as `weighbridge keys generate` or openssl make it).
    /// Several keys all sign: give it more than once, or put `:` between them [default: [signing] keys].
    #[arg(long, env = "WEIGHBRIDGE_SIGNING_KEYS", value_delimiter = ':', value_name = "FILE")]
    signing_key: Vec<OsString>,
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

/// Who signs what a publisher writes, and whose signature it demands.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct PublisherOptions {
    #[command(flatten)]
    signing: SigningOptions,
    #[command(flatten)]
    trust: TrustOptions,
}

impl PublisherOptions {
    /// `root`, through which is signed and demanded. Whoever would refuse their own work is told before it begins.
    pub(super) fn on(&self, context: &Context, root: Root) -> Result<Root> {
        let root = self.trust.on(context, self.signing.on(context, root)?)?;
        let Some(trust) = root.trust() else { return Ok(root) };
        if root.signers().is_some_and(|own| own.public().any(|key| trust.holds(&key))) {
            return Ok(root);
        }
        Err(Failure::usage(format!(
            "a signature by {trust} is demanded, and none of the keys that sign here is among them: what this writes \
             would be refused; give --signing-key (or [signing] keys) one of them"
        )))
    }
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
        let given = named("--signing-key (or WEIGHBRIDGE_SIGNING_KEYS)", &self.signing_key)?;
        let configured = context.config.signing.keys.iter().flatten();
        let files: Vec<_> = if given.is_empty() {
            configured.map(|file| file.as_path()).collect()
        } else {
            given.iter().map(Path::new).collect()
        };
        if files.is_empty() {
            return Ok(None);
        }
        let signers = files.into_iter().map(Signer::read).collect::<std::result::Result<_, _>>()?;
        Ok(Some(Signers::new(signers)?))
    }
}

impl TrustOptions {
    /// `root`, which refuses what is not signed where somebody's signature is demanded.
    pub(super) fn on(&self, context: &Context, root: Root) -> Result<Root> {
        Ok(trusting(root, self.trust(context)?))
    }

    /// Whose signature is demanded; `None` where nobody's is.
    pub(super) fn trust(&self, context: &Context) -> Result<Option<Trust>> {
        let given = self.given()?;
        let configured = context.config.signing.require.iter().flatten();
        trust(if given.is_empty() { configured.collect() } else { given.iter().collect() })
    }

    /// As [`Self::on`], but the configuration is not looked at.
    pub(super) fn given_on(&self, root: Root) -> Result<Root> {
        Ok(trusting(root, trust(self.given()?.iter().collect())?))
    }

    fn given(&self) -> Result<&[String]> {
        named("--require-signed-by (or WEIGHBRIDGE_REQUIRE_SIGNED_BY)", &self.require_signed_by)
    }
}

fn trusting(root: Root, trust: Option<Trust>) -> Root {
    match trust {
        Some(trust) => root.trusting(trust),
        None => root,
    }
}

fn trust(named: Vec<&String>) -> Result<Option<Trust>> {
    if named.is_empty() {
        return Ok(None);
    }
    let keys = named.into_iter().map(|text| PublicKey::named(text));
    let keys = keys.collect::<std::result::Result<Vec<_>, KeyError>>()?;
    Ok(Some(Trust::new(keys)?))
}

/// The keys of an option or its variable. A variable that is set to nothing counts as not set; a nameless key among
/// others does not.
fn named<'k, T: AsRef<OsStr>>(option: &str, keys: &'k [T]) -> Result<&'k [T]> {
    let empty = keys.iter().filter(|key| key.as_ref().is_empty()).count();
    match (empty, keys.len()) {
        (0, _) => Ok(keys),
        (1, 1) => Ok(&[]),
        _ => Err(Failure::usage(format!("{option}: a key's name is empty"))),
    }
}

/// What is wrong where one of these options is given on the command line and is empty: somebody meant a key, and
/// would get a command that signs or demands nothing.
pub(super) fn emptied(matches: &ArgMatches) -> Option<Failure> {
    let is_empty = |option: &str| {
        // Most commands do not have it.
        let Ok(Some(mut values)) = matches.try_get_raw(option) else { return false };
        matches.value_source(option) == Some(ValueSource::CommandLine) && values.any(OsStr::is_empty)
    };
    let options = [("signing_key", "--signing-key"), ("require_signed_by", "--require-signed-by")];
    if let Some((_, name)) = options.into_iter().find(|(option, _)| is_empty(option)) {
        let why =
            "it is given, and names no key; is a variable in it not set? Name one, or leave the option out";
        return Some(Failure::usage(format!("{name}: {why}")));
    }
    matches.subcommand().and_then(|(_, matches)| emptied(matches))
}
