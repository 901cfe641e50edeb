//! LongBench, if somebody has its files: questions about real documents, and its scores.
//!
//! A folder holds one JSONL file for each dataset, as LongBench has them in `data`. How it asks and
//! how long answers may be comes from its `dataset2prompt.json` and `dataset2maxlen.json`, in the
//! folder, in `config` inside it or beside it; without them everybody is asked in one plain way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

/// How a question is put where LongBench's own words are missing.
const PLAIN: &str = "Read the text and answer the question as briefly as you can.\n\nText: \
                     {context}\n\nQuestion: {input}\n\nAnswer:";
const PLAIN_ANSWER: u32 = 64;
/// The longest answer that is believed.
const ANSWER_MAX: u32 = 2048;

/// Datasets whose prompts end in the middle of a pattern, which a chat's turns would break.
const WITHOUT_CHAT: [&str; 6] = ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"];
/// Datasets whose answers are one line; models go on with the next example.
const ONE_LINE: [&str; 4] = ["trec", "triviaqa", "samsum", "lsht"];

/// The questions of one dataset.
#[derive(Debug)]
pub(super) struct Dataset {
    pub(super) name: String,
    /// Tokens that an answer may have.
    pub(super) n_answer: u32,
    pub(super) is_chat: bool,
    template: String,
    items: Vec<Item>,
}

/// A line of a file.
#[derive(Debug, Deserialize)]
struct Item {
    input: String,
    context: String,
    answers: Vec<String>,
    #[serde(default)]
    all_classes: Option<Vec<String>>,
}

/// Reads all datasets of a folder, in the order of their names.
pub(super) fn load(folder: &Path) -> anyhow::Result<Vec<Dataset>> {
    let entries = std::fs::read_dir(folder);
    let entries = entries.with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.map(|e| Ok(e?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|e| e == "jsonl"));
    files.sort();
    ensure!(!files.is_empty(), "no .jsonl file in {}", folder.display());
    let templates: BTreeMap<String, String> = settings(folder, "dataset2prompt.json")?;
    let lengths: BTreeMap<String, u32> = settings(folder, "dataset2maxlen.json")?;
    files.iter().map(|path| Dataset::read(path, &templates, &lengths)).collect()
}

