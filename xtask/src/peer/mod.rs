//! Nuthatch beside llama.cpp on the same file, in one run.
//!
//! The peer comes from the Python registry as source and is built for this CPU in a virtual
//! environment under the target folder, so that nothing has to be installed by hand.

mod bench;
mod greedy;
mod quiet;
mod table;
mod venv;

use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::args::Args;
use crate::shell;

const USAGE: &str = "\
cargo xtask peer llama-cpp [--rounds 3] [--json FILE] [--check] [--quick]
cargo xtask peer greedy    [--tokens 48] [--tolerance 0.5] [--json FILE]
  --model PATH    a GGUF file; the default model otherwise
  --python PATH   an interpreter that has llama-cpp-python; otherwise one is built
  --nuthatch PATH a binary; the release build otherwise
  --threads N     all cores otherwise
";

/// What both comparisons need.
struct Bed {
    /// The release binary.
    nuthatch: PathBuf,
    /// An interpreter that can import `llama_cpp`.
    python: PathBuf,
    /// The GGUF file that both read.
    model: PathBuf,
    /// Threads that both use.
    threads: usize,
}

/// The chore.
pub(crate) fn run(mut args: Args) -> Result<()> {
    match args.word().as_deref() {
        Some("llama-cpp") => bench::run(args),
        Some("greedy") => greedy::run(args),
        _ => bail!("which comparison?\n{USAGE}"),
    }
}

impl Bed {
    /// Takes the shared options and makes everything ready.
    fn prepare(args: &mut Args) -> Result<Self> {
        let model: Option<PathBuf> = args.value("--model")?;
        let python: Option<PathBuf> = args.value("--python")?;
        let nuthatch: Option<PathBuf> = args.value("--nuthatch")?;
        let threads: Option<usize> = args.value("--threads")?;
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let nuthatch = match nuthatch {
            Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
            None => shell::release_binary()?,
        };
        let python = match python {
            Some(path) => path,
            None => venv::llama_cpp()?,
        };
        let model = match model {
            Some(path) => path,
            None => default_model(&nuthatch)?,
        };
        let model = model.canonicalize().with_context(|| model.display().to_string())?;
        Ok(Self { nuthatch, python, model, threads: threads.unwrap_or(cores) })
    }
}

/// Fetches the default model through the binary, which prints where it lies.
fn default_model(nuthatch: &Path) -> Result<PathBuf> {
    let path = shell::capture(shell::command(nuthatch).arg("pull"))?;
    let path = path.lines().next_back().context("nuthatch pull printed no path")?;
    Ok(PathBuf::from(path.trim()))
}
