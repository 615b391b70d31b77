//! What it costs to gather rows, a kind of checkpoint a line: beside it, what plain reads of the same bytes cost.
//!
//! ```text
//! cargo bench --workspace --bench gather [-- --json] [--mib N] [ONLY]
//! ```
//!
//! Every line reads the same file, which lies in the page cache, 256 KiB of rows at a time as a publish does, on one
//! thread; the best of a few rounds is told, in seconds of that thread for a gigabyte. The layouts are made up over
//! the file's bytes, so nothing but reading, copying and hashing is measured.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use weighbridge_converter::checkpoint::{Location, Record, Slice, Strided, Tensor};
use weighbridge_converter::shape::gather::{Scratch, read_elements};
use weighbridge_converter::source::{Source, SourceFile};
use weighbridge_schemas::checkpoint::ManifestFile;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::ids::FileDigest;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What is read at a time, in bytes.
const STEP: usize = 256 << 10;
const ROUNDS: usize = 5;
const NAME: &str = "data";

/// How the slices of a table lie, and what is checked of their bytes.
#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    width: u64,
    /// The slices: so many by rows, and so many by columns.
    grid: (u64, u64),
    /// Whether a slice's columns lie one after another.
    transposed: bool,
    /// How many bytes lie in front of the first slice.
    offset: u64,
    /// Whether every slice is a zip record with a checksum.
    records: bool,
    /// Whether the file's BLAKE3 is declared.
    declared: bool,
}

const ROWS: Layout = Layout {
    name: "safetensors: one dense slice",
    width: 64,
    grid: (1, 1),
    transposed: false,
    offset: 4096,
    records: false,
    declared: false,
};

const COLUMNS: Layout = Layout { grid: (1, 2), offset: 999, ..ROWS };

const LAYOUTS: &[Layout] = &[
    ROWS,
    Layout { name: "the same, BLAKE3 declared", declared: true, ..ROWS },
    Layout { name: "one dense slice at an odd byte", offset: 999, ..ROWS },
    Layout { name: "8 ranks by rows, odd bytes", grid: (8, 1), offset: 999, ..ROWS },
    Layout { name: "8 ranks by rows, zip records", grid: (8, 1), offset: 999, records: true, ..ROWS },
    Layout {
        name: "the same, BLAKE3 declared",
        grid: (8, 1),
        offset: 999,
        records: true,
        declared: true,
        ..ROWS
    },
    Layout { name: "4096 slices by rows", grid: (4096, 1), offset: 9, ..ROWS },
    Layout { name: "2 ranks by columns of 64", ..COLUMNS },
    Layout { name: "8 ranks by columns of 64", grid: (1, 8), ..COLUMNS },
    Layout { name: "8 ranks by columns of 64, zip records", grid: (1, 8), records: true, ..COLUMNS },
    Layout { name: "2 ranks by columns of 128", width: 128, ..COLUMNS },
    Layout { name: "8 ranks by columns of 128", width: 128, grid: (1, 8), ..COLUMNS },
    Layout { name: "8 ranks by columns of 120", width: 120, grid: (1, 8), ..COLUMNS },
    Layout { name: "grid of 4 by 2, zip records", grid: (4, 2), records: true, ..COLUMNS },
    Layout { name: "64 ranks by columns of 64: single elements", grid: (1, 64), ..COLUMNS },
    Layout { name: "transposed", transposed: true, ..ROWS },
    Layout { name: "transposed, zip records", transposed: true, records: true, ..ROWS },
];

impl Layout {
    /// The table over a file of `bytes`.
    fn tensor(&self, file: &Arc<SourceFile>, bytes: &[u8]) -> Result<Tensor> {
        let (down, across) = self.grid;
        let columns = self.width / across;
        // A power of two of rows, as tables have them; that all ranks write the same is what costs caches most.
        let rows = 1 << ((file.len() - (down * across + 1) * self.offset) / (self.width * 4 * down)).ilog2();
        let length = rows * columns * 4;
        let mut slices = Vec::new();
        for number in 0..down * across {
            // Some bytes lie between slices, as the end of one archive and the start of the next do.
            let offset = self.offset + number * (length + self.offset % 1000);
            let strides = if self.transposed { vec![1, rows] } else { vec![columns, 1] };
            let stored = bytes.get(usize::try_from(offset)?..usize::try_from(offset + length)?);
            let record = self.records.then(|| stored.map(crc32fast::hash)).flatten();
            let record = record.map(|crc32| Record { offset, length, crc32 });
            let storage = Strided { offset, strides, record };
            let location = if self.transposed || self.records || across > 1 {
                Location::Strided { file: Arc::clone(file), storage }
            } else {
                Location::Dense { file: Arc::clone(file), offset }
            };
            let offsets = vec![number / across * rows, number % across * columns];
            slices.push(Slice { offsets, sizes: vec![rows, columns], location });
        }
        Ok(Tensor { name: "t".parse()?, dtype: Dtype::F32, shape: vec![rows * down, self.width], slices })
    }

