//! How a rule says in which encoding a tensor is stored.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::encoding::Layout;

/// An encoding by name, or as a table with its layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum EncodeFile {
    /// `encode = "int8"`.
    Name(String),
    /// `encode = { encoding = "int8", layout = "trailing" }`.
    Table(EncodeTable),
}

impl<'de> Deserialize<'de> for EncodeFile {
    /// By hand, so that a mistake within the table is named, and not only that neither form fits.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;

        impl<'de> serde::de::Visitor<'de> for Form {
            type Value = EncodeFile;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(
                    "an encoding's name, or a table such as { encoding = \"int8\", layout = \"trailing\" }",
                )
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<EncodeFile, E> {
                Ok(EncodeFile::Name(name.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<EncodeFile, A::Error> {
                let table = serde::de::value::MapAccessDeserializer::new(map);
                EncodeTable::deserialize(table).map(EncodeFile::Table)
            }
        }

        deserializer.deserialize_any(Form)
    }
}

/// The long form of `encode`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EncodeTable {
    /// The encoding's name.
    pub encoding: String,
    /// Where scale and bias stand.
    #[serde(default)]
    pub layout: Layout,
}
