//! Writes the JSON Schemas under `schemas/json/` anew from the types.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("json");
    for (name, schema) in weighbridge_schemas::schema::all() {
        std::fs::write(folder.join(name), schema)?;
    }
    Ok(())
}
