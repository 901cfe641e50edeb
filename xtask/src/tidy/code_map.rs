//! Rule: documents name what exists.
//!
//! The table under `## Crates` in ARCHITECTURE.md has one row for each package of the workspace, and
//! no other: the row starts with the package's folder in backticks. A path that any document names
//! in backticks from the root exists.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Complaint, Source};

/// Compares the document with the folders of the workspace's packages.
pub(crate) fn check(document: &Source, folders: &BTreeSet<String>, found: &mut Vec<Complaint>) {
    let named = named(&document.text);
    for missing in folders.difference(&named) {
        found.push(document.complain(0, format!("has no row for {missing} under `## Crates`")));
    }
    for stale in named.difference(folders) {
        found.push(document.complain(0, format!("has a row for {stale}, which does not exist")));
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
    text.lines()
        .skip_while(|line| *line != "## Crates")
        .skip(1)
        .take_while(|line| !line.starts_with("## "))
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name.to_owned())
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
        let good = "## Crates\n| `types` | a |\n| `backend-cpu` | b |\n## Rest\n| `x` |\n";
        assert_eq!(count(good), 0);
        assert_eq!(count("## Crates\n| `types` | a |\n"), 1);
        assert_eq!(count("## Crates\n| `types` |\n| `backend-cpu` |\n| `gone` |\n"), 1);
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
