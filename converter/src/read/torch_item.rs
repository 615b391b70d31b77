//! stub
use crate::{checkpoint::Strided, error::Result, source::SourceFile};
use weighbridge_schemas::dtype::Dtype;
/// stub
pub fn locate(_file: &SourceFile, _offset: u64, _length: u64, _dtype: Dtype, _sizes: &[u64]) -> Result<Strided> { todo!() }
