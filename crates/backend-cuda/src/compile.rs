//! Compiling kernels that nobody runs, to see that all of them can be.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::error::OpenError;
use crate::nvrtc::Compiler;
use crate::program::Program;

/// How many of the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One program of each kind, for architectures that differ little from another.
    Few,
    /// Every weight type, and the head widths that models have.
    Usual,
    /// Also the head widths that tests have.
    Every,
}

/// Compiles kernels for an architecture such as `sm_90a`, on as many threads as there are cores, and
/// gives for each program its name and the compiler's report. Keeps them in `cache_dir`, if there is
/// one. Those only whose names begin with `only`. Needs NVRTC, but no device.
pub fn compile_all(
    arch: &str,
    extent: Extent,
    cache_dir: Option<PathBuf>,
    only: &str,
) -> Result<Vec<(String, String)>, OpenError> {
    let compiler = Compiler::new(arch.to_owned(), cache_dir)?;
    let mut programs = Program::all(extent, shared_bytes_max(arch));
    programs.retain(|program| program.name.starts_with(only));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // Those that come last are the longest, and begin first.
    let queue = Mutex::new(programs);
    let work = || {
        let mut reports = Vec::new();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(program) = next else { return Ok(reports) };
            let (cubin, log) = compiler.compile(&program)?;
            compiler.keep(&program, &cubin);
            reports.push((program.name, log));
        }
    };
    let reports = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, Result<Vec<_>, OpenError>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    let mut reports: Vec<_> = reports.into_iter().flatten().collect();
    reports.sort();
    Ok(reports)
}

/// Dynamic shared memory of a block, by NVIDIA's table of compute capabilities.
fn shared_bytes_max(arch: &str) -> usize {
    match arch {
        "sm_80" | "sm_87" => 163 * 1024,
        "sm_86" | "sm_89" | "sm_120" | "sm_120a" => 99 * 1024,
        _ => 227 * 1024,
    }
}
