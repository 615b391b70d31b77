//! The validation report: every tensor's figures, and what the gates make of them.

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::encoding::Encoding;
use weighbridge_schemas::report::{Report, ReportSchema, TensorReport};
use weighbridge_schemas::snapshot::SnapshotManifest;

use super::Request;
use super::plan::{Plan, Planned};
use crate::gates::{self, Judged};

/// Judges what was converted under the policy's gates.
#[must_use]
pub fn judge(
    request: &Request,
    plan: &Plan,
    manifest: &SnapshotManifest,
    statistics: &[Statistics],
) -> Report {
    let judged: Vec<_> = plan.tensors.iter().zip(statistics).map(|both| judged(plan, both)).collect();
    let gates = gates::judge(&request.policy.gates, &judged);
    let saturated = plan.tensors.iter().zip(statistics).filter_map(saturated);
    Report {
        schema: ReportSchema::V1,
        snapshot: manifest.id(),
        model: request.model.clone(),
        run: request.run.clone(),
        step: request.step,
        outcome: gates::overall(&gates),
        gates,
        tensors: (0..plan.tensors.len()).map(|at| tensor(plan, at, &statistics[at])).collect(),
        dropped: plan.dropped.clone(),
        notes: plan.notes.iter().cloned().chain(saturated).collect(),
    }
}

fn judged<'a>(plan: &Plan, (planned, statistics): (&'a Planned, &'a Statistics)) -> Judged<'a> {
    Judged { name: &planned.name, statistics, has_rows: plan.source(planned).shape.len() > 1 }
}

/// Says how much of a tensor was cut off by a cast that saturates. It is no finding of a gate.
fn saturated((planned, statistics): (&Planned, &Statistics)) -> Option<String> {
    let limit = planned.form.encoding.saturates_at()?;
    let (name, encoding) = (&planned.name, planned.form.encoding.as_str());
    let (count, all, rows) = (statistics.saturated_elements, statistics.elements, statistics.saturated_rows);
    (count > 0).then(|| {
        format!(
            "{name}: {count} of {all} values, in {rows} rows, are beyond {encoding}'s largest number and stored \
             as it: {limit}"
        )
    })
}

fn tensor(plan: &Plan, at: usize, statistics: &Statistics) -> TensorReport {
    let planned = &plan.tensors[at];
    let source = plan.source(planned);
    let measured = |figure: f64| (source.dtype.is_float() && figure.is_finite()).then_some(figure);
    let error = |figure: f64| if planned.form.encoding == Encoding::Keep { None } else { measured(figure) };
    TensorReport {
        name: planned.name.clone(),
        source_dtype: source.dtype,
        shape: source.shape.clone(),
        encoding: planned.form.encoding,
        source_bytes: source.bytes(),
        stored_bytes: plan.stored[at].bytes,
        min: statistics.min,
        max: statistics.max,
        norm: measured(statistics.norm()),
        non_finite_elements: statistics.non_finite_elements,
        non_finite_rows: statistics.non_finite_rows,
        overflow_rows: statistics.overflow_rows,
        saturated_elements: statistics.saturated_elements,
        saturated_rows: statistics.saturated_rows,
        max_error: error(statistics.max_error),
        rms_error: error(statistics.rms_error()),
        relative_rms_error: error(statistics.relative_rms_error()),
    }
}
