//! Which policy a publish goes by: the one that its manifest carries or names, the model's own in the store, or the
//! default. What is given on the command line comes before all of them.

use weighbridge_schemas::checkpoint::PolicyChoice;
use weighbridge_schemas::names::{ModelName, PolicyName};
use weighbridge_schemas::policy::{DEFAULT_POLICY, Policy};
use weighbridge_snapshots::policies;
use weighbridge_snapshots::root::Root;

use crate::error::{Failure, Result};

/// Where the policy came from, if nobody gave one.
pub const DEFAULT: &str = "default";
/// The name of the policy in the store that a model has where no other is named.
const MODELS_OWN: &str = "default";

/// A policy, and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The policy, in TOML.
    pub text: String,
    /// Where it came from, for people: `manifest`, `store NAME version N`, `default`.
    pub from: String,
}

impl Resolved {
    /// The policy itself.
    ///
    /// # Errors
    /// Where it does not parse.
    pub fn policy(&self) -> Result<Policy> {
        read(&self.text, &self.from)
    }
}

/// The policy in `text`, which came `from` there.
///
/// # Errors
/// Where it does not parse.
pub fn read(text: &str, from: &str) -> Result<Policy> {
    if from == DEFAULT { Ok(Policy::default()) } else { Ok(Policy::parse(text)?) }
}

/// The policy that a manifest asks for: its own, one by name, the one named `default` of its model, or the default. A
/// failure within is the manifest's own. Without a store there are no policies with names.
///
/// # Errors
/// As the store fails.
pub async fn resolve(
    root: Option<&Root>,
    model: &ModelName,
    choice: Option<&PolicyChoice>,
) -> Result<std::result::Result<Resolved, Failure>> {
    Ok(match choice {
        Some(PolicyChoice::Toml(text)) => Ok(Resolved { text: text.clone(), from: "manifest".to_owned() }),
        Some(PolicyChoice::Name(name)) => {
            named(root, model, name).await?.ok_or_else(|| no_such_policy(model, name))
        }
        None => {
            let own = named(root, model, &MODELS_OWN.parse()?).await?;
            Ok(own.unwrap_or_else(|| Resolved { text: DEFAULT_POLICY.to_owned(), from: DEFAULT.to_owned() }))
        }
    })
}

async fn named(root: Option<&Root>, model: &ModelName, name: &PolicyName) -> Result<Option<Resolved>> {
    let Some(root) = root else { return Ok(None) };
    let version = policies::latest(root, model, name).await?;
    Ok(version.map(|version| Resolved {
        text: version.text,
        from: format!("store {name} version {}", version.number),
    }))
}

/// The failure of whoever names a policy that is not there.
#[must_use]
pub fn no_such_policy(model: &ModelName, name: &PolicyName) -> Failure {
    Failure::usage(format!(
        "model {model} has no policy named {name}; `weighbridge policy put {model} {name} FILE` makes one, \
         `weighbridge policy list {model}` lists them"
    ))
}
