//! Patterns on dotted names: `*` is anything within one part, `**` anything at all; the rest is literal.

use regex::Regex;

use crate::error::DocumentError;
use crate::limits;

/// A compiled pattern. `**.` at its start may also match nothing, so that `**.weight` matches `weight` too.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    regex: Regex,
    wildcards: usize,
}

impl Pattern {
    pub(crate) fn parse(text: &str) -> Result<Self, DocumentError> {
        if text.is_empty() || text.len() > limits::PATTERN_BYTES {
            let why = format!("a pattern has 1 to {} bytes, not {}", limits::PATTERN_BYTES, text.len());
            return Err(DocumentError::malformed("policy", why));
        }
        let mut wildcards = 0;
        let mut expression = String::from("^(?s:");
        let mut rest = text;
        if let Some(behind) = text.strip_prefix("**.") {
            expression.push_str(r"(?:(.*)\.)?");
            wildcards = 1;
            rest = behind;
        }
        while let Some(star) = rest.find('*') {
            expression.push_str(&regex::escape(&rest[..star]));
            let anything = rest[star..].starts_with("**");
            expression.push_str(if anything { "(.*)" } else { "([^.]*)" });
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
        Pattern::parse(pattern).unwrap().captures(name)
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
        assert_eq!(captures("**", "line\nbreak"), Some(vec!["line\nbreak"]));
    }

    #[test]
    fn patterns_are_bounded() {
        assert!(Pattern::parse("").is_err());
        assert!(Pattern::parse(&"*a".repeat(limits::PATTERN_BYTES)).is_err());
        assert!(Pattern::parse(&"*a".repeat(limits::PATTERN_BYTES / 2)).is_ok());
    }
}
