//! What files in a spool are called.

use std::sync::atomic::{AtomicU64, Ordering};

/// Digits of the time in a name: enough for every time, so that names sort as times do.
const DIGITS: usize = 20;
const MANIFEST: &str = ".json";
const TEMPORARY: &str = ".tmp-";
/// Longest id, in bytes.
const ID_BYTES: usize = 128;

/// The name of a manifest that waits. Names order as their files' do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Name {
    /// When it was dropped, in nanoseconds since 1970.
    pub(super) time: u64,
    pub(super) id: String,
}

impl Name {
    pub(super) fn parse(file: &str) -> Option<Self> {
        let (time, id) = file.strip_suffix(MANIFEST)?.split_once('-')?;
        let right = time.len() == DIGITS && time.bytes().all(|byte| byte.is_ascii_digit()) && is_id(id);
        let time = right.then(|| time.parse().ok())??;
        Some(Self { time, id: id.to_owned() })
    }

    pub(super) fn file(&self) -> String {
        format!("{:0DIGITS$}-{}{MANIFEST}", self.time, self.id)
    }
}

/// Whether an id can be part of a file's name.
pub(super) fn is_id(id: &str) -> bool {
    let right = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=ID_BYTES).contains(&id.len()) && !id.starts_with('.') && id.bytes().all(right)
}

/// A name that nobody else writes under.
pub(super) fn temporary(name: &Name) -> String {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let written = WRITTEN.fetch_add(1, Ordering::Relaxed);
    format!("{TEMPORARY}{}-{}-{written}-{}", name.time, std::process::id(), name.id)
}

pub(super) fn is_temporary(file: &str) -> bool {
    file.starts_with(TEMPORARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_sort_by_time() {
        let name = |time, id: &str| Name { time, id: id.to_owned() };
        for name in [name(0, "a"), name(u64::MAX, "0f8fad5b-d9cb-469f-a165-70867728950e"), name(7, "a.json")]
        {
            assert_eq!(Name::parse(&name.file()), Some(name));
        }
        assert!(name(9, "z").file() < name(10, "a").file());
        assert_eq!(name(9, "z").cmp(&name(10, "a")), name(9, "z").file().cmp(&name(10, "a").file()));
    }

    #[test]
    fn other_names_are_foreign() {
        for file in [
            "README",
            "1-a.json",
            "00000000000000000001-.json",
            "00000000000000000001-a.txt",
            "+0000000000000000001-a.json",
            "99999999999999999999-a.json",
            "00000000000000000001-..json",
            "00000000000000000001-a b.json",
            ".lock",
        ] {
            assert_eq!(Name::parse(file), None, "{file}");
        }
        assert!(is_temporary(&temporary(&Name { time: 1, id: "a".to_owned() })));
    }
}
