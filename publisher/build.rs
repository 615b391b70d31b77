//! Compiles the API's protobuf into Rust, without `protoc`.

use std::error::Error;
use std::path::{Path, PathBuf};

const FILES: [&str; 4] = ["snapshots", "publishing", "operating", "fleet"];

#[expect(clippy::disallowed_methods, reason = "cargo tells a build script by variables")]
fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new("../schemas/proto");
    let files = FILES.map(|name| root.join(format!("weighbridge/v1/{name}.proto")));
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let mut compiler = protox::Compiler::new([root])?;
    compiler.include_source_info(true).include_imports(true).open_files(&files)?;
    // With comments: what reflection answers, and what docs/api.md is made of.
    let described = PathBuf::from(std::env::var("OUT_DIR")?).join("weighbridge.bin");
    std::fs::write(described, compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".weighbridge.v1")
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
