//! The binary `nuthatch`: arguments to a configuration, a configuration to an engine, and the
//! engine's tokens to a terminal.
//!
//! Code map: `args` is what was typed, `env` the only reader of the environment, `config` makes
//! sense of both; `resolve` says what a MODEL means and `fetch` brings it here; `load` puts it on a
//! `device`; `run`, `serve`, `batch`, `plan`, `bench`, `eval`, `profile`, `simulate`, `sessions` and
//! `pull` are the commands; `session` is a conversation that is kept.
//!
//! What is not here: anything about tokens' contents, pages or devices. This crate chooses the
//! device once and prints.

mod args;
mod batch;
mod bench;
mod chart;
mod config;
mod device;
mod env;
mod eval;
mod fetch;
mod host;
mod interrupt;
mod known;
mod load;
mod plan;
mod profile;
mod pull;
mod random;
mod resolve;
mod run;
mod serve;
mod sessions;
mod simulate;
mod size;
mod sparse;
mod table;
mod text;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Parser as _;

use nuthatch_engine::topk::GRAMMAR;

use crate::args::{Args, BenchCommand, Command, FileError, with_config_file};
use crate::config::{BatchConfig, BenchConfig, ConfigError, EngineConfig, RunConfig, ServeConfig};
use crate::env::Env;
use crate::fetch::{Fetch, FetchError};
use crate::interrupt::{EXIT_INTERRUPTED, Interrupt};

const EXIT_FAILURE: u8 = 1;
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let words = match with_config_file(std::env::args_os().collect()) {
        Ok(words) => words,
        Err(error) => return report(&error.into()),
    };
    // What comes behind `--` is text.
    let flags = words.split(|word| word == "--").next().unwrap_or_default();
    let asks = |two: &[std::ffi::OsString]| two == ["--sparse", "help"];
    if flags.windows(2).any(asks) || flags.iter().any(|word| word == "--sparse=help") {
        // A closed pipe is not our failure.
        let _ = writeln!(io::stdout(), "A policy is\n{GRAMMAR}");
        return ExitCode::SUCCESS;
    }
    let args = match Args::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are printed this way too; a closed pipe is not our failure.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE));
        }
    };
    start_log(args.verbose);
    match dispatch(&args) {
        Ok(code) => code,
        Err(error) => report(&error),
    }
}

fn dispatch(args: &Args) -> anyhow::Result<ExitCode> {
    let env = Env::read()?;
    let interrupt = Interrupt::install()?;
    let refresh = matches!(args.command, Command::Pull(_));
    let fetch = Fetch { env: &env, interrupt: &interrupt, refresh };
    match &args.command {
        Command::Run(args) => {
            let config = RunConfig::new(args, io::stdin().is_terminal())?;
            return run::run(&config, &fetch);
        }
        Command::Serve(args) => return serve::run(&ServeConfig::new(args)?, &fetch),
        Command::Batch(args) => return batch::run(&BatchConfig::new(args)?, &fetch),
        Command::Simulate(args) => simulate::run(args)?,
        Command::Sessions(args) => sessions::run(&args.what, &env)?,
        Command::Pull(args) => pull::run(args, &fetch)?,
        Command::Plan(args) => plan::run(args, &fetch)?,
        Command::Eval(args) => eval::run(args, &EngineConfig::alone(&args.engine)?, &fetch)?,
        Command::Profile(args) => profile::run(args, &EngineConfig::alone(&args.engine)?, &fetch)?,
        Command::Bench(args) => match &args.what {
            Some(BenchCommand::Serve(args)) => bench::serve(args, &interrupt)?,
            None => bench::run(&BenchConfig::new(args)?, &fetch)?,
        },
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the error once, causes included, and chooses the exit code.
fn report(error: &anyhow::Error) -> ExitCode {
    if error.chain().any(is_broken_pipe) {
        // Whoever read us has read enough.
        return ExitCode::SUCCESS;
    }
    // Nothing is left to tell a closed stderr.
    let _ = writeln!(io::stderr(), "error: {}", chain(error));
    if error.is::<ConfigError>() || error.is::<FileError>() {
        ExitCode::from(EXIT_USAGE)
    } else if matches!(error.downcast_ref::<FetchError>(), Some(FetchError::Interrupted)) {
        ExitCode::from(EXIT_INTERRUPTED)
    } else {
        ExitCode::from(EXIT_FAILURE)
    }
}

/// The error and its causes. A cause that an error has already told is not told again.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(cause: &(dyn std::error::Error + 'static)) -> bool {
    let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
    let json = cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
    io.or(json) == Some(io::ErrorKind::BrokenPipe)
}

/// Logs go to stderr: warnings always, more with each `-v`.
fn start_log(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        2 => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_max_level(level)
        .with_target(verbose > 1)
        .without_time()
        .init();
}
