//! What this machine does with bytes: the floor under every figure, measured in the same run.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use weighbridge_converter::encode::encoder;
use weighbridge_converter::statistics::BlockStatistics;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_tests::tables::Pattern;

use crate::checkpoints::{Checkpoint, files_below};
use crate::{Failure, Sync};

/// More than caches hold.
const MEMORY: usize = 256 << 20;
/// What publish has in hand at a time.
const PIECE: usize = 256 << 10;
/// What a reading thread takes next, and the size of one file of several that are written.
const CHUNK: usize = 8 << 20;
/// Writers of several files at once: syncs of several may overlap.
const WRITERS: usize = 4;
/// The most that is written to measure how fast writing is.
const MOST_WRITTEN: u64 = 1 << 30;

/// Bytes, and the time that they took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate {
    bytes: u64,
    took: Duration,
}

impl Rate {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    pub(crate) fn gigabytes_a_second(self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64().max(1e-9) / 1e9
    }

    /// The seconds that `bytes` take.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    pub(crate) fn seconds(self, bytes: u64) -> f64 {
        bytes as f64 / 1e9 / self.gigabytes_a_second()
    }

    fn of(bytes: u64, work: impl FnOnce() -> Result<(), Failure>) -> Result<Self, Failure> {
        let started = Instant::now();
        work()?;
        Ok(Self { bytes, took: started.elapsed() })
    }
}

/// Memory and a folder to measure with.
pub(crate) struct Machine {
    from: Vec<u8>,
    to: Vec<u8>,
    folder: PathBuf,
}

impl Machine {
    pub(crate) fn new(folder: &Path) -> Result<Self, Failure> {
        let from = Pattern::new().bytes(MEMORY as u64 / 4);
        Ok(Self { from, to: vec![1; MEMORY], folder: folder.to_owned() })
    }

