//! Drives the engine step by step and times each one.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nuthatch_backend_cuda::Cuda;
use nuthatch_engine::topk::Policy;
use nuthatch_engine::{SharedClock, Submission};
use nuthatch_types::{KvShape, Limits, Sampling, TokenId};

use crate::config::WARM_UP_TOKENS;
use crate::device::AnyEngine;
use crate::random::Random;

use super::breakdown::Breakdown;
use super::result::{NearResult, TopKResult};

/// What a test measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) enum Kind {
    /// The prompt's tokens, many in a step.
    #[serde(rename = "pp")]
    Prefill,
    /// The answer's tokens, one in a step.
    #[serde(rename = "tg")]
    Decode,
}

/// One test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Test {
    pub(super) kind: Kind,
    /// Tokens that are measured.
    pub(super) tokens: u32,
    /// Tokens in the cache before.
    pub(super) depth: u32,
}

impl Test {
    /// Tokens of its prompt and of its answer, and where measuring begins.
    fn sequence(self) -> (u32, u32, u32) {
        match self.kind {
            Kind::Prefill => (self.depth + self.tokens, 1, self.depth),
            // The prefill gives the first token, so one more is asked for; an empty cache gets one
            // token, as there must be something to continue.
            Kind::Decode => (self.depth.max(1), self.tokens + 1, self.depth.max(1)),
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Prefill => "pp",
            Kind::Decode => "tg",
        };
        write!(f, "{kind}{}", self.tokens)?;
        if self.depth > 0 { write!(f, " @ d{}", self.depth) } else { Ok(()) }
    }
}

/// One step of the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// Tokens in the cache before it.
    start: u64,
    /// Tokens that it computed.
    n_tokens: u64,
    seconds: f64,
}

/// Where prompts come from.
#[derive(Debug)]
pub(super) enum Tokens {
    /// Any of so many.
    Random(u32),
    /// A text, over and over.
    Text(Vec<TokenId>),
}

impl Tokens {
    fn some(&self, random: &mut Random, n: usize) -> Vec<TokenId> {
        match self {
            Tokens::Random(vocab) => (0..n).map(|_| TokenId(random.below(*vocab))).collect(),
            Tokens::Text(text) => {
                let start = random.below(u32::try_from(text.len()).unwrap_or(u32::MAX)) as usize;
                text.iter().copied().cycle().skip(start).take(n).collect()
            }
        }
    }
}

/// An engine under measurement.
#[derive(Debug)]
pub(super) struct Bench {
    engine: AnyEngine,
    clock: Clock,
    tokens: Tokens,
    random: Random,
    /// Of all steps of one token, and what they read from a file of pages.
    decode_seconds: f64,
    decode_file_bytes: u64,
}

/// [`SharedClock`] with a name to print.
struct Clock(SharedClock);

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

impl Bench {
    pub(super) fn new(engine: AnyEngine, clock: SharedClock, tokens: Tokens) -> Self {
        let (clock, random) = (Clock(clock), Random::new(1));
        Bench { engine, clock, tokens, random, decode_seconds: 0.0, decode_file_bytes: 0 }
    }

    /// Touches everything once: weights, threads, buffers.
    pub(super) fn warm_up(&mut self) -> anyhow::Result<()> {
        self.run_sequence(WARM_UP_TOKENS - 16, 8).map(drop)
    }

    /// Measures a test `repeat` times and gives the speeds, in tokens a second.
    pub(super) fn measure(&mut self, test: Test, repeat: u32) -> anyhow::Result<Vec<f64>> {
        (0..repeat).map(|_| self.measure_once(test)).collect()
    }

    fn measure_once(&mut self, test: Test) -> anyhow::Result<f64> {
        let (prompt, answer, from) = test.sequence();
        let steps = self.run_sequence(prompt, answer)?;
        let seconds = seconds_from(&steps, u64::from(from));
        ensure!(seconds > 0.0, "{test} took no time at all");
        Ok(f64::from(test.tokens) / seconds)
    }

    /// Takes the steps of a test apart.
    pub(super) fn break_down(&mut self, test: Test) -> anyhow::Result<Breakdown> {
        let (prompt, answer, from) = test.sequence();
        ensure!(self.engine.executor().cuda().is_some(), "--breakdown needs a GPU");
        let from = u64::from(from);
        let mut is_begun = false;
        let steps = self.run_sequence_with(prompt, answer, |engine, start| {
            if start >= from && !std::mem::replace(&mut is_begun, true) {
                engine.executor().cuda().into_iter().for_each(Cuda::begin_timing);
            }
        })?;
        let n_steps = steps.iter().filter(|step| step.start >= from).count() as u32;
        let cuda = self.engine.executor().cuda().context("--breakdown needs a GPU")?;
        Ok(Breakdown::new(test.to_string(), n_steps, &cuda.end_timing()?))
    }

    /// Runs one sequence to its end.
    fn run_sequence(&mut self, n_prompt: u32, n_answer: u32) -> anyhow::Result<Vec<Step>> {
        self.run_sequence_with(n_prompt, n_answer, |_, _| {})
    }

