//! The checkpoints that are published: the same tables in every format.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use weighbridge_tests::tables::{self, Cut, Pattern, Table};
use weighbridge_tests::torch;

use crate::Failure;

/// Large tables of a checkpoint; half of the bytes are in tables of each width.
const LARGE_TABLES: u64 = 16;
const WIDTHS: [u64; 2] = [64, 128];
/// Small tables: 4 rows and twice as many, up to 1024, of this width, so 256 B to 64 KiB.
const SMALL_WIDTH: u64 = 16;
const SMALL_ROWS: u64 = 4;
const SMALL_STEPS: u64 = 9;

/// A checkpoint's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// One safetensors file
    Safetensors,
    /// One file of torch.save
    TorchSave,
    /// Distributed Checkpoint of 2 ranks, each with half of the rows
    #[value(name = "dcp-2-rows")]
    Rows2,
    /// Distributed Checkpoint of 8 ranks, each with an eighth of the rows
    #[value(name = "dcp-8-rows")]
    Rows8,
    /// Distributed Checkpoint of 2 ranks, each with half of the columns
    #[value(name = "dcp-2-columns")]
    Columns2,
    /// Distributed Checkpoint of 8 ranks, each with an eighth of the columns
    #[value(name = "dcp-8-columns")]
    Columns8,
}

impl Format {
    pub(crate) const ALL: [Self; 6] =
        [Self::Safetensors, Self::TorchSave, Self::Rows2, Self::Rows8, Self::Columns2, Self::Columns8];
}

/// What a checkpoint consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Tensors {
    /// 16 tables, of 64 and of 128 columns
    Large,
    /// As many tables of 256 B to 64 KiB as it takes
    Small,
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is no size: write 64MiB or 4GiB");
        let units = [("MiB", 20), ("GiB", 30)];
        let (number, shift) = units
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
            .ok_or_else(wrong)?;
        let number: u64 = number.trim().parse().map_err(|_| wrong())?;
        let bytes = number.checked_mul(1 << shift).filter(|bytes| (1 << 20..=1 << 40).contains(bytes));
        bytes.map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 30) == 0 => write!(out, "{} GiB", bytes >> 30),
            bytes => write!(out, "{} MiB", bytes >> 20),
        }
    }
}

/// A checkpoint on the disk.
pub(crate) struct Checkpoint {
    /// What it is, for a row of a table.
    pub(crate) label: String,
    /// A file, or a folder.
    pub(crate) path: PathBuf,
    /// Its files.
    pub(crate) files: Vec<PathBuf>,
    /// Bytes of its tables.
    pub(crate) bytes: u64,
    /// Bytes of its tables, by width.
    pub(crate) by_width: Vec<(u64, u64)>,
}

impl Checkpoint {
    pub(crate) fn remove(self) -> Result<(), Failure> {
        Ok(if self.path.is_dir() { fs::remove_dir_all(self.path) } else { fs::remove_file(self.path) }?)
    }
}

/// Writes a checkpoint into `folder`, and has it reach the disk, so that nothing measured later waits for it.
pub(crate) fn make(
    folder: &Path,
    format: Format,
    tensors: Tensors,
    size: Size,
) -> Result<Checkpoint, Failure> {
    let pattern = Pattern::new();
    let shapes = match tensors {
        Tensors::Large => large(size.0),
        Tensors::Small => small(size.0),
    };
    let name = |number: usize| format!("model.ebc.embedding_bags.t{number:02}.weight");
    let names: Vec<_> = (0..shapes.len()).map(name).collect();
    let tables =
        names.iter().zip(&shapes).map(|(name, &(rows, width))| Table::dense(name, rows, width, &pattern));
    let tables: Vec<_> = tables.collect();
    let path = folder.join(match format {
        Format::Safetensors => "model.safetensors",
        Format::TorchSave => "model.pt",
        _ => "checkpoint",
    });
    let distributed = |cut| {
        fs::create_dir(&path)?;
        torch::distributed(&path, &tables, cut)
    };
    match format {
        Format::Safetensors => tables::safetensors(&path, &tables),
        Format::TorchSave => torch::state_dict(&path, &tables),
        Format::Rows2 => distributed(Cut::Rows(2)),
        Format::Rows8 => distributed(Cut::Rows(8)),
        Format::Columns2 => distributed(Cut::Columns(2)),
        Format::Columns8 => distributed(Cut::Columns(8)),
    }?;
    let files = if path.is_dir() { files_below(&path)? } else { vec![path.clone()] };
    for file in &files {
        File::open(file)?.sync_all()?;
    }
    let bytes_of =
        |wanted: &u64| tables.iter().filter(|table| table.width == *wanted).map(Table::bytes).sum();
    let by_width: Vec<(u64, u64)> =
        [SMALL_WIDTH, WIDTHS[0], WIDTHS[1]].iter().map(|width| (*width, bytes_of(width))).collect();
    let bytes = by_width.iter().map(|(_, bytes)| bytes).sum();
    Ok(Checkpoint { label: label(format, tables.len(), size), path, files, bytes, by_width })
}

fn label(format: Format, tables: usize, size: Size) -> String {
    let format = match format {
        Format::Safetensors => "safetensors",
        Format::TorchSave => ".pt",
        Format::Rows2 => "DCP, 2 ranks, by rows",
        Format::Rows8 => "DCP, 8 ranks, by rows",
        Format::Columns2 => "DCP, 2 ranks, by columns",
        Format::Columns8 => "DCP, 8 ranks, by columns",
    };
    format!("{format}, {size}, {tables} tables")
}

/// Rows and width of each large table.
fn large(bytes: u64) -> Vec<(u64, u64)> {
    let widths = WIDTHS.iter().cycle().take(usize::try_from(LARGE_TABLES).unwrap_or(0));
    widths.map(|&width| (bytes / LARGE_TABLES / (width * 4), width)).collect()
}

/// Rows and width of each small table.
fn small(bytes: u64) -> Vec<(u64, u64)> {
    let mut left = bytes;
    let sizes = (0..SMALL_STEPS).cycle().map(|step| SMALL_ROWS << step);
    let fit = sizes.map_while(|rows| {
        left = left.checked_sub(rows * SMALL_WIDTH * 4)?;
        Some((rows, SMALL_WIDTH))
    });
    fit.collect()
}

/// Every file below `folder`.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}