    /// A copy of memory into memory that was touched before.
    pub(crate) fn memcpy(&mut self, threads: usize) -> Result<Rate, Failure> {
        let part = self.from.len().div_ceil(threads);
        let (from, to) = (&self.from, &mut self.to);
        Rate::of(MEMORY as u64, || {
            std::thread::scope(|scope| {
                for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
                    scope.spawn(move || black_box(to).copy_from_slice(black_box(from)));
                }
            });
            Ok(())
        })
    }

    /// Reads memory: a sum of all of its words.
    pub(crate) fn sum(&self, threads: usize) -> Result<Rate, Failure> {
        self.in_parts(threads, |part| {
            let words = part.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            black_box(words.fold(0, u64::wrapping_add));
        })
    }

    pub(crate) fn blake3(&self, threads: usize) -> Result<Rate, Failure> {
        self.in_parts(threads, |part| {
            let mut hasher = blake3::Hasher::new();
            part.chunks(PIECE).for_each(|piece| {
                hasher.update(piece);
            });
            black_box(hasher.finalize());
        })
    }

    /// Encodes tables of `width` and hashes what comes out, as publish does it, without reading or storing anything.
    pub(crate) fn encode_and_hash(
        &self,
        encoding: Encoding,
        width: u64,
        threads: usize,
    ) -> Result<Rate, Failure> {
        let encoder = encoder(Form::plain(encoding), Dtype::F32, usize::try_from(width)?)
            .ok_or_else(|| format!("{} does not take a width of {width}", encoding.as_str()))?;
        self.in_parts(threads, |part| {
            let (mut hasher, mut statistics) = (blake3::Hasher::new(), BlockStatistics::new(0));
            let mut encoded = Vec::new();
            for rows in part.chunks(PIECE) {
                encoded.resize(encoder.encoded_bytes(rows.len()), 0);
                encoder.encode(rows, &mut encoded, &mut statistics);
                hasher.update(&encoded);
            }
            black_box((hasher.finalize(), statistics));
        })
    }

    fn in_parts(
        &self,
        threads: usize,
        work: impl Fn(&[u8]) + Send + std::marker::Sync,
    ) -> Result<Rate, Failure> {
        // Parts begin where rows do.
        let part = self.from.len().div_ceil(threads).next_multiple_of(PIECE);
        let work = &work;
        Rate::of(MEMORY as u64, || {
            std::thread::scope(|scope| {
                for part in self.from.chunks(part) {
                    scope.spawn(move || work(black_box(part)));
                }
            });
            Ok(())
        })
    }

    /// Reads a checkpoint's files from the page cache, as publish does it: positioned reads of some KiB.
    pub(crate) fn read(&self, checkpoint: &Checkpoint, threads: usize) -> Result<Rate, Failure> {
        let mut chunks = Vec::new();
        for path in &checkpoint.files {
            let file = File::open(path)?;
            let length = file.metadata()?.len();
            let file = std::sync::Arc::new(file);
            let begins = (0..length).step_by(CHUNK);
            chunks.extend(begins.map(|begin| (file.clone(), begin, length.min(begin + CHUNK as u64))));
        }
        let bytes = chunks.iter().map(|(_, begin, end)| end - begin).sum();
        Rate::of(bytes, || {
            in_threads(threads, chunks.len(), |taken| {
                let mut buffer = vec![0; PIECE];
                while let Some((file, begin, end)) = chunks.get(taken()) {
                    let mut at = *begin;
                    while at < *end {
                        let want = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                        let piece = buffer.get_mut(..want).unwrap_or_default();
                        file.read_exact_at(piece, at)?;
                        black_box(&piece);
                        at += want as u64;
                    }
                }
                Ok(())
            })
        })
    }

    /// Writes about as much as `bytes`: one large file, or several of 8 MiB by several threads, whichever is faster.
    /// With durability, every file is synced, and their folder.
    pub(crate) fn write(&self, bytes: u64, sync: Sync) -> Result<Rate, Failure> {
        let bytes = bytes.clamp(1, MOST_WRITTEN);
        let (one, several) = (self.write_files(1, bytes, sync)?, self.write_files(WRITERS, bytes, sync)?);
        Ok(if one.gigabytes_a_second() > several.gigabytes_a_second() { one } else { several })
    }

    pub(crate) fn write_files(&self, writers: usize, bytes: u64, sync: Sync) -> Result<Rate, Failure> {
        let folder = self.folder.join("written");
        fs::create_dir(&folder)?;
        let length = if writers == 1 { bytes } else { bytes.min(CHUNK as u64) };
        let files = usize::try_from(bytes.div_ceil(length))?;
        let rate = Rate::of(length * files as u64, || {
            in_threads(writers, files, |taken| {
                loop {
                    let number = taken();
                    if number >= files {
                        return Ok(());
                    }
                    write_file(&folder.join(number.to_string()), &self.from, length, sync)?;
                }
            })?;
            if sync == Sync::On {
                File::open(&folder)?.sync_all()?;
            }
            Ok(())
        })?;
        self.clear(&folder)?;
        Ok(rate)
    }

    /// `cp -r` of a folder; with durability, every file is synced behind it.
    pub(crate) fn copy(&self, from: &Path, sync: Sync) -> Result<Rate, Failure> {
        let to = self.folder.join("copied");
        let lengths = files_below(from)?
            .iter()
            .map(|file| Ok(fs::metadata(file)?.len()))
            .collect::<io::Result<Vec<_>>>()?;
        let rate = Rate::of(lengths.iter().sum(), || {
            if !std::process::Command::new("cp").arg("-r").arg(from).arg(&to).status()?.success() {
                return Err("cp failed".into());
            }
            if sync == Sync::On {
                for file in files_below(&to)? {
                    File::open(file)?.sync_all()?;
                }
                File::open(&to)?.sync_all()?;
            }
            Ok(())
        })?;
        self.clear(&to)?;
        Ok(rate)
    }

    /// Removes a folder, and waits for the disk, so that what is measured next does not.
    pub(crate) fn clear(&self, folder: &Path) -> Result<(), Failure> {
        fs::remove_dir_all(folder)?;
        Ok(rustix::fs::syncfs(File::open(&self.folder)?)?)
    }
}

/// Has `threads` threads work, each asking for the number of what it takes next; `most` is how much there is.
fn in_threads(
    threads: usize,
    most: usize,
    work: impl Fn(&dyn Fn() -> usize) -> io::Result<()> + Send + std::marker::Sync,
) -> Result<(), Failure> {
    let next = AtomicUsize::new(0);
    let take = || next.fetch_add(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.min(most)).map(|_| scope.spawn(|| work(&take))).collect();
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

fn write_file(path: &Path, from: &[u8], length: u64, sync: Sync) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut left = length;
    while left > 0 {
        let step = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        file.write_all(from.get(..step).unwrap_or_default())?;
        left -= step as u64;
    }
    if sync == Sync::On { file.sync_all() } else { Ok(()) }
}
