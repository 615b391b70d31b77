//! How fast rows are encoded, statistics and all, and decoded: each figure beside what the machine does with the same
//! input in the same run.
//!
//! ```text
//! cargo bench --workspace --bench kernels [-- [--json] [--rounds N] [--only NAME]]
//! ```
//!
//! GB are 10^9 bytes of binary32 input (of decoding: of output). *memory*: 256 MB of input, encoded as a publish does
//! it, 256 KiB at a time into a buffer of a chunk that is used again. *fresh*: the same, into one new output of the
//! whole table. *cache*: 64 KiB of input over and over. Rounds take turns, and the median counts.

use std::error::Error;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use weighbridge_converter::encode::{Encoder, encoder};
use weighbridge_converter::statistics::BlockStatistics;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};

/// Bytes of input that are encoded at a time.
const STEP: usize = 256 << 10;
/// The size of a chunk.
const CHUNK: usize = 8 << 20;
/// Input in memory, and in cache.
const MEMORY: usize = 256_000_000;
const CACHE: usize = 64 << 10;

const ENCODINGS: [Encoding; 10] = [
    Encoding::Int8Sbf32,
    Encoding::Int8Sbf16,
    Encoding::Int4Sbf16,
    Encoding::Int2Sbf16,
    Encoding::F16,
    Encoding::Bf16,
    Encoding::F8E4m3fn,
    Encoding::F8E5m2,
    Encoding::Hfp8E4b7Max240,
    Encoding::Keep,
];

/// What is measured, over the input.
type Work = Box<dyn Fn(&[u8])>;

/// A piece of work, and its speed in every round.
struct Case {
    name: String,
    width: usize,
    threads: usize,
    place: &'static str,
    bytes: usize,
    work: Work,
    rates: Vec<f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut json, mut rounds, mut only) = (false, 7, String::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = true,
            "--rounds" => {
                let number = arguments.next().ok_or("--rounds takes a number")?;
                rounds = number.parse::<usize>()?.max(1);
            }
            "--only" => only = arguments.next().ok_or("--only takes a name")?,
            _ => return Err("usage: kernels [--json] [--rounds N] [--only NAME]".into()),
        }
    }
    let input = input(MEMORY);
    let mut cases = cases();
    cases.retain(|case| case.name == "read" || case.name.contains(&only));
    for _ in 0..=rounds {
        for case in &mut cases {
            let rounds = MEMORY / case.bytes / 4;
            let started = Instant::now();
            for _ in 0..rounds.max(1) {
                (case.work)(&input);
            }
            let bytes = gigabytes(rounds.max(1) * case.bytes);
            case.rates.push(bytes / started.elapsed().as_secs_f64());
        }
    }
    report(&mut cases, json);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "its output is its purpose")]
