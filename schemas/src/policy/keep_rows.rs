//! How a rule says which rows of a table are kept: by a list of row numbers, in a file beside the checkpoint or in a
//! tensor of it. All other rows are pruned.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rule::substitute;
use crate::error::DocumentError;
use crate::names::TensorName;

/// What is put behind a pruned table's name for the tensor that says where each row of the source went.
pub const INDEX_REMAPPING: &str = ".index_remapping";

/// Where the numbers of the rows to keep stand. `$1` to `$9` stand for what the rule's wildcards matched, and `$$` for
/// a `$`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum KeepRowsFile {
    /// `keep_rows = "pruned/$1.ids"`: a text file, relative to the checkpoint's folder; a decimal number a line.
    File(String),
    /// `keep_rows = { tensor = "prune.$1.kept" }`.
    Tensor(KeepRowsTensor),
}

/// A list of row numbers that is a tensor of the checkpoint: integers, of one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepRowsTensor {
    /// The tensor's name in the checkpoint.
    pub tensor: String,
}

impl<'de> Deserialize<'de> for KeepRowsFile {
    /// By hand, so that a mistake within the table is named, and not only that neither form fits.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;

        impl<'de> serde::de::Visitor<'de> for Form {
            type Value = KeepRowsFile;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a file's path, or a table such as { tensor = \"prune.$1.kept\" }")
            }

            fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<KeepRowsFile, E> {
                Ok(KeepRowsFile::File(path.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<KeepRowsFile, A::Error> {
                let table = serde::de::value::MapAccessDeserializer::new(map);
                KeepRowsTensor::deserialize(table).map(KeepRowsFile::Tensor)
            }
        }

        deserializer.deserialize_any(Form)
    }
}

impl KeepRowsFile {
    /// The path or name, with wildcards.
    pub(super) fn template(&self) -> &str {
        match self {
            Self::File(path) => path,
            Self::Tensor(of) => &of.tensor,
        }
    }

    /// The same for one table.
    pub(super) fn resolve(&self, captures: &[&str]) -> Result<KeepRows, DocumentError> {
        let named = substitute(self.template(), captures);
        Ok(match self {
            Self::File(_) => KeepRows::File(named),
            Self::Tensor(_) => KeepRows::Tensor(named.parse()?),
        })
    }
}

/// Where the numbers of the rows to keep of one table stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeepRows {
    /// In the text file of this path, relative to the checkpoint's folder. It may be any text: whoever opens the file
    /// checks that the path stays in the folder.
    File(String),
    /// In this tensor of the checkpoint.
    Tensor(TensorName),
}
