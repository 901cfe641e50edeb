//! `nuthatch run`: one answer, or a chat.

mod answer;
mod chat;
mod input;
mod oneshot;
mod stats;

use std::io::Read as _;
use std::process::ExitCode;

use anyhow::Context as _;

use crate::config::{ConfigError, Prompt, RunConfig};
use crate::fetch::{self, Fetch};
use crate::load::Prepared;
use crate::text;
use answer::Answerer;

/// Most bytes of a prompt on stdin; the tokenizer takes no more in one call.
const STDIN_BYTES_MAX: u64 = nuthatch_tokens::TEXT_LEN_MAX as u64;

/// Runs the command.
pub(crate) fn run(config: &RunConfig, fetch: &Fetch<'_>) -> anyhow::Result<ExitCode> {
    // A prompt that cannot be read is known before anything is fetched or loaded.
    let prompt = match &config.prompt {
        Prompt::Chat => None,
        Prompt::Text(text) => Some(text.clone()),
        Prompt::Stdin => Some(read_stdin()?),
    };
    let path = fetch::fetch(&config.model, fetch)?;
    let prepared = Prepared::open(&path, &config.engine, fetch.env)?;
    let text = text::load(&prepared.files, config.is_raw)?.words;
    if prompt.is_none() && text.template.is_none() {
        anyhow::bail!(
            "{} has no chat template, so it cannot chat; give it a PROMPT to continue",
            path.display()
        );
    }
    let engine = prepared.load()?.engine.spawn()?;
    let answerer = Answerer {
        engine: &engine,
        text: &text,
        interrupt: fetch.interrupt,
        sampling: config.sampling.sampling(&prepared.files.config().generation),
        n: config.sampling.n(),
        beam: config.sampling.beam(),
        streaming: config.streaming,
        stops: config.sampling.stops(),
        max_tokens: config.sampling.max_tokens(),
        max_context: prepared.sizes.max_context,
        is_raw: config.is_raw || text.template.is_none(),
    };
    let code = match prompt {
        Some(prompt) => oneshot::run(config, &answerer, &prompt)?,
        None => chat::run(config, &answerer, fetch.env.history_file())?,
    };
    engine.shutdown()?;
    Ok(code)
}

fn read_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .take(STDIN_BYTES_MAX)
        .read_to_string(&mut text)
        .context("cannot read the prompt from stdin")?;
    if text.trim().is_empty() {
        return Err(ConfigError::EmptyPrompt.into());
    }
    // The shell's last newline is not part of what was asked.
    text.truncate(text.trim_end_matches(['\n', '\r']).len());
    Ok(text)
}
