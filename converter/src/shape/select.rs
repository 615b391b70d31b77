//! Which tensors of a checkpoint are published, under which names, in which encodings.

use std::collections::BTreeMap;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Layout};
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::{Policy, Treatment};

use crate::checkpoint::{Checkpoint, Tensor};

/// One tensor that is published.
#[derive(Debug)]
pub struct Selected<'c> {
    /// The checkpoint's tensor.
    pub tensor: &'c Tensor,
    /// Its name in the snapshot.
    pub name: TensorName,
    /// Its encoding.
    pub encoding: Encoding,
    /// Where scale and bias stand.
    pub layout: Layout,
}

/// What a policy makes of a checkpoint.
#[derive(Debug)]
pub struct Selection<'c> {
    /// What is published, sorted by the name in the snapshot.
    pub published: Vec<Selected<'c>>,
    /// The names of what is dropped.
    pub dropped: Vec<TensorName>,
    /// Where the policy could not be followed to the letter: one line each, for people.
    pub notes: Vec<String>,
}

/// Why a policy does not fit a checkpoint. Always permanent.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// A rename makes a name that tensors may not have.
    #[error("renaming {tensor:?}: {source}")]
    BadName {
        /// The tensor that is renamed.
        tensor: TensorName,
        /// What is wrong with the new name.
        source: DocumentError,
    },
    /// Two tensors would have one name.
    #[error("the policy gives both {first:?} and {second:?} the name {name:?}; change a rename")]
    Collision {
        /// The name.
        name: TensorName,
        /// One of the tensors.
        first: TensorName,
        /// The other.
        second: TensorName,
    },
    /// The policy drops every tensor.
    #[error("the policy drops all {count} tensors of the checkpoint; nothing is left to publish")]
    NothingLeft {
        /// How many tensors there are.
        count: usize,
    },
    /// A row too wide for a row-wise encoding.
    #[error("tensor {tensor:?}: a row of {bytes} bytes is too wide for {encoding}, whose limit is {limit}; keep it, or cast it")]
    RowTooWide {
        /// The tensor.
        tensor: TensorName,
        /// The row's size in the source dtype.
        bytes: u64,
        /// The encoding's name.
        encoding: &'static str,
        /// The limit in bytes.
        limit: u64,
    },
}

/// Applies `policy` to the tensors of `checkpoint`.
///
/// An encoding that cannot apply to a tensor (a row-wise one to a tensor that is not a table of floating-point
/// numbers, a cast to integers) leaves it as it is, with a note.
///
/// # Errors
/// [`SelectError`]
pub fn select<'c>(checkpoint: &'c Checkpoint, policy: &Policy) -> Result<Selection<'c>, SelectError> {
    let mut published: BTreeMap<TensorName, Selected<'c>> = BTreeMap::new();
    let mut selection = Selection { published: Vec::new(), dropped: Vec::new(), notes: Vec::new() };
    for tensor in &checkpoint.tensors {
        let treatment = policy
            .treat(&tensor.name)
            .map_err(|source| SelectError::BadName { tensor: tensor.name.clone(), source })?;
        let Treatment::Publish { name, encoding: wanted, layout } = treatment else {
            selection.dropped.push(tensor.name.clone());
            continue;
        };
        let encoding = match unfit(tensor, wanted)? {
            Some(why) => {
                selection.notes.push(format!("{}: kept, not {}: {why}", tensor.name, wanted.as_str()));
                Encoding::Keep
            }
            None => wanted,
        };
        let selected = Selected { tensor, name: name.clone(), encoding, layout };
        if let Some(first) = published.insert(name.clone(), selected) {
            let first = first.tensor.name.clone();
            return Err(SelectError::Collision { name, first, second: tensor.name.clone() });
        }
    }
    if published.is_empty() {
        return Err(SelectError::NothingLeft { count: checkpoint.tensors.len() });
    }
    selection.published = published.into_values().collect();
    Ok(selection)
}

/// Why `encoding` cannot apply to `tensor`, if it cannot.
fn unfit(tensor: &Tensor, encoding: Encoding) -> Result<Option<&'static str>, SelectError> {
    if encoding == Encoding::Keep {
        return Ok(None);
    }
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        return Ok(Some("only F32, F16 and BF16 are encoded in this version"));
    }
    if !encoding.is_row_wise() {
        return Ok(None);
    }
    let &[_, width] = tensor.shape.as_slice() else {
        return Ok(Some("only tables, of two dimensions, have rows to encode"));
    };
    if width == 0 {
        return Ok(Some("its rows have no elements"));
    }
    let bytes = width.saturating_mul(tensor.dtype.size());
    if bytes > limits::ROW_BYTES {
        return Err(SelectError::RowTooWide {
            tensor: tensor.name.clone(),
            bytes,
            encoding: encoding.as_str(),
            limit: limits::ROW_BYTES,
        });
    }
    Ok(None)
}
