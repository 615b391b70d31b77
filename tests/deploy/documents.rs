//! The commands that documents show: the program understands each of them.

use crate::tools::{check_command_line, text};

const DOCUMENTS: [&str; 7] = [
    "README.md",
    "deploy/README.md",
    "docs/api.md",
    "docs/operations.md",
    "docs/serving.md",
    "docs/signing.md",
    "docs/store.md",
];

const PROGRAM: &str = "weighbridge ";

/// A line of shell's words up to where another command, a redirection or a comment begins.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for character in line.chars() {
        match (quote, character) {
            (Some(open), _) if open == character => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '|' | '&' | '>' | '<' | ';' | ')') => break,
            (None, '#') if word.is_none() => break,
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// The commands of ours in the blocks of shell of a document.
fn commands(document: &str) -> Vec<Vec<String>> {
    let document = document.replace("\\\n", " ");
    let blocks = document.split("```sh\n").skip(1).filter_map(|rest| rest.split_once("```"));
    let lines = blocks.flat_map(|(block, _)| block.lines());
    let begins = lines.filter_map(|line| {
        let is_command = |before: &str| {
            let is_variable = before.contains('=') && !before.contains(' ');
            before.is_empty() || before.ends_with(['(', ';']) || before.ends_with(" --") || is_variable
        };
        let mut all = line.match_indices(PROGRAM);
        let (at, _) = all.find(|(at, _)| is_command(line[..*at].trim_end()))?;
        Some(words(&line[at + PROGRAM.len()..]))
    });
    begins.collect()
}

#[test]
fn the_program_understands_what_the_documents_show() {
    let mut count = 0;
    for document in DOCUMENTS {
        for command in commands(&text(document)) {
            count += 1;
            check_command_line(&command.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
    assert!(count > 60, "{count}");
}

#[test]
fn words_are_taken_as_a_shell_takes_them() {
    assert_eq!(words("fetch  dlrm --exec 'a b' \"c\" > x | y # z"), ["fetch", "dlrm", "--exec", "a b", "c"]);
    assert_eq!(words("verify                 # all"), ["verify"]);
    assert_eq!(commands("```sh\nid=$(weighbridge jobs)\n```\nweighbridge no\n"), [["jobs"]]);
    assert_eq!(commands("```sh\n(umask 077; weighbridge jobs > x)\n```\n"), [["jobs"]]);
}
