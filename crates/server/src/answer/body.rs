//! What a client gets: the body of a response, or the chunks of a stream.

use std::collections::BTreeMap;

use nuthatch_types::TokenId;
use nuthatch_wire::{
    ApiError, AssistantMessage, ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta,
    ChatLogprobs, Chunk, TextChoice, TextChunkChoice, TextCompletion, TextLogprobs, TokenLogprob,
    ToolCallDelta, TopLogprob, Usage,
};
use serde::Serialize;
use serde_json::Value;

use super::job::{Job, Kind, Piece, Shown, Token};

/// What OpenAI sends for a token without probability: JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// What all that is said of one request begins with.
#[derive(Clone, Debug)]
pub struct Heading {
    /// Unique.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: String,
}

impl Heading {
    fn chunk<C: Serialize>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Usage>,
    ) -> Event {
        let Heading { id, created, model } = self;
        Event::of(&Chunk { id, object, created: *created, model, choices, usage })
    }
}

/// The body of a response.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Body {
    /// Of a chat.
    Chat(ChatCompletion),
    /// Of a continuation.
    Completion(TextCompletion),
    /// Of a chat in the newer API's words.
    Responses(Value),
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What kind it is, where the API says so.
    pub(super) name: Option<&'static str>,
    pub(super) data: String,
}

impl Event {
    /// An event without a name.
    fn of(data: &impl Serialize) -> Self {
        // Only a map with keys that are no text could fail, and there is none.
        Event { name: None, data: serde_json::to_string(data).unwrap_or_default() }
    }

    /// As it is sent.
    pub fn into_bytes(self) -> Vec<u8> {
        let name = self.name.map_or_else(String::new, |name| format!("event: {name}\n"));
        format!("{name}data: {}\n\n", self.data).into_bytes()
    }
}

