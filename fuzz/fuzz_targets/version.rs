//! Fuzzes `weighbridge_snapshots::reader::fuzzing::version`.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

/// A folder of this process alone, in memory where the system has such a place.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let memory = PathBuf::from("/dev/shm");
        let above = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let folder = above.join(format!("weighbridge-fuzz-version-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).expect("a folder for versions");
        folder
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    weighbridge_snapshots::reader::fuzzing::version(folder(), input).expect("the folder can be written");
});
