//! What clients get of an answer that is sent as it grows: one chunk for each token.

use serde::Serialize;

use crate::{ChatLogprobs, Finish, TextLogprobs, ToolCall, Usage};

/// What is new in an answer; `C` is a piece of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chunk<'a, C> {
    /// The same in all chunks of a request.
    pub id: &'a str,
    /// What kind of chunk it is.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: &'a str,
    /// The piece; none in the chunk that only tells the usage.
    pub choices: Vec<C>,
    /// What was used, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// A piece of one answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Which of the answers, from 0.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// Probabilities of what is new, if they were asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended, in its last piece.
    pub finish_reason: Option<Finish>,
}

impl ChatChunkChoice {
    /// The value of a chunk's `object`.
    pub const OBJECT: &'static str = "chat.completion.chunk";
}

/// What is new in an answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatDelta {
    /// `assistant`, in the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Tools that are called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// A tool that is called, with its place among those of the answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCallDelta {
    /// From 0.
    pub index: u32,
    /// The call, whole.
    #[serde(flatten)]
    pub call: ToolCall,
}

/// A piece of one continuation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextChunkChoice {
    /// Which of the answers, from 0.
    pub index: u32,
    /// What is new.
    pub text: String,
    /// Probabilities of what is new, if they were asked for.
    pub logprobs: Option<TextLogprobs>,
    /// Why it ended, in its last piece.
    pub finish_reason: Option<Finish>,
}

impl TextChunkChoice {
    /// The value of a chunk's `object`.
    pub const OBJECT: &'static str = "text_completion";
}
