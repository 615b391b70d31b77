//! The checkpoints that the load program measures: the same tables in every format.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;
use weighbridge_tests::tables::{Cut, Pattern, Table, safetensors as write_safetensors};
use weighbridge_tests::torch::{distributed, state_dict};

use crate::binary::Store;
use crate::tensors::tensors;

/// The snapshot of a checkpoint: its files' chunks, and its tensors' bytes.
fn published(checkpoint: &Path) -> (Value, BTreeMap<String, Vec<u8>>) {
    let store = Store::new();
    store.publish(checkpoint, &[]).succeeded();
    store.fetch("m").succeeded();
    let manifest =
        store.objects("models/m/snapshots").into_iter().find(|path| path.extension().is_none()).unwrap();
    let manifest: Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
    let tensors = tensors(&store.served().join("current"));
    (manifest["files"].clone(), tensors.into_iter().map(|(name, tensor)| (name, tensor.bytes)).collect())
}

/// Rows and columns that neither 2 nor 8 divides; one table is of more than one chunk, and one has fewer rows than
/// there are ranks.
#[test]
fn the_same_tables_give_the_same_chunks_in_every_format() {
    let pattern = Pattern::new();
    let table = |name, rows, width| Table::dense(name, rows, width, &pattern);
    let tables = [
        table("m.embedding_bags.a.weight", 150_001, 61),
        table("m.embedding_bags.b.weight", 1001, 7),
        table("m.over.weight", 3, 33),
    ];
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_safetensors(&at("m.safetensors"), &tables).unwrap();
    state_dict(&at("m.pt"), &tables).unwrap();
    let cuts = [Cut::Rows(2), Cut::Rows(8), Cut::Columns(2), Cut::Columns(8)];
    let folders = cuts.map(|cut| at(&format!("{cut:?}")));
    for (cut, folder) in cuts.iter().zip(&folders) {
        std::fs::create_dir(folder).unwrap();
        distributed(folder, &tables, *cut).unwrap();
    }
    let (files, tensors) = published(&at("m.safetensors"));
    assert!(files.to_string().matches("chunk").count() > 0, "{files}");
    let written = std::fs::read(at("m.safetensors")).unwrap();
    let written = SafeTensors::deserialize(&written).unwrap();
    assert_eq!(tensors["m.over.weight"], written.tensor("m.over.weight").unwrap().data());
    for checkpoint in [at("m.pt")].iter().chain(&folders) {
        let (other_files, other_tensors) = published(checkpoint);
        assert_eq!(other_tensors, tensors, "{}", checkpoint.display());
        assert_eq!(other_files, files, "{}", checkpoint.display());
    }
}
