//! Rules about the text of a file: docs, marks of unfinished work, white space, letters, paths.

use super::view::has_word;
use super::{Complaint, Source};

/// Words that mark unfinished work.
const MARKS: [&str; 3] = ["FIXME", "TODO", "XXX"];

/// Starts of paths that only exist on one machine. Split, so that this file passes its own rule.
const MACHINE_PATHS: [&str; 5] = [
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
    concat!("/tm", "p/"),
];

/// Every Rust file says in its first line what it is.
pub(crate) fn module_doc(source: &Source, found: &mut Vec<Complaint>) {
    if source.view.is_some() && !source.text.starts_with("//! ") {
        found.push(source.complain(1, "starts without a module doc (`//! One sentence.`)"));
    }
}

/// No marks of unfinished work, no test that never runs, no doc example that never compiles.
pub(crate) fn unfinished(source: &Source, found: &mut Vec<Complaint>) {
    if source.path.ends_with(".md") {
        return;
    }
    let text = source.view.as_ref().map_or(&source.text, |view| &view.comments);
    for (line, content) in numbered(text) {
        if let Some(mark) = MARKS.iter().find(|mark| has_word(content, mark)) {
            found.push(source.complain(line, format!("{mark}: finish it or take it out")));
        }
        let fence = content.trim_start_matches(['/', '!', ' ', '\t']);
        if source.view.is_some() && fence.starts_with("```ignore") {
            found.push(source.complain(line, "an ignored doc example: use `no_run` or fix it"));
        }
    }
    let Some(view) = &source.view else { return };
    for (line, content) in numbered(&view.code) {
        if content.contains("#[ignore") {
            found.push(source.complain(line, "#[ignore]: assert today's behaviour instead"));
        }
    }
}

/// No white space at the end of a line, no tabs in Rust, a newline at the end of the file.
pub(crate) fn white_space(source: &Source, found: &mut Vec<Complaint>) {
    for (line, content) in numbered(&source.text) {
        if content.ends_with([' ', '\t', '\r']) {
            found.push(source.complain(line, "white space at the end of the line"));
        }
    }
    if !source.text.is_empty() && !source.text.ends_with('\n') {
        found.push(source.complain(0, "no newline at the end of the file"));
    }
}

/// Rust is written in ASCII; strings may hold anything, comments may draw.
pub(crate) fn letters(source: &Source, found: &mut Vec<Complaint>) {
    let Some(view) = &source.view else { return };
    for (line, content) in numbered(&view.code) {
        if let Some(letter) = content.chars().find(|letter| !letter.is_ascii()) {
            found.push(source.complain(line, format!("{letter:?} in code")));
        }
    }
    for (line, content) in numbered(&view.comments) {
        if let Some(letter) =
            content.chars().find(|&letter| !letter.is_ascii() && !is_drawing(letter))
        {
            found.push(
                source.complain(line, format!("{letter:?} in a comment: only ASCII and drawings")),
            );
        }
    }
}

/// Arrows, box drawing, blocks and geometric shapes.
fn is_drawing(letter: char) -> bool {
    matches!(letter, '\u{2190}'..='\u{21ff}' | '\u{2500}'..='\u{25ff}')
}

/// No path that exists on one machine only.
pub(crate) fn machine_paths(source: &Source, found: &mut Vec<Complaint>) {
    for (line, content) in numbered(&source.text) {
        for path in MACHINE_PATHS {
            let absolute = content.match_indices(path).any(|(at, _)| {
                let before = content[..at].chars().next_back();
                !before
                    .is_some_and(|symbol| symbol.is_alphanumeric() || "._-~/$}>)".contains(symbol))
            });
            if absolute {
                found.push(source.complain(line, format!("{path} is a path of one machine")));
            }
        }
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split('\n').enumerate().map(|(at, line)| (at + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rule = fn(&Source, &mut Vec<Complaint>);

    fn check(rule: Rule, path: &str, good: &[&str], bad: &[&str]) {
        let count = |text: &str| {
            let mut found = Vec::new();
            rule(&Source::new(path, text.to_owned()), &mut found);
            found.len()
        };
        for text in good {
            assert_eq!(count(text), 0, "{text:?} should pass");
        }
        for text in bad {
            assert_eq!(count(text), 1, "{text:?} should be reported");
        }
    }

    #[test]
    fn modules_are_documented() {
        check(module_doc, "a.rs", &["//! What.\n"], &["fn f() {}\n", "// What.\n", ""]);
    }

    #[test]
    fn nothing_is_unfinished() {
        let good = ["let a = \"FIXME\";\n", "// METODO\n", "/// ```no_run\n"];
        let bad =
            ["// FIXME: x\n", "// TODO\n", "#[ignore]\n", "#[ignore = \"x\"]\n", "/// ```ignore\n"];
        check(unfinished, "a.rs", &good, &bad);
        check(unfinished, "a.py", &["pass\n"], &["# XXX\n"]);
    }

    #[test]
    fn lines_end_cleanly() {
        check(white_space, "a.py", &["a\n", ""], &["a \n", "a\r\n", "a\n\t\n", "a"]);
    }

    #[test]
    fn letters_are_ascii_outside_strings_and_drawings() {
        let good = ["let a = \"\u{e9}\";\n", "// a \u{2500}\u{25ba} b\n"];
        check(letters, "a.rs", &good, &["let \u{e9} = 1;\n", "// caf\u{e9}\n"]);
    }

    #[test]
    fn paths_hold_everywhere() {
        let good = ["see target/wo\u{72}k/x\n".to_owned(), format!("{}/x\n", "$HOME")];
        let good: Vec<&str> = good.iter().map(String::as_str).collect();
        let bad: Vec<String> = MACHINE_PATHS.iter().map(|path| format!("cd {path}x\n")).collect();
        let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
        check(machine_paths, "a.md", &good, &bad);
    }
}
