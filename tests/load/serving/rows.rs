//! Look-ups of rows out of a fetched version: at rest, and while another one is opened and swapped in, again and again.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weighbridge_schemas::ids::SnapshotId;
use weighbridge_snapshots::reader::{Options, Pages, Serving};
use weighbridge_tests::lookups::{Latencies, Lookups};

use super::House;
use crate::Failure;
use crate::checkpoints::Checkpoint;

/// Rows of a batch, all of one table.
const BATCH: usize = 100;
/// Swaps, and what lies between two of them.
const SWAPS: usize = 100;
const BETWEEN: Duration = Duration::from_millis(50);

/// What the readers and the one that swaps know of each other.
#[derive(Default)]
struct Turns {
    /// Odd while a version is being opened and swapped in.
    swaps: AtomicU64,
    done: AtomicBool,
}

/// Looks up batches of rows by chance until all is done.
fn read(serving: &Serving, table: &str, turns: &Turns, seed: u64) -> Result<Lookups, String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut lookups, mut decoded) = (Lookups::default(), Vec::new());
    while !turns.done.load(Ordering::Relaxed) {
        let before = turns.swaps.load(Ordering::SeqCst);
        let began = Instant::now();
        let version = serving.current();
        let rows = version.table(table).map_err(|error| error.to_string())?;
        let wanted: [u64; BATCH] = std::array::from_fn(|_| random.u64(..rows.rows()));
        decoded.resize(BATCH * rows.width(), 0.0);
        rows.decode_rows(&wanted, &mut decoded).map_err(|error| error.to_string())?;
        let took = began.elapsed();
        drop(version);
        let met = before % 2 == 1 || turns.swaps.load(Ordering::SeqCst) != before;
        if met { lookups.during_swaps.record(took) } else { lookups.at_rest.record(took) }
    }
    Ok(lookups)
}

/// Has `current` point at a version, as a fetch does it.
fn flip(folder: &Path, id: SnapshotId) -> std::io::Result<()> {
    let next = folder.join("next");
    symlink(Path::new("versions").join(id.to_string()), &next)?;
    std::fs::rename(next, folder.join("current"))
}

/// The peak of this process's resident memory since it was set back, in MiB. Mapped pages that were looked at count.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kibibytes.unwrap_or_default() >> 10
}

/// Measures, and gives a table.
pub(super) fn measure(house: &House<'_>, checkpoint: &Checkpoint) -> Result<String, Failure> {
    let ids = [house.publish(&checkpoint.path, 1, &[])?, house.publish(&checkpoint.path, 2, &[])?];
    let folder = house.folder.join("served");
    let into = folder.to_str().ok_or("the folder's name is not UTF-8")?;
    for id in ids {
        house.run(&["fetch", &format!("m@{id}"), "--into", into, "--no-sync"])?;
    }
    let mut text = format!(
        "| look-ups of {BATCH} rows ({}, int8) | batches | p50 µs | p99 µs | p99.9 µs | longest µs | opening and \
         swapping: p50 ms | longest ms | peak MiB |\n|---|---|---|---|---|---|---|---|---|\n",
        checkpoint.label
    );
    for pages in [Pages::OnDemand, Pages::Present] {
        // Back to what it is now.
        std::fs::write("/proc/self/clear_refs", "5")?;
        let (lookups, swaps) = swapped(&folder, ids, pages)?;
        let peak = peak();
        for (what, times) in [("at rest", &lookups.at_rest), ("during swaps", &lookups.during_swaps)] {
            let [half, most, nearly] =
                [500_000, 990_000, 999_000].map(|quantile| microseconds(times.quantile(quantile)));
            text.push_str(&format!(
                "| {what}, pages {} | {} | {half:.1} | {most:.1} | {nearly:.1} | {:.1} | {:.1} | {:.1} | {peak} |\n",
                if pages == Pages::Present { "present" } else { "on demand" },
                times.count(),
                microseconds(times.longest()),
                microseconds(swaps.quantile(500_000)) / 1e3,
                microseconds(swaps.longest()) / 1e3,
            ));
        }
    }
    Ok(text)
}

/// Reads by one thread a processor but one, while the versions take turns.
fn swapped(folder: &Path, ids: [SnapshotId; 2], pages: Pages) -> Result<(Lookups, Latencies), Failure> {
    flip(folder, ids[0])?;
    let serving = Serving::open(folder, Options { pages, ..Options::default() })?;
    let version = serving.current();
    let table = version.tensors().next().ok_or("the snapshot has no table")?.described().name.to_string();
    drop(version);
    let readers = std::thread::available_parallelism().map_or(1, |all| all.get().saturating_sub(1).max(1));
    let turns = Turns::default();
    std::thread::scope(|scope| {
        let (serving, table, turns) = (&serving, table.as_str(), &turns);
        let readers: Vec<_> =
            (0..readers as u64).map(|seed| scope.spawn(move || read(serving, table, turns, seed))).collect();
        let swaps = swap(folder, ids, serving, turns);
        turns.done.store(true, Ordering::Relaxed);
        let mut lookups = Lookups::default();
        for reader in readers {
            lookups.add(&reader.join().map_err(|_| "a thread panicked")??);
        }
        Ok((lookups, swaps?))
    })
}

fn swap(folder: &Path, ids: [SnapshotId; 2], serving: &Serving, turns: &Turns) -> Result<Latencies, Failure> {
    let mut swaps = Latencies::default();
    for id in ids.iter().cycle().skip(1).take(SWAPS) {
        std::thread::sleep(BETWEEN);
        flip(folder, *id)?;
        turns.swaps.fetch_add(1, Ordering::SeqCst);
        let began = Instant::now();
        let swapped = serving.refresh();
        swaps.record(began.elapsed());
        turns.swaps.fetch_add(1, Ordering::SeqCst);
        swapped?;
    }
    Ok(swaps)
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
