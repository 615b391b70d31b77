//! `publish --manifest`: the checkpoint manifest that a trainer wrote, and where the checkpoint lies by it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weighbridge_converter::source::Location;
use weighbridge_schemas::checkpoint::CheckpointManifest;
use weighbridge_schemas::limits;

use crate::error::{Failure, Result};
use crate::sources;

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

/// Where a manifest's location leads: a URL, an absolute path, or a path relative to the folder that the manifest lies
/// in (for standard input, to the current one).
///
/// # Errors
/// For a location that is none of these.
pub(super) fn location(location: &str, manifest: &Path) -> Result<Location> {
    if location.is_empty() {
        return Err(Failure::usage("the manifest's location is empty; name the checkpoint's folder or file"));
    }
    if location.contains("://") {
        return sources::locate(location.as_ref())
            .map_err(|failure| failure.while_doing("the manifest's location"));
    }
    let folder = manifest.parent().filter(|_| manifest != Path::new(STANDARD_INPUT));
    Ok(Location::Local(folder.map_or_else(|| PathBuf::from(location), |folder| folder.join(location))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_a_path_or_a_url() {
        let at = |text: &str, manifest: &str| location(text, Path::new(manifest));
        for (text, manifest, path) in [
            ("step-1", "-", "step-1"),
            ("step-1", "m.json", "step-1"),
            ("step-1", "/a/m.json", "/a/step-1"),
            ("/b/c", "/a/m.json", "/b/c"),
            ("file:///a%20b", "m.json", "/a b"),
        ] {
            let Location::Local(found) = at(text, manifest).unwrap() else { panic!("{text} is a path") };
            assert_eq!(found, Path::new(path));
        }
        assert!(matches!(at("s3://bucket/x", "m.json"), Ok(Location::Remote(_))));
        for text in ["", "hdfs://host/x", "file://host/a", "://"] {
            assert_eq!(at(text, "m.json").unwrap_err().class, "usage", "{text}");
        }
    }
}
