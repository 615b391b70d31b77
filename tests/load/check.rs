//! Ratios beside those of a stored baseline. Ratios to what the same machine does in the same run are compared, never
//! times; even so they differ between machines, and a baseline says which one it comes from.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::Failure;
use crate::report::{machine, note};

/// Writes `ratios` as a baseline.
pub(crate) fn write(path: &Path, ratios: &BTreeMap<String, f64>) -> Result<(), Failure> {
    let baseline = json!({ "machine": machine(), "ratios": ratios });
    std::fs::write(path, format!("{}\n", serde_json::to_string_pretty(&baseline)?))
        .map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Whether no ratio is more than `tolerance` times that of the baseline in `path`; says which are.
pub(crate) fn compare(path: &Path, ratios: &BTreeMap<String, f64>, tolerance: f64) -> Result<bool, Failure> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let baseline: Value = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    let stored: BTreeMap<String, f64> =
        serde_json::from_value(baseline["ratios"].clone()).map_err(|error| wrong(&error))?;
    let from = baseline["machine"].as_str().unwrap_or_default();
    if from != machine() {
        note(&format!("the baseline comes from another machine: {from}"));
    }
    let found = judge(&stored, ratios, tolerance);
    found.lines.iter().for_each(|line| note(line));
    if found.compared == 0 {
        return Err(wrong(&"nothing that was measured is in this baseline; measure the same rows").into());
    }
    note(&format!(
        "{} ratios compared, {} beyond {tolerance} times the baseline",
        found.compared, found.worse
    ));
    Ok(found.worse == 0)
}

/// What a comparison found.
struct Found {
    lines: Vec<String>,
    compared: usize,
    worse: usize,
}

fn judge(stored: &BTreeMap<String, f64>, ratios: &BTreeMap<String, f64>, tolerance: f64) -> Found {
    let mut found = Found { lines: Vec::new(), compared: 0, worse: 0 };
    for (name, &ratio) in ratios {
        let Some(&before) = stored.get(name) else {
            found.lines.push(format!("not in the baseline: {name}"));
            continue;
        };
        found.compared += 1;
        // Whatever is not known to be good is worse: NaN too.
        let good = ratio <= before * tolerance;
        if !good {
            found.worse += 1;
            found.lines.push(format!("worse: {ratio:.2}, was {before:.2}: {name}"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ratios_that_grew_beyond_the_tolerance_are_worse() {
        let ratios = |figures: &[(&str, f64)]| figures.iter().map(|&(n, f)| (n.to_owned(), f)).collect();
        let stored = ratios(&[("a", 1.0), ("b", 2.0), ("c", 1.0), ("gone", 1.0)]);
        let found = judge(&stored, &ratios(&[("a", 1.5), ("b", 3.1), ("c", f64::NAN), ("new", 9.0)]), 1.5);
        assert_eq!((found.compared, found.worse, found.lines.len()), (3, 2, 3));
    }
}
