//! `run` and `bench` on a tiny random model: its answers are nonsense, but always the same.

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use super::{nuthatch, text};

/// Starts a command whose streams the test reads and writes.
pub(crate) fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A golden model of the `model` crate with a vocabulary of single characters and a chat template.
pub(crate) struct Tiny {
    pub(crate) dir: tempfile::TempDir,
}

impl Tiny {
    pub(crate) fn new() -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden/llama-tied");
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "generation_config.json", "model.safetensors"] {
            std::fs::copy(golden.join(name), dir.path().join(name)).unwrap();
        }
        let tiny = Tiny { dir };
        tiny.write("tokenizer.json", &tokenizer().to_string());
        let template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:";
        let config = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template});
        tiny.write("tokenizer_config.json", &config.to_string());
        tiny
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }

    /// A command on the model.
    pub(crate) fn command(&self, command: &str, words: &[&str]) -> Command {
        let model = self.dir.path().to_str().unwrap();
        let mut all = vec![command, "--model", model, "-t", "1"];
        all.extend(words);
        nuthatch(self.dir.path(), &all)
    }

    /// Starts a command on the model.
    pub(crate) fn spawn(&self, command: &str, words: &[&str]) -> Child {
        spawn(&mut self.command(command, words))
    }

    /// Runs a command on the model, with this on stdin.
    pub(crate) fn output(&self, command: &str, words: &[&str], stdin: &str) -> Output {
        let mut child = self.spawn(command, words);
        child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn answer(&self, words: &[&str]) -> String {
        let output = self.output("run", words, "");
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub(crate) fn json(&self, command: &str, words: &[&str]) -> Value {
        let output = self.output(command, words, "");
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn error(&self, words: &[&str]) -> String {
        let output = self.output("run", words, "");
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        text(&output.stderr)
    }
}

/// A byte-level vocabulary of the printable characters, after three special tokens.
fn tokenizer() -> Value {
    let specials = ["<unk>", "<s>", "</s>"];
    let printable = (b'!'..=b'~').map(|byte| char::from(byte).to_string());
    let all = specials.map(String::from).into_iter().chain(["\u{120}".to_owned()]);
    let vocab: serde_json::Map<String, Value> =
        all.chain(printable).enumerate().map(|(id, token)| (token, json!(id))).collect();
    let added = |(id, token): (usize, &&str)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false,
                            "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": specials.iter().enumerate().map(added).collect::<Vec<_>>(),
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

#[test]
fn the_same_seed_gives_the_same_answer() {
    let tiny = Tiny::new();
    let draw = |seed| tiny.answer(&["Hello", "--max-tokens", "24", "--temp", "3", "--seed", seed]);
    let first = draw("7");
    assert_eq!(first, draw("7"));
    assert_ne!(first, draw("8"));
    let greedy = tiny.answer(&["Hello", "--max-tokens", "24", "--greedy"]);
    assert_eq!(
        greedy,
        tiny.answer(&["Hello", "--max-tokens", "24", "--temperature", "0", "--seed", "9"])
    );
}

#[test]
fn several_answers_are_numbered() {
    let tiny = Tiny::new();
    let words = ["-p", "Hello", "--max-tokens", "12", "--temp", "3"];
    let alone = |seed: &str| tiny.answer(&[&words[..], &["--seed", seed]].concat());
    let all = tiny.answer(&[&words[..], &["--seed", "7", "-n", "3"]].concat());
    let expect: String = [(1, "7"), (2, "8"), (3, "9")]
        .iter()
        .map(|(number, seed)| format!("[{number}] {}", alone(seed)))
        .collect();
    assert_eq!(all, expect);
    let json = tiny.json("run", &[&words[..], &["--seed", "7", "-n", "2", "--json"]].concat());
    let answers = json["answers"].as_array().unwrap();
    assert_eq!(format!("{}\n", answers[1]["text"].as_str().unwrap()), alone("8"));
    let n_tokens: usize = answers.iter().map(|a| a["ids"].as_array().unwrap().len()).sum();
    assert_eq!(json["stats"]["completion_tokens"], n_tokens);
    assert_eq!(json["stats"]["prompt_tokens"], json["prompt_ids"].as_array().unwrap().len());
}

#[test]
fn a_search_gives_its_best_answers_first() {
    let tiny = Tiny::new();
    let words = ["-p", "Hello", "--max-tokens", "12", "--json", "--beam-width"];
    let best = tiny.json("run", &[&words[..], &["4"]].concat());
    let all = tiny.json("run", &[&words[..], &["4", "-n", "4", "--early-stopping=never"]].concat());
    let scores: Vec<f64> = all["answers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|answer| answer["score"].as_f64().unwrap())
        .collect();
    assert!(scores.len() == 4 && scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    assert!(best["score"].as_f64().unwrap() <= scores[0]);
    // One beam is the greedy answer.
    let one = tiny.json("run", &[&words[..], &["1"]].concat());
    let greedy = tiny.json("run", &["-p", "Hello", "--max-tokens", "12", "--json", "--greedy"]);
    assert_eq!(one["text"], greedy["text"]);
    let words = ["-p", "Hello", "--max-tokens", "12", "--beam-width", "2", "-n", "2"];
    let text =
        tiny.answer(&[&words[..], &["--length-penalty", "0.5", "--early-stopping"]].concat());
    assert!(text.starts_with("[1, score -"), "{text}");
    let error =
        tiny.error(&["-p", "Hello", "--beam-width", "2", "--kv-cache-memory-bytes", "16KiB"]);
    assert!(error.contains("pages of 16 tokens, but the cache has"), "{error}");
}

#[test]
fn the_prompt_is_the_same_from_everywhere() {
    let tiny = Tiny::new();
    let words = ["--max-tokens", "8", "--greedy"];
    let expect = tiny.answer(&["-p", "Hello", "--max-tokens", "8", "--greedy"]);
    let piped = tiny.output("run", &words, "Hello\n");
    assert_eq!(text(&piped.stdout), expect);
    assert_eq!(text(&piped.stderr), "", "nothing but the answer");
    let dash = tiny.output("run", &["-", "--max-tokens", "8", "--greedy"], "Hello");
    assert_eq!(text(&dash.stdout), expect);
}

#[test]
fn json_says_everything() {
    let tiny = Tiny::new();
    let words = ["-p", "ab", "--json", "--greedy", "--max-tokens", "5", "--logprobs", "3"];
    let chat = tiny.json("run", &words);
    let id = |c: u8| u32::from(c - b'!') + 4;
    let ids = |text: &str| text.bytes().map(id).collect::<Vec<_>>();
    assert_eq!(chat["prompt_ids"], json!(ids("user:ab;a:")));
    let raw = tiny.json("run", &[&words[..], &["--raw"]].concat());
    assert_eq!(raw["prompt_ids"], json!(ids("ab")));
    let with_system = tiny.json("run", &[&words[..], &["--system", "s"]].concat());
    assert_eq!(with_system["prompt_ids"], json!(ids("system:s;user:ab;a:")));

    let n_tokens = raw["ids"].as_array().unwrap().len();
    assert_eq!(raw["stats"]["completion_tokens"], n_tokens);
    assert_eq!(raw["steps"].as_array().unwrap().len(), n_tokens);
    for (step, (id, logprob)) in raw["steps"]
        .as_array()
        .unwrap()
        .iter()
        .zip(raw["ids"].as_array().unwrap().iter().zip(raw["logprobs"].as_array().unwrap()))
    {
        assert_eq!(step.as_array().unwrap().len(), 3);
        assert_eq!(&step[0][0], id, "greedy takes the best");
        assert_eq!(&step[0][1], logprob);
    }
}

#[test]
fn logprobs_are_lines_beside_the_answer() {
    let tiny = Tiny::new();
    let words = ["-p", "ab", "--raw", "--greedy", "--max-tokens", "5", "--logprobs", "2"];
    let output = tiny.output("run", &words, "");
    let lines: Vec<Value> =
        text(&output.stderr).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!((1..=5).contains(&lines.len()), "{lines:?}");
    assert!(lines.iter().all(|line| line["top"][0]["id"] == line["id"]), "{lines:?}");
    let stats =
        tiny.output("run", &["-p", "ab", "--max-tokens", "2", "--stats", "--seed", "77"], "");
    let stats = text(&stats.stderr);
    assert!(stats.starts_with("prompt 10 tokens at ") && stats.ends_with("seed 77\n"), "{stats}");
}

#[test]
fn a_stop_string_ends_the_answer_before_itself() {
    let tiny = Tiny::new();
    let words = ["-p", "Hello", "--greedy", "--max-tokens", "40", "--json"];
    let whole = tiny.json("run", &words)["text"].as_str().unwrap().to_owned();
    let letters: Vec<char> = whole.chars().collect();
    assert!(letters.len() > 6, "the answer has letters to stop at: {whole:?}");
    let stop: String = letters[4..6].iter().collect();
    let end = whole.find(&stop).unwrap();
    let stopped = tiny.json("run", &[&words[..], &["--stop", &stop]].concat());
    assert_eq!(stopped["text"], whole[..end]);
    assert_eq!(stopped["finish_reason"], "stop");
}

#[test]
fn the_context_has_an_end() {
    let tiny = Tiny::new();
    let long = "x".repeat(200);
    let error = tiny.error(&["-p", &long, "--raw"]);
    assert!(error.contains("the prompt has 200 tokens, but the context holds 128"), "{error}");
    let error = tiny.error(&["-p", "x", "-c", "1K"]);
    assert!(error.contains("--max-model-len is 1024, but the model was made for 128"), "{error}");
    let error = tiny.error(&["-p", "x", "--kv-cache-memory-bytes", "900TiB"]);
    assert!(error.contains("not enough memory for"), "{error}");
    for words in [
        &["-c", "1K", "--rope-scaling", "yarn", "--rope-scale", "8"][..],
        &["-c", "64", "--kv-cache-dtype", "f32", "--kv-cache-memory-bytes", "1MiB"],
        &["--kv-cache-dtype", "bf16", "--max-num-batched-tokens", "4", "--max-num-seqs", "3"],
        &["--kv-cache-dtype", "fp8", "--sparse", "quest"],
        &["--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "0"],
        &["--scheduling-policy", "mlfq", "--eviction-policy", "lineage"],
        &["--schedule-policy", "lpm", "--disable-radix-cache", "--chunked-prefill-size", "8"],
    ] {
        let words = [&["-p", "Hello there", "--max-tokens", "4", "--greedy"], words].concat();
        assert!(tiny.answer(&words).ends_with('\n'), "{words:?}");
    }
}

#[test]
fn a_model_without_words_cannot_speak() {
    let tiny = Tiny::new();
    tiny.write("tokenizer_config.json", r#"{"chat_template": "{% for %}"}"#);
    let error = tiny.error(&["-p", "x"]);
    assert!(error.contains("--raw goes without it"), "{error}");
    assert!(tiny.answer(&["-p", "x", "--raw", "--max-tokens", "2"]).ends_with('\n'));
    std::fs::remove_file(tiny.dir.path().join("tokenizer.json")).unwrap();
    let error = tiny.error(&["-p", "x"]);
    assert!(error.contains("there is no tokenizer.json beside the weights"), "{error}");
}

#[test]
fn bench_measures_every_test() {
    let tiny = Tiny::new();
    let words = ["--prompt", "8,20", "--gen", "4", "--depth", "0,30", "-r", "2", "--json", "-"];
    let json = tiny.json("bench", &words);
    let labels: Vec<&str> =
        json["tests"].as_array().unwrap().iter().map(|t| t["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["pp8", "pp8 @ d30", "pp20", "pp20 @ d30", "tg4", "tg4 @ d30"]);
    for test in json["tests"].as_array().unwrap() {
        let samples = test["tokens_per_s"].as_array().unwrap();
        assert_eq!(samples.len(), 2);
        assert!(samples.iter().all(|sample| sample.as_f64().unwrap() > 0.0), "{test}");
    }
    assert_eq!((&json["threads"], &json["kv_dtype"]), (&json!(1), &json!("f16")));
    let file = tiny.dir.path().join("results.json");
    let words = ["--prompt", "8", "--gen", "0", "-r", "1", "--json", file.to_str().unwrap()];
    let table = tiny.output("bench", &words, "");
    assert!(text(&table.stdout).contains(" pp8 |"), "{}", text(&table.stdout));
    let json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(json["tests"][0]["name"], "pp");
}

#[test]
fn bench_reads_a_text() {
    let tiny = Tiny::new();
    let file = tiny.dir.path().join("text.txt");
    let words = ["--prompt", "8", "--gen", "4", "-r", "1", "--text", file.to_str().unwrap()];
    let says = |error: &str| {
        let output = tiny.output("bench", &words, "");
        assert!(!output.status.success() && text(&output.stderr).contains(error), "{output:?}");
    };
    says("text.txt");
    std::fs::write(&file, "").unwrap();
    says("is empty");
    std::fs::write(&file, "a b").unwrap();
    let table = tiny.output("bench", &words, "");
    assert!(text(&table.stdout).contains(" pp8 |"), "{}", text(&table.stderr));
}
