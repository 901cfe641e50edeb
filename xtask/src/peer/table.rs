//! Samples of both engines, their medians and the ratio against the target.
//!
//! On a virtual machine the host may give the CPU to others in the middle of a sample. Each sample
//! says how much was stolen, and where there are undisturbed ones only those count.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// A test in llama-bench's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Test {
    /// Tokens read into an empty cache.
    Prefill {
        /// How many.
        tokens: u32,
    },
    /// One token after another.
    Decode {
        /// Tokens in the cache at the start.
        depth: u32,
    },
}

/// What is measured, how many tokens are decoded, and the ratio to llama.cpp that we promise.
pub(super) const TARGETS: [(Test, u32, f64); 6] = [
    (Test::Prefill { tokens: 512 }, 0, 0.9),
    (Test::Prefill { tokens: 2048 }, 0, 1.2),
    (Test::Prefill { tokens: 8192 }, 0, 2.0),
    (Test::Decode { depth: 128 }, 64, 1.0),
    (Test::Decode { depth: 2048 }, 32, 1.5),
    (Test::Decode { depth: 8000 }, 24, 2.5),
];

/// Tokens per second, by test and by setting of the engine.
#[derive(Debug, Default)]
pub(super) struct Samples {
    by_test: BTreeMap<(Test, String), Vec<Sample>>,
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Tokens per second.
    speed: f64,
    /// Share of the machine's CPU time that the host gave to others meanwhile.
    stolen: f64,
}

/// Share above which a sample is disturbed.
const STOLEN_MAX: f64 = 0.05;

/// One line of the table.
#[derive(Debug)]
pub(super) struct Line {
    test: Test,
    target: f64,
    ours: f64,
    theirs: f64,
    /// The setting with which the peer was fastest.
    setting: String,
    /// Whether both sides have samples that were not disturbed.
    is_quiet: bool,
}

/// The median of a test's samples.
#[derive(Debug)]
struct Median<'a> {
    speed: f64,
    setting: &'a str,
    is_quiet: bool,
}

impl Samples {
    /// Adds the `tests` of one run; `setting` names a field that tells runs apart. `stolen` is the
    /// share of the CPU time that was stolen, for tests that do not say it themselves.
    pub(super) fn add(&mut self, run: &Value, setting: Option<&str>, stolen: f64) -> Result<()> {
        for test in run["tests"].as_array().context("a result without tests")? {
            let number = |field: &str| {
                let value = test[field].as_u64().and_then(|value| u32::try_from(value).ok());
                value.with_context(|| format!("a test without {field}: {test}"))
            };
            let key = match test["name"].as_str() {
                Some("pp") => Test::Prefill { tokens: number("tokens")? },
                Some("tg") => Test::Decode { depth: number("depth")? },
                _ => continue,
            };
            let label = setting.map(|field| format!("{field}={}", test[field])).unwrap_or_default();
            let speeds = test["tokens_per_s"].as_array().context("a test without tokens_per_s")?;
            let into = self.by_test.entry((key, label)).or_default();
            for (i, speed) in speeds.iter().enumerate() {
                let speed = speed.as_f64().context("a speed is a number")?;
                let stolen = test["stolen"][i].as_f64().unwrap_or(stolen);
                into.push(Sample { speed, stolen });
            }
        }
        Ok(())
    }

    /// The best median over the settings.
    fn best(&self, test: Test) -> Option<Median<'_>> {
        let settings = self.by_test.iter().filter(|((of, _), _)| *of == test);
        settings
            .filter_map(|((_, label), samples)| Median::of(samples, label))
            .max_by(|a, b| a.speed.total_cmp(&b.speed))
    }

    /// All samples, for the record.
    pub(super) fn to_json(&self) -> Value {
        self.by_test
            .iter()
            .map(|((test, label), samples)| {
                let speeds: Vec<f64> = samples.iter().map(|sample| sample.speed).collect();
                let stolen: Vec<f64> = samples.iter().map(|sample| sample.stolen).collect();
                json!({
                    "test": name(*test), "setting": label, "tokens_per_s": speeds,
                    "stolen": stolen,
                })
            })
            .collect()
    }
}

