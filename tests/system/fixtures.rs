//! Checkpoints that other libraries wrote.

use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// `tests/data/`.
pub(crate) fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// The folders that hold fixtures: `tests/data/`, and the one that the environment names.
pub(crate) fn roots() -> Vec<PathBuf> {
    let mut roots = vec![data()];
    roots.extend(std::env::var_os("WEIGHBRIDGE_FIXTURES").map(PathBuf::from));
    roots
}

/// A real TorchRec checkpoint: two ranks, tables sharded by table, by row and by column.
pub(crate) fn torchrec() -> PathBuf {
    data().join("checkpoints/dcp_torchrec_2rank")
}

/// The fixtures that hold whole checkpoints: all but `hostile`, and the layout of torch.save that is refused.
pub(crate) fn checkpoints() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in roots() {
        for entry in std::fs::read_dir(root.join("checkpoints")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.join("expected.json").is_file() && name != "hostile" && name != "pt_legacy" {
                found.push(path);
            }
        }
    }
    assert!(found.len() >= 12);
    found
}

/// The tensors that a reader has to give, and the names of those that it may refuse.
pub(crate) fn expected(checkpoint: &Path) -> (serde_json::Map<String, Value>, Vec<String>) {
    let expected = read_json(&checkpoint.join("expected.json"));
    let mut tensors = expected["tensors"].as_object().unwrap().clone();
    let refusable = expected["refusable"].as_array().into_iter().flatten();
    let refusable: Vec<_> = refusable.map(|name| name.as_str().unwrap().to_owned()).collect();
    tensors.retain(|name, _| !refusable.contains(name));
    (tensors, refusable)
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Copies a folder of files and folders.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
