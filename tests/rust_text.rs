//! Rust source as far as the checks read it: lines with code, comments and strings told apart, and what is test code.
//!
//! It is no parser. It knows comments, string and character literals and brackets, which is enough to find where a
//! function ends and which lines belong to `#[cfg(test)]`.

/// A line of a source file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// The line as it stands.
    pub(crate) raw: String,
    /// The line without comments and without what stands in quotes.
    pub(crate) code: String,
    /// The text of the comments on it.
    pub(crate) comment: String,
    /// Whether it belongs to an item under `#[cfg(test)]`.
    pub(crate) test: bool,
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    /// So many block comments deep.
    BlockComment(usize),
    /// In a string; raw ones end at a quote with so many `#`.
    Text {
        hashes: Option<usize>,
    },
}

/// The lines of `text`.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let mut state = State::Code;
    let mut lines: Vec<Line> = text
        .lines()
        .map(|raw| {
            let mut line = Line { raw: raw.to_owned(), ..Line::default() };
            state = split(raw, state, &mut line);
            line
        })
        .collect();
    mark_tests(&mut lines);
    lines
}

/// Sorts the characters of `raw` into `line`, and says in which state the next line begins.
fn split(raw: &str, mut state: State, line: &mut Line) -> State {
    let characters: Vec<char> = raw.chars().collect();
    let mut at = 0;
    while let Some(rest) = characters.get(at..).filter(|rest| !rest.is_empty()) {
        let taken;
        (taken, state) = match state {
            State::Code => next_of_code(rest, line),
            State::LineComment => {
                line.comment.extend(rest);
                (rest.len(), state)
            }
            State::BlockComment(depth) => next_of_comment(rest, depth, line),
            State::Text { hashes } => next_of_text(rest, hashes, line),
        };
        at += taken;
    }
    if matches!(state, State::LineComment) { State::Code } else { state }
}

fn next_of_code(rest: &[char], line: &mut Line) -> (usize, State) {
    match rest {
        ['/', '/', ..] => return (2, State::LineComment),
        ['/', '*', ..] => return (2, State::BlockComment(1)),
        ['\'', '\\', _, tail @ ..] => {
            let end = tail.iter().position(|&character| character == '\'').unwrap_or(tail.len());
            return (end + 4, State::Code);
        }
        ['\'', _, '\'', ..] => return (3, State::Code),
        ['"', ..] => {
            line.code.push('"');
            return (1, State::Text { hashes: None });
        }
        ['r', tail @ ..] if !ends_in_word(&line.code) => {
            let hashes = tail.iter().take_while(|&&character| character == '#').count();
            if tail.get(hashes) == Some(&'"') {
                line.code.push('"');
                return (hashes + 2, State::Text { hashes: Some(hashes) });
            }
        }
        _ => {}
    }
    line.code.extend(rest.first());
    (1, State::Code)
}

/// Whether `code` ends within an identifier; the prefixes of byte and C strings do not count.
fn ends_in_word(code: &str) -> bool {
    let word: String = code.chars().rev().take_while(|&character| is_word(character)).collect();
    !matches!(word.as_str(), "" | "b" | "c")
}

fn next_of_comment(rest: &[char], depth: usize, line: &mut Line) -> (usize, State) {
    match rest {
        ['*', '/', ..] if depth == 1 => (2, State::Code),
        ['*', '/', ..] => (2, State::BlockComment(depth - 1)),
        ['/', '*', ..] => (2, State::BlockComment(depth + 1)),
        _ => {
            line.comment.extend(rest.first());
            (1, State::BlockComment(depth))
        }
    }
}

fn next_of_text(rest: &[char], hashes: Option<usize>, line: &mut Line) -> (usize, State) {
    let closing = hashes.unwrap_or(0);
    match rest {
        ['\\', ..] if hashes.is_none() => (2, State::Text { hashes }),
        ['"', tail @ ..] if tail.iter().take_while(|&&character| character == '#').count() >= closing => {
            line.code.push('"');
            (closing + 1, State::Code)
        }
        _ => (1, State::Text { hashes }),
    }
}

fn mark_tests(lines: &mut [Line]) {
    let mut at = 0;
    while at < lines.len() {
        let Some(column) = lines[at].code.find("#[cfg(test)]") else {
            at += 1;
            continue;
        };
        let end = item_end(lines, at, column).map_or(lines.len() - 1, |(end, _)| end);
        lines[at..=end].iter_mut().for_each(|line| line.test = true);
        at = end + 1;
    }
}

/// The line on which the item ends that begins on line `start` at byte `column`, and whether it has a body in
/// braces; `None` where it does not end.
pub(crate) fn item_end(lines: &[Line], start: usize, column: usize) -> Option<(usize, bool)> {
    let (mut braces, mut others) = (0usize, 0usize);
    for (index, line) in lines.iter().enumerate().skip(start) {
        let code =
            if index == start { line.code.get(column..).unwrap_or_default() } else { line.code.as_str() };
        for character in code.chars() {
            match character {
                '(' | '[' => others += 1,
                ')' | ']' => others = others.saturating_sub(1),
                '{' => braces += 1,
                '}' if braces <= 1 => return Some((index, true)),
                '}' => braces -= 1,
                ';' if braces == 0 && others == 0 => return Some((index, false)),
                _ => {}
            }
        }
    }
    None
}

/// Whether `character` may stand in an identifier.
pub(crate) fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The byte positions at which `word` stands in `code` as a word of its own.
pub(crate) fn words<'c>(code: &'c str, word: &'c str) -> impl Iterator<Item = usize> + 'c {
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = code.get(..at).and_then(|before| before.chars().next_back());
        let behind = code.get(at + word.len()..).and_then(|behind| behind.chars().next());
        !before.is_some_and(is_word) && !behind.is_some_and(is_word)
    })
}

/// Whether `word` stands in `code` as a word of its own.
pub(crate) fn has_word(code: &str, word: &str) -> bool {
    words(code, word).next().is_some()
}

#[test]
fn code_comments_and_strings_are_told_apart() {
    let lines = lines(concat!(
        "let a = \"fn { // no\"; // yes {\n",
        "let b = r#\"one \" two\n",
        "three\"#; let c = '\\'' ; let d = '{'; /* in /* deeper */ still */ x\n",
        "fn e<'a>(f: &'a str) {} // end",
    ));
    let code: Vec<&str> = lines.iter().map(|line| line.code.as_str()).collect();
    assert_eq!(
        code,
        ["let a = \"\"; ", "let b = \"", "\"; let c =  ; let d = ;  x", "fn e<'a>(f: &'a str) {} "]
    );
    let comments: Vec<&str> = lines.iter().map(|line| line.comment.as_str()).collect();
    assert_eq!(comments, [" yes {", "", " in  deeper  still ", " end"]);
}

#[test]
fn test_items_are_marked_to_their_end() {
    let lines = lines("a();\n#[cfg(test)]\nuse b;\nc();\n#[cfg(test)]\nmod tests {\n    fn d() {}\n}\ne();");
    let tests: Vec<bool> = lines.iter().map(|line| line.test).collect();
    assert_eq!(tests, [false, true, true, false, true, true, true, true, false]);
}

#[test]
fn words_end_where_others_begin() {
    assert!(has_word("x = std::env::args()", "std::env") && has_word("unsafe {", "unsafe"));
    assert!(!has_word("eprintln!()", "println!") && !has_word("#![deny(unsafe_code)]", "unsafe"));
}
