//! One rule: a pattern on tensor names, and what becomes of the tensors that it matches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DOCUMENT;
use super::encode::{CastDtype, EncodeFile, Wanted};
use super::keep_rows::{KeepRows, KeepRowsFile};
use crate::error::DocumentError;
use crate::limits;
use crate::names::TensorName;
use crate::pattern::{DOT, Pattern};

/// One rule as a person writes it: a pattern, and either `drop`, or `encode` (or `dtype`), `rename` and `keep_rows`.
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
    /// Its name in the snapshot; `$1` to `$9` are what the wildcards matched, in order, and `$$` is a `$`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rename: Option<String>,
    /// Which rows of the table are kept; absent: all. Beside the table stands `NAME.index_remapping`, which says for
    /// every row of the source its new number, or -1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_rows: Option<KeepRowsFile>,
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
    // Left out where absent: rules without it keep the digest that they had before there was such a field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keep_rows: Option<KeepRowsFile>,
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
        /// With these rows alone; `None`: with all.
        keep_rows: Option<KeepRows>,
    },
}

impl Rule {
    pub(super) fn check(rule: RuleFile) -> Result<Self, DocumentError> {
        let RuleFile { pattern: text, drop, encode, dtype, rename, keep_rows } = rule;
        let pattern = Pattern::parse(&text, DOT)?;
        if drop && (encode.is_some() || dtype.is_some() || rename.is_some() || keep_rows.is_some()) {
            let why = "drop stands alone, without encode, dtype, rename and keep_rows";
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
        let wanted = Wanted::of(encode, dtype)?;
        if let Some(template) = &rename {
            check_template("rename", template, pattern.wildcards())?;
        }
        if let Some(keep_rows) = &keep_rows {
            check_template("keep_rows", keep_rows.template(), pattern.wildcards())?;
        }
        Ok(Self { pattern, written: CanonicalRule { pattern: text, drop, wanted, rename, keep_rows } })
    }
}

/// Every `$` in a replacement is followed by another one, or by the number of a wildcard of the pattern.
fn check_template(field: &str, template: &str, wildcards: usize) -> Result<(), DocumentError> {
    if template.len() > limits::PATTERN_BYTES {
        let why = format!("{field} has at most {} bytes", limits::PATTERN_BYTES);
        return Err(DocumentError::malformed(DOCUMENT, why));
    }
    let mut rest = template;
    while let Some((_, sign, behind)) = next_sign(rest) {
        rest = behind;
        if sign == Some('$') {
            continue;
        }
        let digit = sign.and_then(|c| c.to_digit(10)).unwrap_or(0);
        if digit == 0 || digit as usize > wildcards {
            let why = match wildcards {
                0 => format!("{field}: '$' stands for a wildcard, and match has none; write '$$' for a '$'"),
                _ => format!(
                    "{field}: '$' is followed by a wildcard's number, and match has {wildcards}; write '$$' for a '$'"
                ),
            };
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
    }
    Ok(())
}

/// What stands before the first `$` of `template`, the character behind it, and the rest.
fn next_sign(template: &str) -> Option<(&str, Option<char>, &str)> {
    let (before, behind) = template.split_once('$')?;
    let mut rest = behind.chars();
    Some((before, rest.next(), rest.as_str()))
}

/// `template` with every `$1` to `$9` replaced by what that wildcard matched, and every `$$` by a `$`.
pub(super) fn substitute(template: &str, captures: &[&str]) -> String {
    let mut name = String::new();
    let mut rest = template;
    while let Some((before, sign, behind)) = next_sign(rest) {
        name.push_str(before);
        let digit = sign.and_then(|c| c.to_digit(10)).unwrap_or(0) as usize;
        match sign {
            Some('$') => name.push('$'),
            _ => name
                .push_str(digit.checked_sub(1).and_then(|at| captures.get(at)).copied().unwrap_or_default()),
        }
        rest = behind;
    }
    name + rest
}
