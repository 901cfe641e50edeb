//! What is asked.

use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::args::{BenchServeArgs, DatasetArg};
use crate::random::Random;

/// Short words, of which most vocabularies have each as one token.
const WORDS: [&str; 48] = [
    "the", "time", "river", "house", "light", "green", "small", "water", "night", "road", "paper",
    "stone", "garden", "music", "letter", "winter", "morning", "window", "bird", "story", "market",
    "silver", "forest", "bridge", "doctor", "summer", "island", "number", "animal", "family",
    "village", "machine", "picture", "country", "color", "table", "world", "voice", "train",
    "glass", "mountain", "field", "street", "friend", "ship", "tree", "book", "cloud",
];

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Where it goes.
    pub(crate) path: String,
    /// JSON.
    pub(crate) body: String,
}

/// Requests by their numbers: the same number, the same request.
pub(crate) enum Dataset {
    /// Prompts of random words, some of which may share their beginnings.
    Random { args: Shape, prefixes: Vec<String> },
    /// Requests of a file, again and again.
    File(Vec<Request>),
}

/// What random prompts look like.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    path: String,
    model: String,
    n_words: u32,
    n_output: u32,
    seed: u64,
}

impl Dataset {
    pub(crate) fn new(args: &BenchServeArgs, model: &str) -> anyhow::Result<Self> {
        let shape = Shape {
            path: args.endpoint.clone(),
            model: model.to_owned(),
            n_words: args.random_input_len,
            n_output: args.random_output_len,
            seed: args.seed,
        };
        match (args.dataset_name, &args.dataset_path) {
            (_, Some(path)) => Ok(Dataset::File(read(path, &shape)?)),
            // The arguments ask for a path with this one.
            (DatasetArg::File | DatasetArg::Random, None) => {
                Ok(Dataset::Random { args: shape, prefixes: vec![String::new()] })
            }
            (DatasetArg::SharedPrefix, None) => {
                let mut random = Random::new(args.seed);
                let prefixes = (0..args.num_prefixes)
                    .map(|_| words(&mut random, args.prefix_len) + " ")
                    .collect();
                Ok(Dataset::Random { args: shape, prefixes })
            }
        }
    }

    /// How many different requests there are, if there is an end.
    pub(crate) fn len(&self) -> Option<u64> {
        match self {
            Dataset::Random { .. } => None,
            Dataset::File(requests) => Some(requests.len() as u64),
        }
    }

    /// The request of a number.
    pub(crate) fn request(&self, i: u64) -> Request {
        match self {
            Dataset::File(requests) => requests[(i % requests.len() as u64) as usize].clone(),
            Dataset::Random { args, prefixes } => {
                let mut random = Random::new(Random::new(args.seed ^ i.rotate_left(32)).bits());
                let prefix = &prefixes[(i % prefixes.len() as u64) as usize];
                let prompt = format!("{prefix}{}", words(&mut random, args.n_words));
                args.request(&prompt, args.n_output)
            }
        }
    }
}

impl Shape {
    fn request(&self, prompt: &str, n_output: u32) -> Request {
        let mut body = json!({
            "model": self.model, "max_tokens": n_output, "temperature": 0.0, "ignore_eos": true,
        });
        if self.path.contains("chat") {
            body["messages"] = json!([{ "role": "user", "content": prompt }]);
        } else {
            body["prompt"] = json!(prompt);
        }
        self.finish(body, &self.path)
    }

    /// Asks for a stream that counts.
    fn finish(&self, mut body: Value, path: &str) -> Request {
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        body["model"] = json!(self.model);
        Request { path: path.to_owned(), body: body.to_string() }
    }
}

/// The requests of a file: prompts, or OpenAI batch lines.
fn read(path: &Path, shape: &Shape) -> anyhow::Result<Vec<Request>> {
    let show = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(show)?;
    let mut requests = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{}, line {}", path.display(), i + 1);
        let value: Value = serde_json::from_str(line).with_context(place)?;
        let request = match (value.get("body"), value["prompt"].as_str()) {
            (Some(body), _) if body.is_object() => {
                let path = value["url"].as_str().unwrap_or(&shape.path);
                shape.finish(body.clone(), path)
            }
            (_, Some(prompt)) => {
                let asked = value["output_tokens"].as_u64().and_then(|n| u32::try_from(n).ok());
                shape.request(prompt, asked.unwrap_or(shape.n_output))
            }
            _ => anyhow::bail!("{}: neither a prompt nor a body", place()),
        };
        requests.push(request);
    }
    ensure!(!requests.is_empty(), "{} holds no request", path.display());
    Ok(requests)
}

fn words(random: &mut Random, n: u32) -> String {
    let words: Vec<&str> =
        (0..n).map(|_| WORDS[random.below(WORDS.len() as u32) as usize]).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn prompts_differ_by_number_and_share_what_they_should() {
        let args = Shape {
            path: "/v1/completions".to_owned(),
            model: "m".to_owned(),
            n_words: 8,
            n_output: 4,
            seed: 3,
        };
        let prefixes = vec!["one ".to_owned(), "two ".to_owned()];
        let dataset = Dataset::Random { args, prefixes };
        let prompt = |i| {
            let body: Value = serde_json::from_str(&dataset.request(i).body).unwrap();
            assert_eq!((&body["max_tokens"], &body["stream"]), (&json!(4), &json!(true)));
            body["prompt"].as_str().unwrap().to_owned()
        };
        let all: BTreeSet<String> = (0..100).map(prompt).collect();
        assert_eq!(all.len(), 100);
        assert_eq!(prompt(7), prompt(7));
        assert!(prompt(8).starts_with("one ") && prompt(9).starts_with("two "));
        let tails: BTreeSet<String> =
            (0..100).map(|i| prompt(i)[4..].split(' ').take(3).collect()).collect();
        assert!(tails.len() > 90, "only {} beginnings", tails.len());
    }
}
