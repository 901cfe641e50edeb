//! `nuthatch batch`: a file of OpenAI batch requests, many at a time.
//!
//! ```text
//!   FILE.jsonl --input--> wire --server::answer--> engine --server::answer--> wire --output--> FILE.out.jsonl
//! ```
//!
//! Whatever is wrong with a line is told in the output, and the others go on. Every answer is in the
//! file before the next step, so a batch that was ended by anything goes on where it was.

mod drive;
mod input;
mod job;
mod output;
mod summary;

use std::fs::File;
use std::io::{self, BufReader, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use nuthatch_server::Endpoint;
use nuthatch_wire::caps;

use crate::config::BatchConfig;
use crate::fetch::{self, Fetch};
use crate::host;
use crate::interrupt::EXIT_INTERRUPTED;
use crate::load::{self, Prepared};
use crate::text;
use drive::Driver;
use input::Lines;
use output::OutputFile;
use summary::Counts;

/// Runs the command.
pub(crate) fn run(config: &BatchConfig, fetch: &Fetch<'_>) -> anyhow::Result<ExitCode> {
    // Files that cannot be used are known before anything is fetched or loaded.
    let n_lines = count_lines(&config.input)?;
    let output_name = config.output.display().to_string();
    let (output, answered) =
        open_output(config).with_context(|| format!("cannot append to {output_name}"))?;
    let path = fetch::fetch(&config.model, fetch)?;
    let prepared = Prepared::open(&path, &config.engine, fetch.env)?;
    let loaded = prepared.load()?;
    let text = text::load(&prepared.files, false)?;
    let driver = Driver {
        engine: loaded.engine,
        clock: loaded.clock,
        endpoint: Endpoint::new(
            text.words,
            load::sampling(&prepared.files.config().generation),
            prepared.sizes.max_context,
            text.tools,
        ),
        lines: Lines::new(open(&config.input)?, caps::BODY_BYTES),
        output,
        answered,
        interrupt: fetch.interrupt,
        model: load::model_name(&path),
        created: host::unix_seconds(),
        n_seqs_max: prepared.sizes.scheduler().max_waiting as usize,
        n_lines_max: prepared.sizes.max_seqs,
    };
    let bar = bar(n_lines);
    let counts = driver.run(|counts| show(&bar, counts))?;
    bar.finish_and_clear();
    let text =
        if config.as_json { counts.json(&output_name)? + "\n" } else { counts.text(&output_name) };
    io::stdout().write_all(text.as_bytes())?;
    Ok(if counts.is_interrupted { ExitCode::from(EXIT_INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn open(path: &Path) -> anyhow::Result<BufReader<File>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(BufReader::new(file))
}

/// Lines that are not blank.
fn count_lines(path: &Path) -> anyhow::Result<u64> {
    let mut lines = Lines::new(open(path)?, caps::BODY_BYTES);
    let mut n_lines = 0;
    while let Some((_, line)) = lines.next().with_context(|| path.display().to_string())? {
        n_lines += u64::from(!line.is_blank());
    }
    Ok(n_lines)
}

fn open_output(config: &BatchConfig) -> anyhow::Result<(OutputFile, output::Answered)> {
    let is_input = config.output.canonicalize().ok() == config.input.canonicalize().ok();
    ensure!(!is_input, "it is the file of the requests");
    OutputFile::open(&config.output)
}

fn bar(n_lines: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {msg}, {eta} left");
    ProgressBar::new(n_lines).with_style(style.expect("the template is valid"))
}

fn show(bar: &ProgressBar, counts: &Counts) {
    if bar.is_hidden() {
        return;
    }
    bar.set_position(counts.lines());
    bar.set_message(format!("{:.1} tokens/s, {} errors", counts.rate(), counts.errors));
}
