//! One answer: tokens to the engine, its tokens back to text, stop strings, Ctrl-C.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nuthatch_engine::{EngineHandle, Output, Submission, Ticket, Timings, Usage};
use nuthatch_tokens::{AnswerText, DecodeOptions, Words};
use nuthatch_types::{BeamParams, FinishReason, Limits, Sampling, Streaming, TokenId};

use crate::interrupt::Interrupt;

/// How often Ctrl-C is looked for while a token is computed.
const POLL: Duration = Duration::from_millis(20);

/// Tokens of a sequence that no context bounds.
const ENDLESS: u32 = i32::MAX as u32;

/// What every answer of one run shares.
#[derive(Debug)]
pub(super) struct Answerer<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) text: &'a Words,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: Sampling,
    /// Answers to each prompt.
    pub(super) n: u32,
    pub(super) beam: Option<BeamParams>,
    /// What stays in the cache, if not everything does: then the context bounds nothing.
    pub(super) streaming: Option<Streaming>,
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
    /// If it was asked for.
    pub(super) logprob: Option<f32>,
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
    /// By which a search orders its answers.
    pub(super) score: Option<f32>,
}

/// The prompt leaves no room for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prompt has {n_tokens} tokens, but the context holds {max_context}, answer included")]
pub(super) struct ContextFull {
    pub(super) n_tokens: usize,
    pub(super) max_context: u32,
}

impl Answerer<'_> {
    /// Computes the answers to a prompt, giving their text to `show` as it comes, each piece with
    /// the place of its answer. An error of `show` ends them.
    pub(super) fn answers(
        &self,
        prompt: Vec<TokenId>,
        mut show: impl FnMut(u32, &str, Option<&AnswerToken>) -> io::Result<()>,
    ) -> anyhow::Result<Vec<Answer>> {
        let room = self.room(&prompt)?;
        let max_tokens = self.max_tokens.map_or(room, |asked| asked.min(room));
        let limits = Limits { max_tokens, stop_tokens: self.text.ends.clone(), min_tokens: 0 };
        let _running = self.interrupt.begin();
        let (sampling, n, beam) = (self.sampling.clone(), self.n, self.beam);
        let streaming = self.streaming;
        let submission =
            Submission { prompt, sampling, limits, n, beam, streaming, ..Submission::default() };
        let ticket = self.engine.submit(submission)?;
        let mut streams: Vec<Stream> = (0..n).map(|_| Stream::new(self)).collect();
        let mut answers: Vec<Option<Answer>> = vec![None; n as usize];
        while answers.contains(&None) {
            match self.next(&ticket)? {
                None if self.interrupt.requested() => {
                    streams.iter_mut().for_each(|stream| stream.end(Ending::Interrupted));
                    ticket.cancel();
                }
                None => {}
                Some(Output::Token { index, token, logprob, top }) => {
                    let token = AnswerToken { id: token, logprob, top };
                    let stream = &mut streams[index as usize];
                    stream.push(token, &mut |piece, token| show(index, piece, token))?;
                    if stream.ending.is_some() {
                        ticket.end_answer(index);
                    }
                }
                Some(Output::Finished { index, reason, usage, timings, score }) => {
                    let stream = &mut streams[index as usize];
                    show(index, &stream.flush(), None)?;
                    let ending = match (stream.ending, reason) {
                        (Some(ending), _) => ending,
                        (None, FinishReason::Stop) => Ending::Stop,
                        (None, FinishReason::Length) if max_tokens == room => Ending::Context,
                        (None, FinishReason::Length) => Ending::Length,
                        (None, FinishReason::Cancelled) => Ending::Interrupted,
                        (None, FinishReason::Failed) => bail!(self.failure()),
                    };
                    let text = std::mem::take(&mut stream.shown);
                    let tokens = std::mem::take(&mut stream.tokens);
                    let answer = Answer { text, tokens, ending, usage, timings, score };
                    answers[index as usize] = Some(answer);
                }
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Tokens that an answer may have.
    fn room(&self, prompt: &[TokenId]) -> anyhow::Result<u32> {
        let (n_tokens, max_context) = (prompt.len(), self.max_context);
        let bound = if self.streaming.is_some() { ENDLESS } else { max_context };
        let room = (bound as usize).saturating_sub(n_tokens);
        if room == 0 {
            return Err(ContextFull { n_tokens, max_context }.into());
        }
        if prompt.is_empty() {
            bail!("the prompt has no tokens");
        }
        Ok(u32::try_from(room).unwrap_or(u32::MAX))
    }

    fn next(&self, ticket: &Ticket) -> anyhow::Result<Option<Output>> {
        ticket.recv_timeout(POLL).ok().with_context(|| self.failure())
    }

    /// Why the engine gave up, in its own words.
    fn failure(&self) -> String {
        let reason = self.engine.stats().and_then(|stats| stats.error);
        reason.unwrap_or_else(|| FinishReason::NO_TOKEN.to_owned())
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
            self.end(Ending::Stop);
        }
        Ok(())
    }

    fn end(&mut self, ending: Ending) {
        self.ending.get_or_insert(ending);
    }

    /// What was held back.
    fn flush(&mut self) -> String {
        let rest = self.text.finish();
        self.shown.push_str(&rest);
        rest
    }
}
