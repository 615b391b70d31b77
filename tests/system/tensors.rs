//! What a server finds in a fetched version.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use weighbridge_schemas::snapshot::TensorMetadata;

use crate::fixtures::read_json;

/// A tensor in a fetched version.
pub(crate) struct Fetched {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) metadata: TensorMetadata,
}

/// Every tensor of a fetched version, read by the official safetensors library.
pub(crate) fn tensors(version: &Path) -> BTreeMap<String, Fetched> {
    let mut tensors = BTreeMap::new();
    let mut files = 0;
    for entry in std::fs::read_dir(version).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        files += 1;
        let bytes = std::fs::read(&path).unwrap();
        let (length, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!((length + 8) % 4096, 0, "data starts on a multiple of 4096");
        let described = &header.metadata().as_ref().unwrap()["weighbridge"];
        let mut described: BTreeMap<String, TensorMetadata> = serde_json::from_str(described).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let place = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            assert_eq!(place % (view.dtype().bitsize() / 8), 0, "{name} is aligned in its file");
            let fetched = Fetched {
                dtype: format!("{:?}", view.dtype()),
                shape: view.shape().iter().map(|&size| size as u64).collect(),
                bytes: view.data().to_vec(),
                metadata: described.remove(name).unwrap(),
            };
            assert!(tensors.insert(name.to_owned(), fetched).is_none());
        }
        assert!(described.is_empty());
    }
    check_index(version, &tensors, files);
    tensors
}

/// Several files have an index beside them that names every tensor.
fn check_index(version: &Path, tensors: &BTreeMap<String, Fetched>, files: usize) {
    let index = version.join("model.safetensors.index.json");
    assert_eq!(index.is_file(), files > 1);
    if index.is_file() {
        let index = read_json(&index);
        let named: Vec<_> = index["weight_map"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(named, tensors.keys().cloned().collect::<Vec<_>>());
    }
}
