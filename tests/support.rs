//! What the tests and the load program share: synthetic checkpoints of any size, and a process's peak memory.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

pub mod torch;

/// Writes a safetensors file of `tables` embedding tables of `rows` x `width` F32, without holding it in memory. The
/// values are uniform in -0.5 to 0.5, the same in every run.
///
/// # Panics
/// Where the file cannot be written.
#[expect(clippy::unwrap_used, reason = "only tests and the load program use it")]
pub fn synthetic(path: &Path, tables: usize, rows: usize, width: usize) {
    let size = rows * width * 4;
    let mut header = serde_json::Map::new();
    for table in 0..tables {
        let name = format!("model.ebc.embedding_bags.t{table:02}.weight");
        let offsets = [table * size, (table + 1) * size];
        header.insert(name, json!({ "dtype": "F32", "shape": [rows, width], "data_offsets": offsets }));
    }
    let header = Value::Object(header).to_string();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut row = Vec::with_capacity(width * 4);
    for _ in 0..tables * rows {
        row.clear();
        for _ in 0..width {
            // xorshift: cheap, and different in every row.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            row.extend(unit(state).to_le_bytes());
        }
        file.write_all(&row).unwrap();
    }
    file.flush().unwrap();
}

/// The upper 24 bits as a number from -0.5 to 0.5: exact in binary32.
#[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / 16_777_216.0 - 0.5
}

/// Runs `command` to its end, its standard output thrown away: how it ended, and the peak of its resident memory in
/// bytes, as the kernel counts it (`VmHWM`).
///
/// # Errors
/// Where the process cannot be started.
pub fn peak_memory(command: &mut Command) -> io::Result<(ExitStatus, u64)> {
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = kibibytes.map_or(peak, |kibibytes| peak.max(kibibytes << 10));
        if let Some(ended) = child.try_wait()? {
            return Ok((ended, peak));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
