//! What a sequence has said, and how that moves the next token's logits.
//!
//! Repetition looks at the prompt and the answer (CTRL, Keskar et al. 2019); frequency and presence
//! look at the answer only, as OpenAI's interface defines them.

use nuthatch_backend::Moved;
use nuthatch_types::{FastMap, Sampling, TokenId};

/// The tokens of one sequence that its penalties look back on.
///
/// Keeps nothing when no penalty is in force, so that an ordinary sequence pays nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// How often each token was generated; 0 for one that only the prompt has.
    counts: FastMap<u32, u32>,
}

impl Seen {
    pub(super) fn new(sampling: &Sampling, prompt: &[TokenId], answer: &[TokenId]) -> Self {
        let mut seen = Seen::default();
        if sampling.repetition_penalty != 1.0 {
            for token in prompt {
                seen.counts.entry(token.0).or_insert(0);
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
            *self.counts.entry(token.0).or_insert(0) += 1;
        }
    }

    /// Moves the logits of the tokens seen. Each token is touched once, so the order of the map
    /// does not matter.
    pub(super) fn apply(&self, sampling: &Sampling, logits: &mut [f32]) {
        let repetition = sampling.repetition_penalty;
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if count > 0 {
                *logit -= sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
            }
        }
    }

    /// What [`Seen::apply`] and the bias do, token by token, for a device to do it.
    pub(super) fn moved(&self, sampling: &Sampling) -> Vec<Moved> {
        let penalised = self.counts.iter().map(|(&token, &count)| {
            let times = sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
            let minus = if count > 0 { times } else { 0.0 };
            let factor = sampling.repetition_penalty;
            (token, Moved { factor, minus, ..Moved::nothing(token) })
        });
        let mut moved: FastMap<u32, Moved> = penalised.collect();
        for &(TokenId(token), bias) in &sampling.logit_bias {
            moved.entry(token).or_insert_with(|| Moved::nothing(token)).plus += bias;
        }
        moved.into_values().collect()
    }

    /// The tokens that [`Seen::apply`] moves.
    pub(super) fn tokens(&self) -> impl Iterator<Item = TokenId> {
        self.counts.keys().map(|&token| TokenId(token))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

pub(super) fn penalises(sampling: &Sampling) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.frequency_penalty != 0.0
        || sampling.presence_penalty != 0.0
}
