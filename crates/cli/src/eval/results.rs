//! What was measured: records that a later run goes on with, a table, and a plot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::chart::{Axis, Colour, Figure, Line, Panel, Scale};
use crate::table::{Align, Table};

/// All results of one model.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Results {
    /// The program's version.
    pub(super) version: String,
    pub(super) model: String,
    /// Of the model's files.
    pub(super) fingerprint: String,
    pub(super) seed: u64,
    /// The trace that was written beside the records, if one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) trace: Option<TraceEnd>,
    pub(super) records: Vec<Record>,
}

/// A trace, and how many bytes of it belong to the records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TraceEnd {
    pub(super) file: PathBuf,
    pub(super) bytes: u64,
}

/// One policy's answer to one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) task: String,
    pub(super) length: u32,
    pub(super) sample: u32,
    pub(super) policy: String,
    /// Tokens of the prompt.
    pub(super) n_prompt: u32,
    /// Tokens of the answer.
    pub(super) n_answer: u32,
    /// From 0 to 1; of `ppl`, the negative logarithm of a token's probability.
    pub(super) score: f64,
    /// Divergence from the first policy for each token, of `ppl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kl: Option<f64>,
    /// Hits among the lookups of live heads, and of frozen ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) live_hits: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) frozen_hits: Option<f64>,
    /// Lookups after which the last selection served once more, of those of all heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) late: Option<f64>,
    /// Rows attended and rows moved, as shares of the context, for each head and step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) attended: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) moved: Option<f64>,
    /// The share of attention that fell on attended rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mass: Option<f64>,
    /// The same with heads weighted by their importance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) important_mass: Option<f64>,
    /// The beginning of the answer.
    #[serde(default)]
    pub(super) answer: String,
}

impl Record {
    fn is_for_the_same(&self, other: &Record) -> bool {
        (self.length, self.sample) == (other.length, other.sample)
            && self.task == other.task
            && self.policy == other.policy
    }
}

/// Columns of a table that are shares.
const SHARES: [&str; 7] = ["hits", "frozen", "late", "attended", "moved", "mass", "important mass"];

