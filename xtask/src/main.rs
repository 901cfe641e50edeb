//! Chores, one entry point: `cargo xtask CHORE`.
//!
//! Each chore is one module. They call the same programs a person would call, with `std::process`
//! only; what a machine lacks is skipped loudly, never silently.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "chores talk to the person at the terminal"
)]

mod args;
mod ci;
mod clients;
mod crash;
mod fmt;
mod fuzz;
mod golden;
mod kernels;
mod peer;
mod picture;
mod remote;
mod shell;
mod smoke;
mod test;
mod tidy;

use std::process::ExitCode;

use crate::args::Args;

const USAGE: &str = "\
cargo xtask CHORE

  ci        every lane a change must pass: fmt, clippy, tidy, test, doc, crash, kernels, smoke
  fmt       formats the workspace; --check only looks
  tidy      house rules that lints cannot express
  test      unit, integration and doc tests; further words go to the test runner
  smoke     the binary on the real default model [--release]
  clients   OpenAI's Python package, a reader of KV events and rude clients [--release]
  remote    the remote tier: its tests, and engines that share stores on this machine [--release]
  crash     [--rounds 500] [--seed 1]: kills an engine with a disk tier, and checks what is left
  peer      llama-cpp | greedy: nuthatch beside llama.cpp, in one run
  kernels   compiles every CUDA kernel, without a GPU
  golden    remakes the golden logits with Hugging Face transformers
  fuzz      [TARGET] [--seconds 60]: the fuzz targets, one after another
  picture   runs the binary and draws docs/run.svg
";

fn main() -> ExitCode {
    let mut args = Args::from_env();
    let Some(chore) = args.word() else {
        print!("{USAGE}");
        return ExitCode::FAILURE;
    };
    let outcome = match chore.as_str() {
        "ci" => ci::run(args),
        "fmt" => fmt::run(args),
        "tidy" => tidy::run(args),
        "test" => test::run(args),
        "smoke" => smoke::run(args),
        "clients" => clients::run(args),
        "remote" => remote::run(args),
        "crash" => crash::run(args),
        "peer" => peer::run(args),
        "kernels" => kernels::run(args),
        "golden" => golden::run(args),
        "fuzz" => fuzz::run(args),
        "picture" => picture::run(args),
        "help" | "-h" | "--help" => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(anyhow::anyhow!("no chore named {other:?}\n\n{USAGE}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
