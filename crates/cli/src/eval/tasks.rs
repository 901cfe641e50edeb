//! Questions whose answers are hidden in long prompts, made like RULER's thirteen.
//!
//! A task is a function from a size to a prompt. The caller finds the largest size whose prompt
//! fits; the same seed gives the same needles at any size.

use std::fmt::Write as _;

use super::words::{NOISE, city, key, letters, number, person, sentences, shuffle, uuid, word};
use crate::random::Random;

/// A kind of question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskName {
    Single1,
    Single2,
    Single3,
    MultiKey1,
    MultiKey2,
    MultiKey3,
    MultiValue,
    MultiQuery,
    Variables,
    CommonWords,
    FrequentWords,
    Question1,
    Question2,
    Perplexity,
}

/// A prompt and what its answer must contain.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) prompt: String,
    /// How the answer begins.
    pub(super) answer: String,
    pub(super) references: Vec<String>,
    /// Tokens that an answer may have.
    pub(super) n_answer: u32,
    /// Whether one of the references is enough.
    pub(super) is_any: bool,
}

impl TaskName {
    const ALL: [(TaskName, &str); 14] = [
        (TaskName::Single1, "niah_single_1"),
        (TaskName::Single2, "niah_single_2"),
        (TaskName::Single3, "niah_single_3"),
        (TaskName::MultiKey1, "niah_multikey_1"),
        (TaskName::MultiKey2, "niah_multikey_2"),
        (TaskName::MultiKey3, "niah_multikey_3"),
        (TaskName::MultiValue, "niah_multivalue"),
        (TaskName::MultiQuery, "niah_multiquery"),
        (TaskName::Variables, "vt"),
        (TaskName::CommonWords, "cwe"),
        (TaskName::FrequentWords, "fwe"),
        (TaskName::Question1, "qa_1"),
        (TaskName::Question2, "qa_2"),
        (TaskName::Perplexity, "ppl"),
    ];

    /// All names, for people.
    pub(crate) fn list() -> String {
        Self::ALL.map(|(_, name)| name).join(", ")
    }

    /// As it is typed.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(task, _)| *task == self).map_or("", |(_, name)| name)
    }

    /// The tasks of these names; `all` is all of them.
    pub(crate) fn parse_all(names: &[String]) -> Result<Vec<Self>, String> {
        let mut tasks = Vec::new();
        for name in names {
            if name == "all" {
                tasks.extend(Self::ALL.map(|(task, _)| task));
                continue;
            }
            let found = Self::ALL.iter().find(|(_, known)| known == name);
            let (task, _) =
                found.ok_or_else(|| format!("{name:?} is no task; there are {}", Self::list()))?;
            tasks.push(*task);
        }
        Ok(tasks)
    }

    /// A prompt of about `size` pieces of haystack, which is to be at most `length` tokens long.
    pub(super) fn sample(self, (size, length): (usize, u32), seed: u64, prose: &str) -> Sample {
        let mut random = Random::new(seed);
        let needles = |random: &mut Random, task| niah(random, task, size, prose);
        match self {
            TaskName::Single1 => needles(&mut random, Niah::default()),
            TaskName::Single2 => needles(&mut random, Niah { in_prose: true, ..Niah::default() }),
            TaskName::Single3 => {
                needles(&mut random, Niah { in_prose: true, values: Kind::Uuid, ..Niah::default() })
            }
            TaskName::MultiKey1 => {
                needles(&mut random, Niah { in_prose: true, n_keys: 4, ..Niah::default() })
            }
            TaskName::MultiKey2 => {
                needles(&mut random, Niah { all_needles: true, ..Niah::default() })
            }
            TaskName::MultiKey3 => needles(
                &mut random,
                Niah { all_needles: true, keys: Kind::Uuid, values: Kind::Uuid, ..Niah::default() },
            ),
            TaskName::MultiValue => {
                needles(&mut random, Niah { in_prose: true, n_values: 4, ..Niah::default() })
            }
            TaskName::MultiQuery => needles(
                &mut random,
                Niah { in_prose: true, n_keys: 4, n_queries: 4, ..Niah::default() },
            ),
            TaskName::Variables => variables(&mut random, size),
            TaskName::CommonWords => common_words(&mut random, size, length),
            TaskName::FrequentWords => frequent_words(&mut random, size),
            TaskName::Question1 => documents(&mut random, size, false),
            TaskName::Question2 => documents(&mut random, size, true),
            TaskName::Perplexity => unreachable!("a text is continued as it is"),
        }
    }
}

