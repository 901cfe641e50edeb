//! One request on its way: its answers as they grow, and the response when all have ended.

use std::sync::Arc;

use nuthatch_engine::{Output, Submission, Usage as EngineUsage, best_of};
use nuthatch_tokens::{AnswerText, DecodeOptions, Words};
use nuthatch_types::{FinishReason, TokenId};
use nuthatch_wire::{ApiError, ErrorKind, Finish, Options, Request, ToolCall, Usage};

use super::Endpoint;
use super::echo::Echo;
use super::tool_text::{ToolFormat, ToolText};

/// A request that is being answered.
#[derive(Debug)]
pub struct Job {
    pub(super) words: Words,
    pub(super) kind: Kind,
    /// Whether probabilities were asked for.
    pub(super) with_logprobs: bool,
    /// Whether whole answers are kept, because they are not sent as they grow.
    is_whole: bool,
    /// Answers that are given for each prompt.
    n: u32,
    /// Answers to each prompt, in order; all prompts have the same number.
    answers: Vec<Answer>,
    /// Answers that are computed for each prompt.
    n_computed: u32,
    /// Events of the newer API that were made.
    pub(super) n_events: u64,
    /// Whether answers have no token of the model's: only their prompts are wanted.
    is_mute: bool,
}

/// Which endpoint it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
    /// A chat in the newer API's words.
    Responses,
}

/// One answer on its way.
#[derive(Debug)]
struct Answer {
    text: AnswerText,
    tools: Option<ToolText>,
    /// What the client has got, or will.
    shown: String,
    calls: Vec<ToolCall>,
    /// The prompt's, if the answer begins with it.
    prompt_tokens: Vec<Token>,
    tokens: Vec<Token>,
    n_tokens: u32,
    is_begun: bool,
    end: Option<(Finish, EngineUsage)>,
    /// What the answer begins with, if it repeats its prompt.
    echo: Option<Echo>,
    /// Characters of what it begins with and of its tokens so far.
    n_chars: usize,
}

/// A token and its probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) id: TokenId,
    /// None of a prompt's first token.
    pub(super) logprob: Option<f32>,
    pub(super) top: Vec<(TokenId, f32)>,
    /// Characters before it.
    pub(super) offset: usize,
}

/// What is new in an answer.
#[derive(Debug, Default)]
pub struct Piece {
    /// Which of the request's answers.
    pub(super) choice: u32,
    /// Whether it is the answer's first.
    pub(super) is_first: bool,
    pub(super) text: String,
    /// Tools that are called, and the place of the first among all of the answer.
    pub(super) calls: (usize, Vec<ToolCall>),
    pub(super) token: Option<Token>,
    /// Tokens of the prompt with which the answer begins; they come before `token`.
    pub(super) prompt_tokens: Vec<Token>,
    /// Whether it came with a token of the model.
    pub(super) is_token: bool,
    pub(super) finish: Option<Finish>,
    /// Whether a stop string was found, so that the engine need not go on with this answer.
    pub is_stopped: bool,
}

impl Piece {
    /// Whether there is something to send: each token is, even if it ends no character.
    pub fn is_news(&self) -> bool {
        self.is_token || self.finish.is_some() || !self.text.is_empty() || !self.calls.1.is_empty()
    }
}

/// A whole answer, to be shown.
#[derive(Debug)]
pub(super) struct Shown<'a> {
    pub(super) text: &'a str,
    pub(super) calls: &'a [ToolCall],
    pub(super) prompt_tokens: &'a [Token],
    pub(super) tokens: &'a [Token],
    pub(super) finish: Finish,
}

impl Job {
    /// A request of which nothing is answered, and its submissions.
    pub fn new(request: &Request, endpoint: &Endpoint, submissions: &[Submission]) -> Self {
        let (words, tools) = (&endpoint.words, endpoint.tools);
        let options = request.options();
        let is_search = options.beam.is_some();
        let n_computed = if is_search { options.n } else { options.best_of };
        let mut answers = Vec::with_capacity(submissions.len() * n_computed as usize);
        for (prompt_idx, submission) in submissions.iter().enumerate() {
            for _ in 0..n_computed {
                let mut answer = Answer::new(request, words, tools);
                answer.echo = echo(request, prompt_idx, submission, words);
                answer.n_chars = answer.echo.as_ref().map_or(0, Echo::n_chars);
                answers.push(answer);
            }
        }
        Job {
            words: words.clone(),
            kind: match request {
                Request::Chat(_) => Kind::Chat,
                Request::Completion(_) => Kind::Completion,
            },
            with_logprobs: options.logprobs.is_some(),
            is_whole: !options.stream,
            n: options.n,
            answers,
            n_computed,
            n_events: 0,
            is_mute: options.max_tokens == Some(0),
        }
    }

