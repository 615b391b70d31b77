//! How a rule says in which encoding a tensor is stored, and how its rows are laid out.
//!
//! A mistake is found when the policy is read, as far as the rule alone shows it; whether a table's width suits is
//! found when the policy meets the checkpoint.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DOCUMENT;
use crate::encoding::{Encoding, Layout};
use crate::error::{DocumentError, shorten};
use crate::limits;

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
    /// Where scale and bias stand; absent: `trailing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
    /// Rows are padded with zero bytes to a multiple of this: a power of two up to 4096, with layout `leading` alone.
    /// Absent: not padded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_alignment: Option<u64>,
    /// What becomes of widths that the field's operators cannot read; absent: `refuse`. For `int4` and `int2` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub odd_width: Option<OddWidth>,
}

/// What becomes of a table whose width does not fill the last byte of codes: no multiple of 2 for `int4`, of 4 for
/// `int2`. PyTorch's and FBGEMM's operators neither write nor read such rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OddWidth {
    /// The publish is refused before any work.
    #[default]
    Refuse,
    /// Rows are padded with 0.0 to the next width that is read, before they are quantized.
    Pad,
    /// Rows are written as FBGEMM's scalar function writes them: the bits that are left are 0.
    Write,
}

/// The element type that a rule casts to: the encoding of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CastDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// torch's `float8_e4m3fn`.
    F8E4m3fn,
    /// torch's `float8_e5m2`.
    F8E5m2,
}

impl CastDtype {
    const fn encoding(self) -> Encoding {
        match self {
            Self::F32 => Encoding::F32,
            Self::F16 => Encoding::F16,
            Self::Bf16 => Encoding::Bf16,
            Self::F8E4m3fn => Encoding::F8E4m3fn,
            Self::F8E5m2 => Encoding::F8E5m2,
        }
    }
}

/// How a rule wants a tensor stored, with defaults filled in and checked. Whether a tensor can be stored so is
/// another question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Wanted {
    /// How elements are stored.
    pub encoding: Encoding,
    /// Where scale and bias stand.
    pub layout: Layout,
    /// A row's size is a multiple of this, in bytes.
    pub row_alignment: u64,
    /// What becomes of widths that the field's operators cannot read.
    pub odd_width: OddWidth,
}

impl Wanted {
    /// An encoding in its plain form.
    #[must_use]
    pub const fn plain(encoding: Encoding) -> Self {
        Self { encoding, layout: Layout::Trailing, row_alignment: 1, odd_width: OddWidth::Refuse }
    }

    /// What a rule's fields `encode` and `dtype` say together.
    pub(super) fn of(encode: Option<EncodeFile>, dtype: Option<CastDtype>) -> Result<Self, DocumentError> {
        match (encode, dtype) {
            (Some(_), Some(_)) => Err(wrong("dtype and encode both say how to store it; leave one out")),
            (None, Some(dtype)) => Ok(Self::plain(dtype.encoding())),
            (None, None) => Ok(Self::plain(Encoding::Keep)),
            (Some(EncodeFile::Name(name)), None) => Ok(Self::plain(named(&name)?)),
            (Some(EncodeFile::Table(table)), None) => Self::of_table(&table),
        }
    }

    fn of_table(table: &EncodeTable) -> Result<Self, DocumentError> {
        let encoding = named(&table.encoding)?;
        let name = encoding.as_str();
        let rows = [
            ("layout", table.layout.is_some()),
            ("row_alignment", table.row_alignment.is_some()),
            ("odd_width", table.odd_width.is_some()),
        ];
        if let Some((field, _)) = rows.iter().find(|(_, given)| *given && !encoding.is_row_wise()) {
            return Err(wrong(format!(
                "{field} is about rows with a scale and a bias, and {name} has none; leave it out, or take an \
                 encoding of rows (int8, int4, int2)"
            )));
        }
        if table.odd_width.is_some() && encoding.width_multiple() == 1 {
            return Err(wrong(format!(
                "odd_width is for int4 and int2: {name} takes any width; leave it out"
            )));
        }
        let layout = table.layout.unwrap_or_default();
        let row_alignment = table.row_alignment.map_or(Ok(1), |alignment| checked(alignment, layout))?;
        Ok(Self { encoding, layout, row_alignment, odd_width: table.odd_width.unwrap_or_default() })
    }
}

fn checked(row_alignment: u64, layout: Layout) -> Result<u64, DocumentError> {
    if layout == Layout::Trailing {
        return Err(wrong(
            "row_alignment goes with layout = \"leading\": PyTorch's operators take the width of a trailing row from \
             its bytes, so that it cannot be padded; set the layout, or leave row_alignment out",
        ));
    }
    if row_alignment.is_power_of_two() && row_alignment <= limits::ROW_ALIGNMENT {
        return Ok(row_alignment);
    }
    let most = limits::ROW_ALIGNMENT;
    Err(wrong(format!("row_alignment is a power of two from 1 to {most}, such as 16; not {row_alignment}")))
}

