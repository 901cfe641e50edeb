//! Rule: a file is short enough to be read in one sitting, and the total has a budget.
//!
//! Test modules inside a file do not count; files that are tests have a limit of their own. Files
//! that were too long when the rule came are listed in `xtask/tidy.txt` and may only shrink.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

use super::{Complaint, Source};

/// Lines of a source file without its tests.
const LINES_MAX: usize = 500;
/// Lines of a file that is only tests.
const TEST_LINES_MAX: usize = 1000;

/// What `xtask/tidy.txt` says.
#[derive(Debug, Default)]
pub(crate) struct Ratchet {
    /// Lines of Rust, tests left out, that the whole project may have.
    pub(crate) total: usize,
    /// Files that may be longer than the rule, and how long.
    pub(crate) files: BTreeMap<String, usize>,
}

impl Ratchet {
    /// Reads `total N` and `PATH N` lines; `#` starts a comment.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut ratchet = Self::default();
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((name, lines)) = line.split_once(' ') else { bail!("tidy.txt: {line:?}") };
            let lines = lines.trim().parse().with_context(|| format!("tidy.txt: {line:?}"))?;
            if name == "total" {
                ratchet.total = lines;
            } else {
                ratchet.files.insert(name.to_owned(), lines);
            }
        }
        Ok(ratchet)
    }
}

/// Checks one file.
pub(crate) fn check(source: &Source, ratchet: &Ratchet, found: &mut Vec<Complaint>) {
    let (max, kind) = if source.is_test() {
        (TEST_LINES_MAX, "lines of tests")
    } else {
        (LINES_MAX, "lines without tests")
    };
    let lines = counted_lines(source);
    match ratchet.files.get(&source.path) {
        Some(_) if lines <= max => {
            found.push(source.complain(0, "is short enough now: take it off xtask/tidy.txt"));
        }
        Some(&listed) if lines > listed => {
            found.push(
                source.complain(0, format!("{lines} {kind}; it had {listed} and may only shrink")),
            );
        }
        Some(_) => {}
        None if lines > max => {
            found.push(source.complain(0, format!("{lines} {kind}, more than {max}")));
        }
        None => {}
    }
}

/// Lines that count against the limit.
pub(crate) fn counted_lines(source: &Source) -> usize {
    let all = source.text.lines().count();
    match &source.view {
        Some(view) => all - test_module_lines(&view.code),
        None => all,
    }
}

/// Lines inside `#[cfg(test)] mod NAME { .. }`, the attribute included.
fn test_module_lines(code: &str) -> usize {
    let mut counted = 0;
    let mut lines = code.lines().peekable();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            continue;
        }
        let mut inside = 1;
        let mut depth = 0_usize;
        let mut opened = false;
        for line in lines.by_ref() {
            inside += 1;
            opened |= line.contains('{');
            depth += line.matches('{').count();
            depth = depth.saturating_sub(line.matches('}').count());
            if depth == 0 && (opened || line.trim_end().ends_with(';')) {
                break;
            }
        }
        counted += inside;
    }
    counted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(path: &str, text: &str, ratchet: &str) -> Vec<String> {
        let mut found = Vec::new();
        let source = Source::new(path, text.to_owned());
        check(&source, &Ratchet::parse(ratchet).unwrap(), &mut found);
        found.into_iter().map(|complaint| complaint.message).collect()
    }

    #[test]
    fn a_file_is_at_most_five_hundred_lines() {
        let good = "let a = 1;\n".repeat(LINES_MAX);
        let bad = "let a = 1;\n".repeat(LINES_MAX + 1);
        assert!(complaints("crates/a/src/b.rs", &good, "").is_empty());
        assert_eq!(complaints("crates/a/src/b.rs", &bad, "").len(), 1);
        assert!(complaints("crates/a/tests/b.rs", &bad, "").is_empty());
    }

    #[test]
    fn test_modules_do_not_count() {
        let tests = "    fn t() { \"}\"; }\n".repeat(300);
        let text = format!("{}#[cfg(test)]\nmod tests {{\n{tests}}}\n", "a;\n".repeat(400));
        assert!(complaints("crates/a/src/b.rs", &text, "").is_empty());
        assert_eq!(test_module_lines("#[cfg(test)]\nmod tests;\nfn f() {}\n"), 2);
    }

    #[test]
    fn the_ratchet_only_shrinks() {
        let long = "a;\n".repeat(600);
        assert!(complaints("x.rs", &long, "x.rs 600").is_empty());
        assert_eq!(complaints("x.rs", &long, "x.rs 599").len(), 1);
        assert_eq!(complaints("x.rs", "a;\n", "x.rs 600").len(), 1);
        assert!(Ratchet::parse("total many").is_err());
    }
}
