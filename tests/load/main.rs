//! Publishes and fetches a synthetic checkpoint, and prints time and peak memory beside what this machine does with
//! the same bytes in the same run: memory copies, BLAKE3, durable writes.
//!
//! ```text
//! cargo build --release --workspace && ./target/release/load --gib 4
//! ```
//!
//! Figures differ from machine to machine and run to run; the ratios say more. Nothing here asserts a time.

use std::error::Error;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use weighbridge_tests::{peak_memory, synthetic};

const TABLES: usize = 16;
const WIDTH: usize = 64;
const BLOCK: usize = 8 << 20;

/// Bytes, and the time that they took.
struct Rate {
    bytes: u64,
    took: Duration,
}

impl Rate {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn gigabytes_a_second(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64() / 1e9
    }
}

#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn main() -> Result<(), Box<dyn Error>> {
    let gib = gib()?;
    let folder = tempfile::tempdir_in(".")?;
    let checkpoint = folder.path().join("model.safetensors");
    let bytes = gib << 30;
    let rows = usize::try_from(bytes)? / (TABLES * WIDTH * 4);
    println!("writing {gib} GiB: {TABLES} tables of {rows} x {WIDTH} F32");
    synthetic(&checkpoint, TABLES, rows, WIDTH);
    let read = read(&checkpoint)?;
    println!("| what | input GB/s | seconds | peak MiB |\n|---|---|---|---|");
    row("read the file, one thread, page cache", &read, None);
    row("memcpy, one thread", &memcpy(bytes), None);
    row("BLAKE3, one thread", &blake3(bytes), None);
    row("durable write, 8 MiB files, one thread", &durable_write(folder.path(), bytes / 4)?, None);
    for threads in ["1", "all"] {
        let store = folder.path().join(format!("store-{threads}"));
        let (publish, peak) = run(&mut publish(&checkpoint, &store, threads), bytes)?;
        row(&format!("publish, default policy, threads: {threads}"), &publish, Some(peak));
    }
    let store = folder.path().join("store-all");
    let (again, peak) = run(&mut publish(&checkpoint, &store, "all"), bytes)?;
    row("publish again, nothing new", &again, Some(peak));
    let stored = bytes / 4 / u64::try_from(WIDTH)? * u64::try_from(WIDTH + 8)?;
    let mut fetch = Command::new(binary()?);
    fetch
        .args(["fetch", "m", "--json", "--into"])
        .arg(folder.path().join("served"))
        .arg("--store")
        .arg(&store);
    let (fetched, peak) = run(&mut fetch, stored)?;
    row("fetch (GB/s of the snapshot)", &fetched, Some(peak));
    Ok(())
}

fn gib() -> Result<u64, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => Ok(4),
        (Some("--gib"), Some(gib)) => Ok(gib.parse()?),
        _ => Err("usage: load [--gib N]".into()),
    }
}

fn binary() -> Result<PathBuf, Box<dyn Error>> {
    let binary = std::env::current_exe()?.with_file_name("weighbridge");
    if binary.is_file() {
        return Ok(binary);
    }
    Err(format!("{} is not there; run `cargo build --release` first", binary.display()).into())
}

fn publish(checkpoint: &Path, store: &Path, threads: &str) -> Command {
    let mut command = Command::new(binary().unwrap_or_default());
    command.arg("publish").arg(checkpoint).args(["--model", "m", "--json", "--store"]).arg(store);
    if threads != "all" {
        command.args(["--threads", threads]);
    }
    command
}

fn run(command: &mut Command, bytes: u64) -> Result<(Rate, u64), Box<dyn Error>> {
    let started = Instant::now();
    let (status, peak) = peak_memory(command)?;
    let took = started.elapsed();
    if status.success() {
        Ok((Rate { bytes, took }, peak))
    } else {
        Err(format!("{command:?}: {status}").into())
    }
}

#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn row(what: &str, rate: &Rate, peak: Option<u64>) {
    let peak = peak.map_or_else(|| "-".to_owned(), |peak| (peak >> 20).to_string());
    println!("| {what} | {:.2} | {:.2} | {peak} |", rate.gigabytes_a_second(), rate.took.as_secs_f64());
}

fn read(path: &Path) -> Result<Rate, Box<dyn Error>> {
    let mut buffer = vec![0; BLOCK];
    let (started, mut bytes, mut file) = (Instant::now(), 0, File::open(path)?);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Rate { bytes, took: started.elapsed() }),
            read => bytes += black_box(&buffer[..read]).len() as u64,
        }
    }
}

/// Over 256 MiB again and again, so that no cache holds it.
fn memcpy(bytes: u64) -> Rate {
    let from = vec![1u8; 256 << 20];
    let mut to = vec![2u8; 256 << 20];
    let rounds = bytes.div_ceil(from.len() as u64).max(1);
    let started = Instant::now();
    for _ in 0..rounds {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    }
    Rate { bytes: rounds * from.len() as u64, took: started.elapsed() }
}

fn blake3(bytes: u64) -> Rate {
    let from = vec![1u8; 256 << 20];
    let rounds = bytes.div_ceil(from.len() as u64).max(1);
    let started = Instant::now();
    for _ in 0..rounds {
        black_box(::blake3::hash(black_box(&from)));
    }
    Rate { bytes: rounds * from.len() as u64, took: started.elapsed() }
}

fn durable_write(folder: &Path, bytes: u64) -> Result<Rate, Box<dyn Error>> {
    let folder = folder.join("written");
    fs::create_dir(&folder)?;
    let block = vec![3u8; BLOCK];
    let files = bytes.div_ceil(BLOCK as u64).clamp(1, 64);
    let started = Instant::now();
    for n in 0..files {
        let mut file = File::create(folder.join(n.to_string()))?;
        file.write_all(&block)?;
        file.sync_all()?;
        File::open(&folder)?.sync_all()?;
    }
    let rate = Rate { bytes: files * BLOCK as u64, took: started.elapsed() };
    fs::remove_dir_all(folder)?;
    Ok(rate)
}
