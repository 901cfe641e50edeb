//! What was measured: a table for people, JSON for scripts.

use serde::Serialize;

use super::breakdown::Breakdown;
use super::measure::{Kind, Test};
use crate::size::Bytes;
use crate::table::{Align, Table};

/// Everything that one call measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct BenchResult {
    pub(super) version: &'static str,
    /// Of the source, if the build was told.
    pub(super) commit: Option<&'static str>,
    pub(super) model: String,
    pub(super) architecture: &'static str,
    pub(super) weights_bytes: u64,
    pub(super) n_params: u64,
    pub(super) device: String,
    pub(super) threads: usize,
    pub(super) kv_dtype: String,
    pub(super) max_batched_tokens: u32,
    /// Share of the steps' time outside the executor.
    pub(super) overhead: f64,
    /// What top-k attention did, if there was such.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) topk: Option<TopKResult>,
    pub(super) tests: Vec<TestResult>,
    /// What stages take, if that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) breakdowns: Vec<Breakdown>,
}

/// What top-k attention did. Shares are of the context, for each head and step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TopKResult {
    pub(super) policy: String,
    /// Rows that were attended.
    pub(super) attended: Option<f64>,
    /// Rows that a selection brought.
    pub(super) moved: Option<f64>,
    /// Hits among the lookups of live heads, and of frozen ones.
    pub(super) live_hits: Option<f64>,
    pub(super) frozen_hits: Option<f64>,
    /// Time of looking up, scoring and selecting, of the decode steps'.
    pub(super) choosing: f64,
    /// What was kept near, if pages were far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) near: Option<NearResult>,
}

/// What was kept near.
#[derive(Clone, Debug, Serialize)]
pub(super) struct NearResult {
    /// Bytes of rows and digests.
    pub(super) bytes: u64,
    /// Bytes of all pages.
    pub(super) far_bytes: u64,
    /// Heads that stayed whole.
    pub(super) resident_heads: usize,
    pub(super) n_heads: usize,
    /// Bytes that were brought in all steps, and those that the policy says.
    pub(super) brought_bytes: u64,
    pub(super) moved_bytes: u64,
    /// Rows that were found missing.
    pub(super) filled_rows: u64,
    /// Bytes that decode steps read from the file that pages are in.
    pub(super) file_bytes: u64,
    /// Time that attention waited for rows, of the decode steps'.
    pub(super) waiting: f64,
}

impl NearResult {
    fn line(&self) -> String {
        format!(
            "near {} of {} far, {} of {} heads whole; brought {} (the policy moves {}), filled in {} \
             rows, decode read {} from a file, waiting took {:.1} % of decode\n",
            Bytes(self.bytes),
            Bytes(self.far_bytes),
            self.resident_heads,
            self.n_heads,
            Bytes(self.brought_bytes),
            Bytes(self.moved_bytes),
            self.filled_rows,
            Bytes(self.file_bytes),
            100.0 * self.waiting,
        )
    }
}

impl TopKResult {
    fn line(&self) -> String {
        let share = |share: Option<f64>| {
            share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
        };
        format!(
            "{}: attended {}, moved {}, hits {} (frozen heads {}), choosing took {:.1} % of decode\n{}",
            self.policy,
            share(self.attended),
            share(self.moved),
            share(self.live_hits),
            share(self.frozen_hits),
            100.0 * self.choosing,
            self.near.as_ref().map(NearResult::line).unwrap_or_default(),
        )
    }
}

/// One test's samples and what they say.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TestResult {
    pub(super) name: Kind,
    pub(super) tokens: u32,
    pub(super) depth: u32,
    pub(super) label: String,
    /// All samples.
    pub(super) tokens_per_s: Vec<f64>,
    pub(super) median: f64,
    pub(super) stddev: f64,
}

impl TestResult {
    /// Of samples, at least one.
    pub(super) fn new(test: Test, tokens_per_s: Vec<f64>) -> Self {
        TestResult {
            name: test.kind,
            tokens: test.tokens,
            depth: test.depth,
            label: test.to_string(),
            median: median(&tokens_per_s),
            stddev: stddev(&tokens_per_s),
            tokens_per_s,
        }
    }
}

impl BenchResult {
    /// A Markdown table in the manner of llama-bench.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new([
            ("model", Align::Left),
            ("size", Align::Right),
            ("params", Align::Right),
            ("device", Align::Left),
            ("kv", Align::Left),
            ("test", Align::Right),
            ("t/s", Align::Right),
        ]);
        for test in &self.tests {
            table.push([
                format!("{} {}", self.architecture, self.model),
                Bytes(self.weights_bytes).to_string(),
                format!("{:.2} M", self.n_params as f64 / 1e6),
                self.device.clone(),
                self.kv_dtype.clone(),
                test.label.clone(),
                format!("{:.2} \u{b1} {:.2}", test.median, test.stddev),
            ]);
        }
        let commit = self.commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
        let topk = self.topk.as_ref().map(TopKResult::line).unwrap_or_default();
        let breakdowns: String = self.breakdowns.iter().map(Breakdown::table).collect();
        format!(
            "{}{breakdowns}\n{topk}nuthatch {}{commit}, medians; planning and bookkeeping took {:.2} % of the time\n",
            table.markdown(),
            self.version,
            self.overhead * 100.0,
        )
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n.is_multiple_of(2) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// Of a sample, so divided by one less than there are.
fn stddev(samples: &[f64]) -> f64 {
    if samples.len() < 2 {
        return 0.0;
    }
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let squares: f64 = samples.iter().map(|x| (x - mean).powi(2)).sum();
    (squares / (samples.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_deviations() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(stddev(&[5.0]), 0.0);
        assert_eq!(stddev(&[1.0, 3.0]), 2f64.sqrt());
    }

    #[test]
    fn the_table_and_the_json_say_the_same() {
        let test = Test { kind: Kind::Decode, tokens: 128, depth: 2048 };
        let result = BenchResult {
            version: "1.2.3",
            commit: Some("abc"),
            model: "m.gguf".to_owned(),
            architecture: "llama",
            weights_bytes: 98_000_000,
            n_params: 134_515_008,
            device: "cpu".to_owned(),
            threads: 2,
            kv_dtype: "f16".to_owned(),
            max_batched_tokens: 512,
            overhead: 0.0123,
            topk: None,
            tests: vec![TestResult::new(test, vec![100.0, 110.0, 90.0])],
            breakdowns: Vec::new(),
        };
        let table = result.table();
        assert!(table.contains("| tg128 @ d2048 | 100.00 \u{b1} 10.00 |"), "{table}");
        assert!(
            table.contains("nuthatch 1.2.3 (abc), medians; planning and bookkeeping took 1.23 %"),
            "{table}"
        );
        let json = serde_json::to_value(&result).unwrap();
        assert_eq!(json["tests"][0]["name"], "tg");
        assert_eq!(json["tests"][0]["depth"], 2048);
        assert_eq!(json["tests"][0]["tokens_per_s"][1], 110.0);
    }
}
