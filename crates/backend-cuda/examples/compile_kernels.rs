//! Compiles kernels for the architectures that are named, and prints what each uses: every kernel
//! for the first architecture, one of each kind for the others.
//!
//!     cargo run --example compile_kernels -- sm_90a sm_80 sm_100
//!
//! With `few` as a further word, one of each kind for the first too. With a folder, every kernel with every
//! head width of the tests is kept there. With `only=NAME`, programs whose names begin so.
//!
//! Needs NVRTC on the library path, and no GPU. `cargo xtask kernels` fetches NVRTC and runs this.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a tool for people")]

use std::path::PathBuf;
use std::process::ExitCode;

use nuthatch_backend_cuda::Extent;

/// What the compiler says of one kernel.
#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    kernel: String,
    registers: String,
    /// Bytes of registers that went to memory.
    spilled: usize,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // A folder is where every kernel is kept; architectures have no slashes.
    let dir = words.iter().find(|word| word.contains('/'));
    let is_short = words.iter().any(|word| word == "few");
    let only = words.iter().find_map(|word| word.strip_prefix("only=")).unwrap_or("");
    let archs = words.iter().filter(|word| !word.contains(['/', '=']) && *word != "few");
    for (i, arch) in archs.enumerate() {
        let extent = match (dir, i) {
            _ if is_short => Extent::Few,
            (Some(_), _) => Extent::Every,
            (None, 0) => Extent::Usual,
            (None, _) => Extent::Few,
        };
        match nuthatch_backend_cuda::compile_all(arch, extent, dir.map(PathBuf::from), only) {
            Ok(programs) => {
                for (program, log) in programs {
                    for usage in usages(&log) {
                        let Usage { kernel, registers, spilled } = usage;
                        println!(
                            "{arch:<7} {program:<20} {kernel:<13} {registers:>4} {spilled:>5}"
                        );
                    }
                }
            }
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Reads the report of the assembler: three lines for each kernel.
fn usages(log: &str) -> Vec<Usage> {
    let mut usages = Vec::new();
    let mut usage = Usage::default();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            usage.kernel = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if let Some((before, _)) = line.split_once(" bytes spill stores") {
            let number = before.rsplit([' ', ',']).next().unwrap_or_default();
            usage.spilled = number.parse().unwrap_or(0);
        } else if let Some((_, rest)) = line.split_once("Used ") {
            usage.registers = rest.split(' ').next().unwrap_or_default().to_owned();
            usages.push(std::mem::take(&mut usage));
        }
    }
    usages
}
