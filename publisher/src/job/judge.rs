//! The validation report: every tensor's figures, and what the gates make of them.

use weighbridge_converter::statistics::Statistics;
use weighbridge_schemas::encoding::Encoding;
use weighbridge_schemas::report::{ArtifactsReport, Report, ReportSchema, TensorReport};
use weighbridge_schemas::snapshot::SnapshotManifest;

use super::Request;
use super::plan::{Content, Plan, Planned};
use crate::gates::{self, Judged};

/// Judges what was converted under the policy's gates.
#[must_use]
pub fn judge(
    request: &Request,
    plan: &Plan,
    manifest: &SnapshotManifest,
    statistics: &[Statistics],
) -> Report {
    let judged: Vec<_> = (0..plan.tensors.len()).map(|at| judged(plan, at, &statistics[at])).collect();
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
        artifacts: artifacts(plan),
        dropped: plan.dropped.clone(),
        notes: plan.notes.iter().cloned().chain(saturated).collect(),
    }
}

fn judged<'a>(plan: &'a Plan, at: usize, statistics: &'a Statistics) -> Judged<'a> {
    let planned = &plan.tensors[at];
    Judged { name: &planned.name, statistics, has_rows: planned.rows.own }
}

fn artifacts(plan: &Plan) -> Option<ArtifactsReport> {
    let count = plan.artifacts.len() as u64;
    (count > 0).then(|| ArtifactsReport { count, bytes: plan.artifact_bytes() })
}

/// Says how much of a tensor was cut off by a cast that saturates. It is no finding of a gate.
fn saturated((planned, statistics): (&Planned, &Statistics)) -> Option<String> {
    let limit = planned.form.encoding.saturates_at()?;
    let (name, encoding) = (&planned.name, planned.form.encoding.as_str());
    let (count, all) = (statistics.saturated_elements, statistics.elements);
    let in_rows = match statistics.saturated_rows {
        rows if planned.rows.own => format!(", in {rows} rows,"),
        _ => String::new(),
    };
    (count > 0).then(|| {
        format!(
            "{name}: {count} of {all} values{in_rows} are beyond {encoding}'s largest number and stored as it: \
             {limit}"
        )
    })
}

fn tensor(plan: &Plan, at: usize, statistics: &Statistics) -> TensorReport {
    let planned = &plan.tensors[at];
    let metadata = &plan.stored[at].metadata;
    let source_bytes = match planned.content {
        Content::Whole | Content::Rows(_) => plan.source(planned).bytes(),
        Content::Remapping(_) => 0,
    };
    let measured = |figure: f64| (metadata.source_dtype.is_float() && figure.is_finite()).then_some(figure);
    let error = |figure: f64| if planned.form.encoding == Encoding::Keep { None } else { measured(figure) };
    TensorReport {
        name: planned.name.clone(),
        source_dtype: metadata.source_dtype,
        shape: metadata.shape.clone(),
        encoding: planned.form.encoding,
        source_bytes,
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