    /// A request in the newer API's words, which repeats the whole answer at the end of a stream.
    pub fn into_responses(self) -> Self {
        Job { kind: Kind::Responses, is_whole: true, ..self }
    }

    /// Keeps whole answers even if they are sent as they grow, for [`Job::text`].
    pub(crate) fn keep_text(&mut self) {
        self.is_whole = true;
    }

    /// The text of the first answer so far.
    pub(crate) fn text(&self) -> String {
        self.answers.first().map(|answer| answer.shown.clone()).unwrap_or_default()
    }

    /// Takes in what the engine says of the answers to one of the prompts.
    pub fn take(&mut self, prompt_idx: usize, output: Output) -> Piece {
        let (is_whole, keeps_tokens) = (self.is_whole, self.with_logprobs || self.is_compared());
        let index = match &output {
            Output::Token { index, .. } | Output::Finished { index, .. } => *index,
        };
        let place = prompt_idx * self.n_computed as usize + index as usize;
        let Some(answer) = self.answers.get_mut(place) else { return Piece::default() };
        let mut piece = match output {
            Output::Token { .. } if self.is_mute => return Piece::default(),
            Output::Token { token, logprob, top, .. } => {
                let spelled = keeps_tokens.then(|| self.words.piece(token));
                answer.push(token, (logprob, top), spelled.as_deref())
            }
            Output::Finished { reason, usage, .. } => answer.finish(reason, usage),
        };
        piece.choice = place as u32;
        if piece.is_first
            && let Some(echo) = answer.echo.take()
        {
            piece.text.insert_str(0, &echo.text);
            piece.prompt_tokens = echo.tokens(&self.words);
        }
        answer.calls.extend(piece.calls.1.iter().cloned());
        if is_whole {
            answer.shown += &piece.text;
            answer.prompt_tokens.extend_from_slice(&piece.prompt_tokens);
            answer.tokens.extend(piece.token.clone());
        }
        piece
    }

    /// Whether every answer has ended.
    pub fn is_done(&self) -> bool {
        self.answers.iter().all(|answer| answer.end.is_some())
    }

    /// Why there is no response, if the engine could not go on with one of the answers.
    pub fn failure(&self) -> Option<ApiError> {
        let has_failed = |answer: &Answer| matches!(answer.end, Some((Finish::Error, _)));
        self.answers.iter().any(has_failed).then(|| {
            ApiError::new(ErrorKind::Server, FinishReason::NO_TOKEN).with_code("engine_failed")
        })
    }

    /// What all answers used so far, those that are not shown too. A prompt with several answers
    /// counts once.
    pub fn usage(&self) -> Usage {
        let ends = || self.answers.iter().filter_map(|answer| answer.end.map(|(_, usage)| usage));
        Usage::new(
            ends().map(|usage| usage.prompt_tokens).sum(),
            ends().map(|usage| usage.cached_tokens).sum(),
            // Tokens that were computed after a stop string are nobody's.
            self.answers.iter().map(|answer| answer.n_tokens).sum(),
        )
    }

    /// How each answer ended, those that are not shown too.
    pub fn finishes(&self) -> impl Iterator<Item = Finish> + '_ {
        self.answers.iter().filter_map(|answer| answer.end.map(|(finish, _)| finish))
    }

    /// The answers to be shown, those to the first prompt first.
    pub(super) fn shown(&self) -> Vec<Shown<'_>> {
        let mut shown = Vec::new();
        for answers in self.answers.chunks(self.n_computed.max(1) as usize) {
            let logprobs =
                |answer: &Answer| answer.tokens.iter().filter_map(|t| t.logprob).collect();
            let places = if self.is_compared() {
                best_of(&answers.iter().map(logprobs).collect::<Vec<_>>(), self.n as usize)
            } else {
                (0..answers.len()).collect()
            };
            shown.extend(places.into_iter().map(|place| answers[place].shown()));
        }
        shown
    }

    /// Whether more answers are computed than shown.
    fn is_compared(&self) -> bool {
        self.n_computed > self.n
    }
}

