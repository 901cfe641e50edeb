//! The text of an answer as its tokens come: the detokenizer, then the stop strings.

use std::sync::Arc;

use nuthatch_types::TokenId;

use crate::{DecodeOptions, Detokenizer, StopMatcher, Tokenizer};

/// The text of an answer that is still growing.
#[derive(Clone, Debug)]
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
}

impl AnswerText {
    /// An answer without tokens, which ends before the first of `stops`, or after it with
    /// `include_stop`.
    pub fn new<S: AsRef<str>>(
        tokenizer: Arc<Tokenizer>,
        options: DecodeOptions,
        stops: &[S],
        include_stop: bool,
    ) -> Self {
        AnswerText {
            detokenizer: Detokenizer::new(tokenizer, options),
            stops: StopMatcher::new(stops, include_stop),
        }
    }

    /// Takes the next token and gives the text that may be shown now. After a stop string that is
    /// nothing.
    pub fn push(&mut self, id: TokenId) -> String {
        self.stops.push(&self.detokenizer.push(id)).text
    }

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.stops.is_stopped()
    }

    /// Ends the answer and gives the text that was held back.
    pub fn finish(&mut self) -> String {
        if self.stops.is_stopped() {
            return String::new();
        }
        let mut rest = self.stops.push(&self.detokenizer.flush()).text;
        if !self.stops.is_stopped() {
            rest += &self.stops.flush();
        }
        rest
    }
}
