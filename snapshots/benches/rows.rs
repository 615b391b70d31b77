//! What it costs to look rows up in a version that is open, an encoding a line.
//!
//! ```text
//! cargo bench --workspace --bench rows [-- ROWS]
//! ```
//!
//! Batches of 256 random rows of 64 elements are decoded on one thread, out of a table of a few rows, which stays in
//! the processor's cache, and out of one of `ROWS` (a million unless given), which does not; the best of a few rounds
//! is told, in nanoseconds a row. The version lies in the system's folder for temporary files, in the page cache.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_schemas::ids::{ChunkId, SnapshotId};
use weighbridge_snapshots::reader::{Options, Pages, Version};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const WIDTH: u64 = 64;
const FEW: u64 = 256;
const BATCH: usize = 256;
const BATCHES: usize = 2000;
const ROUNDS: usize = 7;

/// Writes a version with a table `t` whose bytes are noise, chunk by chunk.
fn write(folder: &Path, encoding: Encoding, rows: u64) -> Result<Version> {
    let form = Form::plain(encoding);
    let source = weighbridge_schemas::dtype::Dtype::F32;
    let size = usize::try_from(form.row_bytes(WIDTH, source).ok_or("a row has a size")? * rows)?;
    let mut random = fastrand::Rng::with_seed(7);
    let noise: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take((1 << 20) - 3).collect();
    let mut bytes: Vec<u8> = noise.iter().copied().cycle().take(size).collect();
    if matches!(encoding, Encoding::Int8Sbf32) {
        // Plain numbers for scale and bias: what is not finite may take other ways through the processor.
        let width = usize::try_from(WIDTH)?;
        for row in bytes.chunks_exact_mut(width + 8) {
            row[width..].copy_from_slice(&[0.01f32.to_le_bytes(), (-1.0f32).to_le_bytes()].concat());
        }
    }
    let chunks: Vec<_> = bytes
        .chunks(8 << 20)
        .map(|chunk| serde_json::json!({ "id": ChunkId::of(chunk), "size": chunk.len() }))
        .collect();
    let zeros = "00".repeat(32);
    let manifest = serde_json::json!({
        "schema": "weighbridge.snapshot/v1", "model": "m", "run": "r", "step": 1, "format": "safetensors",
        "checkpoint": zeros, "rules": zeros, "encoding_version": 2,
        "files": [{ "name": "t", "size": size, "chunks": chunks }],
        "tensors": [{
            "name": "t", "shape": [rows, WIDTH], "source_dtype": source, "encoding": encoding, "layout": "trailing",
            "file": "t", "begin": 0, "end": size,
        }],
    });
    let manifest = serde_json::to_vec(&manifest)?;
    let version = folder.join(SnapshotId::of(&manifest).to_string());
    fs::create_dir(&version)?;
    fs::write(version.join("snapshot.json"), manifest)?;
    fs::write(version.join("t"), bytes)?;
    Ok(Version::open(&version, &Options { pages: Pages::Present, ..Options::default() })?)
}

/// Nanoseconds a row, of the best round.
fn measure(version: &Version, rows: u64) -> Result<f64> {
    let table = version.table("t")?;
    let mut random = fastrand::Rng::with_seed(3);
    let ids: Vec<u64> = std::iter::repeat_with(|| random.u64(..rows)).take(BATCH * BATCHES).collect();
    let mut decoded = vec![0.0; BATCH * table.width()];
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        for batch in ids.chunks(BATCH) {
            table.decode_rows(batch, &mut decoded)?;
            std::hint::black_box(&decoded);
        }
        best = best.min(began.elapsed());
    }
    Ok(best.as_secs_f64() * 1e9 / ids.len() as f64)
}

#[expect(clippy::print_stdout, reason = "it prints what it measured")]
fn main() -> Result<()> {
    let rows = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1_000_000);
    println!("{:18} {:>12} {:>12}", "ns a row", format!("{FEW} rows"), format!("{rows} rows"));
    for &encoding in Encoding::ALL {
        let folder = tempfile::tempdir()?;
        let few = measure(&write(folder.path(), encoding, FEW)?, FEW)?;
        let many = measure(&write(folder.path(), encoding, rows)?, rows)?;
        println!("{:18} {few:12.1} {many:12.1}", encoding.as_str());
    }
    Ok(())
}
