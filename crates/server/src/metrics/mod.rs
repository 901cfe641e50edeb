//! Numbers for those who watch: Prometheus's text format under vLLM's names, and the dashboard's.
//!
//! What the engine counts is asked of the engine when somebody looks. What only the server sees,
//! when tokens arrive and which clients leave, is counted here.

mod histogram;
mod prometheus;
mod watch;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nuthatch_types::FinishReason;

pub(crate) use self::histogram::{Histogram, Recent};
pub(crate) use self::prometheus::page;
pub(crate) use self::watch::Watch;

/// The shares for which percentiles are told.
pub(crate) const SHARES: [f64; 3] = [0.5, 0.9, 0.99];

/// What the server counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    model: String,
    pub(crate) started: Duration,
    counts: Mutex<Counts>,
}

/// What the server counts. Histograms have vLLM's ranges.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) latency: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) inference: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) prompt_tokens: Histogram,
    pub(crate) generation_tokens: Histogram,
    pub(crate) computed_tokens: Histogram,
    /// Tokens of prompts that the cache held.
    pub(crate) n_cached: u64,
    /// Answers by how they ended: stop, length, abort, error.
    pub(crate) ended: [u64; 4],
    /// Responses by status.
    pub(crate) responses: BTreeMap<u16, u64>,
    /// Requests whose client left before the end.
    pub(crate) clients_left: u64,
    /// Requests that a panic ended.
    pub(crate) panics: u64,
    pub(crate) recent_first: Recent,
    pub(crate) recent_next: Recent,
}

const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const NEXT_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0,
    50000.0, 100000.0, 200000.0, 500000.0, 1000000.0,
];

impl Metrics {
    pub(crate) fn new(model: &str, now: Duration) -> Self {
        let counts = Counts {
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token: Histogram::new(NEXT_TOKEN),
            latency: Histogram::new(REQUEST),
            queue: Histogram::new(REQUEST),
            prefill: Histogram::new(REQUEST),
            decode: Histogram::new(REQUEST),
            inference: Histogram::new(REQUEST),
            per_token: Histogram::new(NEXT_TOKEN),
            prompt_tokens: Histogram::new(TOKENS),
            generation_tokens: Histogram::new(TOKENS),
            computed_tokens: Histogram::new(TOKENS),
            n_cached: 0,
            ended: [0; 4],
            responses: BTreeMap::new(),
            clients_left: 0,
            panics: 0,
            recent_first: Recent::default(),
            recent_next: Recent::default(),
        };
        Metrics { model: model.to_owned(), started: now, counts: Mutex::new(counts) }
    }

    /// Everything as it is now.
    pub(crate) fn counts(&self) -> Counts {
        self.lock().clone()
    }

    pub(crate) fn responded(&self, status: u16) {
        *self.lock().responses.entry(status).or_default() += 1;
    }

    /// A client left, and so many of its answers were ended for that.
    pub(crate) fn client_left(&self, n_answers: usize) {
        let counts = &mut *self.lock();
        counts.clients_left += 1;
        counts.ended[reason_idx(FinishReason::Cancelled)] += n_answers as u64;
    }

    pub(crate) fn panicked(&self) {
        self.lock().panics += 1;
    }

    fn first_token(&self, now: Duration, waited: Duration) {
        let mut counts = self.lock();
        counts.time_to_first_token.add(waited.as_secs_f64());
        counts.recent_first.add(now, waited.as_secs_f64());
    }

    fn next_token(&self, now: Duration, waited: Duration) {
        let mut counts = self.lock();
        counts.inter_token.add(waited.as_secs_f64());
        counts.recent_next.add(now, waited.as_secs_f64());
    }

    fn ended(&self, answer: &watch::EndedAnswer) {
        let counts = &mut *self.lock();
        counts.ended[reason_idx(answer.reason)] += 1;
        let (usage, timings) = (answer.usage, answer.timings);
        counts.latency.add(answer.latency.as_secs_f64());
        counts.queue.add(timings.queue.as_secs_f64());
        counts.prefill.add(timings.prefill.as_secs_f64());
        counts.decode.add(timings.decode.as_secs_f64());
        counts.inference.add((timings.prefill + timings.decode).as_secs_f64());
        counts.generation_tokens.add(f64::from(usage.completion_tokens));
        if usage.completion_tokens > 1 {
            let n_gaps = f64::from(usage.completion_tokens - 1);
            counts.per_token.add(timings.decode.as_secs_f64() / n_gaps);
        }
        if answer.is_first {
            let n_computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
            counts.prompt_tokens.add(f64::from(usage.prompt_tokens));
            counts.computed_tokens.add(f64::from(n_computed));
            counts.n_cached += u64::from(usage.cached_tokens);
        }
    }

    /// A panic of one request must not take the numbers from all others.
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// In the order of [`REASONS`].
fn reason_idx(reason: FinishReason) -> usize {
    match reason {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
        FinishReason::Cancelled => 2,
        FinishReason::Failed => 3,
    }
}

/// How answers end, in vLLM's words.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];
