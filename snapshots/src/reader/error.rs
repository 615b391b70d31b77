//! What goes wrong when something is looked up in a version that is open.

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::error::Kind;
use weighbridge_schemas::ids::SnapshotId;

/// A look-up that gives nothing. Always [`Kind::Permanent`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The snapshot has no such tensor.
    #[error("snapshot {snapshot} has no tensor {name:?}; its snapshot.json lists those that it has")]
    UnknownTensor {
        /// What was asked for.
        name: String,
        /// Where.
        snapshot: SnapshotId,
    },
    /// A tensor of other than two dimensions has no rows.
    #[error("tensor {name:?} of shape {shape:?} is no table: only two dimensions have rows; read its values")]
    NotATable {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A row behind the last one.
    #[error("table {table:?} has no row {row}; its {rows} rows are numbered from 0")]
    RowOutOfRange {
        /// The table.
        table: String,
        /// What was asked for.
        row: u64,
        /// How many there are.
        rows: u64,
    },
    /// Room for decoded rows that is too small or too large.
    #[error(
        "a buffer of {found} elements does not take {rows} rows of table {table:?}, of {width} elements each"
    )]
    WrongBuffer {
        /// The table.
        table: String,
        /// The buffer's length.
        found: usize,
        /// How many rows were asked for.
        rows: usize,
        /// A row's elements.
        width: usize,
    },
    /// Rows of integers, which are not decoded to floating-point numbers.
    #[error(
        "table {table:?} holds {dtype:?}, which is not decoded to floating-point numbers; read its values"
    )]
    NotFloats {
        /// The table.
        table: String,
        /// What it holds.
        dtype: Dtype,
    },
    /// Values of another type than the tensor stores.
    #[error("tensor {name:?} is stored as {stored:?}, and was asked for as {asked:?}")]
    WrongType {
        /// The tensor.
        name: String,
        /// What it is stored as.
        stored: Dtype,
        /// What was asked for.
        asked: Dtype,
    },
    /// Values that do not lie where this machine could read them in place.
    #[error(
        "tensor {name:?} cannot be read in place as {asked:?} on this machine; read its bytes, or decode its rows"
    )]
    NotInPlace {
        /// The tensor.
        name: String,
        /// What was asked for.
        asked: Dtype,
    },
    /// A remapping that leads out of its table.
    #[error(
        "the remapping of table {table:?} leads from row {row} to {to}, where no row is: fetch the snapshot again"
    )]
    DamagedRemapping {
        /// The table.
        table: String,
        /// The row that was asked for.
        row: u64,
        /// Where the remapping says that it is.
        to: i32,
    },
}

impl LookupError {
    /// The stable class name.
    #[must_use]
    pub const fn class(&self) -> &'static str {
        match self {
            Self::UnknownTensor { .. } => "unknown_tensor",
            Self::NotATable { .. } => "not_a_table",
            Self::RowOutOfRange { .. } => "row_out_of_range",
            Self::WrongBuffer { .. } => "wrong_buffer",
            Self::NotFloats { .. } => "not_floats",
            Self::WrongType { .. } => "wrong_type",
            Self::NotInPlace { .. } => "not_in_place",
            Self::DamagedRemapping { .. } => "integrity",
        }
    }

    /// What the failure asks for.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        Kind::Permanent
    }
}
