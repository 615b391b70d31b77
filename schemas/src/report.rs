//! The validation report `weighbridge.report/v1`: what every tensor measured, and what the gates made of it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::encoding::Encoding;
use crate::error::DocumentError;
use crate::ids::SnapshotId;
use crate::json;
use crate::limits;
use crate::names::{ModelName, RunName, TensorName};

const DOCUMENT: &str = "validation report";

/// The `schema` field of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ReportSchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.report/v1")]
    V1,
}

/// What a gate, or all of them, came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Nothing was found.
    Passed,
    /// Something was found, and the policy allows it.
    Allowed,
    /// Something was found that the policy rejects.
    Rejected,
}

impl Outcome {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Allowed => "allowed",
            Self::Rejected => "rejected",
        }
    }
}

/// The validation report of one snapshot under one policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// Always `weighbridge.report/v1`.
    pub schema: ReportSchema,
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The model.
    pub model: ModelName,
    /// The training run.
    pub run: RunName,
    /// The training step.
    pub step: u64,
    /// `rejected` where any gate rejects.
    pub outcome: Outcome,
    /// Every gate that was applied.
    pub gates: Vec<GateResult>,
    /// Every published tensor's figures, in order of their names.
    pub tensors: Vec<TensorReport>,
    /// The files beside the checkpoint that are published with it. Absent where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifacts: Option<ArtifactsReport>,
    /// The names of the tensors that the policy drops.
    pub dropped: Vec<TensorName>,
    /// What was passed over or done otherwise, a line each.
    pub notes: Vec<String>,
}

/// Files that lay beside a checkpoint and were published as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArtifactsReport {
    /// How many.
    pub count: u64,
    /// Their size in all, in bytes.
    pub bytes: u64,
}

/// What one gate found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GateResult {
    /// The gate's name in the policy.
    pub gate: String,
    /// What it came to.
    pub outcome: Outcome,
    /// What it found, a tensor each.
    pub findings: Vec<Finding>,
}

/// What a gate found in one tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The tensor's name in the snapshot.
    pub tensor: TensorName,
    /// The first rows concerned, from 0; of a pruned table, by their numbers in the checkpoint.
    pub rows: Vec<u64>,
    /// The figure that was measured; absent where it is no finite number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<f64>,
    /// The bound that the policy sets, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// The same for people.
    pub message: String,
}

/// One tensor's figures. They come out of the pass that encodes it. Those of tensors of integers are absent, and so
/// is a figure that is no finite number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TensorReport {
    /// The name in the snapshot.
    pub name: TensorName,
    /// The element type in the checkpoint.
    pub source_dtype: Dtype,
    /// The logical shape.
    pub shape: Vec<u64>,
    /// The encoding.
    pub encoding: Encoding,
    /// The size in the checkpoint, in bytes.
    pub source_bytes: u64,
    /// The size in the snapshot, in bytes.
    pub stored_bytes: u64,
    /// The smallest finite value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// The largest finite value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// The Euclidean norm of the finite values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<f64>,
    /// How many values are NaN or infinite.
    pub non_finite_elements: u64,
    /// How many rows hold one. This and the other numbers of rows count runs of 4096 elements where a tensor has fewer
    /// than two dimensions, or rows too wide to be stored as one.
    pub non_finite_rows: u64,
    /// How many finite rows overflow when encoded.
    pub overflow_rows: u64,
    /// How many finite values are beyond the largest number of a cast that saturates, and were stored as it.
    #[serde(default)]
    pub saturated_elements: u64,
    /// How many rows hold one.
    #[serde(default)]
    pub saturated_rows: u64,
    /// The largest absolute reconstruction error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_error: Option<f64>,
    /// The root mean square of the reconstruction error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rms_error: Option<f64>,
    /// The same, relative to the root mean square of the values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative_rms_error: Option<f64>,
}

impl Report {
    /// The bytes that are stored: JSON, indented, fields in the order above.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // No field is a map with keys that are no strings, so this cannot fail.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Reads a report.
    ///
    /// # Errors
    /// [`DocumentError`] where the bytes are no report.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        if json.len() > limits::REPORT_BYTES {
            let why = format!("{} bytes; at most {}", json.len(), limits::REPORT_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        json::object(DOCUMENT, json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_round_trip() {
        let report = Report {
            schema: ReportSchema::V1,
            snapshot: SnapshotId::of(b"s"),
            model: "m".parse().unwrap(),
            run: "r".parse().unwrap(),
            step: 1,
            outcome: Outcome::Rejected,
            gates: vec![GateResult {
                gate: "max_rms_error".into(),
                outcome: Outcome::Rejected,
                findings: vec![Finding {
                    tensor: "t".parse().unwrap(),
                    rows: vec![3],
                    figure: Some(0.1),
                    bound: Some(0.01),
                    message: "too far off".into(),
                }],
            }],
            tensors: vec![],
            artifacts: Some(ArtifactsReport { count: 2, bytes: 3 }),
            dropped: vec!["optim.x".parse().unwrap()],
            notes: vec![],
        };
        assert_eq!(Report::parse(&report.to_bytes()).unwrap(), report);
    }
}