/// The encoding called `name`.
fn named(name: &str) -> Result<Encoding, DocumentError> {
    Encoding::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Encoding::ALL.iter().map(|known| known.as_str()).collect();
        let aliases: Vec<_> = Encoding::ALIASES
            .iter()
            .map(|(alias, known)| format!("{alias} for {}", known.as_str()))
            .collect();
        wrong(format!(
            "unknown encoding {:?}; this version writes {} (and {})",
            shorten(name),
            names.join(", "),
            aliases.join(", ")
        ))
    })
}

fn wrong(why: impl std::fmt::Display) -> DocumentError {
    DocumentError::malformed(DOCUMENT, why)
}

#[cfg(test)]
mod tests {
    use crate::policy::{Policy, Treatment};

    use super::*;

    fn policy(rule: &str) -> Result<Policy, DocumentError> {
        Policy::parse(&format!("schema = 'weighbridge.policy/v1'\n[[rule]]\nmatch = 'a'\n{rule}"))
    }

    fn wanted(rule: &str) -> Wanted {
        match policy(rule).unwrap().treat(&"a".parse().unwrap()).unwrap().1 {
            Treatment::Publish { wanted, .. } => wanted,
            Treatment::Drop => panic!("{rule}"),
        }
    }

    #[test]
    fn a_rule_lays_out_rows() {
        let long =
            "encode = { encoding = 'int4', layout = 'leading', row_alignment = 16, odd_width = 'pad' }";
        let all = Wanted {
            encoding: Encoding::Int4Sbf16,
            layout: Layout::Leading,
            row_alignment: 16,
            odd_width: OddWidth::Pad,
        };
        assert_eq!(wanted(long), all);
        let some = Wanted { layout: Layout::Leading, ..Wanted::plain(Encoding::Int8Sbf16) };
        assert_eq!(wanted("encode = { encoding = 'int8_sbf16', layout = 'leading' }"), some);
        assert_eq!(wanted("encode = 'int2'"), Wanted::plain(Encoding::Int2Sbf16));
        assert_eq!(wanted("encode = { encoding = 'f16' }"), Wanted::plain(Encoding::F16));
    }

    #[test]
    fn a_dtype_is_a_cast_by_name_and_the_same_rule() {
        for name in ["f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2"] {
            let (dtype, encode) = (format!("dtype = '{name}'"), format!("encode = '{name}'"));
            assert_eq!(wanted(&dtype).encoding.as_str(), name);
            assert_eq!(policy(&dtype).unwrap().rules_digest(), policy(&encode).unwrap().rules_digest());
        }
    }

    #[test]
    fn the_digest_covers_the_layout() {
        let rules = [
            "encode = 'int4'",
            "encode = { encoding = 'int4', odd_width = 'pad' }",
            "encode = { encoding = 'int4', odd_width = 'write' }",
            "encode = { encoding = 'int4', layout = 'leading' }",
            "encode = { encoding = 'int4', layout = 'leading', row_alignment = 16 }",
        ];
        let digests: Vec<_> = rules.iter().map(|rule| policy(rule).unwrap().rules_digest()).collect();
        for (at, digest) in digests.iter().enumerate() {
            assert_eq!(digests.iter().position(|other| other == digest), Some(at), "{}", rules[at]);
        }
        let plain = "encode = { encoding = 'int4_sbf16', layout = 'trailing', odd_width = 'refuse' }";
        assert_eq!(policy(plain).unwrap().rules_digest(), digests[0]);
    }

    #[test]
    fn mistakes_name_the_way_out() {
        for (rule, words) in [
            ("encode = 'int9'", &["int9", "int4_sbf16", "int4 for int4_sbf16"][..]),
            ("encode = { encoding = 'int8', row_alignment = 16 }", &["layout = \"leading\"", "leave"]),
            (
                "encode = { encoding = 'int8', layout = 'leading', row_alignment = 12 }",
                &["power of two from 1 to 4096", "12"],
            ),
            ("encode = { encoding = 'int8', layout = 'leading', row_alignment = 0 }", &["power of two"]),
            ("encode = { encoding = 'int8', layout = 'leading', row_alignment = 8192 }", &["8192"]),
            ("encode = { encoding = 'f16', layout = 'trailing' }", &["layout", "f16 has none", "leave"]),
            ("encode = { encoding = 'keep', row_alignment = 16 }", &["row_alignment", "keep has none"]),
            ("encode = { encoding = 'bf16', odd_width = 'pad' }", &["odd_width", "bf16 has none"]),
            ("encode = { encoding = 'int8', odd_width = 'pad' }", &["int8_sbf32 takes any width", "leave"]),
            ("encode = { encoding = 'int4', odd_width = 'round' }", &["round", "refuse"]),
            ("encode = { encoding = 'int4', layout = 'middle' }", &["middle", "leading"]),
            ("dtype = 'f16'\nencode = 'f16'", &["dtype and encode", "leave one out"]),
            ("dtype = 'int8'", &["int8", "f8_e4m3fn"]),
            ("dtype = 'f16'\ndrop = true", &["drop stands alone"]),
        ] {
            let error = policy(rule).unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{rule}: {error}");
            }
        }
    }
}
