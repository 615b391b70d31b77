//! Gates: statistics in, verdict out; a file a rule.

/// The class of the failure that a gate's no is.
pub const REJECTED: &str = "rejected_by_gate";

mod non_finite;
mod reconstruction;

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::Gates;
use weighbridge_schemas::report::{Finding, GateResult, Outcome};

/// One published tensor, as gates see it.
#[derive(Debug)]
pub struct Judged<'a> {
    /// Its name in the snapshot.
    pub name: &'a TensorName,
    /// What was measured while it was encoded.
    pub statistics: &'a Statistics,
    /// Whether its figures are taken row by row: it has two dimensions or more, and its rows fit into chunks.
    pub has_rows: bool,
}

/// Applies every gate that the policy sets.
#[must_use]
pub fn judge(gates: &Gates, tensors: &[Judged<'_>]) -> Vec<GateResult> {
    let mut results = vec![non_finite::judge(gates.non_finite, tensors)];
    if let Some(bound) = gates.max_rms_error {
        results.push(reconstruction::judge_relative(bound, tensors));
    }
    if let Some(bound) = gates.max_abs_error {
        results.push(reconstruction::judge_absolute(bound, tensors));
    }
    results
}

/// What several gates come to together.
#[must_use]
pub fn overall(results: &[GateResult]) -> Outcome {
    let found = |outcome| results.iter().any(|result| result.outcome == outcome);
    if found(Outcome::Rejected) {
        Outcome::Rejected
    } else if found(Outcome::Allowed) {
        Outcome::Allowed
    } else {
        Outcome::Passed
    }
}

/// A gate's result: passed without findings, else as told.
fn result(gate: &str, findings: Vec<Finding>, otherwise: Outcome) -> GateResult {
    let outcome = if findings.is_empty() { Outcome::Passed } else { otherwise };
    GateResult { gate: gate.to_owned(), outcome, findings }
}
