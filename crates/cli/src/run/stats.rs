//! What an answer cost, in one line.

use std::time::Duration;

use nuthatch_engine::Timings;

use super::answer::Answer;

/// Tokens and speeds of an answer.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(super) struct Speeds {
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    /// From submission to the first token.
    first_token_ms: f64,
    prefill_tokens_per_s: Option<f64>,
    decode_tokens_per_s: Option<f64>,
}

impl Speeds {
    /// Of the finished answers to a prompt, which were computed side by side.
    pub(super) fn of(answers: &[Answer]) -> Self {
        let rate = |n: u32, time: Duration| {
            (n > 0 && !time.is_zero()).then(|| f64::from(n) / time.as_secs_f64())
        };
        let sum = |count: fn(&Answer) -> u32| answers.iter().map(count).sum::<u32>();
        let longest = |part: fn(&Timings) -> Duration| {
            answers.iter().map(|answer| part(&answer.timings)).max().unwrap_or_default()
        };
        let first = answers.first().map(|answer| answer.timings).unwrap_or_default();
        let prompt_tokens = sum(|answer| answer.usage.prompt_tokens);
        let cached_tokens = sum(|answer| answer.usage.cached_tokens);
        let computed = prompt_tokens.saturating_sub(cached_tokens);
        // The first token comes out of the prefill.
        let decoded = sum(|answer| answer.usage.completion_tokens.saturating_sub(1));
        Speeds {
            prompt_tokens,
            cached_tokens,
            completion_tokens: sum(|answer| answer.usage.completion_tokens),
            first_token_ms: (first.queue + first.prefill).as_secs_f64() * 1e3,
            prefill_tokens_per_s: rate(computed, first.prefill),
            decode_tokens_per_s: rate(decoded, longest(|timings| timings.decode)),
        }
    }

    /// For people.
    pub(super) fn line(&self, seed: u64) -> String {
        let rate = |rate: Option<f64>| {
            rate.map_or_else(String::new, |rate| format!(" at {rate:.1} tokens/s"))
        };
        let cached = match self.cached_tokens {
            0 => String::new(),
            n => format!(" ({n} cached)"),
        };
        format!(
            "prompt {} tokens{cached}{}, answer {} tokens{}, first token after {:.0} ms, seed {seed}",
            self.prompt_tokens,
            rate(self.prefill_tokens_per_s),
            self.completion_tokens,
            rate(self.decode_tokens_per_s),
            self.first_token_ms,
        )
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_engine::Usage;

    use super::*;
    use crate::run::answer::Ending;

    #[test]
    fn speeds_count_what_was_computed() {
        let answer = Answer {
            text: String::new(),
            tokens: Vec::new(),
            ending: Ending::Stop,
            usage: Usage { prompt_tokens: 120, cached_tokens: 20, completion_tokens: 51 },
            timings: Timings {
                queue: Duration::from_millis(5),
                prefill: Duration::from_millis(200),
                decode: Duration::from_millis(500),
            },
            score: None,
        };
        assert_eq!(
            Speeds::of(std::slice::from_ref(&answer)).line(7),
            "prompt 120 tokens (20 cached) at 500.0 tokens/s, answer 51 tokens at 100.0 tokens/s, \
             first token after 205 ms, seed 7"
        );
        let other =
            Answer { usage: Usage { completion_tokens: 51, ..Usage::default() }, ..answer.clone() };
        assert!(
            Speeds::of(&[answer.clone(), other]).line(7).contains("answer 102 tokens at 200.0")
        );
        let none = Answer { usage: Usage::default(), timings: Timings::default(), ..answer };
        assert_eq!(
            Speeds::of(&[none]).line(0),
            "prompt 0 tokens, answer 0 tokens, first token after 0 ms, seed 0"
        );
    }
}
