//! NaN and infinity in a tensor, and finite values that overflow when they are encoded.

use weighbridge_schemas::policy::Verdict;
use weighbridge_schemas::report::{Finding, GateResult, Outcome};

use super::{Judged, result};

/// Rejects, or counts and allows, tensors with such values.
pub(super) fn judge(verdict: Verdict, tensors: &[Judged<'_>]) -> GateResult {
    let findings = tensors.iter().filter_map(finding).collect();
    let otherwise = match verdict {
        Verdict::Reject => Outcome::Rejected,
        Verdict::Allow => Outcome::Allowed,
    };
    result("non_finite", findings, otherwise)
}

fn finding(tensor: &Judged<'_>) -> Option<Finding> {
    let statistics = tensor.statistics;
    let (bad, overflowing) = (statistics.non_finite_elements, statistics.overflow_rows);
    if bad == 0 && overflowing == 0 {
        return None;
    }
    let mut parts = Vec::new();
    let mut rows = Vec::new();
    let places = |first: &[u64]| {
        let listed: Vec<_> = first.iter().map(ToString::to_string).collect();
        if tensor.has_rows && !listed.is_empty() { format!(" (first: {})", listed.join(", ")) } else { String::new() }
    };
    if bad > 0 {
        let first = &statistics.first_non_finite_rows;
        let (elements, count) = (statistics.elements, statistics.non_finite_rows);
        let in_rows = if tensor.has_rows { format!(" in {count} rows") } else { String::new() };
        parts.push(format!("{bad} of {elements} values are NaN or infinite{in_rows}{}", places(first)));
        rows.extend(first);
    }
    if overflowing > 0 {
        let first = &statistics.first_overflow_rows;
        parts.push(format!("{overflowing} finite rows overflow when encoded{}", places(first)));
        rows.extend(first);
    }
    if !tensor.has_rows {
        rows.clear();
    }
    rows.sort_unstable();
    Some(Finding {
        tensor: tensor.name.clone(),
        rows,
        #[expect(clippy::cast_precision_loss, reason = "a count for people; exact to 2^53")]
        figure: Some(bad.max(overflowing) as f64),
        bound: Some(0.0),
        message: parts.join("; "),
    })
}
