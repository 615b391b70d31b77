//! The house rules that a program can check.
//!
//! Each rule is a function from a file to what is wrong in it. [`EXCEPTIONS`] lists files that break a rule for now:
//! it may only shrink, since a file that no longer breaks its rule has to leave the list.

use std::collections::BTreeMap;

use rust_text::Line;

mod rust_text;
mod tracked;

/// Files that break a rule for now: the rule's name and the file.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// Most lines of a file, its tests aside.
const FILE_LINES: usize = 500;
/// Most lines of a function.
const FUNCTION_LINES: usize = 70;
/// Most columns of a line of Rust.
const COLUMNS: usize = 120;
/// Largest file, in bytes.
const FILE_BYTES: u64 = 1 << 20;
/// How far above its use a reason may stand, in lines: attributes stand above whole functions.
const REASON_ABOVE: usize = 12;
/// How far above its use a note on safety may stand, in lines.
const SAFETY_ABOVE: usize = 3;
/// What a file under `tests/` has to say before it may spell paths of some machine.
const PATHS_ARE_EXAMPLES: &str = "tidy: paths are examples";

/// Something that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    rule: &'static str,
    file: String,
    /// From 1 on.
    line: usize,
    /// What is wrong, and the way out.
    what: String,
}

/// A file of Rust.
struct Source<'f> {
    file: &'f str,
    lines: Vec<Line>,
}

impl<'f> Source<'f> {
    fn new(file: &'f str, text: &str) -> Self {
        Self { file, lines: rust_text::lines(text) }
    }

    /// Whether all of it is test code, or a program that only developers run.
    fn is_test(&self) -> bool {
        !self.file.contains("/src/") || self.file.ends_with("/tests.rs") || self.file.contains("/tests/")
    }

    /// The lines with their numbers from 0 on, tests aside.
    fn lines_that_ship(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.lines.iter().enumerate().filter(|(_, line)| !line.test && !self.is_test())
    }

    /// Whether `word` stands on line `at` or on one of the `above` lines before it.
    fn says_above(&self, at: usize, above: usize, word: &str) -> bool {
        let near = self.lines.get(at.saturating_sub(above)..=at).unwrap_or_default();
        near.iter().any(|line| line.raw.contains(word))
    }

    fn finding(&self, rule: &'static str, at: usize, what: impl Into<String>) -> Finding {
        Finding { rule, file: self.file.to_owned(), line: at + 1, what: what.into() }
    }
}