impl<'a> Median<'a> {
    /// Of the undisturbed samples, or of all if there are none.
    fn of(samples: &[Sample], setting: &'a str) -> Option<Self> {
        let quiet: Vec<f64> =
            samples.iter().filter(|s| s.stolen <= STOLEN_MAX).map(|s| s.speed).collect();
        let is_quiet = !quiet.is_empty();
        let speeds = if is_quiet { quiet } else { samples.iter().map(|s| s.speed).collect() };
        Some(Median { speed: median(&speeds)?, setting, is_quiet })
    }
}

impl Line {
    /// Our speed in units of the peer's.
    fn ratio(&self) -> f64 {
        self.ours / self.theirs
    }

    /// Whether the promise holds.
    pub(super) fn met(&self) -> bool {
        self.ratio() >= self.target
    }

    /// Whether both sides have samples that were not disturbed.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// The line for the record.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "test": name(self.test), "nuthatch": self.ours, "llama_cpp": self.theirs,
            "llama_cpp_setting": self.setting, "ratio": self.ratio(), "target": self.target,
            "met": self.met(), "undisturbed": self.is_quiet,
        })
    }
}

/// Compares; tests that one side did not run are left out.
pub(super) fn compare(ours: &Samples, theirs: &Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for (test, _, target) in TARGETS {
        if let (Some(ours), Some(theirs)) = (ours.best(test), theirs.best(test)) {
            lines.push(Line {
                test,
                target,
                ours: ours.speed,
                theirs: theirs.speed,
                setting: theirs.setting.to_owned(),
                is_quiet: ours.is_quiet && theirs.is_quiet,
            });
        }
    }
    lines
}

/// The table as Markdown.
pub(super) fn render(lines: &[Line]) -> String {
    let mut text = format!(
        "| {:<12} | {:>9} | {:>9} | {:>6} | {:>6} |      | llama.cpp with |\n",
        "tokens/s", "nuthatch", "llama.cpp", "ratio", "target"
    );
    text.push_str("|---|---:|---:|---:|---:|---|---|\n");
    for line in lines {
        text.push_str(&format!(
            "| {:<12} | {:>9.1} | {:>9.1} | {:>6.2} | {:>6.2} | {:<4} | {} |\n",
            name(line.test),
            line.ours,
            line.theirs,
            line.ratio(),
            line.target,
            if line.met() { "ok" } else { "MISS" },
            if line.is_quiet {
                line.setting.clone()
            } else {
                format!("{} (disturbed)", line.setting)
            },
        ));
    }
    text
}

fn name(test: Test) -> String {
    match test {
        Test::Prefill { tokens } => format!("pp{tokens}"),
        Test::Decode { depth } => format!("tg @ {depth}"),
    }
}

fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_median_and_the_better_setting_of_the_peer() {
        let mut theirs = Samples::default();
        let run = json!({ "tests": [
            { "name": "tg", "tokens": 24, "depth": 8000, "flash": true, "tokens_per_s": [10.0, 99.0, 11.0],
              "stolen": [0.0, 0.5, 0.01] },
            { "name": "tg", "tokens": 24, "depth": 8000, "flash": false, "tokens_per_s": [20.0] },
        ]});
        theirs.add(&run, Some("flash"), 0.0).unwrap();
        let mut ours = Samples::default();
        let run = json!({ "tests": [
            { "name": "tg", "tokens": 24, "depth": 8000, "tokens_per_s": [70.0, 60.0, 1.0] },
            { "name": "pp", "tokens": 512, "depth": 0, "tokens_per_s": [900.0] },
        ]});
        ours.add(&run, None, 0.0).unwrap();
        let lines = compare(&ours, &theirs);
        assert_eq!(lines.len(), 1);
        assert!((lines[0].ratio() - 3.0).abs() < 1e-9);
        assert!(lines[0].met());
        assert_eq!(lines[0].setting, "flash=false");
        assert!(render(&lines).contains("3.00"));
    }

    #[test]
    fn a_result_without_its_fields_is_an_error() {
        let mut samples = Samples::default();
        assert!(samples.add(&json!({}), None, 0.0).is_err());
        assert!(samples.add(&json!({ "tests": [{ "name": "pp" }] }), None, 0.0).is_err());
    }
}
