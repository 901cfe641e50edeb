//! Clients against the server: OpenAI's Python package, a reader of KV events, and rude ones.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::Args;
use crate::shell;

/// The versions that the server is held against.
const PACKAGES: [&str; 3] = ["openai==3.49.0", "pyzmq==27.3.0", "msgpack==1.2.4"];

/// The chore.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let is_release = args.flag("--release");
    args.finish()?;
    let nuthatch = if is_release { shell::release_binary()? } else { shell::dev_binary()? };
    check(&nuthatch)
}

/// Runs the clients against a server of this binary.
pub(crate) fn check(nuthatch: &Path) -> Result<()> {
    let python = python("clients", &PACKAGES)?;
    for script in ["openai_client.py", "kv_events.py", "hardness.py"] {
        let script = shell::root().join("eval").join("serve").join(script);
        shell::run(shell::command(&python).arg(script).arg(nuthatch))?;
    }
    Ok(())
}

/// The interpreter of a virtual environment of this name that has the packages.
pub(crate) fn python(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = shell::target_dir().join("peers").join(name);
    let wanted = packages.join(" ");
    let python = folder.join("bin").join("python");
    let stamp = folder.join("nuthatch-stamp.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    println!("installing {wanted} from the Python registry, once");
    shell::run(shell::command("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    shell::run(shell::command(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))?;
    std::fs::write(&stamp, wanted).with_context(|| stamp.display().to_string())?;
    Ok(python)
}
