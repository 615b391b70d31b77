//! `publish --manifest`: the checkpoint manifest that a trainer wrote, and where the checkpoint lies by it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weighbridge_schemas::checkpoint::{CheckpointManifest, PolicyChoice};
use weighbridge_schemas::limits;
use weighbridge_schemas::policy::Policy;

use crate::error::{Failure, Result};

/// The name that stands for standard input.
const STANDARD_INPUT: &str = "-";

/// Reads the manifest in a file, or on standard input (`-`).
///
/// # Errors
/// Where it cannot be read, or is no checkpoint manifest.
pub(super) fn read(path: &Path) -> Result<CheckpointManifest> {
    let shown = path.display();
    let bytes = read_bytes(path)
        .map_err(|error| Failure::usage(format!("manifest {shown}: it cannot be read: {error}")))?;
    CheckpointManifest::parse(&bytes).map_err(|error| Failure::from(error).while_doing(shown))
}

/// One byte more than the limit at most: that is enough to refuse it.
fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let most = limits::CHECKPOINT_MANIFEST_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    if path == Path::new(STANDARD_INPUT) {
        io::stdin().lock().take(most).read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Where a manifest's location leads: an absolute path, a `file://` URL, or a path relative to the folder that the
/// manifest lies in (for standard input, to the current one).
///
/// # Errors
/// For a location that is neither.
pub(super) fn location(location: &str, manifest: &Path) -> Result<PathBuf> {
    let bad = |why: &str| Failure::usage(format!("the manifest's location {location:?}: {why}"));
    if location.is_empty() {
        return Err(bad("it is empty; name the checkpoint's folder or file"));
    }
    let Some((scheme, _)) = location.split_once("://") else {
        let folder = manifest.parent().filter(|_| manifest != Path::new(STANDARD_INPUT));
        return Ok(folder.map_or_else(|| PathBuf::from(location), |folder| folder.join(location)));
    };
    if scheme != "file" {
        return Err(bad(&format!("{scheme}:// is not read here; give a path or a file:// URL")));
    }
    let url = url::Url::parse(location).map_err(|error| bad(&format!("it is no URL: {error}")))?;
    url.to_file_path().map_err(|()| bad("a file:// URL has an absolute path and no host"))
}

/// The policy that a manifest carries as text; `None` where it says nothing.
///
/// # Errors
/// For a policy that is named, or does not parse.
pub(super) fn policy(manifest: &CheckpointManifest) -> Result<Option<Policy>> {
    match &manifest.policy {
        None => Ok(None),
        Some(PolicyChoice::Toml(text)) => {
            Policy::parse(text).map(Some).map_err(|error| Failure::from(error).while_doing("the manifest"))
        }
        Some(PolicyChoice::Name(name)) => Err(Failure::usage(format!(
            "the manifest names the policy {:?}, but policies by name are not kept in the store in this version; give \
             --policy FILE, or put the policy's text into the manifest's policy.toml",
            name.as_str()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_a_path_or_a_file_url() {
        let at = |text: &str, manifest: &str| location(text, Path::new(manifest));
        assert_eq!(at("step-1", "-").unwrap(), Path::new("step-1"));
        assert_eq!(at("step-1", "m.json").unwrap(), Path::new("step-1"));
        assert_eq!(at("step-1", "/a/m.json").unwrap(), Path::new("/a/step-1"));
        assert_eq!(at("/b/c", "/a/m.json").unwrap(), Path::new("/b/c"));
        assert_eq!(at("file:///a%20b", "m.json").unwrap(), Path::new("/a b"));
        for text in ["", "s3://bucket/x", "file://host/a", "://"] {
            assert_eq!(at(text, "m.json").unwrap_err().class, "usage", "{text}");
        }
    }
}
