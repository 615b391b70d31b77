//! How tensors are laid out in a snapshot's files.
//!
//! A tensor of more than 8 MiB has a safetensors file of its own; smaller ones are packed together, up to a bound,
//! ordered by element size (largest first, so that every tensor is aligned) and then by name, as the safetensors
//! library itself does. Every header is padded with spaces so that the data starts on a multiple of 4096. One file
//! is called `model.safetensors`; several are numbered as Hugging Face does, with an index beside them.
//!
//! Everything here is a pure function of names, encodings and shapes.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde_json::{Value, json};

use weighbridge_schemas::canonical;
use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::snapshot::TensorMetadata;

/// The data of a file starts on a multiple of this.
pub const DATA_ALIGNMENT: u64 = 4096;
/// A packed file takes no more data than this, in bytes.
const PACKED_BYTES: u64 = 1 << 30;
/// A packed file's header takes no more than about this, in bytes, so that it stays one chunk.
const PACKED_HEADER_BYTES: u64 = 4 << 20;

/// A tensor to be stored.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The name in the snapshot.
    pub name: TensorName,
    /// The dtype in the safetensors header.
    pub dtype: Dtype,
    /// The shape in the safetensors header.
    pub shape: Vec<u64>,
    /// The size in bytes: dtype times shape.
    pub bytes: u64,
    /// What the header says about it beyond that.
    pub metadata: TensorMetadata,
}

/// A safetensors file: its header, and which tensors follow.
#[derive(Debug)]
pub struct FilePlan {
    /// The file's name.
    pub name: String,
    /// Length prefix, JSON and padding; a multiple of [`DATA_ALIGNMENT`].
    pub header: Vec<u8>,
    /// The tensors in order, as indices into the planned list; their bytes follow each other without gaps.
    pub tensors: Vec<usize>,
}

/// Lays out `tensors`, which are sorted by name.
#[must_use]
pub fn plan(tensors: &[Stored]) -> Vec<FilePlan> {
    let groups = groups(tensors);
    let count = groups.len();
    let files = groups.into_iter().enumerate().map(|(index, group)| FilePlan {
        name: file_name(index, count),
        header: header(group.iter().filter_map(|&at| tensors.get(at))),
        tensors: group,
    });
    files.collect()
}

/// The Hugging Face index beside several files: its name and bytes; `None` for a single file.
#[must_use]
pub fn index(tensors: &[Stored], files: &[FilePlan]) -> Option<(String, Vec<u8>)> {
    if files.len() < 2 {
        return None;
    }
    let total: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    let place = |file: &FilePlan, at: &usize| Some((tensors.get(*at)?.name.to_string(), file.name.clone()));
    let weight_map: BTreeMap<String, String> =
        files.iter().flat_map(|file| file.tensors.iter().filter_map(move |at| place(file, at))).collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    Some(("model.safetensors.index.json".to_owned(), canonical::bytes(&index)))
}

/// Which tensors share a file: the packed ones first, then each large one alone.
fn groups(tensors: &[Stored]) -> Vec<Vec<usize>> {
    let (large, mut small): (Vec<usize>, Vec<usize>) =
        (0..tensors.len()).partition(|&at| tensors[at].bytes > limits::CHUNK_BYTES);
    let mut groups = Vec::new();
    while !small.is_empty() {
        let rest = small.split_off(packed(tensors, &small));
        small.sort_by_key(|&at| (Reverse(tensors[at].dtype.size()), at));
        groups.push(small);
        small = rest;
    }
    groups.extend(large.into_iter().map(|at| vec![at]));
    groups
}

/// How many of `small`, by name, go into one packed file: at least one.
fn packed(tensors: &[Stored], small: &[usize]) -> usize {
    let (mut data, mut header) = (0, 0);
    let over = small.iter().position(|&at| {
        let tensor = &tensors[at];
        data += tensor.bytes;
        // The name stands twice, once of it escaped twice over; shapes and the rest take about 250 bytes.
        header += tensor.name.as_str().len() as u64 * 4 + tensor.shape.len() as u64 * 42 + 250;
        data > PACKED_BYTES || header > PACKED_HEADER_BYTES
    });
    over.map_or(small.len(), |at| at.max(1))
}

fn file_name(index: usize, count: usize) -> String {
    if count == 1 {
        "model.safetensors".to_owned()
    } else {
        format!("model-{:05}-of-{count:05}.safetensors", index + 1)
    }
}

