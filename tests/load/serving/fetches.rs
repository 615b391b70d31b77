//! A fetch of a whole snapshot into an empty folder, out of the store and by an API on the same machine, beside `cp -r`
//! of the same files.

use std::path::Path;

use weighbridge_tests::process::{self, Taken, processor_time};

use super::{From, House};
use crate::checkpoints::{Checkpoint, files_below};
use crate::rates::Machine;
use crate::report::median;
use crate::{Failure, Sync};

/// One way to fetch, and what each round took.
struct Row {
    from: From,
    sync: Sync,
    copies: Vec<f64>,
    fetches: Vec<Taken>,
    /// Processor time of the server, in seconds.
    server: Vec<f64>,
}

/// Measures, and gives a table.
pub(super) fn measure(house: &House<'_>, checkpoint: &Checkpoint, runs: u32) -> Result<String, Failure> {
    house.publish(&checkpoint.path, 1, &[])?;
    let server = house.serve()?;
    let machine = Machine::new(&house.folder)?;
    let into = house.folder.join("fetched");
    let mut rows: Vec<_> = From::BOTH
        .iter()
        .flat_map(|&from| [Sync::On, Sync::Off].map(|sync| (from, sync)))
        .map(|(from, sync)| Row { from, sync, copies: vec![], fetches: vec![], server: vec![] })
        .collect();
    let mut bytes = 0;
    for _ in 0..runs {
        for row in &mut rows {
            let into_text = into.to_str().ok_or("the folder's name is not UTF-8")?;
            let mut fetch = row.from.command(house, &server, &["fetch", "m", "--into", into_text, "--json"]);
            if row.sync == Sync::Off {
                fetch.arg("--no-sync");
            }
            let before = processor_time(server.running.0.id());
            let (status, taken) = process::measure(&mut fetch)?;
            if !status.success() {
                return Err(format!("a fetch by {} failed", row.from.label()).into());
            }
            row.server.push((processor_time(server.running.0.id()) - before).as_secs_f64());
            row.fetches.push(taken);
            let versions = into.join("versions");
            bytes = size(&versions)?;
            row.copies.push(machine.copy(&versions, row.sync)?.seconds(bytes));
            machine.clear(&into)?;
        }
    }
    Ok(table(&rows, bytes, &checkpoint.label))
}

fn size(folder: &Path) -> Result<u64, Failure> {
    let lengths = files_below(folder)?.into_iter().map(|file| Ok(std::fs::metadata(file)?.len()));
    lengths.sum()
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn table(rows: &[Row], bytes: u64, label: &str) -> String {
    let mut text = format!(
        "| fetch of {} MiB ({label}, int8) | sync | cp s | whole process s: median | / cp | MB/s | user + sys s | the \
         server's user + sys s | peak MiB |\n|---|---|---|---|---|---|---|---|---|\n",
        bytes >> 20
    );
    for row in rows {
        let of = |figure: fn(&Taken) -> f64| median(&row.fetches.iter().map(figure).collect::<Vec<_>>());
        let (whole, copy) = (of(|taken| taken.time.as_secs_f64()), median(&row.copies));
        let server =
            if row.from == From::Api { format!("{:.2}", median(&row.server)) } else { "-".to_owned() };
        text.push_str(&format!(
            "| by {} | {} | {copy:.3} | {whole:.3} | {:.2} | {:.0} | {:.2} | {server} | {:.0} |\n",
            row.from.label(),
            if row.sync == Sync::On { "on" } else { "off" },
            whole / copy,
            bytes as f64 / whole / 1e6,
            of(|taken| taken.processor.as_secs_f64()),
            of(|taken| taken.peak as f64 / f64::from(1 << 20)),
        ));
    }
    text
}