    /// The same; calls `before` with the tokens in the cache before each step.
    fn run_sequence_with(
        &mut self,
        n_prompt: u32,
        n_answer: u32,
        mut before: impl FnMut(&AnyEngine, u64),
    ) -> anyhow::Result<Vec<Step>> {
        // Other tokens each time, so that nothing of it is in the cache.
        let prompt = self.tokens.some(&mut self.random, n_prompt as usize);
        let limits = Limits { max_tokens: n_answer, ..Limits::default() };
        let sampling = Sampling::greedy();
        let submission = Submission { prompt, sampling, limits, ..Submission::default() };
        let (sender, outputs) = crossbeam_channel::unbounded();
        self.engine.submit(submission, sender, self.clock.0.now())?;
        let mut steps = Vec::new();
        let mut start = 0;
        let (mut computed, mut read) = (self.computed(), self.file_bytes());
        loop {
            before(&self.engine, start);
            let begin = self.clock.0.now();
            let ran = self.engine.step().context("the device failed")?;
            let elapsed: Duration = self.clock.0.now().saturating_sub(begin);
            let now = self.computed();
            let n_tokens = now - computed;
            if !ran {
                break;
            }
            let seconds = elapsed.as_secs_f64();
            let came = self.file_bytes() - read;
            if n_tokens == 1 {
                self.decode_seconds += seconds;
                self.decode_file_bytes += came;
            }
            read += came;
            steps.push(Step { start, n_tokens, seconds });
            start += n_tokens;
            computed = now;
        }
        drop(outputs);
        Ok(steps)
    }

    fn file_bytes(&self) -> u64 {
        self.engine.executor().near().map_or(0, |(_, came)| came.file_bytes)
    }

    fn computed(&self) -> u64 {
        self.engine.stats().scheduler.counters.computed_tokens
    }

    /// What top-k attention did in all steps, if there was such, and the share of the decode steps'
    /// time that choosing took.
    pub(super) fn topk(
        &self,
        policy: Option<&Policy>,
        (kv, far_bytes): (KvShape, u64),
    ) -> Option<TopKResult> {
        let row_bytes = kv.row_bytes(0) as u64;
        let stats = self.engine.executor().topk_stats()?;
        let counts = stats.policies.first()?;
        let of_decode =
            |nanos: u64| nanos as f64 / 1e9 / self.decode_seconds.max(f64::MIN_POSITIVE);
        let near = self.engine.executor().near().map(|(near, came)| NearResult {
            bytes: near.row_bytes + near.digest_bytes,
            far_bytes,
            resident_heads: near.n_resident(),
            n_heads: near.is_resident.len(),
            brought_bytes: came.n_brought * row_bytes,
            moved_bytes: counts.rows_moved * row_bytes,
            filled_rows: came.n_filled,
            file_bytes: self.decode_file_bytes,
            waiting: of_decode(stats.bring_nanos),
        });
        Some(TopKResult {
            policy: policy?.to_string(),
            attended: counts.attended_share(),
            moved: counts.moved_share(),
            live_hits: counts.live_hit_ratio(),
            frozen_hits: counts.frozen_hit_ratio(),
            choosing: of_decode(stats.select_nanos),
            near,
        })
    }

    /// Share of the steps' time that is not the executor's: planning and bookkeeping.
    pub(super) fn overhead(&self) -> f64 {
        let stats = self.engine.stats();
        let outside = stats.step_time.saturating_sub(stats.execute_time).as_secs_f64();
        outside / stats.step_time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Time of the steps from token `from` on. A step across the border counts by its share of tokens.
fn seconds_from(steps: &[Step], from: u64) -> f64 {
    steps
        .iter()
        .map(|step| {
            let end = step.start + step.n_tokens;
            let inside = end.saturating_sub(step.start.max(from));
            step.seconds * inside as f64 / step.n_tokens.max(1) as f64
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_as_llama_bench_names_them() {
        let test = |kind, tokens, depth| Test { kind, tokens, depth }.to_string();
        assert_eq!(test(Kind::Prefill, 512, 0), "pp512");
        assert_eq!(test(Kind::Decode, 128, 2048), "tg128 @ d2048");
    }

    #[test]
    fn time_counts_from_the_depth_on() {
        let step = |start, n_tokens, seconds| Step { start, n_tokens, seconds };
        let steps = [step(0, 512, 1.0), step(512, 512, 2.0), step(1024, 256, 3.0)];
        assert_eq!(seconds_from(&steps, 0), 6.0);
        assert_eq!(seconds_from(&steps, 512), 5.0);
        assert_eq!(seconds_from(&steps, 768), 4.0);
        assert_eq!(seconds_from(&steps, 1280), 0.0);
        // A decode of two tokens after a prompt of one.
        let steps = [step(0, 1, 1.0), step(1, 1, 0.5), step(2, 1, 0.25)];
        assert_eq!(seconds_from(&steps, 1), 0.75);
    }
}
