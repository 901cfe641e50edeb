//! What an answer begins with that repeats its prompt: the text, and its tokens if somebody wants
//! to know how probable they were.

use std::sync::Arc;

use nuthatch_engine::{PromptScores, Submission};
use nuthatch_tokens::{DecodeOptions, Detokenizer, Words};
use nuthatch_types::TokenId;
use nuthatch_wire::PromptInput;

use super::job::Token;

/// What an answer begins with that repeats its prompt.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) text: String,
    /// The prompt's tokens and their probabilities, if these were asked for.
    scored: Option<(Vec<TokenId>, PromptScores)>,
}

impl Echo {
    pub(super) fn new(prompt: &PromptInput, submission: &Submission, words: &Words) -> Self {
        let text = match prompt {
            PromptInput::Text(text) => text.clone(),
            PromptInput::Tokens(tokens) => words.tokenizer.decode(tokens, DecodeOptions::default()),
        };
        let scores = submission.scores.clone();
        let scored = scores.map(|scores| (submission.prompt.clone(), scores));
        Echo { text, scored }
    }

    /// Characters of the text.
    pub(super) fn n_chars(&self) -> usize {
        self.text.chars().count()
    }

    /// The prompt's tokens, if they were asked for. Their probabilities are known when the answer
    /// begins; of the first token there is none.
    pub(super) fn tokens(&self, words: &Words) -> Vec<Token> {
        let Some((prompt, scores)) = &self.scored else { return Vec::new() };
        let mut decoder = Detokenizer::new(Arc::clone(&words.tokenizer), DecodeOptions::default());
        let (mut n_bytes, mut n_chars) = (0, 0);
        let mut tokens = Vec::with_capacity(prompt.len());
        let scores = std::iter::once(None).chain(scores.tokens().into_iter().map(Some));
        for (&id, scored) in prompt.iter().zip(scores) {
            let offset = n_chars;
            let mut text = decoder.push(id);
            // A special token is part of the text only where the client has spelled it out.
            let spelled = words.tokenizer.is_special(id).then(|| words.piece(id));
            let rest = self.text.get(n_bytes..).unwrap_or_default();
            text.extend(spelled.filter(|spelled| rest.starts_with(spelled)));
            n_bytes += text.len();
            n_chars += text.chars().count();
            let logprob = scored.as_ref().map(|scored| scored.logprob);
            let mut top = scored.map_or_else(Vec::new, |scored| scored.top);
            // The token itself is always among those that are told.
            if let Some(logprob) = logprob
                && top.iter().all(|&(other, _)| other != id)
            {
                top.push((id, logprob));
            }
            tokens.push(Token { id, logprob, top, offset });
        }
        tokens
    }
}
