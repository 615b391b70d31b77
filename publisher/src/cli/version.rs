//! `version`: what this binary is, and what it writes.

use serde_json::json;

use weighbridge_schemas::encoding::{ENCODING_VERSION, Encoding};

use super::Context;

/// Shows versions.
pub(super) fn run(context: &Context) {
    let version = env!("CARGO_PKG_VERSION");
    let encodings: Vec<_> = Encoding::ALL.iter().map(|encoding| encoding.as_str()).collect();
    let document = json!({
        "version": version,
        "encoding_version": ENCODING_VERSION,
        "encodings": encodings,
        "formats": ["safetensors", "dcp"],
    });
    context.output.listing(&document, || {
        format!("weighbridge {version}\nencodings (version {ENCODING_VERSION}): {}\n", encodings.join(", "))
    });
}