impl Results {
    /// What is in the file, if it is of the same model and seed; an error if it is of another.
    pub(super) fn resume(path: &Path, new: Results) -> anyhow::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(new),
            Err(error) => return Err(error).context(format!("cannot read {}", path.display())),
        };
        let old: Results = serde_json::from_str(&text)
            .with_context(|| format!("{} holds no results", path.display()))?;
        anyhow::ensure!(
            old.fingerprint == new.fingerprint && old.seed == new.seed,
            "{} holds results of {} with seed {}; choose another file",
            path.display(),
            old.model,
            old.seed
        );
        Ok(Results { records: old.records, trace: old.trace, ..new })
    }

    /// Bytes of a trace that a run which goes on may keep: of another file than the records', all.
    pub(super) fn trace_bytes(&self, path: &Path) -> u64 {
        let own =
            |trace: &&TraceEnd| std::path::absolute(path).is_ok_and(|path| trace.file == path);
        self.trace.as_ref().filter(own).map_or(u64::MAX, |trace| trace.bytes)
    }

    /// The trace has so many bytes now.
    pub(super) fn trace_ends(&mut self, path: &Path, bytes: u64) -> std::io::Result<()> {
        self.trace = Some(TraceEnd { file: std::path::absolute(path)?, bytes });
        Ok(())
    }

    /// Replaces the file by these results, all or nothing.
    pub(super) fn save(&self, path: &Path) -> anyhow::Result<()> {
        let part = path.with_extension("part");
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(&part, text)
            .and_then(|()| std::fs::rename(&part, path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Adds records, in place of those of the same prompts and policies.
    pub(super) fn replace(&mut self, records: Vec<Record>) {
        self.records.retain(|old| !records.iter().any(|new| new.is_for_the_same(old)));
        self.records.extend(records);
    }

    /// Whether a record is there.
    pub(super) fn has(&self, task: &str, length: u32, sample: u32, policy: &str) -> bool {
        self.records.iter().any(|r| {
            (r.length, r.sample) == (length, sample) && r.task == task && r.policy == policy
        })
    }

    /// A row for each policy, a column for each task and length.
    pub(super) fn table(&self, policies: &[String]) -> String {
        // In order, however processes have shared the prompts.
        let cells: BTreeSet<(&str, u32)> =
            self.records.iter().map(|r| (&r.task[..], r.length)).collect();
        let mut columns = vec![("policy".to_owned(), Align::Left)];
        columns.extend(cells.iter().map(|(task, n)| (format!("{task} @ {n}"), Align::Right)));
        for name in ["average", "kl"].into_iter().chain(SHARES) {
            columns.push((name.to_owned(), Align::Right));
        }
        let mut table = Table::new(columns);
        for policy in policies {
            let of = |pick: &dyn Fn(&Record) -> Option<f64>| {
                mean(self.records.iter().filter(|r| r.policy == *policy).filter_map(pick))
            };
            let mut row = vec![policy.clone()];
            for (task, n) in &cells {
                let is_cell = |r: &Record| (r.task == *task && r.length == *n).then_some(r.score);
                row.push(number(
                    of(&is_cell),
                    if *task == "ppl" { Unit::Ppl } else { Unit::Score },
                ));
            }
            row.push(number(of(&|r| (r.task != "ppl").then_some(r.score)), Unit::Score));
            row.push(number(of(&|r| r.kl), Unit::Small));
            for pick in [
                &|r: &Record| r.live_hits,
                &|r: &Record| r.frozen_hits,
                &|r: &Record| r.late,
                &|r: &Record| r.attended,
                &|r: &Record| r.moved,
                &|r: &Record| r.mass,
                &|r: &Record| r.important_mass,
            ] as [&dyn Fn(&Record) -> Option<f64>; SHARES.len()]
            {
                row.push(number(of(pick), Unit::Share));
            }
            table.push(row);
        }
        table.markdown()
    }

    /// Accuracy against length, a curve for each policy, a panel for each task.
    pub(super) fn figure(&self, policies: &[String]) -> Figure {
        let mut panels: BTreeMap<&str, BTreeMap<(usize, u32), Vec<f64>>> = BTreeMap::new();
        let (mut shortest, mut longest) = (u32::MAX, 0);
        for record in self.records.iter().filter(|r| r.task != "ppl") {
            let Some(policy) = policies.iter().position(|p| *p == record.policy) else { continue };
            let panel = panels.entry(&record.task).or_default();
            panel.entry((policy, record.length)).or_default().push(record.score);
            (shortest, longest) = (shortest.min(record.length), longest.max(record.length));
        }
        let panels = panels.into_iter().map(|(task, points)| Panel {
            title: task.to_owned(),
            lines: (0..policies.len())
                .map(|policy| Line {
                    colour: Colour(policy),
                    points: points
                        .iter()
                        .filter(|((p, _), _)| *p == policy)
                        .map(|((_, n), scores)| {
                            let score = mean(scores.iter().copied()).unwrap_or(0.0);
                            (f64::from(*n), 100.0 * score)
                        })
                        .collect(),
                    is_stepped: false,
                })
                .collect(),
        });
        let axis = |label: &str, scale, min, max| Axis { label: label.to_owned(), scale, min, max };
        Figure {
            title: format!("Answers found, {}", self.model),
            x: axis(
                "tokens",
                Scale::Log,
                f64::from(shortest.clamp(1, 1 << 30)) * 0.9,
                f64::from(longest.max(2)) * 1.1,
            ),
            y: axis("%", Scale::Linear, 0.0, 100.0),
            legend: policies.iter().enumerate().map(|(i, p)| (p.clone(), Colour(i))).collect(),
            panels: panels.collect(),
        }
    }
}

enum Unit {
    Score,
    Ppl,
    Share,
    Small,
}

fn number(value: Option<f64>, unit: Unit) -> String {
    match (value, unit) {
        (None, _) => "-".to_owned(),
        (Some(x), Unit::Score) => format!("{:.1}", 100.0 * x),
        (Some(x), Unit::Ppl) => format!("{:.3}", x.exp()),
        (Some(x), Unit::Share) => format!("{:.1} %", 100.0 * x),
        (Some(x), Unit::Small) => format!("{x:.4}"),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, sum) = values.fold((0u32, 0.0), |(n, sum), x| (n + 1, sum + x));
    (n > 0).then(|| sum / f64::from(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(policy: &str, sample: u32, score: f64) -> Record {
        Record {
            task: "vt".to_owned(),
            length: 2048,
            sample,
            policy: policy.to_owned(),
            n_prompt: 2000,
            n_answer: 9,
            score,
            kl: None,
            live_hits: None,
            frozen_hits: None,
            late: None,
            attended: Some(0.125),
            moved: None,
            mass: None,
            important_mass: None,
            answer: String::new(),
        }
    }

    #[test]
    fn only_the_trace_of_the_records_is_cut() {
        let (path, mut results) = (Path::new("a/trace.jsonl"), Results::default());
        assert_eq!(results.trace_bytes(path), u64::MAX);
        results.trace_ends(path, 7).unwrap();
        assert_eq!(results.trace_bytes(path), 7);
        assert_eq!(results.trace_bytes(&std::path::absolute(path).unwrap()), 7);
        assert_eq!(results.trace_bytes(Path::new("b/trace.jsonl")), u64::MAX);
    }

    #[test]
    fn results_are_kept_and_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.json");
        let new = Results { fingerprint: "ab".to_owned(), seed: 1, ..Results::default() };
        let mut results = Results::resume(&path, new.clone()).unwrap();
        let longer = Record { length: 4096, ..record("full", 0, 0.75) };
        results.records.extend([longer, record("full", 0, 1.0), record("full", 1, 0.5)]);
        results.save(&path).unwrap();
        let again = Results::resume(&path, new.clone()).unwrap();
        assert_eq!(again.records, results.records);
        assert!(again.has("vt", 2048, 1, "full") && !again.has("vt", 2048, 1, "quest"));
        let table = again.table(&["full".to_owned()]);
        assert!(table.contains("| full ") && table.contains(" 75.0 |"), "{table}");
        assert!(table.find("vt @ 2048") < table.find("vt @ 4096"), "{table}");
        assert!(table.contains("12.5 %"), "{table}");
        assert!(Results::resume(&path, Results { seed: 2, ..new }).is_err());
    }
}
