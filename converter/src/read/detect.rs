//! stub
use crate::{error::Result, source::Source};
/// stub
pub fn format(_: &Source) -> Result<weighbridge_schemas::checkpoint::Format> { todo!() }
