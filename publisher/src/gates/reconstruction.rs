//! How far decoded values may be from the checkpoint's: relative for a tensor, absolute for an element.

use weighbridge_schemas::report::{Finding, GateResult, Outcome};

use super::{Judged, result};

/// Rejects tensors whose root-mean-square error, relative to their root mean square, is over `bound`.
pub(super) fn judge_relative(bound: f64, tensors: &[Judged<'_>]) -> GateResult {
    let findings = tensors.iter().filter_map(|tensor| {
        let figure = tensor.statistics.relative_rms_error();
        over(tensor, figure, bound, "the relative RMS error of reconstruction")
    });
    result("max_rms_error", findings.collect(), Outcome::Rejected)
}

/// Rejects tensors with an element whose error is over `bound`.
pub(super) fn judge_absolute(bound: f64, tensors: &[Judged<'_>]) -> GateResult {
    let findings = tensors.iter().filter_map(|tensor| {
        let figure = tensor.statistics.max_error;
        over(tensor, figure, bound, "the largest error of reconstruction")
    });
    result("max_abs_error", findings.collect(), Outcome::Rejected)
}

fn over(tensor: &Judged<'_>, figure: f64, bound: f64, what: &str) -> Option<Finding> {
    // Not `figure > bound`: a figure that is no number must not pass.
    if figure <= bound {
        return None;
    }
    let row = tensor.statistics.max_error_row.filter(|_| tensor.has_rows);
    let place = row.map_or_else(String::new, |row| format!("; the largest is in row {row}"));
    Some(Finding {
        tensor: tensor.name.clone(),
        rows: row.into_iter().collect(),
        figure: figure.is_finite().then_some(figure),
        bound: Some(bound),
        message: format!("{what} is {figure:.3e}, over the policy's {bound:.3e}{place}"),
    })
}
