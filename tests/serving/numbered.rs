//! Checkpoints in which every value is the snapshot's number: a row that belongs to another snapshot shows at once.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::binary::Store;

pub(crate) const TABLES: [&str; 3] = ["bags.kept.weight", "bags.coded.weight", "bags.halved.weight"];
pub(crate) const ROWS: usize = 61;
pub(crate) const WIDTH: usize = 16;

/// Numbers that all encodings of [`policy`] hold without rounding.
pub(crate) const MOST: u16 = 2048;

/// The checkpoint of this number, as a file in `folder`.
pub(crate) fn checkpoint(folder: &Path, number: u16) -> PathBuf {
    assert!(number <= MOST);
    let values = f32::from(number).to_le_bytes().repeat(ROWS * WIDTH);
    let view = || TensorView::new(Dtype::F32, vec![ROWS, WIDTH], &values).unwrap();
    let path = folder.join(format!("numbered-{number}.safetensors"));
    let tables = TABLES.map(|name| (name, view()));
    std::fs::write(&path, safetensors::serialize(tables, None).unwrap()).unwrap();
    path
}

/// Each table in another encoding.
pub(crate) fn policy(store: &Store) -> PathBuf {
    store.policy(
        "rule = [\n{ match = 'bags.coded.weight', encode = 'int8' },\n\
         { match = 'bags.halved.weight', dtype = 'f16' } ]",
    )
}

/// Publishes the checkpoint of this number as the step of this number; the snapshot's id.
pub(crate) fn publish(store: &Store, policy: &Path, number: u16) -> String {
    let checkpoint = checkpoint(store.folder.path(), number);
    let step = number.to_string();
    let more = ["--policy", policy.to_str().unwrap(), "--step", &step, "--no-sync"];
    let published = store.publish(&checkpoint, &more).succeeded();
    std::fs::remove_file(checkpoint).unwrap();
    published["snapshot"].as_str().unwrap().to_owned()
}
