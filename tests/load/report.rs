//! Medians over rounds, as Markdown tables for people and as ratios for [`check`](crate::check).

use std::collections::BTreeMap;
use std::io::Write;

use crate::Sync;
use crate::runs::{Measured, Round, Row};

/// The default memory budget of a run, in MiB.
const BUDGET: f64 = 512.0;

/// Says something beside the tables.
#[expect(clippy::print_stderr, reason = "its output is its purpose")]
pub(crate) fn note(text: &str) {
    eprintln!("{text}");
}

/// Prints all tables.
pub(crate) fn print(measured: &Measured) {
    let mut lines = vec![format!("{}; {} rounds", machine(), rounds(measured)), String::new()];
    lines.extend(machine_table(measured));
    lines.push(String::new());
    lines.extend(publish_table(measured));
    lines.push(String::new());
    lines.extend(fetch_table(measured));
    // Whoever reads it may have gone.
    let _ = writeln!(std::io::stdout(), "{}", lines.join("\n"));
}

fn rounds(measured: &Measured) -> usize {
    measured.rows.first().map_or(0, |row| row.rounds.len())
}

/// The machine, without its name.
pub(crate) fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown processor", |(_, model)| model);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{model}, {threads} hardware threads, {}", std::env::consts::OS)
}

fn machine_table(measured: &Measured) -> Vec<String> {
    let mut lines = vec!["| the machine | GB/s: median (min to max) |".to_owned(), "|---|---|".to_owned()];
    lines.extend(measured.machine.iter().map(|(what, figures)| {
        let (low, high) = range(figures);
        format!("| {what} | {:.2} ({low:.2} to {high:.2}) |", median(figures))
    }));
    lines
}

fn publish_table(measured: &Measured) -> Vec<String> {
    let head = "| publish | encoding | threads | sync | reading s | encoding, hashing s | writing s \
                | whole process s: median (min to max) | / slowest part | s / GiB | user + sys s | peak MiB |";
    let mut lines = vec![head.to_owned(), "|---|---|---|---|---|---|---|---|---|---|---|---|".to_owned()];
    lines.extend(measured.rows.iter().map(|row| {
        let of = |figure: fn(&Round) -> f64| median_of(row, figure);
        let whole: Vec<_> = row.rounds.iter().map(|round| round.publish.time.as_secs_f64()).collect();
        let (low, high) = range(&whole);
        format!(
            "| {} | {:.3} | {:.3} | {:.3} | {:.3} ({low:.3} to {high:.3}) | {:.2} | {:.2} | {:.2} | {:.0} |",
            cells(row),
            of(|round| round.reading),
            of(|round| round.encoding),
            of(|round| round.writing),
            median(&whole),
            of(Round::publish_ratio),
            median(&whole) / in_units(row.bytes, 30),
            of(|round| round.publish.processor.as_secs_f64()),
            of(publish_peak),
        )
    }));
    lines
}

fn fetch_table(measured: &Measured) -> Vec<String> {
    let head = "| fetch | encoding | threads | sync | MiB | cp s | whole process s: median (min to max) \
                | / cp | user + sys s | peak MiB |";
    let mut lines = vec![head.to_owned(), "|---|---|---|---|---|---|---|---|---|---|".to_owned()];
    lines.extend(measured.rows.iter().map(|row| {
        let of = |figure: fn(&Round) -> f64| median_of(row, figure);
        let whole: Vec<_> = row.rounds.iter().map(|round| round.fetch.time.as_secs_f64()).collect();
        let (low, high) = range(&whole);
        format!(
            "| {} | {:.0} | {:.3} | {:.3} ({low:.3} to {high:.3}) | {:.2} | {:.2} | {:.0} |",
            cells(row),
            in_units(row.fetched, 20),
            of(|round| round.copying),
            median(&whole),
            of(Round::fetch_ratio),
            of(|round| round.fetch.processor.as_secs_f64()),
            of(fetch_peak),
        )
    }));
    lines
}

/// The first cells of a row: what was published, and how.
fn cells(row: &Row) -> String {
    let case = row.case;
    let sync = if case.sync == Sync::On { "on" } else { "off" };
    format!("{} | {} | {} | {sync}", row.checkpoint, case.encoding.as_str(), case.threads.label())
}

/// The ratios of every row, by names that say what was measured. Greater is worse in all of them.
pub(crate) fn ratios(measured: &Measured) -> BTreeMap<String, f64> {
    let mut ratios = BTreeMap::new();
    for row in &measured.rows {
        let name = cells(row).replace(" | ", "; ");
        let mut ratio = |what: &str, figure: fn(&Round) -> f64| {
            ratios.insert(format!("{what}: {name}"), (median_of(row, figure) * 1000.0).round() / 1000.0);
        };
        ratio("publish / slowest part", Round::publish_ratio);
        ratio("fetch / cp", Round::fetch_ratio);
        ratio("peak of publish / budget", |round| publish_peak(round) / BUDGET);
        ratio("peak of fetch / budget", |round| fetch_peak(round) / BUDGET);
    }
    ratios
}

fn publish_peak(round: &Round) -> f64 {
    in_units(round.publish.peak, 20)
}

fn fetch_peak(round: &Round) -> f64 {
    in_units(round.fetch.peak, 20)
}

/// Bytes in units of 2 to the power of `shift`.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn in_units(bytes: u64, shift: u32) -> f64 {
    bytes as f64 / (1_u64 << shift) as f64
}

fn median_of(row: &Row, figure: fn(&Round) -> f64) -> f64 {
    median(&row.rounds.iter().map(figure).collect::<Vec<_>>())
}

pub(crate) fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { at(half) } else { f64::midpoint(at(half.saturating_sub(1)), at(half)) }
}

fn range(figures: &[f64]) -> (f64, f64) {
    figures.iter().fold((f64::INFINITY, 0.0), |(low, high), &figure| (low.min(figure), high.max(figure)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_or_between_the_middle_two() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 3.0, 2.0])), (2.0, 2.5));
        assert_eq!(range(&[3.0, 1.0, 2.0]), (1.0, 3.0));
    }
}