impl Answer {
    fn new(request: &Request, words: &Words, tools: ToolFormat) -> Self {
        let options: &Options = request.options();
        let continuing = matches!(request, Request::Completion(_));
        let tools = match request {
            Request::Chat(chat) if !chat.tools.is_empty() => {
                ToolText::new(tools, &chat.tool_choice)
            }
            Request::Chat(_) | Request::Completion(_) => None,
        };
        let decode = DecodeOptions { skip_special: options.skip_special, continuing };
        let tokenizer = Arc::clone(&words.tokenizer);
        Answer {
            text: AnswerText::new(tokenizer, decode, &options.stop, options.include_stop),
            tools,
            shown: String::new(),
            calls: Vec::new(),
            prompt_tokens: Vec::new(),
            tokens: Vec::new(),
            n_tokens: 0,
            is_begun: false,
            end: None,
            echo: None,
            n_chars: 0,
        }
    }

    /// Takes the next token; `spelled` is its text, if tokens are kept.
    fn push(
        &mut self,
        id: TokenId,
        (logprob, top): (Option<f32>, Vec<(TokenId, f32)>),
        spelled: Option<&str>,
    ) -> Piece {
        // Tokens that were on their way when the answer was stopped are not part of it.
        if self.text.is_stopped() || self.end.is_some() {
            // The engine may have been too busy to be told, so it is told again.
            return Piece { is_stopped: self.text.is_stopped(), ..Piece::default() };
        }
        self.n_tokens += 1;
        let text = self.text.push(id);
        let mut piece = self.piece(text);
        // The text of a call is held back until it is whole.
        piece.is_token = self.tools.is_none() || spelled.is_some();
        piece.token = spelled.map(|spelled| {
            let offset = self.n_chars;
            self.n_chars += spelled.chars().count();
            Token { id, logprob, top, offset }
        });
        piece.is_stopped = self.text.is_stopped();
        piece
    }

    fn finish(&mut self, reason: FinishReason, usage: EngineUsage) -> Piece {
        let is_stopped = self.text.is_stopped();
        let rest = self.text.finish();
        let mut piece = self.piece(rest);
        if let Some(tools) = &mut self.tools {
            let (text, mut calls) = tools.finish();
            piece.text += &text;
            piece.calls.1.append(&mut calls);
        }
        let n_calls = self.calls.len() + piece.calls.1.len();
        let finish = match reason {
            _ if is_stopped => Finish::Stop,
            FinishReason::Stop if n_calls > 0 => Finish::ToolCalls,
            FinishReason::Stop
            | FinishReason::Length
            | FinishReason::Cancelled
            | FinishReason::Failed => Finish::from(reason),
        };
        self.end = Some((finish, usage));
        piece.finish = Some(finish);
        piece
    }

    /// A piece with this text, of which tool calls are taken out.
    fn piece(&mut self, text: String) -> Piece {
        let (text, calls) = match &mut self.tools {
            None => (text, Vec::new()),
            Some(tools) => tools.push(&text),
        };
        let is_first = !std::mem::replace(&mut self.is_begun, true);
        Piece { is_first, text, calls: (self.calls.len(), calls), ..Piece::default() }
    }

    fn shown(&self) -> Shown<'_> {
        let finish = self.end.map_or(Finish::Abort, |(finish, _)| finish);
        let (text, calls) = (&self.shown, &self.calls);
        Shown { text, calls, prompt_tokens: &self.prompt_tokens, tokens: &self.tokens, finish }
    }
}

/// What the answers to one of the prompts begin with, if they repeat it.
fn echo(
    request: &Request,
    prompt_idx: usize,
    submission: &Submission,
    words: &Words,
) -> Option<Echo> {
    match request {
        Request::Completion(completion) if completion.echo => {
            Some(Echo::new(completion.prompts.get(prompt_idx)?, submission, words))
        }
        Request::Chat(_) | Request::Completion(_) => None,
    }
}
