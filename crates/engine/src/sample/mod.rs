//! Choosing the next token from the logits.
//!
//! ```text
//! logits -> logprobs (of the raw logits)
//!        -> penalties -> bias -> temperature 0: the best token
//!                             -> temperature -> top-k -> top-p -> min-p -> draw
//! ```
//!
//! A [`Sampler`] belongs to one sequence; the [`Scratch`] is shared by all. A draw depends on the
//! logits, the seed and the position, and on nothing else: batching and preemption do not change
//! it. Nothing here sorts a vocabulary, and nothing is allocated per token but the list of top
//! logprobs, when it is asked for.

mod greedy;
mod nucleus;
mod penalty;
mod random;
mod softmax;

#[cfg(test)]
mod tests;

use nuthatch_types::{Sampling, TokenId};

use self::nucleus::{Candidate, Room};
use self::penalty::Seen;

/// One sequence's way of choosing tokens, and what it remembers for its penalties.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seen: Seen,
}

/// Memory that sampling reuses for every token of every sequence.
#[derive(Debug)]
pub struct Scratch(Room);

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability before penalties, temperature and filters.
    pub logprob: f32,
    /// The most probable tokens and their logarithms, as many as were asked for, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// The model gave no distribution to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN, the largest is infinite, or none is above minus infinity.
    #[error("the logits at position {position} are not numbers to choose by")]
    Logits {
        /// Position of the token that was to be chosen.
        position: u32,
    },
}

impl Scratch {
    /// Memory for a vocabulary of `vocab` tokens.
    pub fn with_vocab(vocab: usize) -> Self {
        Scratch(Room::with_vocab(vocab))
    }
}

impl Sampler {
    /// A sampler for a sequence that already has `prompt`, and `answer` after it.
    ///
    /// `sampling` must be valid ([`Sampling::validate`]).
    pub fn new(sampling: Sampling, prompt: &[TokenId], answer: &[TokenId]) -> Self {
        debug_assert_eq!(sampling.validate(), Ok(()));
        let seen = Seen::new(&sampling, prompt, answer);
        Sampler { sampling, seen }
    }

    /// Chooses the token at `position` from `logits` (`[V]`) and remembers it.
    ///
    /// Changes `logits`: they are the caller's reused buffer, and copying them costs as much as
    /// choosing greedily does. Tokens outside the vocabulary in bias or history are ignored. After
    /// an error the sampler is as it was.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        position: u32,
        scratch: &mut Scratch,
    ) -> Result<Choice, SampleError> {
        let room = &mut scratch.0;
        let raw_max = softmax::finite_max(logits).ok_or(SampleError::Logits { position })?;
        let log_total = softmax::log_sum_exp(logits, raw_max);
        let top = self.top_logprobs(logits, log_total, room);
        let (token, raw) = if self.is_plain() {
            let token = self.choose(logits, raw_max, position, room);
            (token, logits[token.0 as usize])
        } else {
            self.choose_adjusted(logits, position, room)?
        };
        self.seen.push(&self.sampling, token);
        Ok(Choice { token, logprob: (f64::from(raw) - log_total) as f32, top })
    }

    /// Whether the raw logits are the ones to choose by.
    fn is_plain(&self) -> bool {
        self.seen.is_empty() && self.sampling.logit_bias.is_empty()
    }

    /// Applies penalties and bias, chooses, and returns the token with its raw logit.
    fn choose_adjusted(
        &self,
        logits: &mut [f32],
        position: u32,
        room: &mut Room,
    ) -> Result<(TokenId, f32), SampleError> {
        let mut touched = std::mem::take(&mut room.touched);
        touched.clear();
        let bias = self.sampling.logit_bias.iter().map(|&(token, _)| token);
        touched.extend(self.seen.tokens().chain(bias).filter_map(|token| {
            let value = *logits.get(token.0 as usize)?;
            Some(Candidate { value, id: token.0 })
        }));
        self.seen.apply(&self.sampling, logits);
        for &(token, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(token.0 as usize) {
                *logit += bias;
            }
        }
        let chosen = softmax::finite_max(logits)
            .map(|max| self.choose(logits, max, position, room))
            .ok_or(SampleError::Logits { position });
        let raw = chosen.map(|token| {
            let saved = touched.iter().find(|c| c.id == token.0);
            (token, saved.map_or(logits[token.0 as usize], |c| c.value))
        });
        room.touched = touched;
        raw
    }

    fn choose(&self, logits: &[f32], max: f32, position: u32, room: &mut Room) -> TokenId {
        if self.sampling.temperature == 0.0 {
            return greedy::first_of(logits, max);
        }
        let uniform = random::uniform(self.sampling.seed, position);
        nucleus::draw(&self.sampling, logits, max, uniform, room)
    }

    fn top_logprobs(&self, logits: &[f32], log_total: f64, room: &mut Room) -> Vec<(TokenId, f32)> {
        let n = self.sampling.n_logprobs as usize;
        if n == 0 {
            return Vec::new();
        }
        nucleus::select_best(logits, n, &mut room.candidates);
        nucleus::sort_best(&mut room.candidates);
        let logprob = |c: &Candidate| (TokenId(c.id), (f64::from(c.value) - log_total) as f32);
        room.candidates.iter().map(logprob).collect()
    }
}
