//! Tests: nextest where it is installed, cargo's own runner elsewhere, then the doc tests.

use anyhow::Result;

use crate::args::Args;
use crate::shell;

/// Runs all tests; further words go to the runner.
pub(crate) fn run(args: Args) -> Result<()> {
    let words = args.rest();
    tests(&words)?;
    if words.is_empty() { doc_tests() } else { Ok(()) }
}

/// Unit and integration tests.
pub(crate) fn tests(words: &[String]) -> Result<()> {
    let mut command = shell::cargo();
    if shell::has_cargo_tool("nextest") {
        command.args(["nextest", "run", "--workspace"]);
    } else {
        eprintln!("xtask: cargo-nextest is not installed, so tests run without its time limits");
        command.args(["test", "--workspace", "--lib", "--bins", "--tests"]);
    }
    shell::run(command.args(words))
}

/// The examples in the documentation, which nextest does not run.
pub(crate) fn doc_tests() -> Result<()> {
    shell::run(shell::cargo().args(["test", "--workspace", "--doc", "--quiet"]))
}
