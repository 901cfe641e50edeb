//! One request on its way: a sequence for each answer, and the response when all have ended.

use std::collections::BTreeMap;

use crossbeam_channel::Receiver;
use nuthatch_engine::Output;
use nuthatch_tokens::AnswerText;
use nuthatch_types::{FinishReason, SeqId, TokenId};
use nuthatch_wire::{
    AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs, TextChoice, TextCompletion,
    TextLogprobs, TokenLogprob, TopLogprob, Usage,
};
use serde::Serialize;

use crate::text::Text;

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct Job {
    /// The line that it came from.
    pub(super) line: u64,
    pub(super) custom_id: String,
    pub(super) kind: Kind,
    /// Whether probabilities were asked for.
    pub(super) with_logprobs: bool,
    /// One for each answer, in order.
    pub(super) parts: Vec<Part>,
}

/// Which endpoint it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// One answer on its way.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) seq: SeqId,
    /// Whether its prompt was counted with an earlier answer.
    pub(super) is_repeat: bool,
    outputs: Receiver<Output>,
    /// Taken when the answer has ended.
    text: Option<AnswerText>,
    shown: String,
    tokens: Vec<Token>,
    end: Option<(FinishReason, nuthatch_engine::Usage)>,
}

#[derive(Debug)]
struct Token {
    id: TokenId,
    logprob: f32,
    top: Vec<(TokenId, f32)>,
}

/// What became of an answer since it was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It goes on, or has ended.
    None,
    /// A stop string was found: the engine need not go on.
    Stopped,
}

impl Part {
    pub(super) fn new(
        seq: SeqId,
        is_repeat: bool,
        outputs: Receiver<Output>,
        text: AnswerText,
    ) -> Self {
        let text = Some(text);
        Part { seq, is_repeat, outputs, text, shown: String::new(), tokens: vec![], end: None }
    }

    /// Takes in what the last step gave.
    pub(super) fn poll(&mut self) -> Progress {
        let mut progress = Progress::None;
        while let Ok(output) = self.outputs.try_recv() {
            match output {
                Output::Token { token, logprob, top, .. } => {
                    let Some(text) = self.text.as_mut().filter(|text| !text.is_stopped()) else {
                        continue;
                    };
                    self.shown += &text.push(token);
                    let logprob = logprob.unwrap_or_default();
                    self.tokens.push(Token { id: token, logprob, top });
                    if text.is_stopped() {
                        progress = Progress::Stopped;
                    }
                }
                Output::Finished { reason, usage, .. } => self.finish(reason, usage),
            }
        }
        progress
    }

    fn finish(&mut self, reason: FinishReason, usage: nuthatch_engine::Usage) {
        let Some(mut text) = self.text.take() else { return };
        let reason = if text.is_stopped() { FinishReason::Stop } else { reason };
        self.shown += &text.finish();
        self.end = Some((reason, usage));
    }

    fn reason(&self) -> FinishReason {
        self.end.map_or(FinishReason::Cancelled, |(reason, _)| reason)
    }
}

/// The body of a response.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Body {
    Chat(ChatCompletion),
    Completion(TextCompletion),
}

impl Job {
    /// Whether every answer has ended.
    pub(super) fn is_done(&self) -> bool {
        self.parts.iter().all(|part| part.end.is_some())
    }

    /// Whether the engine could not go on with one of the answers.
    pub(super) fn has_failed(&self) -> bool {
        self.parts.iter().any(|part| part.reason() == FinishReason::Failed)
    }

    /// What all answers used. A prompt with several answers counts once.
    pub(super) fn usage(&self) -> Usage {
        let ends = || self.parts.iter().filter_map(|part| Some((part.is_repeat, part.end?.1)));
        let prompts = || ends().filter(|(is_repeat, _)| !is_repeat).map(|(_, usage)| usage);
        Usage::new(
            prompts().map(|usage| usage.prompt_tokens).sum(),
            prompts().map(|usage| usage.cached_tokens).sum(),
            ends().map(|(_, usage)| usage.completion_tokens).sum(),
        )
    }

    /// The response's body, when every answer has ended.
    pub(super) fn body(&self, text: &Text, model: &str, created: u64) -> Body {
        let (model, usage) = (model.to_owned(), self.usage());
        let parts = || (0..).zip(&self.parts);
        match self.kind {
            Kind::Chat => Body::Chat(ChatCompletion {
                id: format!("chatcmpl-{}", self.line),
                object: ChatCompletion::OBJECT,
                created,
                model,
                choices: parts().map(|(index, part)| self.chat_choice(index, part, text)).collect(),
                usage,
            }),
            Kind::Completion => Body::Completion(TextCompletion {
                id: format!("cmpl-{}", self.line),
                object: TextCompletion::OBJECT,
                created,
                model,
                choices: parts().map(|(index, part)| self.text_choice(index, part, text)).collect(),
                usage,
            }),
        }
    }

    fn chat_choice(&self, index: u32, part: &Part, text: &Text) -> ChatChoice {
        let one = |&(id, logprob): &(TokenId, f32)| TopLogprob {
            token: text.piece(id),
            logprob,
            bytes: text.tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
        };
        let token = |token: &Token| TokenLogprob {
            token: one(&(token.id, token.logprob)),
            top_logprobs: token.top.iter().map(one).collect(),
        };
        let logprobs = self
            .with_logprobs
            .then(|| ChatLogprobs { content: part.tokens.iter().map(token).collect() });
        ChatChoice {
            index,
            message: AssistantMessage::new(part.shown.clone()),
            logprobs,
            finish_reason: part.reason(),
        }
    }

    fn text_choice(&self, index: u32, part: &Part, text: &Text) -> TextChoice {
        let logprobs = self.with_logprobs.then(|| {
            let mut lists = TextLogprobs::default();
            let mut offset = 0;
            for token in &part.tokens {
                let piece = text.piece(token.id);
                let top = token.top.iter().map(|&(id, logprob)| (text.piece(id), logprob));
                lists.text_offset.push(offset);
                offset += piece.chars().count();
                lists.tokens.push(piece);
                lists.token_logprobs.push(token.logprob);
                lists.top_logprobs.push(top.collect::<BTreeMap<_, _>>());
            }
            lists
        });
        let finish_reason = part.reason();
        TextChoice { index, text: part.shown.clone(), logprobs, finish_reason }
    }
}
