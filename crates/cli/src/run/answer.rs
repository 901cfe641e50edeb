//! One answer: tokens to the engine, its tokens back to text, stop strings, Ctrl-C.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nuthatch_engine::{EngineHandle, Output, Submission, Ticket, Timings, Usage};
use nuthatch_tokens::{AnswerText, DecodeOptions};
use nuthatch_types::{FinishReason, Limits, Sampling, TokenId};

use crate::interrupt::Interrupt;
use crate::text::Text;

/// How often Ctrl-C is looked for while a token is computed.
const POLL: Duration = Duration::from_millis(20);

/// What every answer of one run shares.
#[derive(Debug)]
pub(super) struct Answerer<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) text: &'a Text,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: Sampling,
    pub(super) stops: &'a [String],
    pub(super) max_tokens: Option<u32>,
    pub(super) max_context: u32,
    /// The answer continues the prompt's own text.
    pub(super) is_raw: bool,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ending {
    /// The model ended it, or a stop string was found.
    Stop,
    /// The token limit was reached.
    Length,
    /// The context is full.
    Context,
    /// Ctrl-C.
    Interrupted,
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AnswerToken {
    pub(super) id: TokenId,
    pub(super) logprob: f32,
    /// The most probable tokens, best first.
    pub(super) top: Vec<(TokenId, f32)>,
}

/// An answer, whole.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) tokens: Vec<AnswerToken>,
    pub(super) ending: Ending,
    pub(super) usage: Usage,
    pub(super) timings: Timings,
}

/// The prompt leaves no room for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prompt has {n_tokens} tokens, but the context holds {max_context}, answer included")]
pub(super) struct ContextFull {
    pub(super) n_tokens: usize,
    pub(super) max_context: u32,
}

impl Answerer<'_> {
    /// Computes an answer, giving its text to `show` as it comes. An error of `show` ends it.
    pub(super) fn answer(
        &self,
        prompt: Vec<TokenId>,
        mut show: impl FnMut(&str, Option<&AnswerToken>) -> io::Result<()>,
    ) -> anyhow::Result<Answer> {
        let room = (self.max_context as usize).saturating_sub(prompt.len());
        if room == 0 {
            let (n_tokens, max_context) = (prompt.len(), self.max_context);
            return Err(ContextFull { n_tokens, max_context }.into());
        }
        if prompt.is_empty() {
            bail!("the prompt has no tokens");
        }
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let max_tokens = self.max_tokens.map_or(room, |asked| asked.min(room));
        let limits = Limits { max_tokens, stop_tokens: self.text.ends.clone(), min_tokens: 0 };
        let _running = self.interrupt.begin();
        let sampling = self.sampling.clone();
        let submission = Submission { prompt, sampling, limits, ..Submission::default() };
        let ticket = self.engine.submit(submission)?;
        let mut stream = Stream::new(self);
        let (reason, usage, timings) = loop {
            match self.next(&ticket)? {
                None => {
                    if self.interrupt.requested() {
                        stream.end(Ending::Interrupted, &ticket);
                    }
                }
                Some(Output::Token { token, logprob, top }) => {
                    let token = AnswerToken { id: token, logprob, top };
                    stream.push(token, &ticket, &mut show)?;
                }
                Some(Output::Finished { reason, usage, timings }) => {
                    break (reason, usage, timings);
                }
            }
        };
        let rest = stream.text.finish();
        stream.shown.push_str(&rest);
        show(&rest, None)?;
        let ending = match (stream.ending, reason) {
            (Some(ending), _) => ending,
            (None, FinishReason::Stop) => Ending::Stop,
            (None, FinishReason::Length) if max_tokens == room => Ending::Context,
            (None, FinishReason::Length) => Ending::Length,
            (None, FinishReason::Cancelled) => Ending::Interrupted,
            (None, FinishReason::Failed) => bail!(self.failure()),
        };
        Ok(Answer { text: stream.shown, tokens: stream.tokens, ending, usage, timings })
    }

    fn next(&self, ticket: &Ticket) -> anyhow::Result<Option<Output>> {
        ticket.recv_timeout(POLL).ok().with_context(|| self.failure())
    }

    /// Why the engine gave up, in its own words.
    fn failure(&self) -> String {
        let reason = self.engine.stats().and_then(|stats| stats.error);
        reason.unwrap_or_else(|| "the engine gave no answer: its logits were no numbers".to_owned())
    }
}

/// The text of an answer as it comes.
#[derive(Debug)]
struct Stream {
    text: AnswerText,
    shown: String,
    tokens: Vec<AnswerToken>,
    /// Why we ended it ourselves, if we did.
    ending: Option<Ending>,
}

impl Stream {
    fn new(answerer: &Answerer<'_>) -> Self {
        let tokenizer = Arc::clone(&answerer.text.tokenizer);
        let options = DecodeOptions { skip_special: true, continuing: answerer.is_raw };
        Stream {
            text: AnswerText::new(tokenizer, options, answerer.stops, false),
            shown: String::new(),
            tokens: Vec::new(),
            ending: None,
        }
    }

    fn push(
        &mut self,
        token: AnswerToken,
        ticket: &Ticket,
        show: &mut impl FnMut(&str, Option<&AnswerToken>) -> io::Result<()>,
    ) -> io::Result<()> {
        // Tokens that were on their way when the answer was ended are not part of it.
        if self.ending.is_some() {
            return Ok(());
        }
        let piece = self.text.push(token.id);
        self.shown.push_str(&piece);
        show(&piece, Some(&token))?;
        self.tokens.push(token);
        if self.text.is_stopped() {
            self.end(Ending::Stop, ticket);
        }
        Ok(())
    }

    fn end(&mut self, ending: Ending, ticket: &Ticket) {
        if self.ending.is_none() {
            self.ending = Some(ending);
            ticket.cancel();
        }
    }
}
