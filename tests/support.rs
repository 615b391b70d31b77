//! What the tests and the load program share: synthetic checkpoints of any size, what a process or a look-up takes, a
//! real RabbitMQ, real object stores.

use std::path::Path;

pub mod buckets;
pub mod certificates;
pub mod lookups;
pub mod packages;
mod ports;
pub mod process;
pub mod proxy;
pub mod rabbit;
pub mod tables;
pub mod torch;

pub use process::peak_memory;
use tables::{Pattern, Table};

/// Writes a safetensors file of `tables` embedding tables of `rows` x `width` F32, without holding it in memory. The
/// values are the same in every run.
///
/// # Panics
/// Where the file cannot be written.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
pub fn synthetic(path: &Path, tables: usize, rows: usize, width: usize) {
    let pattern = Pattern::new();
    let names: Vec<_> =
        (0..tables).map(|table| format!("model.ebc.embedding_bags.t{table:02}.weight")).collect();
    let tables: Vec<_> =
        names.iter().map(|name| Table::dense(name, rows as u64, width as u64, &pattern)).collect();
    tables::safetensors(path, &tables).unwrap();
}
