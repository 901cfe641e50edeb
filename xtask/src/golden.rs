//! Remakes the golden logits of the tiny models with Hugging Face transformers.
//!
//! The goldens are committed, so this runs only when a model is added or the script changes.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::args::Args;
use crate::shell;

/// What the script imports.
const PACKAGES: [&str; 4] = ["torch", "transformers", "safetensors", "gguf"];

/// The chore: `--python PATH` reuses an interpreter, further words go to the script.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let python: Option<PathBuf> = args.value("--python")?;
    let script = shell::root().join("eval/golden/make.py");
    ensure!(script.is_file(), "{} is missing", script.display());
    let python = match python {
        Some(path) => path,
        None => environment()?,
    };
    shell::run(shell::command(python).arg(script).args(args.rest()))
}

/// A virtual environment with the packages, made once.
fn environment() -> Result<PathBuf> {
    let folder = shell::target_dir().join("golden-venv");
    let python = folder.join("bin").join("python");
    if !python.is_file() {
        println!("fetching {} from the Python registry, once", PACKAGES.join(", "));
        shell::run(shell::command("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    shell::run(shell::command(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
    Ok(python)
}