/// The header of a file that holds `tensors`, in this order.
fn header<'t>(tensors: impl Iterator<Item = &'t Stored>) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut described: BTreeMap<&str, &TensorMetadata> = BTreeMap::new();
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes;
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end] });
        entries.insert(tensor.name.to_string(), entry);
        described.insert(tensor.name.as_str(), &tensor.metadata);
        begin = end;
    }
    let described = String::from_utf8(canonical::bytes(&described)).unwrap_or_default();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt", "weighbridge": described }));
    let json = canonical::bytes(&Value::Object(entries));
    let length = (json.len() as u64 + 8).next_multiple_of(DATA_ALIGNMENT) - 8;
    let mut header = length.to_le_bytes().to_vec();
    header.extend(json);
    header.resize(header.len().next_multiple_of(DATA_ALIGNMENT_BYTES), b' ');
    header
}

/// [`DATA_ALIGNMENT`] as a length in memory.
const DATA_ALIGNMENT_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weighbridge_schemas::encoding::{Encoding, Layout};

    fn stored(name: &str, dtype: Dtype, shape: &[u64]) -> Stored {
        let bytes = shape.iter().product::<u64>() * dtype.size();
        let metadata = TensorMetadata {
            encoding: Encoding::Keep,
            layout: Layout::Trailing,
            shape: shape.to_vec(),
            source_dtype: dtype,
            pruned: None,
        };
        Stored { name: name.parse().unwrap(), dtype, shape: shape.to_vec(), bytes, metadata }
    }

    /// The file's bytes, with tensor bytes all zero.
    fn file(plan: &FilePlan, tensors: &[Stored]) -> Vec<u8> {
        let data: u64 = plan.tensors.iter().map(|&at| tensors[at].bytes).sum();
        let mut bytes = plan.header.clone();
        bytes.resize(bytes.len() + usize::try_from(data).unwrap(), 0);
        bytes
    }

    #[test]
    fn one_small_model_is_one_file_that_the_official_reader_opens() {
        let tensors = [
            stored("", Dtype::U8, &[5]),
            stored("a", Dtype::F32, &[3, 2]),
            stored("b", Dtype::I64, &[]),
            stored("模型", Dtype::F32, &[0, 4]),
        ];
        let plans = plan(&tensors);
        assert_eq!(plans.len(), 1);
        assert_eq!(plans[0].name, "model.safetensors");
        assert_eq!(plans[0].tensors, [2, 1, 3, 0], "by element size, then by name");
        let bytes = file(&plans[0], &tensors);
        let opened = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(opened.tensor("a").unwrap().shape(), [3, 2]);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let described = metadata.metadata().as_ref().unwrap()["weighbridge"].clone();
        let described: BTreeMap<String, TensorMetadata> = serde_json::from_str(&described).unwrap();
        assert_eq!(described["模型"], tensors[3].metadata);
        assert!(index(&tensors, &plans).is_none());
    }

    #[test]
    fn a_large_table_has_a_file_of_its_own_that_starts_on_a_page() {
        let tensors = [stored("large", Dtype::F32, &[3 << 20]), stored("small", Dtype::F32, &[2])];
        let plans = plan(&tensors);
        let names: Vec<_> = plans.iter().map(|plan| plan.name.as_str()).collect();
        assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
        assert_eq!(plans[1].tensors, [0]);
        assert!(plans.iter().all(|plan| plan.header.len() % 4096 == 0));
        let (name, bytes) = index(&tensors, &plans).unwrap();
        assert_eq!(name, "model.safetensors.index.json");
        let index: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(index["weight_map"]["large"], names[1]);
    }

    proptest! {
        #[test]
        fn every_tensor_has_one_place(sizes in prop::collection::vec(0u64..(20 << 20), 0..40)) {
            let mut tensors: Vec<_> = sizes.iter().enumerate()
                .map(|(n, &size)| stored(&format!("t{n:03}"), Dtype::ALL[n % Dtype::ALL.len()], &[size]))
                .collect();
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            let plans = plan(&tensors);
            let mut places: Vec<_> = plans.iter().flat_map(|plan| plan.tensors.clone()).collect();
            places.sort_unstable();
            prop_assert_eq!(places, (0..tensors.len()).collect::<Vec<_>>());
        }
    }
}
