//! Formatting: `cargo fmt` over the workspace.

use anyhow::Result;

use crate::args::Args;
use crate::shell;

/// Formats; with `--check` it only looks.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let check = args.flag("--check");
    args.finish()?;
    format(check)
}

/// The lane.
pub(crate) fn format(check: bool) -> Result<()> {
    let mut command = shell::cargo();
    command.args(["fmt", "--all"]);
    if check {
        command.arg("--check");
    }
    shell::run(&mut command)
}
