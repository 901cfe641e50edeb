//! Which logits move before a token is chosen: those of what a sequence has said, by its penalties, and
//! those that have a bias.
//!
//! Repetition looks at the prompt and the answer (CTRL, Keskar et al. 2019); frequency and presence
//! look at the answer only, as OpenAI's interface defines them.

#![expect(clippy::rc_buffer, reason = "the list grows where it is")]

use std::sync::Arc;

use nuthatch_backend::Moved;
use nuthatch_types::{FastMap, Sampling, TokenId};

/// The tokens of one sequence whose logits move.
///
/// Kept from token to token, so that a step costs no more than what it changes. Empty when no penalty is in
/// force and nothing has a bias, so that an ordinary sequence pays nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Each token once; shared with the steps that are on their way.
    moved: Arc<Vec<Moved>>,
    /// Where a token is among them, and how often it was generated.
    tokens: FastMap<u32, (usize, u32)>,
}

impl Seen {
    pub(super) fn new(sampling: &Sampling, prompt: &[TokenId], answer: &[TokenId]) -> Self {
        let mut seen = Seen::default();
        for &(token, bias) in &sampling.logit_bias {
            seen.of(token).0.plus += bias;
        }
        if sampling.repetition_penalty != 1.0 {
            for &token in prompt {
                seen.of(token).0.factor = sampling.repetition_penalty;
            }
        }
        for &token in answer {
            seen.push(sampling, token);
        }
        seen
    }

    /// Records a generated token.
    pub(super) fn push(&mut self, sampling: &Sampling, token: TokenId) {
        if penalises(sampling) {
            let (moved, count) = self.of(token);
            *count += 1;
            moved.factor = sampling.repetition_penalty;
            moved.minus = sampling.frequency_penalty * *count as f32 + sampling.presence_penalty;
        }
    }

    fn of(&mut self, TokenId(token): TokenId) -> (&mut Moved, &mut u32) {
        let moved = Arc::make_mut(&mut self.moved);
        let (at, count) = self.tokens.entry(token).or_insert((moved.len(), 0));
        if *at == moved.len() {
            moved.push(Moved::nothing(token));
        }
        (&mut moved[*at], count)
    }

    /// Moves the logits.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        for moved in self.moved.iter() {
            if let Some(logit) = logits.get_mut(moved.token as usize) {
                *logit = moved.apply(*logit);
            }
        }
    }

    /// What [`Seen::apply`] does, token by token, for a device to do it.
    pub(super) fn moved(&self) -> &Arc<Vec<Moved>> {
        &self.moved
    }
}

pub(super) fn penalises(sampling: &Sampling) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.frequency_penalty != 0.0
        || sampling.presence_penalty != 0.0
}
