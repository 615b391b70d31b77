//! How the newest run of gc ended, for whoever looks.

use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::retention::{GcEnded, GcNote};

use super::run;
use crate::error::Result;
use crate::jobs;
use crate::layout::{self, GcNote as Note};
use crate::root::Root;

/// The newest run of gc.
#[derive(Debug, Clone)]
pub struct Past {
    /// Its number.
    pub number: u64,
    /// Who began it.
    pub begun: Option<GcNote>,
    /// How it ended; `None` where it goes on, or was left.
    pub ended: Option<GcEnded>,
}

/// The newest run of gc of a model; `None` where there was none.
///
/// # Errors
/// [`crate::error::Class::Integrity`] where its notes cannot be read; else as the store fails.
pub async fn newest(root: &Root, model: &ModelName) -> Result<Option<Past>> {
    let Some(number) = run::runs(root, model).await?.last().copied() else { return Ok(None) };
    Ok(Some(Past {
        number,
        begun: jobs::get(root, &layout::gc_note(model, number, Note::Begun)).await?,
        ended: jobs::get(root, &layout::gc_note(model, number, Note::Ended)).await?,
    }))
}
