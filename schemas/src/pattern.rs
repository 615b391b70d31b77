//! Patterns on names made of parts (dotted tensor names, paths of files): `*` is anything within one part, `**`
//! anything at all; the rest is literal.

use regex::Regex;

use crate::error::DocumentError;
use crate::limits;

/// What stands between the parts of a tensor's name.
pub(crate) const DOT: char = '.';
/// What stands between the parts of a file's path.
pub(crate) const SLASH: char = '/';

/// A compiled pattern. `**` and a separator at its start may also match nothing, so that `**.weight` matches `weight`
/// too.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    regex: Regex,
    wildcards: usize,
}

impl Pattern {
    /// A pattern on names whose parts `separator` stands between.
    pub(crate) fn parse(text: &str, separator: char) -> Result<Self, DocumentError> {
        if text.is_empty() || text.len() > limits::PATTERN_BYTES {
            let why = format!("a pattern has 1 to {} bytes, not {}", limits::PATTERN_BYTES, text.len());
            return Err(DocumentError::malformed("policy", why));
        }
        let escaped = regex::escape(separator.encode_utf8(&mut [0; 4]));
        let mut wildcards = 0;
        let mut expression = String::from("^(?s:");
        let mut rest = text;
        if let Some(behind) = text.strip_prefix("**").and_then(|rest| rest.strip_prefix(separator)) {
            expression.push_str(&format!("(?:(.*){escaped})?"));
            wildcards = 1;
            rest = behind;
        }
        while let Some(star) = rest.find('*') {
            expression.push_str(&regex::escape(&rest[..star]));
            let anything = rest[star..].starts_with("**");
            if anything {
                expression.push_str("(.*)");
            } else {
                expression.push_str(&format!("([^{escaped}]*)"));
            }
            wildcards += 1;
            rest = rest[star..].trim_start_matches('*');
        }
        expression.push_str(&regex::escape(rest));
        expression.push_str(")$");
        let regex = Regex::new(&expression).map_err(|error| DocumentError::malformed("policy", error))?;
        Ok(Self { regex, wildcards })
    }

    /// What the wildcards matched, in order, or `None` where the pattern does not match.
    pub(crate) fn captures<'n>(&self, name: &'n str) -> Option<Vec<&'n str>> {
        let captures = self.regex.captures(name)?;
        Some(captures.iter().skip(1).map(|capture| capture.map_or("", |found| found.as_str())).collect())
    }

    pub(crate) fn wildcards(&self) -> usize {
        self.wildcards
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captures<'n>(pattern: &str, name: &'n str) -> Option<Vec<&'n str>> {
        Pattern::parse(pattern, DOT).unwrap().captures(name)
    }

    #[test]
    fn paths_have_parts_between_slashes() {
        let matches = |pattern, path| Pattern::parse(pattern, SLASH).unwrap().captures(path).is_some();
        assert!(matches("*.json", "config.json") && !matches("*.json", "sub/config.json"));
        assert!(matches("tokenizer/**", "tokenizer/a/b.txt") && !matches("tokenizer/**", "tokenizer"));
        assert!(matches("**/config.json", "config.json") && matches("**/config.json", "a/b/config.json"));
        assert!(!matches("**/config.json", "a/my_config.json"));
        assert!(matches("a/*/c", "a/b.b/c") && !matches("a/*/c", "a/b/b/c"));
        assert!(matches("**", "a/b.c"));
    }

    #[test]
    fn wildcards_and_what_they_match() {
        assert_eq!(captures("a.*.c", "a.b.c"), Some(vec!["b"]));
        assert_eq!(captures("a.*.c", "a.b.b.c"), None);
        assert_eq!(captures("a.**.c", "a.b.b.c"), Some(vec!["b.b"]));
        assert_eq!(captures("optim.**", "optim"), None);
        assert_eq!(captures("**.weight", "x.y.weight"), Some(vec!["x.y"]));
        assert_eq!(captures("**.weight", "weight"), Some(vec![""]));
        assert_eq!(captures("**.weight", "overweight"), None);
        assert_eq!(captures("a+b", "aab"), None);
        assert_eq!(captures("*.**.*", "a.b.c.d"), Some(vec!["a", "b.c", "d"]));
        assert_eq!(captures("**", "line\nbreak"), Some(vec!["line\nbreak"]));
    }

    #[test]
    fn patterns_are_bounded() {
        assert!(Pattern::parse("", DOT).is_err());
        assert!(Pattern::parse(&"*a".repeat(limits::PATTERN_BYTES), DOT).is_err());
        assert!(Pattern::parse(&"*a".repeat(limits::PATTERN_BYTES / 2), DOT).is_ok());
    }
}
