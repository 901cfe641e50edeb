//! `nuthatch pull`: fetches a model and prints where it is.

use std::io::Write as _;

use crate::args::PullArgs;
use crate::fetch::{self, Fetch};
use crate::resolve::ModelSpec;

/// Runs the command. The path is the last line on stdout, for scripts.
pub(crate) fn run(args: &PullArgs, fetch: &Fetch<'_>) -> anyhow::Result<()> {
    let spec = ModelSpec::parse(&args.model)?;
    let path = fetch::fetch(&spec, fetch)?;
    writeln!(std::io::stdout(), "{}", path.display())?;
    Ok(())
}
