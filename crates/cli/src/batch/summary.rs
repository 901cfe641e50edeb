//! What a batch did, in numbers and in words.

use std::time::Duration;

use nuthatch_wire::Usage;
use serde::Serialize;

/// What a batch did so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Requests that were answered.
    pub(super) answered: u64,
    /// Lines that are errors.
    pub(super) errors: u64,
    /// Lines that an earlier run answered.
    pub(super) skipped: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) preemptions: u64,
    /// Preemptions whose pages went to the host.
    pub(super) swaps: u64,
    /// Most sequences that had their pages on the device at one time.
    pub(super) max_running: u32,
    /// The share of used pages' places that held no token then.
    pub(super) waste: f64,
    pub(super) elapsed: Duration,
    pub(super) is_interrupted: bool,
    /// Another model that a request names, and how many do.
    other_model: Option<(String, u64)>,
}

/// What a batch did, for programs.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    answered: u64,
    errors: u64,
    skipped: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    seconds: f64,
    completion_tokens_per_s: f64,
    preemptions: u64,
    swaps: u64,
    max_running: u32,
    waste: f64,
    interrupted: bool,
    output: &'a str,
}

impl Counts {
    /// Lines that need no more work.
    pub(super) fn lines(&self) -> u64 {
        self.answered + self.errors + self.skipped
    }

    /// Counts an answer.
    pub(super) fn add(&mut self, usage: &Usage) {
        self.answered += 1;
        self.prompt_tokens += u64::from(usage.prompt_tokens);
        self.cached_tokens += u64::from(usage.prompt_tokens_details.cached_tokens);
        self.completion_tokens += u64::from(usage.completion_tokens);
    }

    /// Remembers how full the cache is, if more sequences run than ever before.
    pub(super) fn note_running(&mut self, stats: &nuthatch_scheduler::Stats) {
        if stats.running > self.max_running {
            self.max_running = stats.running;
            self.waste = stats.cache.waste_fraction();
        }
    }

    /// Remembers a request that names another model than the one that answers.
    pub(super) fn note_model(&mut self, asked: Option<&str>, model: &str) {
        if let Some(asked) = asked.filter(|&asked| asked != model) {
            self.other_model.get_or_insert_with(|| (asked.to_owned(), 0)).1 += 1;
        }
    }

    /// Tokens of answers in a second.
    pub(super) fn rate(&self) -> f64 {
        self.completion_tokens as f64 / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// For people.
    pub(super) fn text(&self, output: &str) -> String {
        let mut text = format!(
            "{} requests answered in {:.1} s, {} errors, {} answered before\n\
             prompts {} tokens, {} of them cached; answers {} tokens, {:.1} tokens/s; \
             {} preemptions, {} of them swapped; at most {} sequences ran at one time\nanswers are in {output}\n",
            self.answered,
            self.elapsed.as_secs_f64(),
            self.errors,
            self.skipped,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.rate(),
            self.preemptions,
            self.swaps,
            self.max_running,
        );
        if let Some((model, n)) = &self.other_model {
            text += &format!("{n} requests name another model, such as `{model}`\n");
        }
        if self.is_interrupted {
            text += "interrupted: the same command goes on where this one ended\n";
        }
        text
    }

    /// For programs.
    pub(super) fn json(&self, output: &str) -> serde_json::Result<String> {
        serde_json::to_string_pretty(&Summary {
            answered: self.answered,
            errors: self.errors,
            skipped: self.skipped,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            seconds: self.elapsed.as_secs_f64(),
            completion_tokens_per_s: self.rate(),
            preemptions: self.preemptions,
            swaps: self.swaps,
            max_running: self.max_running,
            waste: self.waste,
            interrupted: self.is_interrupted,
            output,
        })
    }
}
