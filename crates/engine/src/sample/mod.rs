//! Choosing the next token from the logits.
//!
//! ```text
//! logits -> logprobs (of the raw logits, if they are asked for)
//!        -> penalties -> bias -> temperature 0: the best token
//!                             -> temperature -> top-k -> top-p -> min-p -> draw
//!
//! logits -> logprobs -> penalties -> bias -> the best candidates, where the caller chooses
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

use std::sync::Arc;

use nuthatch_backend::Draw;
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
    /// Natural logarithm of its probability before penalties, temperature and filters, if it was
    /// asked for.
    pub logprob: Option<f32>,
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

    /// Chooses the token at `position` from `logits` (`[V]`) and remembers it. Where the caller
    /// chooses, gives the candidates, takes the best for the choice, and remembers nothing: see
    /// [`Sampler::remember`].
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
        if self.sampling.n_candidates > 0 {
            return Ok(self.candidates(logits, raw_max, room));
        }
        let log_total = self.sampling.n_logprobs.map(|_| softmax::log_sum_exp(logits, raw_max));
        let n_top = self.sampling.n_logprobs.unwrap_or(0);
        let top =
            log_total.map_or_else(Vec::new, |total| best_logprobs(logits, total, n_top, room));
        let (token, raw) = if self.is_plain() {
            let token = self.choose(logits, raw_max, position, room);
            (token, logits[token.0 as usize])
        } else {
            self.choose_adjusted(logits, position, room)?
        };
        self.seen.push(&self.sampling, token);
        let logprob = log_total.map(|total| logprob(raw, total));
        Ok(Choice { token, logprob, top })
    }

    /// How the token at `position` is chosen, for a device that does it. Not for what comes with
    /// logarithms of probabilities: those are worked out here.
    pub fn draw(&self, position: u32) -> Option<Draw> {
        let &Sampling { temperature, top_k, top_p, min_p, seed, .. } = &self.sampling;
        if self.sampling.n_candidates > 0 || self.sampling.n_logprobs.is_some() {
            return None;
        }
        let uniform = random::uniform(seed, position);
        let moved = Arc::clone(self.seen.moved());
        Some(Draw { temperature, top_k, top_p, min_p, uniform, moved })
    }

    /// The same where the token before is not known, if the choice does not depend on it.
    pub fn draw_unseen(&self, position: u32) -> Option<Draw> {
        if penalty::penalises(&self.sampling) { None } else { self.draw(position) }
    }

    /// Remembers a token that the caller chose.
    pub fn remember(&mut self, token: TokenId) {
        self.seen.push(&self.sampling, token);
    }

    /// The best tokens with the logarithms of their probabilities, moved by penalties and bias.
    ///
    /// As in Hugging Face's beam search, these move the logarithms and not the logits; nothing is
    /// normalised again.
    fn candidates(&self, logits: &mut [f32], raw_max: f32, room: &mut Room) -> Choice {
        let mut total = softmax::log_sum_exp(logits, raw_max);
        if !self.is_plain() {
            for logit in logits.iter_mut() {
                *logit = logprob(*logit, total);
            }
            total = 0.0;
            self.seen.apply(logits);
        }
        let top = best_logprobs(logits, total, self.sampling.n_candidates, room);
        let (token, logprob) = top[0];
        Choice { token, logprob: Some(logprob), top }
    }

    /// Whether it draws tokens, or leaves the choice to the caller.
    pub fn draws(&self) -> bool {
        self.sampling.n_candidates == 0
    }

    /// Whether the raw logits are the ones to choose by.
    fn is_plain(&self) -> bool {
        self.seen.moved().is_empty()
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
        touched.extend(self.seen.moved().iter().filter_map(|moved| {
            let value = *logits.get(moved.token as usize)?;
            Some(Candidate { value, id: moved.token })
        }));
        self.seen.apply(logits);
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
}

/// The logarithm of a token's probability, and the `n_top` most probable tokens with theirs. `None`
/// if the logits are no numbers.
pub(crate) fn score(
    logits: &[f32],
    token: TokenId,
    n_top: u32,
    scratch: &mut Scratch,
) -> Option<(f32, Vec<(TokenId, f32)>)> {
    let total = softmax::log_sum_exp(logits, softmax::finite_max(logits)?);
    let logit = *logits.get(token.0 as usize)?;
    Some((logprob(logit, total), best_logprobs(logits, total, n_top, &mut scratch.0)))
}

/// The `n` best tokens, best first, each with its logit less `log_total`.
fn best_logprobs(logits: &[f32], log_total: f64, n: u32, room: &mut Room) -> Vec<(TokenId, f32)> {
    nucleus::select_best(logits, n as usize, &mut room.candidates);
    nucleus::sort_best(&mut room.candidates);
    room.candidates.iter().map(|c| (TokenId(c.id), logprob(c.value, log_total))).collect()
}

fn logprob(logit: f32, log_total: f64) -> f32 {
    (f64::from(logit) - log_total) as f32
}
