//! House rules that lints cannot express: one file per rule, each with a good and a bad example.

mod code_map;
mod edges;
mod length;
mod text;
mod unsafety;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use self::length::Ratchet;
use self::view::View;
use crate::args::Args;
use crate::shell;

/// File name endings that the rules about text read.
const TEXTS: [&str; 12] = [
    ".rs", ".py", ".cu", ".cuh", ".md", ".toml", ".json", ".sh", ".yml", ".txt", ".jinja",
    ".ci/run",
];
/// Folders whose files are test data: their bytes are the point. Code in them is still read.
const FIXTURES: [&str; 4] = ["fuzz/seeds/", "/fixtures/", "/golden/", "proptest-regressions/"];

/// One file of the checkout.
pub(crate) struct Source {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    /// The whole text.
    pub(crate) text: String,
    /// Code and comments apart, for Rust.
    pub(crate) view: Option<View>,
}

/// One broken rule.
#[derive(Debug)]
pub(crate) struct Complaint {
    /// Path from the root, or what else the complaint is about.
    pub(crate) path: String,
    /// Line from 1; 0 for the whole file.
    pub(crate) line: usize,
    /// What is wrong.
    pub(crate) message: String,
}

impl Source {
    fn new(path: impl Into<String>, text: String) -> Self {
        let path = path.into();
        let view = path.ends_with(".rs").then(|| View::new(&text));
        Self { path, text, view }
    }

    fn complain(&self, line: usize, message: impl Into<String>) -> Complaint {
        Complaint { path: self.path.clone(), line, message: message.into() }
    }

    /// Whether the file is only tests.
    fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }
}

/// The chore.
pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    check()
}

/// The lane.
pub(crate) fn check() -> Result<()> {
    let sources = sources(shell::root())?;
    let ratchet_text = std::fs::read_to_string(shell::root().join("xtask/tidy.txt"));
    let ratchet = Ratchet::parse(&ratchet_text.context("xtask/tidy.txt")?)?;
    let metadata = shell::capture(shell::cargo().args([
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
    ]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;

    let mut found = Vec::new();
    for source in &sources {
        text::module_doc(source, &mut found);
        text::unfinished(source, &mut found);
        text::white_space(source, &mut found);
        text::letters(source, &mut found);
        text::machine_paths(source, &mut found);
        unsafety::check(source, &mut found);
        if [".rs", ".py", ".cu", ".cuh"].iter().any(|end| source.path.ends_with(end)) {
            length::check(source, &ratchet, &mut found);
        }
        if source.path.ends_with(".md") {
            code_map::check_paths(source, shell::root(), &mut found);
        }
        if source.path == "ARCHITECTURE.md" {
            code_map::check(source, &folders(&metadata), &mut found);
        }
    }
    for listed in ratchet.files.keys() {
        if !sources.iter().any(|source| source.path == *listed) {
            found.push(Complaint {
                path: "xtask/tidy.txt".to_owned(),
                line: 0,
                message: format!("lists {listed}, which does not exist"),
            });
        }
    }
    edges::check(&metadata, &mut found)?;
    budget(&sources, ratchet.total, &mut found);
    report(&found)
}

fn report(found: &[Complaint]) -> Result<()> {
    for complaint in found {
        match complaint.line {
            0 => println!("{}: {}", complaint.path, complaint.message),
            line => println!("{}:{line}: {}", complaint.path, complaint.message),
        }
    }
    if !found.is_empty() {
        bail!("{} house rules broken", found.len());
    }
    Ok(())
}

/// Prints the size of each crate, and complains when the whole is over its budget.
fn budget(sources: &[Source], total_max: usize, found: &mut Vec<Complaint>) {
    let mut sizes = BTreeMap::<&str, usize>::new();
    let mut tests = 0;
    for source in sources.iter().filter(|source| source.view.is_some()) {
        let all = source.text.lines().count();
        let counted = if source.is_test() { 0 } else { length::counted_lines(source) };
        tests += all - counted;
        *sizes.entry(home(&source.path)).or_default() += counted;
    }
    let total: usize = sizes.values().sum();
    for (name, lines) in &sizes {
        println!("{lines:>7}  {name}");
    }
    println!("{total:>7}  lines of Rust in all, of {total_max}; {tests} more are tests");
    if total > total_max {
        found.push(Complaint {
            path: "xtask/tidy.txt".to_owned(),
            line: 0,
            message: format!(
                "{total} lines are over the budget of {total_max}: raise it and say why"
            ),
        });
    }
}

/// The crate or folder a path belongs to: `crates/cache`, `xtask`.
fn home(path: &str) -> &str {
    let mut ends = path.match_indices('/').map(|(at, _)| at);
    let depth = usize::from(path.starts_with("crates/"));
    ends.nth(depth).map_or(path, |end| &path[..end])
}

/// Names of the packages' folders.
fn folders(metadata: &Value) -> BTreeSet<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter_map(|package| Path::new(package["manifest_path"].as_str()?).parent())
        .filter_map(|folder| Some(folder.file_name()?.to_str()?.to_owned()))
        .collect()
}

/// Every text file that git tracks or would track.
fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut git = shell::command("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let listing = shell::capture(&mut git).context("tidy reads the files that git knows")?;
    let mut paths: Vec<&str> = listing.lines().collect();
    paths.sort_unstable();
    paths.dedup();
    let mut sources = Vec::new();
    for path in paths {
        let code = path.ends_with(".rs") || path.ends_with(".py");
        let data = FIXTURES.iter().any(|part| path.contains(part));
        let wanted = code || (!data && TEXTS.iter().any(|end| path.ends_with(end)));
        // A file that git still lists may be gone from the working tree.
        if !wanted || !root.join(path).is_file() {
            continue;
        }
        let text = std::fs::read_to_string(root.join(path)).with_context(|| path.to_owned())?;
        sources.push(Source::new(path, text));
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_knows_its_crate() {
        assert_eq!(home("crates/cache/src/lib.rs"), "crates/cache");
        assert_eq!(home("xtask/src/main.rs"), "xtask");
    }

    #[test]
    fn the_budget_complains_when_it_is_exceeded() {
        let sources = [Source::new("crates/a/src/lib.rs", "//! A.\nfn f() {}\n".to_owned())];
        let mut found = Vec::new();
        budget(&sources, 2, &mut found);
        assert!(found.is_empty());
        budget(&sources, 1, &mut found);
        assert_eq!(found.len(), 1);
    }
}
