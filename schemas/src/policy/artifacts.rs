//! Which files beside a checkpoint are published with it as they are: model graphs, tokenizers, compile caches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DOCUMENT, list};
use crate::error::{DocumentError, shorten};
use crate::limits;
use crate::pattern::{Pattern, SLASH};

/// Patterns on paths relative to the checkpoint's folder: `*` within a part of the path, `**` across parts. Without
/// any, no artifact is published. Of a file its bytes and its path are published, not whether it may be executed; an
/// empty folder is not published.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ArtifactsFile {
    /// Which files are published. Files that the checkpoint itself consists of never are.
    #[serde(default, deserialize_with = "patterns")]
    pub include: Vec<String>,
    /// Which of them are not.
    #[serde(default, deserialize_with = "patterns")]
    pub exclude: Vec<String>,
}

fn patterns<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    list::deserialize(deserializer, "a list of patterns in brackets, such as [\"*.json\"]")
}

impl ArtifactsFile {
    pub(super) fn is_empty(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }
}

/// Checked patterns of artifacts.
#[derive(Debug, Clone, Default)]
pub struct Artifacts {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    /// Sorted, each pattern once: the order means nothing, so the rules' digest does not depend on it.
    pub(super) written: ArtifactsFile,
}

impl Artifacts {
    pub(super) fn check(file: ArtifactsFile) -> Result<Self, DocumentError> {
        if file.include.is_empty() && !file.exclude.is_empty() {
            let why = "artifacts.exclude takes away from what artifacts.include names, and that is empty";
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
        let mut written = file;
        for list in [&mut written.include, &mut written.exclude] {
            list.sort_unstable();
            list.dedup();
        }
        let include = compile("include", &written.include)?;
        let exclude = compile("exclude", &written.exclude)?;
        Ok(Self { include, exclude, written })
    }

    /// Whether no artifact is published at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.include.is_empty()
    }

    /// The patterns that say which files are published, in the order that [`Self::includes`] counts in.
    #[must_use]
    pub fn include(&self) -> &[String] {
        &self.written.include
    }

    /// The places of the patterns in [`Self::include`] that match `path`; whether it is excluded all the same is
    /// another question.
    pub fn includes(&self, path: &str) -> impl Iterator<Item = usize> {
        let matches = |(at, pattern): (usize, &Pattern)| pattern.captures(path).map(|_| at);
        self.include.iter().enumerate().filter_map(matches)
    }

    /// Whether `path` is excluded.
    #[must_use]
    pub fn excludes(&self, path: &str) -> bool {
        self.exclude.iter().any(|pattern| pattern.captures(path).is_some())
    }
}

fn compile(list: &str, patterns: &[String]) -> Result<Vec<Pattern>, DocumentError> {
    if patterns.len() > limits::ARTIFACT_PATTERNS {
        let why =
            format!("artifacts.{list}: {} patterns; at most {}", patterns.len(), limits::ARTIFACT_PATTERNS);
        return Err(DocumentError::OverLimit { document: DOCUMENT, why });
    }
    let compiled = patterns.iter().map(|text| {
        check_parts(text).and_then(|()| Pattern::parse(text, SLASH)).map_err(|error| {
            let place = format!("artifacts.{list} ({:?})", shorten(text));
            let why = match error {
                DocumentError::Malformed { why, .. } => why,
                other => other.to_string(),
            };
            DocumentError::malformed(DOCUMENT, format!("{place}: {why}"))
        })
    });
    compiled.collect()
}

/// Refuses what no path relative to a folder matches.
fn check_parts(pattern: &str) -> Result<(), DocumentError> {
    if pattern.split(SLASH).any(|part| matches!(part, "" | "." | "..")) {
        let why = "it matches no file: paths are relative to the checkpoint's folder, and none of their parts is \
                   empty, '.' or '..'; all that a folder holds is FOLDER/**";
        return Err(DocumentError::malformed(DOCUMENT, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifacts(include: &[&str], exclude: &[&str]) -> Result<Artifacts, DocumentError> {
        let owned = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
        Artifacts::check(ArtifactsFile { include: owned(include), exclude: owned(exclude) })
    }

    #[test]
    fn patterns_say_what_is_published_and_exclude_wins() {
        let artifacts = artifacts(&["tokenizer/**", "*.json"], &["**/*.tmp", "secret.json"]).unwrap();
        let matching =
            |path| artifacts.includes(path).map(|at| artifacts.include()[at].as_str()).collect::<Vec<_>>();
        assert_eq!(matching("config.json"), ["*.json"]);
        assert_eq!(matching("tokenizer/a/vocabulary.txt"), ["tokenizer/**"]);
        assert!(matching("sub/config.json").is_empty());
        assert!(artifacts.excludes("secret.json") && artifacts.excludes("tokenizer/x.tmp"));
        assert!(!artifacts.excludes("config.json"));
    }

    #[test]
    fn mistakes_are_named() {
        assert!(artifacts(&[], &["a"]).unwrap_err().to_string().contains("artifacts.include"));
        for never in ["/etc/hosts", "./config.json", "a/../b", "..", "a//b", "tokenizer/", "**/./a", "."] {
            let error = artifacts(&["a"], &[never]).unwrap_err().to_string();
            assert!(error.contains(&format!("artifacts.exclude ({never:?}): it matches no file")), "{error}");
        }
        assert!(artifacts(&[".hidden", "..a/b.", "**/.*"], &[]).is_ok());
        assert!(artifacts(&[""], &[]).unwrap_err().to_string().contains("artifacts.include (\"\")"));
        let many = vec!["a*"; limits::ARTIFACT_PATTERNS + 1];
        assert!(artifacts(&many, &[]).is_ok(), "one and the same pattern");
        let many: Vec<_> = (0..=limits::ARTIFACT_PATTERNS).map(|at| format!("a{at}")).collect();
        assert!(artifacts(&many.iter().map(String::as_str).collect::<Vec<_>>(), &[]).is_err());
    }
}
