//! What goes into the engine and what comes out, as plain data.

use std::time::Duration;

use nuthatch_cache::Retention;
use nuthatch_scheduler::{Tenant, Usage};
use nuthatch_types::{FinishReason, Limits, Sampling, TokenId};

/// A request, in tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Submission {
    /// The prompt; at least one token, all of them of the model's vocabulary.
    pub prompt: Vec<TokenId>,
    /// How the answer's tokens are chosen.
    pub sampling: Sampling,
    /// When the answer ends.
    pub limits: Limits,
    /// How the request is served.
    pub hints: Hints,
}

/// What a request says about how it is served. The default says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Only requests with the same bytes share pages.
    pub cache_salt: Vec<u8>,
    /// How long the request's pages should stay when it is gone.
    pub retention: Retention,
    /// How urgent it is under [`Policy::Priority`](nuthatch_scheduler::Policy::Priority); higher is
    /// more.
    pub priority: u8,
    /// Who pays for it under [`Policy::Fair`](nuthatch_scheduler::Policy::Fair).
    pub tenant: Tenant,
}

/// News of one request: tokens in order, then one `Finished`, then nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// The next token of the answer.
    Token {
        /// The token.
        token: TokenId,
        /// Natural logarithm of its probability before penalties, temperature and filters.
        logprob: f32,
        /// The most probable tokens and their logarithms, as many as were asked for, best first.
        top: Vec<(TokenId, f32)>,
    },
    /// The answer has ended.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
        /// How long its parts took.
        timings: Timings,
    },
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
