//! Replays the corpora in `fuzz/corpus/`, and a few thousand changes of each seed's bytes that are the same in every
//! run.

use std::path::{Path, PathBuf};

use super::{TARGETS, Target};

/// How many changed inputs each target gets, in all.
const CHANGED: u64 = 4000;
/// Largest seed, in bytes: the corpora are in every clone.
const SEED_BYTES: usize = 64 << 10;

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

/// The seeds of a target by name, sorted.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = corpora().join(target);
    let mut seeds: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    seeds.sort();
    seeds
}

/// xorshift: cheap, and the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, or 0.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 16).unwrap() % bound.max(1)
    }

    /// One to eight changes of `bytes`.
    fn change(&mut self, bytes: &mut Vec<u8>) {
        const TELLING: [&[u8]; 9] =
            [b"\0", b"\xff", b"\xff\xff\xff\xff", b"\x7f", b"0", b"9", b"-1", b"\"", b"18446744073709551615"];
        for _ in 0..=self.below(8) {
            let at = self.below(bytes.len());
            let end = (at + self.below(32)).min(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..end)),
                2 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
                3 => drop(
                    bytes.splice(at..end.min(at + 4), TELLING[self.below(TELLING.len())].iter().copied()),
                ),
                4 => bytes[at..end].iter_mut().for_each(|byte| *byte = byte.wrapping_add(1)),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = self.next().to_be_bytes()[0]),
            }
        }
    }
}

fn replay((name, function): Target) {
    let seeds = seeds(name);
    assert!(!seeds.is_empty(), "{name} has no corpus");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    function(&[]);
    for (seed, bytes) in &seeds {
        assert!(bytes.len() <= SEED_BYTES, "{name}/{seed} has {} bytes; at most {SEED_BYTES}", bytes.len());
        function(bytes);
    }
    for turn in 0..CHANGED {
        let mut bytes = seeds[usize::try_from(turn).unwrap() % seeds.len()].1.clone();
        random.change(&mut bytes);
        function(&bytes);
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(*TARGETS.iter().find(|(name, _)| *name == stringify!($name)).unwrap());
        })*

        /// Targets have a replay above, and a program in `fuzz/`.
        #[test]
        fn every_target_is_replayed() {
            let names: Vec<_> = TARGETS.iter().map(|&(name, _)| name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            for name in names {
                let program = corpora().join(format!("../fuzz_targets/{name}.rs"));
                assert!(program.is_file(), "{}", program.display());
            }
        }
    };
}

replays! {
    header index pickle_metadata pickle_tensors zip torch_save dcp_metadata
    policy checkpoint_manifest snapshot_manifest channel_entry envelope report queued encoders
}