/// Words, digits or random names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Words,
    Numbers,
    Uuid,
}

impl Kind {
    fn draw(self, random: &mut Random) -> String {
        match self {
            Kind::Words => key(random),
            Kind::Numbers => number(random),
            Kind::Uuid => uuid(random),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Words => "words",
            Kind::Numbers => "numbers",
            Kind::Uuid => "uuids",
        }
    }
}

/// Needles in a haystack.
#[derive(Clone, Copy, Debug)]
struct Niah {
    in_prose: bool,
    /// Whether the haystack is other needles.
    all_needles: bool,
    keys: Kind,
    values: Kind,
    n_keys: usize,
    n_values: usize,
    n_queries: usize,
}

impl Default for Niah {
    fn default() -> Self {
        Niah {
            in_prose: false,
            all_needles: false,
            keys: Kind::Words,
            values: Kind::Numbers,
            n_keys: 1,
            n_values: 1,
            n_queries: 1,
        }
    }
}

fn niah(random: &mut Random, task: Niah, size: usize, prose: &str) -> Sample {
    let needle = |key: &str, value: &str| {
        format!("One of the special magic {} for {key} is: {value}.", task.values.name())
    };
    let mut keys: Vec<String> = Vec::new();
    while keys.len() < task.n_keys.max(task.n_queries) {
        let key = task.keys.draw(random);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let asked = &keys[..task.n_queries];
    let (mut needles, mut references) = (Vec::new(), Vec::new());
    for (i, key) in keys.iter().enumerate() {
        for _ in 0..task.n_values {
            let value = task.values.draw(random);
            needles.push(needle(key, &value));
            if i < task.n_queries {
                references.push(value);
            }
        }
    }
    // Where needles are does not depend on how long the haystack is.
    let depths: Vec<f64> = needles.iter().map(|_| random.unit()).collect();
    let mut pieces: Vec<String> = if task.all_needles {
        let other = |random: &mut Random| {
            let (key, value) = (task.keys.draw(random), task.values.draw(random));
            if keys.contains(&key) { NOISE.to_owned() } else { needle(&key, &value) }
        };
        (0..size).map(|_| other(random)).collect()
    } else if task.in_prose {
        let sentences = sentences(prose);
        let first = random.below(sentences.len().max(1) as u32) as usize;
        sentences.iter().cycle().skip(first).take(size).map(|&s| s.to_owned()).collect()
    } else {
        vec![NOISE.to_owned(); size]
    };
    for (needle, depth) in needles.into_iter().zip(depths) {
        let at = (depth * (pieces.len() + 1) as f64) as usize;
        pieces.insert(at.min(pieces.len()), needle);
    }
    let (kind, query) = (task.values.name(), asked.join(", "));
    let separator = if task.in_prose { " " } else { "\n" };
    let is_one = references.len() == 1;
    let (some, are) = if is_one {
        (format!("A special magic {}", kind.trim_end_matches('s')), "is")
    } else {
        (format!("Some special magic {kind}"), "are")
    };
    let what = if is_one {
        format!("What is the special magic {} for {query}", kind.trim_end_matches('s'))
    } else {
        format!("What are all the special magic {kind} for {query}")
    };
    Sample {
        prompt: format!(
            "{some} {are} hidden within the following text. Make sure to memorize it. I will quiz \
             you about it afterwards.\n{}\n{what} mentioned in the provided text?",
            pieces.join(separator)
        ),
        answer: if is_one {
            format!(
                " The special magic {} for {query} mentioned in the provided text is",
                kind.trim_end_matches('s')
            )
        } else {
            format!(" The special magic {kind} for {query} mentioned in the provided text are")
        },
        n_answer: if task.values == Kind::Uuid { 48 } else { 14 * references.len() as u32 },
        references,
        is_any: false,
    }
}

/// A chain of variables of the same value among noise.
fn variables(random: &mut Random, size: usize) -> Sample {
    const HOPS: usize = 4;
    let chain = |random: &mut Random| {
        let names: Vec<String> = (0..=HOPS).map(|_| letters(random, 5, 'A')).collect();
        let value = (10_000 + random.below(90_000)).to_string();
        let mut lines = vec![format!("VAR {} = {value}", names[0])];
        for pair in names.windows(2) {
            lines.push(format!("VAR {} = VAR {}", pair[1], pair[0]));
        }
        (names, value, lines)
    };
    let hide = |random: &mut Random, lines: Vec<String>, size: usize| {
        let mut depths: Vec<f64> = lines.iter().map(|_| random.unit()).collect();
        depths.sort_by(f64::total_cmp);
        let mut pieces = vec![NOISE.to_owned(); size];
        for (line, depth) in lines.into_iter().zip(depths).rev() {
            let at = (depth * (size + 1) as f64) as usize;
            pieces.insert(at.min(size), line);
        }
        pieces.join("\n")
    };
    let question = |value: &str| {
        format!(
            "Question: Find all variables that are assigned the value {value} in the text above."
        )
    };
    let answer = |value: &str| {
        format!(
            " Answer: According to the chain(s) of variable assignment in the text above, {} \
             variables are assigned the value {value}, they are: ",
            HOPS + 1
        )
    };
    let intro = "Memorize and track the chain(s) of variable assignment hidden in the following \
                 text.";
    let (example_names, example_value, example_lines) = chain(random);
    let example = hide(random, example_lines, 2);
    let (names, value, lines) = chain(random);
    let text = hide(random, lines, size);
    Sample {
        prompt: format!(
            "{intro}\n\n{example}\n{}{}{}\n\n{intro}\n\n{text}\n{}",
            question(&example_value),
            answer(&example_value),
            example_names.join(" "),
            question(&value),
        ),
        answer: answer(&value),
        references: names,
        n_answer: 30,
        is_any: false,
    }
}

/// The ten most common words of a list. In short prompts, as RULER has it, all words come less often: ten words
/// thirty times each would not fit.
fn common_words(random: &mut Random, size: usize, length: u32) -> Sample {
    let is_short = length < 4096;
    let (n_common, n_rare) = if is_short { (6, 1) } else { (30, 3) };
    let mut list = |n_others: usize, n_common: usize, n_rare: usize| {
        let mut words: Vec<String> = Vec::new();
        while words.len() < n_others + 10 {
            let new = format!("{}{}", word(random), letters(random, 2, 'a'));
            if !words.contains(&new) {
                words.push(new);
            }
        }
        let mut all = Vec::new();
        for (i, word) in words.iter().enumerate() {
            let n = if i < 10 { n_common } else { n_rare };
            all.extend(std::iter::repeat_n(word.clone(), n));
        }
        shuffle(random, &mut all);
        let mut text = String::new();
        for (i, word) in all.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = write!(text, "{}. {word} ", i + 1);
        }
        (text, words[..10].to_vec())
    };
    let intro = "Below is a numbered list of words. In these words, some appear more often than \
                 others. Memorize the ones that appear most often.";
    let question = "Question: What are the 10 most common words in the above list?";
    let answer = " Answer: The top 10 words that appear most often in the list are:";
    let (example, example_words) = list(20, if is_short { 3 } else { 4 }, 1);
    let (text, words) = list(size, n_common, n_rare);
    Sample {
        prompt: format!(
            "{intro}\n{example}\n{question}{answer} {}\n\n{intro}\n{text}\n{question}",
            example_words.join(" ")
        ),
        answer: answer.to_owned(),
        references: words,
        n_answer: 60,
        is_any: false,
    }
}

