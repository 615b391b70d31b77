//! The binary `weighbridge`.

use std::process::ExitCode;

/// Chunk buffers of many threads come and go: this allocator gives them back, where the system's keeps some for every
/// thread that ever had one.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    weighbridge::cli::main()
}
