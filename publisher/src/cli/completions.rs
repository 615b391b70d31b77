//! `completions`: a script for a shell.

use clap::Args;
use clap_complete::Shell;
use serde_json::json;

use super::Context;

/// Write a completion script for a shell to standard output.
#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self, context: &Context) {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::definition(), "weighbridge", &mut script);
        let script = String::from_utf8_lossy(&script);
        context
            .output
            .listing(&json!({ "shell": self.shell.to_string(), "script": script }), || script.to_string());
    }
}
