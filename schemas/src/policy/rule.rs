//! One rule: a pattern on tensor names, and what becomes of the tensors that it matches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DOCUMENT;
use super::encode::{CastDtype, EncodeFile, Wanted};
use crate::error::DocumentError;
use crate::limits;
use crate::names::TensorName;
use crate::pattern::Pattern;

/// One rule as a person writes it: a pattern, and either `drop`, or `encode` (or `dtype`) and `rename`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleFile {
    /// A pattern on tensor names: `*` within a dotted part, `**` anything.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Leave the tensor out.
    #[serde(default)]
    pub drop: bool,
    /// How to encode it; absent: kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode: Option<EncodeFile>,
    /// The element type to cast it to: another word for the encoding of that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<CastDtype>,
    /// Its name in the snapshot; `$1` is what the first wildcard matched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rename: Option<String>,
}

#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub(super) pattern: Pattern,
    pub(super) written: CanonicalRule,
}

/// A rule in the one form that its digest covers: aliases resolved, defaults filled in.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CanonicalRule {
    #[serde(rename = "match")]
    pub(super) pattern: String,
    pub(super) drop: bool,
    #[serde(flatten)]
    pub(super) wanted: Wanted,
    pub(super) rename: Option<String>,
}

/// What a policy says about one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Treatment {
    /// Leave it out.
    Drop,
    /// Put it into the snapshot.
    Publish {
        /// Under this name.
        name: TensorName,
        /// Stored like this.
        wanted: Wanted,
    },
}

impl Rule {
    pub(super) fn check(rule: RuleFile) -> Result<Self, DocumentError> {
        let RuleFile { pattern: text, drop, encode, dtype, rename } = rule;
        let pattern = Pattern::parse(&text)?;
        if drop && (encode.is_some() || dtype.is_some() || rename.is_some()) {
            let why = "drop stands alone, without encode, dtype and rename";
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
        let wanted = Wanted::of(encode, dtype)?;
        if let Some(template) = &rename {
            check_template(template, pattern.wildcards())?;
        }
        Ok(Self { pattern, written: CanonicalRule { pattern: text, drop, wanted, rename } })
    }
}

/// Every `$` in a replacement is followed by the number of a wildcard of the pattern.
fn check_template(template: &str, wildcards: usize) -> Result<(), DocumentError> {
    if template.len() > limits::PATTERN_BYTES {
        let why = format!("rename has at most {} bytes", limits::PATTERN_BYTES);
        return Err(DocumentError::malformed(DOCUMENT, why));
    }
    for behind in template.split('$').skip(1) {
        let digit = behind.chars().next().and_then(|c| c.to_digit(10)).unwrap_or(0);
        if digit == 0 || digit as usize > wildcards {
            let why = match wildcards {
                0 => "rename: '$' stands for a wildcard, and match has none".to_owned(),
                _ => format!("rename: '$' is followed by a wildcard's number; match has {wildcards}"),
            };
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
    }
    Ok(())
}

pub(super) fn substitute(template: &str, captures: &[&str]) -> String {
    let mut parts = template.split('$');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digit = part.chars().next().and_then(|c| c.to_digit(10)).unwrap_or(0) as usize;
        name.push_str(digit.checked_sub(1).and_then(|at| captures.get(at)).copied().unwrap_or_default());
        name.push_str(part.get(1..).unwrap_or_default());
    }
    name
}
