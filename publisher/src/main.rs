//! The binary `weighbridge`.

use std::process::ExitCode;

fn main() -> ExitCode {
    weighbridge::cli::main()
}
