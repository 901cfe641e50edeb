//! What clients get: whole answers of both kinds.

use std::collections::BTreeMap;

use nuthatch_types::FinishReason;
use serde::Serialize;

use crate::ToolCall;

/// The answer to a [`ChatRequest`](crate::ChatRequest).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatCompletion {
    /// Unique.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answers.
    pub choices: Vec<ChatChoice>,
    /// What they used.
    pub usage: Usage,
}

impl ChatCompletion {
    /// The value of `object`.
    pub const OBJECT: &'static str = "chat.completion";
}

/// One answer of a chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Which of the answers, from 0.
    pub index: u32,
    /// What the model says.
    pub message: AssistantMessage,
    /// Probabilities, if they were asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: Finish,
}

/// What the model says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: &'static str,
    /// The text, if there is one.
    pub content: Option<String>,
    /// Always null: what a model refuses it refuses in its text.
    pub refusal: Option<String>,
    /// Tools that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// A message of this text.
    pub fn new(content: String) -> Self {
        let content = Some(content);
        AssistantMessage { role: "assistant", content, refusal: None, tool_calls: Vec::new() }
    }
}

/// Probabilities of a chat's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// Token by token.
    pub content: Vec<TokenLogprob>,
}

/// One token and what else was probable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token.
    #[serde(flatten)]
    pub token: TopLogprob,
    /// The most probable ones, best first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token and its probability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopLogprob {
    /// Its text; bytes that are no text become U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The answer to a [`CompletionRequest`](crate::CompletionRequest).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextCompletion {
    /// Unique.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answers, those to the first prompt first.
    pub choices: Vec<TextChoice>,
    /// What they used.
    pub usage: Usage,
}

impl TextCompletion {
    /// The value of `object`.
    pub const OBJECT: &'static str = "text_completion";
}

/// One continuation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextChoice {
    /// Which of the answers, from 0.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Probabilities, if they were asked for.
    pub logprobs: Option<TextLogprobs>,
    /// Why it ended.
    pub finish_reason: Finish,
}

/// Probabilities of a continuation: lists of the same length, token by token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TextLogprobs {
    /// The tokens' texts.
    pub tokens: Vec<String>,
    /// Natural logarithms of their probabilities. Null for the first token of a prompt that is
    /// repeated, before which there is nothing.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens and their logarithms; null where those are.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins, in characters from the begin of the answer.
    pub text_offset: Vec<usize>,
}

/// Tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of all prompts, each counted once.
    pub prompt_tokens: u32,
    /// Of all answers.
    pub completion_tokens: u32,
    /// Of both.
    pub total_tokens: u32,
    /// More about the prompts.
    pub prompt_tokens_details: PromptTokensDetails,
}

/// More about the tokens of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Those that were not computed, because the cache held them.
    pub cached_tokens: u32,
}

impl Usage {
    /// From its parts.
    pub fn new(prompt_tokens: u32, cached_tokens: u32, completion_tokens: u32) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        }
    }
}

/// Why an answer ended, as clients are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it, or a stop string was found.
    Stop,
    /// It is as long as it may be.
    Length,
    /// The model called tools.
    ToolCalls,
    /// It was cancelled.
    Abort,
    /// The engine could not go on.
    Error,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Finish::Stop,
            FinishReason::Length => Finish::Length,
            FinishReason::Cancelled => Finish::Abort,
            FinishReason::Failed => Finish::Error,
        }
    }
}