type Rule = fn(&Source<'_>) -> Vec<Finding>;

const RULES: &[Rule] = &[
    short_files,
    short_functions,
    module_doc,
    narrow_lines,
    nothing_left_over,
    reasoned_unwraps,
    explained_unsafe,
];

fn short_files(source: &Source<'_>) -> Vec<Finding> {
    let lines = source.lines.iter().filter(|line| !line.test).count();
    let what = format!("{lines} lines without tests; at most {FILE_LINES}: split it by what it holds");
    (lines > FILE_LINES).then(|| source.finding("short_files", FILE_LINES, what)).into_iter().collect()
}

fn short_functions(source: &Source<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (start, line) in source.lines.iter().enumerate() {
        for column in rust_text::words(&line.code, "fn").filter(|&column| is_named(&line.code, column)) {
            let Some((end, true)) = rust_text::item_end(&source.lines, start, column) else { continue };
            let lines = end - start + 1;
            if lines > FUNCTION_LINES {
                let what = format!("a function of {lines} lines; at most {FUNCTION_LINES}: name its parts");
                findings.push(source.finding("short_functions", start, what));
            }
        }
    }
    findings
}

/// Whether a name stands behind the `fn` at `column`, as it does not in the type of a function.
fn is_named(code: &str, column: usize) -> bool {
    code.get(column + 2..).is_some_and(|behind| behind.trim_start().starts_with(rust_text::is_word))
}

fn module_doc(source: &Source<'_>) -> Vec<Finding> {
    let documented = source.lines.first().is_some_and(|line| line.raw.starts_with("//!"));
    let what = "the file does not begin with a module doc: say in a `//!` comment what it holds, and why";
    (!documented).then(|| source.finding("module_doc", 0, what)).into_iter().collect()
}

fn narrow_lines(source: &Source<'_>) -> Vec<Finding> {
    let wide = source.lines.iter().enumerate().filter(|(_, line)| line.raw.chars().count() > COLUMNS);
    let what =
        |line: &Line| format!("{} columns; at most {COLUMNS}: break the line", line.raw.chars().count());
    wide.map(|(at, line)| source.finding("narrow_lines", at, what(line))).collect()
}

fn nothing_left_over(source: &Source<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in source.lines.iter().enumerate() {
        for word in ["todo!", "unimplemented!", "dbg!"] {
            if rust_text::has_word(&line.code, word) {
                findings.push(source.finding(
                    "nothing_left_over",
                    at,
                    format!("{word} is left over: finish it"),
                ));
            }
        }
        for word in ["FIXME", "XXX"] {
            if rust_text::has_word(&line.comment, word) || rust_text::has_word(&line.code, word) {
                let what = format!("{word}: do it, or say plainly what is missing and why");
                findings.push(source.finding("nothing_left_over", at, what));
            }
        }
    }
    findings
}

fn reasoned_unwraps(source: &Source<'_>) -> Vec<Finding> {
    let unwraps = |line: &Line| line.code.contains(".unwrap()") || line.code.contains(".expect(");
    let found = source.lines_that_ship().filter(|(_, line)| unwraps(line));
    let found = found.filter(|&(at, _)| !source.says_above(at, REASON_ABOVE, "reason ="));
    let what = "it may panic: return an error, or add #[expect(clippy::unwrap_used, reason = \"...\")]";
    found.map(|(at, _)| source.finding("reasoned_unwraps", at, what)).collect()
}

fn explained_unsafe(source: &Source<'_>) -> Vec<Finding> {
    let found = source.lines.iter().enumerate().filter(|(_, line)| rust_text::has_word(&line.code, "unsafe"));
    let found = found.filter(|&(at, _)| !source.says_above(at, SAFETY_ABOVE, "SAFETY"));
    let what = "unsafe without a `// SAFETY:` comment right above: say why it is sound";
    found.map(|(at, _)| source.finding("explained_unsafe", at, what)).collect()
}

/// Paths that only some machine has.
fn no_machine_paths(file: &str, text: &str) -> Vec<Finding> {
    const PATHS: [&str; 4] =
        [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("../", "shared")];
    if file.starts_with(".ci") || (file.starts_with("tests/") && text.contains(PATHS_ARE_EXAMPLES)) {
        return Vec::new();
    }
    let found = text
        .lines()
        .enumerate()
        .filter_map(|(at, line)| Some((at, PATHS.iter().find(|path| has_path(line, path))?)));
    let what = |path| {
        format!("{path} is a path of some machine: write it relative to the repository, or leave it out")
    };
    found
        .map(|(at, path)| Finding {
            rule: "no_machine_paths",
            file: file.to_owned(),
            line: at + 1,
            what: what(path),
        })
        .collect()
}

/// Whether `path` begins somewhere in `line`, and not within a longer path.
fn has_path(line: &str, path: &str) -> bool {
    let before = |at: usize| line.get(..at).and_then(|before| before.chars().next_back());
    line.match_indices(path)
        .any(|(at, _)| !before(at).is_some_and(|character| rust_text::is_word(character) || character == '.'))
}

fn small_files(file: &str, bytes: u64) -> Vec<Finding> {
    let what =
        format!("{bytes} bytes; at most {FILE_BYTES}: make it from something smaller, or leave it out");
    let finding = Finding { rule: "small_files", file: file.to_owned(), line: 1, what };
    (bytes > FILE_BYTES).then_some(finding).into_iter().collect()
}

/// Files under `src` that no `mod` declares are never compiled. `sources` has all files of Rust by path.
fn no_dead_files(sources: &BTreeMap<&str, Source<'_>>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources.values() {
        let Some((module, parents)) = declared_by(source.file) else { continue };
        let declared = parents
            .iter()
            .filter_map(|parent| sources.get(parent.as_str()))
            .any(|parent| parent.lines.iter().any(|line| declares(&line.code, module)));
        if !declared {
            let what =
                format!("no `mod {module};` in {}: declare the file, or delete it", parents.join(" or "));
            findings.push(source.finding("no_dead_files", 0, what));
        }
    }
    findings
}

