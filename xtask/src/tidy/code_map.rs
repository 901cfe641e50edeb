//! Rule: ARCHITECTURE.md names every crate of the workspace, and no other.
//!
//! A crate is named as `crates/NAME` anywhere in the text.

use std::collections::BTreeSet;

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
}
