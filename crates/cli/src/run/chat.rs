//! A conversation with a person at a terminal.
//!
//! The whole conversation is rendered and submitted anew for each answer, so that what the model
//! sees is always what its template makes of the messages.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use nuthatch_tokens::Conversation;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::History;
use super::answer::{Answer, Answerer, ContextFull, Ending};
use super::input::{HELP, Input, Lines};
use super::stats::Speeds;
use crate::config::RunConfig;

const PROMPT: &str = ">>> ";
const PROMPT_MORE: &str = "... ";

/// Chats until the person leaves.
pub(super) fn run(
    config: &RunConfig,
    answerer: &Answerer<'_>,
    lines: Option<PathBuf>,
    history: History,
) -> anyhow::Result<ExitCode> {
    let mut editor = Editor::new(lines)?;
    let mut chat = Chat { config, answerer, history, last: None };
    say("/help says what there is, Ctrl-D leaves")?;
    if let Some((name, n)) = config.session.as_ref().zip(chat.n_said()) {
        say(&format!("session {name}: {n} messages so far"))?;
    }
    while let Some(input) = editor.read()? {
        match input {
            Input::Empty => {}
            Input::Message(text) => chat.answer(text)?,
            Input::Help => write!(io::stdout(), "{HELP}")?,
            Input::Reset => {
                chat.history.clear()?;
                say("a new conversation")?;
            }
            Input::Stats => chat.stats()?,
            Input::System(None) => {
                say(chat.history.system.as_deref().unwrap_or("no system message"))?;
            }
            Input::System(Some(text)) => chat.history.system = Some(text),
            Input::Unknown(command) => say(&format!("there is no {command}; see /help"))?,
            Input::Exit => break,
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn say(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// A conversation so far.
struct Chat<'a> {
    config: &'a RunConfig,
    answerer: &'a Answerer<'a>,
    history: History,
    last: Option<Speeds>,
}

impl Chat<'_> {
    /// Answers a message. A message that cannot be answered is forgotten, the conversation stays.
    fn answer(&mut self, text: String) -> anyhow::Result<()> {
        let answer = match self.try_answer(&text) {
            Ok(answer) => answer,
            Err(error) if error.is::<io::Error>() => return Err(error),
            Err(error) => {
                say(&format!("error: {}", crate::chain(&error)))?;
                if error.is::<ContextFull>() {
                    say(
                        "the conversation is too long: /reset begins a new one, --ctx-size makes \
                         the context larger",
                    )?;
                }
                return Ok(());
            }
        };
        match answer.ending {
            Ending::Stop => {}
            Ending::Interrupted => say("(interrupted)")?,
            Ending::Length => say("(ended by --max-tokens)")?,
            Ending::Context => say("(the context is full: /reset begins a new conversation)")?,
        }
        let speeds = Speeds::of(std::slice::from_ref(&answer));
        if self.config.with_stats {
            say(&speeds.line(self.config.sampling.seed))?;
        }
        self.last = Some(speeds);
        self.history.answered(&text, &answer.text)
    }

    /// Messages so far, if there are some.
    fn n_said(&self) -> Option<usize> {
        Some(self.history.messages.len()).filter(|&n| n > 0)
    }

    fn try_answer(&self, text: &str) -> anyhow::Result<Answer> {
        let messages = self.history.asking(text);
        let tokens = self.answerer.text.conversation(&Conversation::Plain(messages))?;
        let mut answers = self.answerer.answers(tokens, |_, piece, _| {
            let mut out = io::stdout().lock();
            out.write_all(piece.as_bytes())?;
            out.flush()
        })?;
        let answer = answers.pop().expect("a chat asks for one answer");
        if !answer.text.ends_with('\n') {
            writeln!(io::stdout())?;
        }
        Ok(answer)
    }

    fn stats(&self) -> anyhow::Result<()> {
        match &self.last {
            Some(speeds) => say(&speeds.line(self.config.sampling.seed))?,
            None => say("no answer yet")?,
        }
        say(&format!(
            "{} messages, context {} tokens",
            self.history.messages.len(),
            self.answerer.max_context
        ))?;
        if let Some(stats) = self.answerer.engine.stats() {
            let counters = stats.scheduler.counters;
            let outside = stats.step_time.saturating_sub(stats.execute_time).as_secs_f64();
            let share = 100.0 * outside / stats.step_time.as_secs_f64().max(f64::MIN_POSITIVE);
            say(&format!(
                "{} steps, {} tokens computed, {} sampled, {share:.2} % of the time planning and bookkeeping",
                counters.steps, counters.computed_tokens, counters.sampled_tokens,
            ))?;
        }
        Ok(())
    }
}

/// Line editing with a history that outlives the program.
struct Editor {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Editor {
    fn new(history: Option<PathBuf>) -> anyhow::Result<Self> {
        let mut editor = DefaultEditor::new()?;
        if let Some(path) = &history {
            if let Some(parent) = path.parent()
                && let Err(error) = std::fs::create_dir_all(parent)
            {
                tracing::warn!("no history: cannot create {}: {error}", parent.display());
            }
            // There is no history the first time.
            let _ = editor.load_history(path);
        }
        Ok(Editor { editor, history })
    }

    /// The next input; `None` when the person leaves.
    fn read(&mut self) -> anyhow::Result<Option<Input>> {
        let mut lines = Lines::default();
        loop {
            let prompt = if lines.is_open() { PROMPT_MORE } else { PROMPT };
            let line = match self.editor.readline(prompt) {
                Ok(line) => line,
                Err(ReadlineError::Eof) => return Ok(None),
                // Ctrl-C leaves a half-typed message, and the program when there is none.
                Err(ReadlineError::Interrupted) if lines.is_open() => {
                    lines = Lines::default();
                    continue;
                }
                Err(ReadlineError::Interrupted) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            self.remember(&line);
            if let Some(input) = lines.push(&line) {
                return Ok(Some(input));
            }
        }
    }

    fn remember(&mut self, line: &str) {
        if line.trim().is_empty() || !self.editor.add_history_entry(line).unwrap_or(false) {
            return;
        }
        if let Some(path) = &self.history
            && let Err(error) = self.editor.append_history(path)
        {
            tracing::debug!("history not saved to {}: {error}", path.display());
        }
    }
}