/// The module that `file` is, and the files that may declare it; `None` for the root of a crate.
fn declared_by(file: &str) -> Option<(&str, Vec<String>)> {
    let (package, path) = file.split_once("/src/")?;
    let path = path.strip_suffix(".rs")?;
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if ["lib", "main"].contains(&path) || path.starts_with("bin/") {
        return None;
    }
    let (folder, module) = path.rsplit_once('/').unwrap_or(("", path));
    let parents = if folder.is_empty() {
        vec!["lib".to_owned(), "main".to_owned()]
    } else {
        vec![format!("{folder}/mod"), folder.to_owned()]
    };
    Some((module, parents.iter().map(|parent| format!("{package}/src/{parent}.rs")).collect()))
}

fn declares(code: &str, module: &str) -> bool {
    let mut words = code.trim().trim_end_matches(';').split_whitespace().rev();
    code.trim().ends_with(';') && words.next() == Some(module) && words.next() == Some("mod")
}

/// Every member of the workspace takes the workspace's lints.
fn shared_lints(file: &str, text: &str) -> Vec<Finding> {
    let mut lines = text.lines().map(str::trim).skip_while(|&line| line != "[lints]");
    let shared = lines.nth(1) == Some("workspace = true");
    let what = "the package has lints of its own: add `[lints]` with `workspace = true`".to_owned();
    let finding = Finding { rule: "shared_lints", file: file.to_owned(), line: 1, what };
    (!shared && file.ends_with("/Cargo.toml")).then_some(finding).into_iter().collect()
}

fn changelog(text: Option<&str>) -> Vec<Finding> {
    let kept = text.is_some_and(|text| text.lines().any(|line| line.trim_end() == "## [Unreleased]"));
    let what =
        "there is no heading `## [Unreleased]`: what changes for users is written down there".to_owned();
    let finding = Finding { rule: "changelog", file: "CHANGELOG.md".to_owned(), line: 1, what };
    (!kept).then_some(finding).into_iter().collect()
}

/// Everything that breaks a rule in the repository.
fn all_findings() -> Vec<Finding> {
    let files = tracked::files();
    let texts: BTreeMap<&str, String> =
        files.iter().filter_map(|file| Some((file.as_str(), tracked::text(file)?))).collect();
    let rust = texts.iter().filter(|(file, _)| file.ends_with(".rs"));
    let sources: BTreeMap<&str, Source<'_>> =
        rust.map(|(&file, text)| (file, Source::new(file, text))).collect();
    let mut findings = no_dead_files(&sources);
    findings.extend(sources.values().flat_map(|source| RULES.iter().flat_map(|rule| rule(source))));
    findings.extend(texts.iter().flat_map(|(file, text)| no_machine_paths(file, text)));
    findings.extend(texts.iter().flat_map(|(file, text)| shared_lints(file, text)));
    findings.extend(changelog(texts.get("CHANGELOG.md").map(String::as_str)));
    for file in &files {
        let bytes = std::fs::metadata(tracked::root().join(file)).map_or(0, |metadata| metadata.len());
        findings.extend(small_files(file, bytes));
    }
    findings
}

/// What is left of `findings` with the files in `exceptions` let pass, and exceptions that nothing needs any more.
fn judge(findings: &[Finding], exceptions: &[(&str, &str)]) -> Vec<String> {
    let excused = |finding: &&Finding| exceptions.contains(&(finding.rule, finding.file.as_str()));
    let breaches = findings.iter().filter(|finding| !excused(finding));
    let breaches =
        breaches.map(|Finding { rule, file, line, what }| format!("{file}:{line}: {rule}: {what}"));
    let needed = |&&(rule, file): &&(&str, &str)| {
        findings.iter().any(|found| (found.rule, found.file.as_str()) == (rule, file))
    };
    let needless = exceptions.iter().filter(|exception| !needed(exception));
    let needless =
        needless.map(|(rule, file)| format!("{file}: {rule}: it keeps the rule now; take it off EXCEPTIONS"));
    breaches.chain(needless).collect()
}