/// One of LongBench's files of settings, empty if there is none.
fn settings<T: Default + serde::de::DeserializeOwned>(
    folder: &Path,
    name: &str,
) -> anyhow::Result<T> {
    let places = [folder.join(name), folder.join("config").join(name)];
    let beside = folder.parent().map(|parent| parent.join("config").join(name));
    let Some(path) = places.into_iter().chain(beside).find(|path| path.is_file()) else {
        return Ok(T::default());
    };
    let text = std::fs::read_to_string(&path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is wrong", path.display()))
}

impl Dataset {
    fn read(
        path: &Path,
        templates: &BTreeMap<String, String>,
        lengths: &BTreeMap<String, u32>,
    ) -> anyhow::Result<Self> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let items = lines.map(|(i, line)| {
            let item: Item = serde_json::from_str(line)
                .with_context(|| format!("line {} of {}", i + 1, path.display()))?;
            ensure!(!item.answers.is_empty(), "line {} of {}: no answer", i + 1, path.display());
            Ok(item)
        });
        let items: Vec<Item> = items.collect::<anyhow::Result<_>>()?;
        // LongBench-E asks the same way, about texts of even lengths.
        let kind = name.strip_suffix("_e").unwrap_or(&name);
        let n_answer = lengths.get(kind).copied().unwrap_or(PLAIN_ANSWER);
        ensure!((1..=ANSWER_MAX).contains(&n_answer), "{kind}: answers of {n_answer} tokens");
        Ok(Dataset {
            n_answer,
            is_chat: !WITHOUT_CHAT.contains(&kind),
            template: templates.get(kind).map_or(PLAIN, String::as_str).to_owned(),
            items,
            name,
        })
    }

    fn kind(&self) -> &str {
        self.name.strip_suffix("_e").unwrap_or(&self.name)
    }

    /// A question; nothing after the last.
    pub(super) fn prompt(&self, i: u32) -> Option<String> {
        let item = self.items.get(i as usize)?;
        // Each placeholder once and from left to right: a text may contain the other's name.
        let mut prompt = String::new();
        let mut rest = self.template.as_str();
        while let Some(at) = rest.find('{') {
            let (before, after) = rest.split_at(at);
            prompt.push_str(before);
            let (value, name) = match after {
                _ if after.starts_with("{context}") => (item.context.as_str(), "{context}"),
                _ if after.starts_with("{input}") => (item.input.as_str(), "{input}"),
                _ => ("{", "{"),
            };
            prompt.push_str(value);
            rest = &after[name.len()..];
        }
        prompt.push_str(rest);
        Some(prompt)
    }

    /// The best score of an answer against the ones that are right, from 0 to 1.
    pub(super) fn score(&self, i: u32, answer: &str) -> f64 {
        let Some(item) = self.items.get(i as usize) else { return 0.0 };
        let answer = match ONE_LINE.contains(&self.kind()) {
            true => answer.trim_start_matches('\n').lines().next().unwrap_or(""),
            false => answer,
        };
        let classes = item.all_classes.as_deref().unwrap_or_default();
        let scores = item.answers.iter().map(|right| match self.kind() {
            "gov_report" | "qmsum" | "multi_news" | "samsum" => {
                overlap(&words(answer), &words(right))
            }
            "dureader" | "vcsum" => overlap(&letters(answer), &letters(right)),
            "multifieldqa_zh" => shared(&letters(answer), &letters(right)),
            "trec" | "lsht" => class(answer, right, classes),
            "passage_count" | "passage_retrieval_en" | "passage_retrieval_zh" => {
                number(answer, right)
            }
            "lcc" | "repobench-p" => {
                let is_code =
                    |line: &&str| !["`", "#", "//"].iter().any(|mark| line.contains(mark));
                let line = answer.trim_start_matches('\n').lines().find(is_code).unwrap_or("");
                overlap(&line.chars().collect::<Vec<_>>(), &right.chars().collect::<Vec<_>>())
            }
            _ => shared(&plain_words(answer), &plain_words(right)),
        });
        scores.fold(0.0, f64::max)
    }
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Words in small letters, without punctuation and articles.
fn plain_words(text: &str) -> Vec<String> {
    let text: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let words = text.split_whitespace().filter(|word| !["a", "an", "the"].contains(word));
    words.map(str::to_owned).collect()
}

/// Letters and digits one by one, for languages that do not separate words.
fn letters(text: &str) -> Vec<char> {
    text.to_lowercase().chars().filter(|c| c.is_alphanumeric()).collect()
}

/// The harmonic mean of both shares that `n` common parts have.
fn harmonic(n: usize, a: usize, b: usize) -> f64 {
    if n == 0 { 0.0 } else { 2.0 * n as f64 / (a + b) as f64 }
}

/// F1 of the parts that both have, whatever their order.
fn shared<T: Ord>(a: &[T], b: &[T]) -> f64 {
    let mut counts: BTreeMap<&T, usize> = BTreeMap::new();
    for part in a {
        *counts.entry(part).or_default() += 1;
    }
    let mut n = 0;
    for part in b {
        if let Some(left) = counts.get_mut(part).filter(|left| **left > 0) {
            *left -= 1;
            n += 1;
        }
    }
    harmonic(n, a.len(), b.len())
}

/// F1 of the longest common subsequence (ROUGE-L, and the edit similarity of code).
fn overlap<T: Eq>(a: &[T], b: &[T]) -> f64 {
    let mut row = vec![0usize; b.len() + 1];
    for part in a {
        let mut corner = 0;
        for (j, other) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if part == other { corner + 1 } else { above.max(row[j]) };
            corner = above;
        }
    }
    harmonic(row[b.len()], a.len(), b.len())
}

/// Whether the right class is named; shared with other classes that are named and are no part of it.
fn class(answer: &str, right: &str, classes: &[String]) -> f64 {
    let is_named = |class: &&String| answer.contains(class.as_str());
    let is_rival = |class: &&String| class.as_str() == right || !right.contains(class.as_str());
    let named: Vec<_> = classes.iter().filter(is_named).filter(is_rival).collect();
    let is_right = named.iter().any(|class| class.as_str() == right);
    if is_right { 1.0 / named.len() as f64 } else { 0.0 }
}

