//! What a step gives to the callers, as plain data.

use nuthatch_types::{FinishReason, Sampled, SeqId, TokenId};

/// News of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// The next token of the answer.
    Token(Sampled),
    /// The sequence is paused until the caller has chosen: see [`crate::Scheduler::proceed`].
    Candidates {
        /// The sequence.
        seq: SeqId,
        /// The best tokens and their scores, best first.
        top: Vec<(TokenId, f32)>,
    },
    /// The last news of a sequence: its pages are free and its id is forgotten.
    Finished {
        /// The sequence.
        seq: SeqId,
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
}

impl Output {
    /// The sequence of which this is news.
    pub fn seq(&self) -> SeqId {
        match *self {
            Output::Token(Sampled { seq, .. })
            | Output::Candidates { seq, .. }
            | Output::Finished { seq, .. } => seq,
        }
    }
}

/// Tokens that a sequence used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were not computed, because the cache held them.
    pub cached_tokens: u32,
    /// Tokens of the answer, a stop token at its end not counted.
    pub completion_tokens: u32,
}

impl Usage {
    /// The same without the prompt, for answers whose prompt is counted elsewhere.
    pub fn without_prompt(self) -> Self {
        Usage { prompt_tokens: 0, cached_tokens: 0, ..self }
    }
}