impl Job {
    /// The prefix of an id that OpenAI's clients expect.
    pub fn id_prefix(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chatcmpl-",
            Kind::Completion => "cmpl-",
            Kind::Responses => "resp_",
        }
    }

    /// The events with which a stream begins.
    pub fn opening(&mut self, heading: &Heading) -> Vec<Event> {
        match self.kind {
            Kind::Chat | Kind::Completion => Vec::new(),
            Kind::Responses => self.responses_opening(heading),
        }
    }

    /// The events that send a piece, with what was used so far if `with_usage`.
    pub fn events(&mut self, heading: &Heading, piece: Piece, with_usage: bool) -> Vec<Event> {
        if self.kind == Kind::Responses {
            return self.responses_piece(heading, &piece);
        }
        let usage = with_usage.then(|| self.usage());
        vec![self.chunk(heading, piece, usage)]
    }

    /// The events with which a stream ends whose answers are whole.
    pub fn closing(&mut self, heading: &Heading, with_usage: bool) -> Vec<Event> {
        if self.kind == Kind::Responses {
            return self.responses_closing(heading);
        }
        let usage = with_usage.then(|| self.usage_chunk(heading));
        usage.into_iter().chain([done()]).collect()
    }

    /// The events with which a stream ends that cannot go on.
    pub fn failing(&mut self, error: &ApiError) -> Vec<Event> {
        match self.kind {
            Kind::Chat | Kind::Completion => vec![Event::of(&error.body()), done()],
            Kind::Responses => vec![self.responses_error(error)],
        }
    }

    /// The response's body, when every answer has ended.
    pub fn body(&self, heading: &Heading) -> Body {
        let Heading { id, created, model } = heading.clone();
        let usage = self.usage();
        let shown = (0..).zip(self.shown());
        match self.kind {
            Kind::Chat => Body::Chat(ChatCompletion {
                id,
                object: ChatCompletion::OBJECT,
                created,
                model,
                choices: shown.map(|(index, shown)| self.chat_choice(index, &shown)).collect(),
                usage,
            }),
            Kind::Completion => Body::Completion(TextCompletion {
                id,
                object: TextCompletion::OBJECT,
                created,
                model,
                choices: shown.map(|(index, shown)| self.text_choice(index, &shown)).collect(),
                usage,
            }),
            Kind::Responses => Body::Responses(self.responses_body(heading)),
        }
    }

    /// The chunk that sends a piece.
    fn chunk(&self, heading: &Heading, piece: Piece, usage: Option<Usage>) -> Event {
        let (index, finish_reason) = (piece.choice, piece.finish);
        match self.kind {
            Kind::Chat | Kind::Responses => {
                let logprobs = piece.token.as_ref().filter(|_| self.with_logprobs);
                let logprobs =
                    logprobs.map(|token| ChatLogprobs { content: vec![self.chat_logprob(token)] });
                let (n_before, calls) = piece.calls;
                let has_content = !piece.text.is_empty() || (piece.is_token && calls.is_empty());
                let calls = (n_before as u32..).zip(calls);
                let delta = ChatDelta {
                    role: piece.is_first.then_some("assistant"),
                    content: has_content.then_some(piece.text),
                    tool_calls: calls.map(|(index, call)| ToolCallDelta { index, call }).collect(),
                };
                let choice = ChatChunkChoice { index, delta, logprobs, finish_reason };
                heading.chunk(ChatChunkChoice::OBJECT, vec![choice], usage)
            }
            Kind::Completion => {
                let mut tokens = piece.prompt_tokens.iter().chain(&piece.token).peekable();
                let has_some = self.with_logprobs && tokens.peek().is_some();
                let logprobs = has_some.then(|| self.text_logprobs(tokens));
                let choice = TextChunkChoice { index, text: piece.text, logprobs, finish_reason };
                heading.chunk(TextChunkChoice::OBJECT, vec![choice], usage)
            }
        }
    }

    /// The chunk that only tells what was used.
    fn usage_chunk(&self, heading: &Heading) -> Event {
        let object = match self.kind {
            Kind::Chat | Kind::Responses => ChatChunkChoice::OBJECT,
            Kind::Completion => TextChunkChoice::OBJECT,
        };
        heading.chunk::<()>(object, Vec::new(), Some(self.usage()))
    }

    fn chat_choice(&self, index: u32, shown: &Shown<'_>) -> ChatChoice {
        let logprobs = self.with_logprobs.then(|| ChatLogprobs {
            content: shown.tokens.iter().map(|token| self.chat_logprob(token)).collect(),
        });
        let mut message = AssistantMessage::new(shown.text.to_owned());
        message.tool_calls = shown.calls.to_vec();
        if !shown.calls.is_empty() && shown.text.is_empty() {
            message.content = None;
        }
        ChatChoice { index, message, logprobs, finish_reason: shown.finish }
    }

    fn text_choice(&self, index: u32, shown: &Shown<'_>) -> TextChoice {
        let tokens = shown.prompt_tokens.iter().chain(shown.tokens);
        let logprobs = self.with_logprobs.then(|| self.text_logprobs(tokens));
        TextChoice { index, text: shown.text.to_owned(), logprobs, finish_reason: shown.finish }
    }

    fn chat_logprob(&self, token: &Token) -> TokenLogprob {
        let one = |&(id, logprob): &(TokenId, f32)| TopLogprob {
            token: self.words.piece(id),
            logprob: logprob.max(LOGPROB_MIN),
            bytes: self.words.tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
        };
        TokenLogprob {
            token: one(&(token.id, token.logprob.unwrap_or_default())),
            top_logprobs: token.top.iter().map(one).collect(),
        }
    }

    fn text_logprobs<'a>(&self, tokens: impl Iterator<Item = &'a Token>) -> TextLogprobs {
        let mut lists = TextLogprobs::default();
        for token in tokens {
            let mut top = BTreeMap::new();
            for &(id, logprob) in &token.top {
                // Of two tokens with the same text, the better one counts.
                top.entry(self.words.piece(id)).or_insert(logprob.max(LOGPROB_MIN));
            }
            let piece = self.words.piece(token.id);
            let logprob = token.logprob.map(|logprob| logprob.max(LOGPROB_MIN));
            // The token itself is told too, be it among the best or not.
            let top = logprob.map(|logprob| {
                top.entry(piece.clone()).or_insert(logprob);
                top
            });
            lists.text_offset.push(token.offset);
            lists.tokens.push(piece);
            lists.token_logprobs.push(logprob);
            lists.top_logprobs.push(top);
        }
        lists
    }
}

/// The end of a stream, as OpenAI's older APIs have it.
fn done() -> Event {
    Event { name: None, data: "[DONE]".to_owned() }
}
