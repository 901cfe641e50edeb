//! The clients that people have, against the server: OpenAI's Python package.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::Args;
use crate::shell;

/// The version that the server is held against.
const OPENAI: &str = "openai==3.49.0";

/// The chore.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let is_release = args.flag("--release");
    args.finish()?;
    let nuthatch = if is_release { shell::release_binary()? } else { shell::dev_binary()? };
    check(&nuthatch)
}

/// Runs the clients against a server of this binary.
pub(crate) fn check(nuthatch: &Path) -> Result<()> {
    let script = shell::root().join("eval").join("serve").join("openai_client.py");
    shell::run(shell::command(python()?).arg(script).arg(nuthatch))
}

/// The interpreter of a virtual environment that has the package.
fn python() -> Result<PathBuf> {
    let folder = shell::target_dir().join("peers").join("openai");
    let python = folder.join("bin").join("python");
    let stamp = folder.join("nuthatch-stamp.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == OPENAI) {
        return Ok(python);
    }
    println!("installing {OPENAI} from the Python registry, once");
    shell::run(shell::command("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    shell::run(shell::command(&python).args(["-m", "pip", "install", "--quiet", OPENAI]))?;
    std::fs::write(&stamp, OPENAI).with_context(|| stamp.display().to_string())?;
    Ok(python)
}
