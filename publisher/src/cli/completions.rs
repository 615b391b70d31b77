//! `completions`: a script for a shell.

use clap::Args;
use clap_complete::Shell;

/// Write a completion script for a shell to standard output.
#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::definition(), "weighbridge", &mut script);
        super::output::print(&String::from_utf8_lossy(&script));
    }
}
