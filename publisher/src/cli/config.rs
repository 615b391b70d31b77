//! `config check`: are configuration and policies right?

use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde_json::json;

use super::Context;
use super::publish::read_policy;
use crate::config::{Config, DEFAULT_FILE, read_text};
use crate::error::{Failure, Result};

/// Check configuration and policy files.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Check files: a policy is told by its `schema`; anything else is taken for a weighbridge.toml. Files that its
    /// [client] names and that are not there are told, and are no failure.
    Check {
        /// The files; without any, the configuration that is in force.
        files: Vec<PathBuf>,
    },
    /// Show the default policy: ordinary TOML, to copy and change.
    DefaultPolicy,
}

impl Command {
    pub(super) fn run(self, context: &Context) -> Result<()> {
        match self {
            Self::Check { files } => check(context, files),
            Self::DefaultPolicy => {
                let text = weighbridge_schemas::policy::DEFAULT_POLICY;
                context.output.listing(&json!({ "policy": text }), || text.to_owned());
                Ok(())
            }
        }
    }
}

fn check(context: &Context, files: Vec<PathBuf>) -> Result<()> {
    // Without a file, the configuration has been read, and so checked, on the way here.
    let mut checked = Vec::new();
    for file in &files {
        checked.push((file.clone(), check_file(file)?));
    }
    if files.is_empty() {
        let named = context.global.config.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE));
        if named.is_file() {
            checked.push((named, Kind::Configuration(missing(&context.config))));
        }
    }
    let document = |(path, kind): &(PathBuf, Kind)| {
        let path = path.display().to_string();
        json!({ "path": path, "kind": kind.name(), "missing": kind.missing() })
    };
    let documents: Vec<_> = checked.iter().map(document).collect();
    for (path, kind) in &checked {
        for missing in kind.missing() {
            context.output.tell(&format!("{}: warning: {missing} is not there\n", path.display()));
        }
    }
    context.output.done(&json!({ "checked": documents }), || {
        if checked.is_empty() {
            return format!("there is no {DEFAULT_FILE} here; the defaults are in force\n");
        }
        checked
            .iter()
            .map(|(path, kind)| format!("{}: {}, {}\n", path.display(), kind.name(), kind.how()))
            .collect()
    });
    Ok(())
}

/// What a file is.
enum Kind {
    Policy,
    /// With those files that it names for asking an API, and that are not there.
    Configuration(Vec<String>),
}

impl Kind {
    fn name(&self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Configuration(_) => "configuration",
        }
    }

    fn missing(&self) -> &[String] {
        match self {
            Self::Policy => &[],
            Self::Configuration(missing) => missing,
        }
    }

    fn how(&self) -> &'static str {
        if self.missing().is_empty() { "all right" } else { "all right but for what is missing" }
    }
}

/// The files of `[client]` that are not there. They may come later, or be another machine's: so it is no mistake.
fn missing(config: &Config) -> Vec<String> {
    let client = &config.client;
    let named = [
        ("token_file", &client.token_file),
        ("ca", &client.ca),
        ("certificate", &client.certificate),
        ("key", &client.key),
    ];
    let named = named.into_iter().filter_map(|(what, path)| Some((what, path.as_ref()?)));
    let absent = named.filter(|(_, path)| matches!(path.try_exists(), Ok(false)));
    absent.map(|(what, path)| format!("[client] {what} {}", path.display())).collect()
}

fn check_file(path: &Path) -> Result<Kind> {
    let text = read_text(path)
        .map_err(|error| Failure::usage(format!("{}: it cannot be read: {error}", path.display())))?;
    let is_policy =
        text.lines().any(|line| line.trim_start_matches('\u{feff}').trim_start().starts_with("schema"));
    if is_policy {
        read_policy(path)?;
        return Ok(Kind::Policy);
    }
    let config = Config::parse(&text).map_err(|mut failure| {
        if text.contains("[[rule]]") {
            failure.message.push_str("; a policy begins with schema = \"weighbridge.policy/v1\"");
        }
        failure.while_doing(path.display())
    })?;
    Ok(Kind::Configuration(missing(&config)))
}
