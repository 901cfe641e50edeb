//! What goes into the engine and what comes out, as plain data.

use std::fmt;
use std::time::Duration;

use crossbeam_channel::Sender;
use nuthatch_cache::Retention;
use nuthatch_scheduler::{Tenant, Usage};
use nuthatch_types::{BeamParams, FinishReason, Limits, Sampling, Streaming, TokenId};

use crate::{Form, HiddenSink, PromptScores};

/// A request, in tokens.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The prompt; at least one token, all of them of the model's vocabulary.
    pub prompt: Vec<TokenId>,
    /// How the answers' tokens are chosen. `n_candidates` is the engine's own and is not looked at.
    pub sampling: Sampling,
    /// When each answer ends.
    pub limits: Limits,
    /// Answers, at least 1. They share the pages of the prompt. Samples differ because the answer
    /// with index `i` has the seed `sampling.seed + i`; with the same seed, answer `i` is the same
    /// whatever `n` is.
    pub n: u32,
    /// Searches for the `n` most probable answers instead of sampling. `n` may not be more than the
    /// width. Temperature, filters and seed do not count; penalties and bias do.
    pub beam: Option<BeamParams>,
    /// Keeps only the first and the last tokens in the cache (StreamingLLM), so that neither the
    /// context nor the cache bounds prompt and answer. An approximation: what was dropped is not
    /// seen again. Not for a beam search.
    pub streaming: Option<Streaming>,
    /// The form that the answers must have. Not for a beam search.
    pub form: Option<Form>,
    /// Who wants to see the hidden state of the prompt. Its mean is not for a beam search.
    pub hidden: Option<HiddenSink>,
    /// Who wants to know the probabilities of the prompt's tokens. Not for a beam search.
    pub scores: Option<PromptScores>,
    /// How the request is served.
    pub hints: Hints,
}

impl Default for Submission {
    fn default() -> Self {
        Submission {
            prompt: Vec::new(),
            sampling: Sampling::default(),
            limits: Limits::default(),
            n: 1,
            beam: None,
            streaming: None,
            form: None,
            hidden: None,
            scores: None,
            hints: Hints::default(),
        }
    }
}

/// What a request says about how it is served. The default says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Only requests with the same bytes share pages.
    pub cache_salt: Vec<u8>,
    /// How long the request's pages should stay when it is gone.
    pub retention: Retention,
    /// How urgent it is, where the scheduler goes by priority; higher is more.
    pub priority: u8,
    /// Who pays for it, where the scheduler is fair between tenants.
    pub tenant: Tenant,
}

/// News of one request: each answer's tokens in order, then its `Finished`; and nothing after the
/// last answer's.
///
/// Samples come as they are computed, each answer at its own pace. The answers of a beam search come
/// when it is over, the best one first.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// The next token of an answer.
    Token {
        /// Which answer, from 0.
        index: u32,
        /// The token.
        token: TokenId,
        /// Natural logarithm of its probability before penalties, temperature and filters, if it
        /// was asked for. In a beam search, what the token adds to the answer's sum.
        logprob: Option<f32>,
        /// The most probable tokens and their logarithms, as many as were asked for, best first.
        top: Vec<(TokenId, f32)>,
    },
    /// An answer has ended.
    Finished {
        /// Which answer, from 0.
        index: u32,
        /// Why it ended.
        reason: FinishReason,
        /// What it used. The prompt is counted with the first answer only, so that the sum over all
        /// answers is what the request used.
        usage: Usage,
        /// How long its parts took.
        timings: Timings,
        /// The score by which a beam search orders its answers.
        score: Option<f32>,
    },
}

/// Where the news of one request go.
///
/// Called on the engine's thread, so it must not wait for anything. It says whether somebody still
/// listens; if not, the request is cancelled.
pub struct Sink(Box<dyn FnMut(Output) -> bool + Send>);

impl Sink {
    /// A sink that gives each piece of news to `take`.
    pub fn new(take: impl FnMut(Output) -> bool + Send + 'static) -> Self {
        Sink(Box::new(take))
    }

    /// Gives the next news, and says whether somebody listens.
    pub(crate) fn send(&mut self, output: Output) -> bool {
        (self.0)(output)
    }
}

/// The channel should be unbounded.
impl From<Sender<Output>> for Sink {
    fn from(sender: Sender<Output>) -> Self {
        Sink::new(move |output| sender.send(output).is_ok())
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sink")
    }
}

/// The `n` best of several finished answers, by the mean of their tokens' `logprobs`: their places,
/// best first. Of equals the first is better, and an answer without a token is the worst.
pub fn best_of(logprobs: &[Vec<f32>], n: usize) -> Vec<usize> {
    let mean = |answer: &Vec<f32>| match answer.len() {
        0 => f64::NEG_INFINITY,
        len => answer.iter().map(|&logprob| f64::from(logprob)).sum::<f64>() / len as f64,
    };
    let mut places: Vec<(usize, f64)> = logprobs.iter().map(mean).enumerate().collect();
    places.sort_by(|a, b| b.1.total_cmp(&a.1));
    places.into_iter().take(n).map(|(place, _)| place).collect()
}

/// How long the parts of a request took.
///
/// ```text
///   submitted -- queue --> first step -- prefill --> first token -- decode --> finished
/// ```
///
/// A part that was not reached is zero; the part in which the request ended lasts until its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to the first step that computes something for it.
    pub queue: Duration,
    /// From there to the first token of the answer.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
}

/// When a request reached its parts, on the engine's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Milestones {
    pub(crate) submitted: Duration,
    pub(crate) started: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
}

impl Milestones {
    pub(crate) fn submitted(at: Duration) -> Self {
        Milestones { submitted: at, started: None, first_token: None }
    }

    /// The parts of a request that ends at `end`.
    pub(crate) fn timings(&self, end: Duration) -> Timings {
        let started = self.started.unwrap_or(end);
        let first_token = self.first_token.unwrap_or(end);
        Timings {
            queue: started.saturating_sub(self.submitted),
            prefill: first_token.saturating_sub(started),
            decode: end.saturating_sub(first_token),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_have_the_highest_mean() {
        let answers = [vec![-3.0], vec![], vec![-1.0, -2.0], vec![-1.5], vec![-0.1, -5.0]];
        assert_eq!(best_of(&answers, 3), [2, 3, 4]);
        assert_eq!(best_of(&answers, 9), [2, 3, 4, 0, 1]);
        assert_eq!(best_of(&[], 2), Vec::<usize>::new());
    }
}
