//! Rule: documents name what exists.
//!
//! ARCHITECTURE.md names every crate of the workspace, as `crates/NAME` anywhere in the text, and no
//! other. A path that any document names in backticks from the root exists.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Complaint, Source};

/// Compares the document with the folders of the workspace's crates.
pub(crate) fn check(document: &Source, folders: &BTreeSet<String>, found: &mut Vec<Complaint>) {
    let named = named(&document.text);
    for missing in folders.difference(&named) {
        found.push(document.complain(0, format!("does not name crates/{missing}")));
    }
    for stale in named.difference(folders) {
        found.push(document.complain(0, format!("names crates/{stale}, which does not exist")));
    }
}

/// Folders of the root whose files documents name.
const FOLDERS: [&str; 6] = ["crates/", "xtask/", "fuzz/", "eval/", "examples/", "docs/"];

/// Reports paths in backticks that lead nowhere.
pub(crate) fn check_paths(document: &Source, root: &Path, found: &mut Vec<Complaint>) {
    for (at, line) in document.text.lines().enumerate() {
        for quoted in line.split('`').skip(1).step_by(2) {
            let plain = !quoted.contains(|symbol: char| " *<>{}()$,".contains(symbol));
            if plain
                && FOLDERS.iter().any(|folder| quoted.starts_with(folder))
                && !root.join(quoted).exists()
            {
                found.push(document.complain(at + 1, format!("{quoted} does not exist")));
            }
        }
    }
}

fn named(text: &str) -> BTreeSet<String> {
    text.match_indices("crates/")
        .map(|(at, mark)| {
            let rest = &text[at + mark.len()..];
            let end = rest.find(|symbol: char| !symbol.is_ascii_alphanumeric() && symbol != '-');
            rest[..end.unwrap_or(rest.len())].to_owned()
        })
        .filter(|name| !name.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_the_territory() {
        let folders = BTreeSet::from(["types".to_owned(), "backend-cpu".to_owned()]);
        let count = |text: &str| {
            let mut found = Vec::new();
            check(&Source::new("ARCHITECTURE.md", text.to_owned()), &folders, &mut found);
            found.len()
        };
        assert_eq!(
            count("`crates/types/`: ids. See crates/backend-cpu/src/lib.rs. In crates/:"),
            0
        );
        assert_eq!(count("crates/types"), 1);
        assert_eq!(count("crates/types crates/backend-cpu crates/gone"), 1);
    }

    #[test]
    fn named_paths_exist() {
        let count = |text: &str| {
            let mut found = Vec::new();
            let document = Source::new("SAFETY.md", text.to_owned());
            check_paths(&document, crate::shell::root(), &mut found);
            found.len()
        };
        assert_eq!(count("see `xtask/src/main.rs`, `xtask/` and `eval/results/*.json`\n"), 0);
        assert_eq!(count("see `xtask/src/gone.rs`\n"), 1);
    }
}
