//! What was measured of a run of rows, as it travels from the worker that measured it to the one that assembles.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A binary64 number as the 16 hexadecimal digits of its bits: JSON has no infinity, and no number may change on its
/// way.
#[derive(Debug, Clone, Copy)]
pub struct Bits(pub f64);

impl PartialEq for Bits {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Bits {}

impl Serialize for Bits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0.to_bits()))
    }
}

impl<'de> Deserialize<'de> for Bits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
        bits.map(|bits| Self(f64::from_bits(bits)))
            .ok_or_else(|| serde::de::Error::custom("a number's bits are 16 hexadecimal digits"))
    }
}

impl JsonSchema for Bits {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Bits".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^[0-9a-f]{16}$" })
    }
}

/// The statistics of a run of rows, bit for bit. What each figure means stands at the converter's statistics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartStatistics {
    /// Rows seen.
    pub rows: u64,
    /// Elements seen.
    pub elements: u64,
    /// The smallest finite element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<Bits>,
    /// The largest finite element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<Bits>,
    /// The sum of the squares of the finite elements.
    pub sum_squares: Bits,
    /// Finite binary64 elements beyond binary32.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub beyond_elements: u64,
    /// Elements that are NaN or infinite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub non_finite_elements: u64,
    /// Rows that hold one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub non_finite_rows: u64,
    /// The first of these rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_non_finite_rows: Vec<u64>,
    /// Elements of finite rows that decode to something non-finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overflow_elements: u64,
    /// Finite rows that decode to something non-finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overflow_rows: u64,
    /// The first of these rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_overflow_rows: Vec<u64>,
    /// Finite elements beyond the largest number of a saturating cast.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saturated_elements: u64,
    /// Rows that hold one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saturated_rows: u64,
    /// Elements over which errors were taken.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub compared_elements: u64,
    /// The largest absolute error.
    pub max_error: Bits,
    /// The first row with that error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_error_row: Option<u64>,
    /// The sum of the squared errors.
    pub error_squares: Bits,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_keeps_its_bits() {
        for number in [0.0, -0.0, 1.0 / 3.0, f64::INFINITY, f64::NAN, f64::MIN_POSITIVE / 2.0, f64::MAX] {
            let text = serde_json::to_string(&Bits(number)).unwrap();
            assert_eq!(serde_json::from_str::<Bits>(&text).unwrap(), Bits(number), "{text}");
        }
        for text in ["\"\"", "\"+000000000000001\"", "1", "\"00000000000000000\"", "\"000000000000000g\""] {
            assert!(serde_json::from_str::<Bits>(text).is_err(), "{text}");
        }
    }
}
