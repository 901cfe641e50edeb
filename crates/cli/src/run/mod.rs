//! `nuthatch run`: one answer, or a chat.

mod answer;
mod chat;
mod input;
mod oneshot;
mod stats;

use std::io::Read as _;
use std::process::ExitCode;

use anyhow::Context as _;
use nuthatch_engine::{DiskIo, DiskOptions};
use nuthatch_server::{Session, Sessions};
use nuthatch_tokens::Message;

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
    let history = History::open(config, fetch)?;
    let path = fetch::fetch(&config.model, fetch)?;
    let mut prepared = Prepared::open(&path, &config.engine, fetch.env)?;
    if config.session.is_some()
        && let Some(dir) = fetch.env.page_dir()
    {
        let (bytes_max, io) = (SESSION_BYTES_MAX, DiskIo::default());
        prepared.keep_if_free(DiskOptions { dir, bytes_max, io });
    }
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
        Some(prompt) => oneshot::run(config, &answerer, &prompt, history)?,
        None => chat::run(config, &answerer, fetch.env.history_file(), history)?,
    };
    engine.shutdown()?;
    Ok(code)
}

/// Bytes of pages that sessions keep, where nothing else was said.
const SESSION_BYTES_MAX: u64 = 4 << 30;

/// What was said so far, and where it is kept if it is.
struct History {
    system: Option<String>,
    /// Users' and assistant's messages in turn.
    messages: Vec<Message>,
    kept: Option<(Sessions, String, Session)>,
}

impl History {
    /// What was said in the session, or nothing.
    fn open(config: &RunConfig, fetch: &Fetch<'_>) -> anyhow::Result<Self> {
        let Some(name) = &config.session else {
            let (system, messages) = (config.system.clone(), Vec::new());
            return Ok(History { system, messages, kept: None });
        };
        let sessions = Sessions::new(fetch.env.session_dir()?);
        let model = config.model.to_string();
        let mut session = sessions.load(name)?.unwrap_or_else(|| Session::new(&model));
        let system = config.system.clone().or_else(|| session.system.clone());
        let messages = session.messages();
        session.model = model;
        Ok(History { system, messages, kept: Some((sessions, name.clone(), session)) })
    }

    /// The conversation with one more message of the user.
    fn asking(&self, text: &str) -> Vec<Message> {
        let system = self.system.iter().map(|system| Message::new("system", system));
        let said = self.messages.iter().cloned();
        system.chain(said).chain([Message::new("user", text)]).collect()
    }

    /// Takes in a question and its answer, and keeps them.
    fn answered(&mut self, question: &str, answer: &str) -> anyhow::Result<()> {
        self.messages.push(Message::new("user", question));
        self.messages.push(Message::new("assistant", answer));
        self.keep()
    }

    /// Forgets what was said.
    fn clear(&mut self) -> anyhow::Result<()> {
        self.messages.clear();
        self.keep()
    }

    fn keep(&mut self) -> anyhow::Result<()> {
        let Some((sessions, name, session)) = &mut self.kept else { return Ok(()) };
        session.system = self.system.clone();
        session.set_messages(&self.messages);
        Ok(sessions.save(name, session)?)
    }
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