    /// Seconds of this thread for a gigabyte, in the best of a few rounds.
    fn measure(&self, folder: &Path, bytes: &[u8], digest: FileDigest) -> Result<f64> {
        best(|| {
            // Anew each round: what was hashed once is not hashed again.
            let source = Source::open(folder)?;
            let declared =
                ManifestFile { path: NAME.to_owned(), size: bytes.len() as u64, blake3: Some(digest) };
            let source = if self.declared { source.declare(&[declared])? } else { source };
            let tensor = self.tensor(&source.file(NAME)?, bytes)?;
            let step = STEP as u64 / (self.width * 4) * self.width;
            let mut out = vec![0; STEP];
            let mut scratch = Scratch::default();
            let started = seconds();
            let mut first = 0;
            while first < tensor.elements() {
                let count = step.min(tensor.elements() - first);
                let rows = out.get_mut(..usize::try_from(count * 4)?).ok_or("a step is too large")?;
                read_elements(&tensor, first, rows, &mut scratch)?;
                first += count;
            }
            Ok((seconds() - started, tensor.bytes()))
        })
    }
}

/// Plain reads of the half of a file that the tables lie in, `step` bytes at a time.
fn plain(file: &File, step: usize) -> Result<f64> {
    // Kernels copy by one instruction, which takes nearly twice as long where the target lies a few bytes further into
    // its page than the source does, as what large vectors hold does.
    let mut out = vec![0; step + 64];
    let start = out.as_ptr().align_offset(64);
    let out = out.get_mut(start..start + step).ok_or("a buffer that cannot be aligned")?;
    let length = file.metadata()?.len() / 2;
    best(|| {
        let started = seconds();
        for offset in (0..length).step_by(step) {
            file.read_exact_at(out, offset)?;
        }
        Ok((seconds() - started, length))
    })
}

/// Small tensors one by one: seconds for a million of them.
fn small(folder: &Path) -> Result<f64> {
    let source = Source::open(folder)?;
    let file = source.file(NAME)?;
    let tensors = (0..10_000u64).map(|number| {
        let location = Location::Dense { file: Arc::clone(&file), offset: number * 64 };
        let slices = vec![Slice { offsets: vec![0, 0], sizes: vec![4, 4], location }];
        Ok(Tensor { name: format!("t{number}").parse()?, dtype: Dtype::F32, shape: vec![4, 4], slices })
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let mut scratch = Scratch::default();
    let mut out = [0; 64];
    best(|| {
        let started = seconds();
        for tensor in &tensors {
            read_elements(tensor, 0, &mut out, &mut scratch)?;
        }
        // A hundredth of what is told: a million of them as a gigabyte.
        Ok((seconds() - started, 10_000_000))
    })
}

/// Seconds for a gigabyte in the best of a few rounds, each of which tells its seconds and bytes.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn best(mut round: impl FnMut() -> Result<(f64, u64)>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let (seconds, bytes) = round()?;
        best = best.min(seconds / bytes as f64 * 1e9);
    }
    Ok(best)
}

/// What this thread has worked so far, in the kernel too.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes that no two places have in common.
fn noise(mib: usize) -> Vec<u8> {
    let mut state: u64 = 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        state.to_le_bytes()
    };
    (0..mib << 17).flat_map(|_| next()).collect()
}

#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn main() -> Result<()> {
    let (mut json, mut mib, mut only) = (false, 256, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo adds the first to every bench.
            "--bench" => {}
            "--json" => json = true,
            "--mib" => mib = arguments.next().ok_or("--mib wants a number")?.parse()?,
            other => other.clone_into(&mut only),
        }
    }
    let folder = tempfile::tempdir()?;
    let bytes = noise(mib);
    let digest = FileDigest::from_bytes(*blake3::hash(&bytes).as_bytes());
    File::create_new(folder.path().join(NAME))?.write_all(&bytes)?;
    let file = File::open(folder.path().join(NAME))?;
    let base = plain(&file, STEP)?;
    let row = |name: &str, seconds: f64| {
        if json {
            println!("{{\"layout\":\"{name}\",\"seconds\":{seconds:.4}}}");
        } else {
            println!("| {name} | {seconds:.3} | {:.2} |", seconds / base);
        }
    };
    if !json {
        println!("| layout | seconds a GB | of plain reads |\n|---|---|---|");
    }
    row("plain reads of 256 KiB", base);
    row("plain reads of 1 MiB", plain(&file, 1 << 20)?);
    for layout in LAYOUTS.iter().filter(|layout| layout.name.contains(&only)) {
        row(layout.name, layout.measure(folder.path(), &bytes, digest)?);
    }
    row("small tensors: seconds for a million", small(folder.path())?);
    Ok(())
}