fn report(cases: &mut [Case], json: bool) {
    if !json {
        println!("| what | width | threads | where | GB/s, median | min | max | of reading |");
        println!("|---|---|---|---|---|---|---|---|");
    }
    let read = cases.iter_mut().filter(|case| case.name == "read");
    let reading: Vec<_> = read.map(|case| (case.threads, case.median().1)).collect();
    for case in cases {
        let (min, median, max) = case.median();
        let Case { name, width, threads, place, .. } = case;
        if json {
            let described =
                format!(r#""name": "{name}", "width": {width}, "threads": {threads}, "where": "{place}""#);
            println!(r#"{{{described}, "gb_s": {median:.3}}}"#);
        } else {
            let of = reading.iter().find(|(of, _)| of == threads).map_or(f64::NAN, |(_, rate)| median / rate);
            let of = of * 100.0;
            println!(
                "| {name} | {width} | {threads} | {place} | {median:.2} | {min:.2} | {max:.2} | {of:.0} % |"
            );
        }
    }
}

impl Case {
    fn new(
        name: &str,
        width: usize,
        threads: usize,
        place: &'static str,
        work: impl Fn(&[u8]) + 'static,
    ) -> Self {
        let bytes = if place == "cache" { CACHE } else { MEMORY };
        Self { name: name.to_owned(), width, threads, place, bytes, work: Box::new(work), rates: Vec::new() }
    }

    /// The least, the median and the most; the first round warms up.
    fn median(&mut self) -> (f64, f64, f64) {
        let rates = self.rates.get_mut(1..).unwrap_or_default();
        rates.sort_by(f64::total_cmp);
        let at = |at: usize| rates.get(at).copied().unwrap_or(f64::NAN);
        (at(0), at(rates.len() / 2), at(rates.len().saturating_sub(1)))
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for threads in [1, cores()] {
        cases.push(Case::new("read", 0, threads, "memory", move |input| {
            on_threads(threads, input, |part| {
                black_box(read(part));
            });
        }));
        cases.push(Case::new("memcpy", 0, threads, "memory", move |input| {
            on_threads(threads, input, |part| {
                let mut to = vec![0; CHUNK];
                part.chunks(CHUNK).for_each(|chunk| to[..chunk.len()].copy_from_slice(black_box(chunk)));
                black_box(&to);
            });
        }));
        for encoding in ENCODINGS {
            let widths: &[usize] =
                if encoding == Encoding::Int8Sbf32 { &[16, 32, 64, 100, 128, 256] } else { &[64, 128] };
            for &width in widths {
                let form = Form::plain(encoding);
                let work =
                    move |input: &[u8]| on_threads(threads, input, |part| in_chunks(form, width, part));
                cases.push(Case::new(encoding.as_str(), width, threads, "memory", work));
                if threads == 1 && (width == 64 || encoding == Encoding::Int8Sbf32) {
                    let fresh = move |input: &[u8]| drop(black_box(encode(form, width, input)));
                    cases.push(Case::new(encoding.as_str(), width, 1, "fresh", fresh));
                    let cached = move |input: &[u8]| in_chunks(form, width, &input[..CACHE]);
                    cases.push(Case::new(encoding.as_str(), width, 1, "cache", cached));
                }
            }
            let form = Form::plain(encoding);
            let rows = encode(form, 64, &input(CACHE));
            if threads == 1 {
                let decode = move |_: &[u8]| decode(form, &rows);
                cases.push(Case::new(&format!("decode {}", encoding.as_str()), 64, 1, "cache", decode));
            }
        }
    }
    cases
}

/// As trained embeddings are: about normal, with a deviation of 0.05.
fn input(size: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(size);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let sum: u16 = state.to_le_bytes().into_iter().map(u16::from).sum();
        bytes.extend(
            ((f32::from(sum) - 1020.0) / 4180.0 * (1.0 + f32::from((state & 0xFF) as u8) / 1e4))
                .to_le_bytes(),
        );
    }
    bytes
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn on_threads(threads: usize, input: &[u8], work: impl Fn(&[u8]) + Sync) {
    // Parts of whole rows of any width that is measured.
    let part = (input.len() / threads).next_multiple_of(256 * 4 * 25);
    std::thread::scope(|scope| {
        let mut parts = input.chunks(part);
        let own = parts.next();
        for part in parts {
            scope.spawn(|| work(part));
        }
        own.map(&work);
    });
}

fn read(bytes: &[u8]) -> u64 {
    let (chunks, _) = bytes.as_chunks::<64>();
    let mut sums = [0u64; 8];
    for chunk in chunks {
        let (words, _) = chunk.as_chunks::<8>();
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum ^= u64::from_le_bytes(*word);
        }
    }
    sums.into_iter().fold(0, |all, sum| all ^ sum)
}

fn new(form: Form, width: usize) -> Box<dyn Encoder> {
    encoder(form, Dtype::F32, width).unwrap_or_else(|| unreachable!("binary32 has every encoding"))
}

/// Buffers of chunks that nobody uses at the moment.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Encodes as a publish does it.
fn in_chunks(form: Form, width: usize, input: &[u8]) {
    let encoder = new(form, width);
    let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let mut chunk = spare.unwrap_or_else(|| vec![0; CHUNK]);
    let mut statistics = BlockStatistics::new(0);
    let mut at = 0;
    for rows in input.chunks(step(&*encoder)) {
        let size = encoder.encoded_bytes(rows.len());
        at = if at + size > chunk.len() { 0 } else { at };
        encoder.encode(rows, &mut chunk[at..at + size], &mut statistics);
        at += size;
    }
    black_box(statistics);
    SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(black_box(chunk));
}

fn encode(form: Form, width: usize, input: &[u8]) -> Vec<u8> {
    let encoder = new(form, width);
    let mut out = vec![0; encoder.encoded_bytes(input.len())];
    let mut statistics = BlockStatistics::new(0);
    let mut at = 0;
    for rows in input.chunks(step(&*encoder)) {
        let size = encoder.encoded_bytes(rows.len());
        encoder.encode(rows, &mut out[at..at + size], &mut statistics);
        at += size;
    }
    black_box(statistics);
    out
}

fn step(encoder: &dyn Encoder) -> usize {
    STEP / encoder.source_row_bytes() * encoder.source_row_bytes()
}

fn decode(form: Form, rows: &[u8]) {
    let mut decoded = [0.0; 64];
    let size = new(form, 64).encoded_bytes(64 * 4);
    for row in rows.chunks_exact(size) {
        assert!(form.decode_row(Dtype::F32, row, &mut decoded));
        black_box(&mut decoded);
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}
