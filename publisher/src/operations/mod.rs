//! What operators and trainers ask for, a file an operation: the command line and the API call these, and print or
//! send what comes of them.
//!
//! Each takes roots, queue, names, who asks and when, and gives a typed result. Nothing here knows of options or
//! prints. What may be long is listed a page at a time: [`Page`].

pub mod channels;
pub mod dead;
pub mod jobs;
pub mod moves;
pub mod pins;
pub mod republish;
pub mod submit;

use weighbridge_schemas::names::ModelName;
use weighbridge_snapshots::catalog;
use weighbridge_snapshots::error::{Class, StoreError};
use weighbridge_snapshots::reference::PREFIX_DIGITS;
use weighbridge_snapshots::root::Root;

use crate::error::Result;

/// How much of a list is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a, A> {
    /// The most that is given.
    pub most: usize,
    /// The most that is read for it: what does not fit the filter counts too.
    pub reads: usize,
    /// Where the page before ended.
    pub after: Option<&'a A>,
}

impl<A> Page<'_, A> {
    /// All of the list, or its first `most`.
    #[must_use]
    pub const fn first(most: usize) -> Self {
        Self { most, reads: usize::MAX, after: None }
    }
}

/// The model that was named, which has to be there; else all.
///
/// # Errors
/// [`Class::NotFound`] where there is no such model; a bad name; else as the store fails.
pub async fn models(root: &Root, named: Option<&str>) -> Result<Vec<ModelName>> {
    let known = catalog::models(root).await?;
    let Some(named) = named else { return Ok(known) };
    let model: ModelName = named.parse()?;
    if known.contains(&model) {
        return Ok(vec![model]);
    }
    let known: Vec<_> = known.iter().map(ToString::to_string).collect();
    let why = format!("the store holds no such model; it holds: {}", known.join(", "));
    Err(StoreError::new(Class::NotFound, model, why).into())
}

/// Keeps the first integrity failure and goes on; any other failure ends the listing.
///
/// # Errors
/// Every other failure than of integrity.
pub fn whole<T>(
    outcome: weighbridge_snapshots::error::Result<T>,
    damage: &mut Option<StoreError>,
) -> Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.class() == Class::Integrity => {
            damage.get_or_insert(error);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether ids of jobs and dead letters may begin so, and it is long enough.
#[must_use]
pub fn is_prefix(text: &str) -> bool {
    text.len() >= PREFIX_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_may_be_shortened_but_not_too_much() {
        for (text, right) in [
            ("0f8fad5b-d9cb-469f-a165-70867728950e", true),
            ("0f8fad", true),
            ("0f8fa", false),
            ("0F8FAD", false),
            ("../../x", false),
        ] {
            assert_eq!(is_prefix(text), right, "{text}");
        }
    }
}