#[test]
fn the_house_is_tidy() {
    let wrong = judge(&all_findings(), EXCEPTIONS);
    assert!(wrong.is_empty(), "{} breaches of the house rules\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn exceptions_may_only_shrink() {
    let finding = Source::new("a/src/a.rs", "").finding("module_doc", 0, "why");
    assert_eq!(judge(&[finding], &[]), ["a/src/a.rs:1: module_doc: why"]);
    let finding = Source::new("a/src/a.rs", "").finding("module_doc", 0, "why");
    assert!(judge(&[finding], &[("module_doc", "a/src/a.rs")]).is_empty());
    assert_eq!(judge(&[], &[("module_doc", "a/src/a.rs")]).len(), 1);
}

/// The lines on which `rule` finds something in `text`.
fn found(rule: Rule, text: &str) -> Vec<usize> {
    rule(&Source::new("a/src/a.rs", text)).iter().map(|finding| finding.line).collect()
}

#[test]
fn lengths_are_counted_without_tests() {
    let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// x\n".repeat(FILE_LINES));
    assert!(found(short_files, &format!("{}{tests}", "// x\n".repeat(FILE_LINES))).is_empty());
    assert_eq!(found(short_files, &format!("{}{tests}", "// x\n".repeat(FILE_LINES + 1))), [FILE_LINES + 1]);
    let function =
        |lines: usize| format!("type F = fn();\nfn a(b: [u8; 2]) {{\n{}}}\n", "    {}\n".repeat(lines - 2));
    assert!(found(short_functions, &function(FUNCTION_LINES)).is_empty());
    assert_eq!(found(short_functions, &function(FUNCTION_LINES + 1)), [2]);
    assert!(found(narrow_lines, &"é".repeat(COLUMNS)).is_empty());
    assert_eq!(found(narrow_lines, &"x".repeat(COLUMNS + 1)), [1]);
}

#[test]
fn words_are_looked_for_where_they_mean_something() {
    assert_eq!(found(module_doc, "// x"), [1]);
    assert!(found(module_doc, "//! x").is_empty());
    assert_eq!(
        found(nothing_left_over, "todo!();\n\"todo!()\";\n// XXX later\n\"XXX\";\ndbg!(1);"),
        [1, 3, 5]
    );
    assert_eq!(found(explained_unsafe, "unsafe {}\n// SAFETY: sound\nunsafe {}\n// unsafe"), [1]);
    assert_eq!(found(explained_unsafe, "// SAFETY: far\n\n\n\nunsafe fn a() {}\n#![deny(unsafe_code)]"), [5]);
}

#[test]
fn unwraps_have_a_reason_or_are_tests() {
    let reason = "#[expect(clippy::unwrap_used, reason = \"constant\")]\n";
    assert_eq!(
        found(reasoned_unwraps, "a.unwrap();\nb.expect(\"c\");\n// d.unwrap()\ne.unwrap_or(1);"),
        [1, 2]
    );
    assert!(found(reasoned_unwraps, &format!("{reason}a.unwrap();")).is_empty());
    assert!(found(reasoned_unwraps, "#[cfg(test)]\nmod tests {\n    a.unwrap();\n}").is_empty());
    assert!(reasoned_unwraps(&Source::new("tests/a.rs", "a.unwrap();")).is_empty());
}

#[test]
fn files_of_other_machines_and_sizes_are_found() {
    let path = concat!("/ho", "me/");
    assert_eq!(no_machine_paths("docs/a.md", &format!("x\nsee {path}me")).len(), 1);
    assert!(no_machine_paths("docs/a.md", &format!("example.org{path}")).is_empty());
    assert!(no_machine_paths("tests/a.rs", &format!("// {PATHS_ARE_EXAMPLES}\n{path}")).is_empty());
    assert_eq!(small_files("a", FILE_BYTES + 1).len(), 1);
    assert!(small_files("a", FILE_BYTES).is_empty());
}

#[test]
fn files_are_declared_and_packages_share_lints() {
    let files = [
        ("a/src/lib.rs", "pub mod b;\n// mod c;"),
        ("a/src/b/mod.rs", "mod d;"),
        ("a/src/b/d.rs", ""),
        ("a/src/c.rs", ""),
        ("a/src/bin/e.rs", ""),
        ("a/examples/f.rs", ""),
    ];
    let sources = files.iter().map(|&(file, text)| (file, Source::new(file, text))).collect();
    let dead = no_dead_files(&sources);
    assert_eq!(dead.iter().map(|finding| finding.file.as_str()).collect::<Vec<_>>(), ["a/src/c.rs"]);
    assert!(shared_lints("a/Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n").is_empty());
    assert_eq!(shared_lints("a/Cargo.toml", "[package]\n[lints]\n[x]\nworkspace = true\n").len(), 1);
    assert!(shared_lints("Cargo.toml", "[workspace]").is_empty());
    assert!(changelog(Some("# Changelog\n\n## [Unreleased]\n")).is_empty());
    assert_eq!((changelog(None).len(), changelog(Some("Unreleased")).len()), (1, 1));
}