/// The share of the answer's numbers that are the right one, which is the first of `right`.
fn number(answer: &str, right: &str) -> f64 {
    let numbers = |text: &str| -> Vec<String> {
        let parts = text.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        parts.map(str::to_owned).collect()
    };
    let (found, right) = (numbers(answer), numbers(right));
    let Some(right) = right.first() else { return 0.0 };
    let n_right = found.iter().filter(|number| *number == right).count();
    n_right as f64 / found.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    const LINE: &str = r#"{"input": "Who?", "context": "An {input} owl.", "answers": ["The owl", "a wren"], "length": 3, "all_classes": null}"#;

    #[test]
    fn questions_are_put_as_the_files_say() {
        let prompts = r#"{"hotpotqa": "{context} Q: {input} {x}"}"#;
        let folder = folder(&[
            ("hotpotqa_e.jsonl", &format!("{LINE}\n\n{LINE}\n")),
            ("other.jsonl", LINE),
            ("config/dataset2prompt.json", prompts),
            ("config/dataset2maxlen.json", r#"{"hotpotqa": 32}"#),
        ]);
        let sets = load(folder.path()).unwrap();
        assert_eq!(sets.len(), 2);
        assert_eq!((sets[0].name.as_str(), sets[0].n_answer), ("hotpotqa_e", 32));
        assert_eq!(sets[0].prompt(1).unwrap(), "An {input} owl. Q: Who? {x}");
        assert_eq!(sets[0].prompt(2), None);
        assert!(sets[1].prompt(0).unwrap().contains("Question: Who?"));
        assert_eq!(sets[0].score(0, "It is the OWL."), 0.5);
        assert_eq!(sets[0].score(0, "A wren!"), 1.0);
        assert_eq!(sets[0].score(7, "A wren!"), 0.0);
    }

    #[test]
    fn wrong_files_are_errors_that_say_where() {
        let error =
            |files: &[(&str, &str)]| format!("{:#}", load(folder(files).path()).unwrap_err());
        assert!(error(&[("readme.md", "")]).contains("no .jsonl file"));
        assert!(error(&[("a.jsonl", &format!("{LINE}\n{{"))]).contains("line 2 of"));
        let no_answer = LINE.replace(r#"["The owl", "a wren"]"#, "[]");
        assert!(error(&[("a.jsonl", &no_answer)]).contains("no answer"));
        let huge = [("a.jsonl", LINE), ("dataset2maxlen.json", r#"{"a": 4000000000}"#)];
        assert!(error(&huge).contains("answers of 4000000000 tokens"));
    }

    #[test]
    fn answers_are_scored_as_each_dataset_wants() {
        let set = |name: &str, answers: &str, classes: &str| {
            let line = format!(
                r#"{{"input": "", "context": "", "answers": {answers}, "all_classes": {classes}}}"#
            );
            load(folder(&[(&format!("{name}.jsonl"), &line)]).path()).unwrap().remove(0)
        };
        let trec = set("trec", r#"["Food"]"#, r#"["Food", "Fast Food", "Animal"]"#);
        assert_eq!(trec.score(0, "\nFood\nType: Animal"), 1.0);
        assert_eq!(trec.score(0, "Food or Animal"), 0.5);
        assert_eq!(trec.score(0, "Animal"), 0.0);
        let count = set("passage_count", r#"["7"]"#, "null");
        assert_eq!(count.score(0, "7 of 12"), 0.5);
        assert_eq!(count.score(0, "none"), 0.0);
        let place = set("passage_retrieval_en", r#"["Paragraph 30"]"#, "null");
        assert_eq!(place.score(0, "Paragraph 30"), 1.0);
        let report = set("gov_report", r#"["a b c d"]"#, "null");
        assert_eq!(report.score(0, "a x c d"), 0.75);
        assert_eq!(report.score(0, ""), 0.0);
        let code = set("lcc", r#"["x = 1"]"#, "null");
        assert_eq!(code.score(0, "# set\nx = 1\ny = 2"), 1.0);
        let chinese = set("multifieldqa_zh", r#"["红色的鸟"]"#, "null");
        assert_eq!(chinese.score(0, "鸟，红色的。"), 1.0);
    }
}