/// The three most frequent of coded words whose frequencies fall with the square of their rank.
fn frequent_words(random: &mut Random, size: usize) -> Sample {
    let n_words = (size * 10).max(40);
    let mut codes: Vec<String> = Vec::new();
    while codes.len() < (n_words / 50).max(8) {
        let code = letters(random, 6, 'a');
        if !codes.contains(&code) {
            codes.push(code);
        }
    }
    let mut words = Vec::new();
    for (i, code) in codes.iter().enumerate() {
        let share = 6.0 / (std::f64::consts::PI * (i + 1) as f64).powi(2);
        let n = (share * n_words as f64).ceil() as usize;
        let code = if i == 0 { "..." } else { code };
        words.extend(std::iter::repeat_n(code.to_owned(), n));
    }
    shuffle(random, &mut words);
    Sample {
        prompt: format!(
            "Read the following coded text and track the frequency of each coded word. Find the \
             three most frequently appeared coded words. {}\nQuestion: Do not provide any \
             explanation. Please ignore the dots '....'. What are the three most frequently \
             appeared words in the above coded text?",
            words.join(" ")
        ),
        answer: " Answer: According to the coded text above, the three most frequently appeared \
                 words are:"
            .to_owned(),
        references: codes[1..4].to_vec(),
        n_answer: 30,
        is_any: false,
    }
}

