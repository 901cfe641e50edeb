//! Figures of a load, under the names that vLLM's results have.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::Outcome;
use super::memory::Curve;
use crate::args::{BenchServeArgs, Figure};
use crate::host;

/// Errors that are told, of all there were.
const N_ERRORS: usize = 5;

/// What a load came to.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    model: String,
    base_url: String,
    settings: Value,
    date: u64,
    duration: f64,
    completed: usize,
    n_good: usize,
    errors: Vec<String>,
    n_errors: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    /// In milliseconds, by name.
    times: [(&'static str, Spread); 4],
    memory: Option<Curve>,
}

/// How values spread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spread {
    mean: f64,
    median: f64,
    std: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Report {
    pub(crate) fn new(
        args: &BenchServeArgs,
        model: &str,
        elapsed: Duration,
        outcomes: &[Outcome],
    ) -> Self {
        let fine: Vec<&Outcome> = outcomes.iter().filter(|o| o.error.is_none()).collect();
        let errors: Vec<&String> = outcomes.iter().filter_map(|o| o.error.as_ref()).collect();
        let is_good = |outcome: &&&Outcome| {
            args.goodput
                .iter()
                .all(|goal| figure(outcome, goal.what).is_none_or(|ms| ms <= goal.ms))
        };
        let all = |what| fine.iter().filter_map(|o| figure(o, what)).collect::<Vec<f64>>();
        let gaps = fine.iter().flat_map(|o| o.gaps.iter().map(|&gap| ms(gap))).collect();
        let sum = |count: fn(&Outcome) -> u64| fine.iter().map(|o| count(o)).sum();
        Report {
            model: model.to_owned(),
            base_url: args.base_url.clone(),
            settings: json!({
                "endpoint": args.endpoint,
                "dataset": format!("{:?}", args.dataset_name),
                "request_rate": args.request_rate.is_finite().then_some(args.request_rate),
                "max_concurrency": args.max_concurrency,
                "random_input_len": args.random_input_len,
                "random_output_len": args.random_output_len,
                "prefix_len": args.prefix_len,
                "num_prefixes": args.num_prefixes,
                "seed": args.seed,
            }),
            date: host::unix_seconds(),
            duration: elapsed.as_secs_f64(),
            completed: fine.len(),
            n_good: fine.iter().filter(is_good).count(),
            n_errors: errors.len(),
            errors: errors.into_iter().take(N_ERRORS).cloned().collect(),
            prompt_tokens: sum(|o| o.prompt_tokens),
            cached_tokens: sum(|o| o.cached_tokens),
            output_tokens: sum(|o| o.output_tokens),
            times: [
                ("ttft", Spread::of(all(Figure::Ttft))),
                ("tpot", Spread::of(all(Figure::Tpot))),
                ("itl", Spread::of(gaps)),
                ("e2el", Spread::of(all(Figure::E2el))),
            ],
            memory: None,
        }
    }

    pub(crate) fn with_memory(&self, memory: Option<Curve>) -> Self {
        Report { memory, ..self.clone() }
    }

    /// Requests that were answered.
    pub(crate) fn completed(&self) -> usize {
        self.completed
    }

    pub(crate) fn json(&self) -> Value {
        let per_second = |n: f64| n / self.duration;
        let mut json = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "date": self.date,
            "model_id": self.model,
            "base_url": self.base_url,
            "settings": self.settings,
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.n_errors,
            "errors": self.errors,
            "total_input_tokens": self.prompt_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": per_second(self.completed as f64),
            "request_goodput": per_second(self.n_good as f64),
            "output_throughput": per_second(self.output_tokens as f64),
            "total_token_throughput": per_second((self.prompt_tokens + self.output_tokens) as f64),
        });
        for (name, spread) in &self.times {
            for (which, value) in spread.named() {
                json[format!("{which}_{name}_ms")] = json!(value);
            }
        }
        if let Some(curve) = &self.memory {
            let samples: Vec<Value> =
                curve.samples.iter().map(|&(s, bytes)| json!([s, bytes])).collect();
            json["rss"] = json!({ "pid": curve.pid, "samples": samples });
        }
        json
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "{} requests answered, {} failed, in {:.1} s\n",
            self.completed, self.n_errors, self.duration
        );
        let per_second = |n: u64| n as f64 / self.duration;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:.2} requests/s; {:.1} tokens/s of answers, {:.1} of prompts, of which {:.0} % cached",
            self.completed as f64 / self.duration,
            per_second(self.output_tokens),
            per_second(self.prompt_tokens),
            100.0 * self.cached_tokens as f64 / (self.prompt_tokens.max(1)) as f64,
        );
        let _ = writeln!(
            text,
            "{:>8} {:>10} {:>10} {:>10} {:>10}",
            "ms", "mean", "median", "p99", "max"
        );
        for (name, Spread { mean, median, p99, max, .. }) in &self.times {
            let name = name.to_uppercase();
            let _ = writeln!(text, "{name:>8} {mean:>10.1} {median:>10.1} {p99:>10.1} {max:>10.1}");
        }
        if let Some(curve) = &self.memory
            && let (Some((_, first)), Some((_, last))) =
                (curve.samples.first(), curve.samples.last())
        {
            let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
            let _ = writeln!(
                text,
                "memory of {}: {:.1} MiB, then {:.1}",
                curve.pid,
                mib(first),
                mib(last)
            );
        }
        for error in &self.errors {
            let _ = writeln!(text, "failed: {error}");
        }
        text
    }
}

/// A figure of a request that was answered, in milliseconds.
fn figure(outcome: &Outcome, what: Figure) -> Option<f64> {
    match what {
        Figure::Ttft => Some(ms(outcome.first)),
        Figure::E2el => Some(ms(outcome.last)),
        Figure::Tpot => {
            let n_after = outcome.output_tokens.checked_sub(1).filter(|&n| n > 0)?;
            Some(ms(outcome.last.saturating_sub(outcome.first)) / n_after as f64)
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (Some(&max), n) = (values.last(), values.len() as f64) else {
            return Spread::default();
        };
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n;
        let at = |share| percentile(&values, share);
        let (median, p90, p99) = (at(0.5), at(0.9), at(0.99));
        Spread { mean, median, std: variance.sqrt(), p90, p99, max }
    }

    fn named(&self) -> [(&'static str, f64); 6] {
        let Spread { mean, median, std, p90, p99, max } = *self;
        [("mean", mean), ("median", median), ("std", std), ("p90", p90), ("p99", p99), ("max", max)]
    }
}

/// A percentile of sorted values, between two of them by their distance, as NumPy has it.
fn percentile(values: &[f64], share: f64) -> f64 {
    let place = share * (values.len() - 1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    values[low] + (values[high] - values[low]) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_spread_as_numpy_says() {
        // numpy.percentile([1, 2, 4, 10], [50, 90, 99]) and numpy.std
        let spread = Spread::of(vec![4.0, 1.0, 10.0, 2.0]);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(spread.mean, 4.25);
        close(spread.median, 3.0);
        close(spread.p90, 8.2);
        close(spread.p99, 9.82);
        close(spread.std, 3.491_060_010_942_235);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn times_are_as_vllm_defines_them() {
        let time = Duration::from_millis;
        let (first, last) = (time(100), time(500));
        let outcome = Outcome { first, last, output_tokens: 5, ..Outcome::default() };
        assert_eq!(figure(&outcome, Figure::Tpot), Some(100.0));
        assert_eq!(figure(&Outcome { output_tokens: 1, ..outcome }, Figure::Tpot), None);
    }
}