/// A question about one document among many, or about two of them that hang together.
fn documents(random: &mut Random, size: usize, is_two_hops: bool) -> Sample {
    let (name, town) = (person(random), city(random));
    let ruler = person(random);
    let year = 1900 + random.below(100);
    let trade = word(random);
    let mut facts = vec![
        format!("{name} was born in {town} in {year} and made a living with a {trade}."),
        format!("The mayor of {town} is {ruler}, who has held the office for many years."),
    ];
    for _ in 0..size {
        let (other, place) = (person(random), city(random));
        let (year, trade) = (1900 + random.below(100), word(random));
        let is_mayor = random.below(2) == 0;
        if other == name || place == town {
            continue;
        }
        facts.push(if is_mayor {
            format!("The mayor of {place} is {other}, who has held the office for many years.")
        } else {
            format!("{other} was born in {place} in {year} and made a living with a {trade}.")
        });
    }
    shuffle(random, &mut facts);
    let mut text = String::new();
    for (i, fact) in facts.iter().enumerate() {
        // Writing to a string does not fail.
        let _ = write!(text, "Document {}:\n{fact}\n\n", i + 1);
    }
    let (question, reference) = if is_two_hops {
        (format!("Who is the mayor of the town in which {name} was born?"), ruler)
    } else {
        (format!("In which town was {name} born?"), town.to_owned())
    };
    Sample {
        prompt: format!(
            "Answer the question based on the given documents. Only give me the answer and do not \
             output any other words.\n\nThe following are given documents.\n\n{text}Answer the \
             question based on the given documents. Only give me the answer and do not output any \
             other words.\n\nQuestion: {question}"
        ),
        answer: " Answer:".to_owned(),
        references: vec![reference],
        n_answer: 24,
        is_any: true,
    }
}

impl Sample {
    /// The share of the references that the answer contains.
    pub(super) fn score(&self, answer: &str) -> f64 {
        let answer = answer.to_lowercase();
        let n_found = self.references.iter().filter(|r| answer.contains(&r.to_lowercase())).count();
        if self.is_any {
            return f64::from(n_found > 0);
        }
        n_found as f64 / self.references.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::PROSE;
    use super::*;

    #[test]
    fn every_prompt_holds_its_answer_and_grows() {
        for (task, name) in TaskName::ALL {
            if task == TaskName::Perplexity {
                continue;
            }
            for seed in 0..5 {
                let sample = |size| task.sample((size, 8192), seed, PROSE);
                let (small, large) = (sample(5), sample(50));
                assert!(large.prompt.len() > small.prompt.len(), "{name}");
                assert_eq!(small.references, sample(5).references, "{name}");
                for sample in [small, large] {
                    for reference in &sample.references {
                        assert!(sample.prompt.contains(reference), "{name}: {reference}");
                        assert!(!sample.answer.contains(reference), "{name}: {reference}");
                    }
                    assert_eq!(sample.score(&sample.references.join(" and ")), 1.0);
                    assert_eq!(sample.score("nothing"), 0.0);
                }
            }
            let references = |seed| task.sample((5, 8192), seed, PROSE).references;
            assert_ne!(references(1), references(2));
        }
    }

    #[test]
    fn common_words_fit_into_short_prompts() {
        let words = |length| {
            let sample = TaskName::CommonWords.sample((1, length), 7, PROSE);
            for reference in &sample.references {
                assert!(sample.prompt.matches(reference.as_str()).count() >= 6, "{reference}");
            }
            sample.prompt.split_whitespace().count()
        };
        // A numbered word is about seven tokens.
        assert!(words(2048) < 400 && words(4096) > 700, "{} {}", words(2048), words(4096));
    }

    #[test]
    fn names_are_those_of_ruler() {
        let names = ["vt".to_owned(), "niah_multikey_2".to_owned()];
        assert_eq!(
            TaskName::parse_all(&names).unwrap(),
            [TaskName::Variables, TaskName::MultiKey2]
        );
        assert_eq!(TaskName::parse_all(&["all".to_owned()]).unwrap().len(), 14);
        assert!(TaskName::parse_all(&["niah".to_owned()]).unwrap_err().contains("niah_single_1"));
    }
}
