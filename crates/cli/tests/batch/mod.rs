//! `batch` on a tiny random model.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::text;
use super::tiny::Tiny;

/// A line that asks for a few tokens, greedily.
fn chat(id: &str, said: &str, more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": said}],
        "max_tokens": 8, "temperature": 0, "ignore_eos": true,
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body})
}

fn completion(id: &str, body: &Value) -> Value {
    json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body})
}

fn lines(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

struct Batch {
    tiny: Tiny,
}

impl Batch {
    fn new(input: &str) -> Self {
        let tiny = Tiny::new();
        tiny.write("in.jsonl", input);
        Batch { tiny }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.tiny.dir.path().join(name)
    }

    /// Runs the batch and gives its summary.
    fn run(&self, words: &[&str]) -> Value {
        let input = self.path("in.jsonl");
        let words = [&[input.to_str().unwrap(), "--json"], words].concat();
        self.tiny.json("batch", &words)
    }

    fn answers(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("in.out.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Answers by the names of their lines.
    fn by_name(&self) -> BTreeMap<String, Value> {
        let named = |answer: Value| (answer["custom_id"].as_str().unwrap().to_owned(), answer);
        self.answers().into_iter().map(named).collect()
    }
}

/// What was said in an answer.
fn said(answer: &Value) -> &str {
    let choice = &answer["response"]["body"]["choices"][0];
    choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap()
}

#[test]
fn every_line_is_answered_as_if_alone() {
    let asked = ["Hello", "Hi", "What?", "Hello", "Why is it so?", "x", "yz", "Hello there"];
    let name = |i: usize| format!("line {i}");
    let input: Vec<Value> =
        asked.iter().enumerate().map(|(i, said)| chat(&name(i), said, &json!({}))).collect();
    let batch = Batch::new(&lines(&input));
    let summary = batch.run(&["--max-num-seqs", "3", "--max-num-batched-tokens", "16"]);
    assert_eq!((&summary["answered"], &summary["errors"]), (&json!(8), &json!(0)));
    assert_eq!(summary["completion_tokens"], 64);
    assert_eq!(batch.answers().len(), 8);
    let answers = batch.by_name();
    for (i, prompt) in asked.iter().enumerate() {
        let answer = &answers[&name(i)];
        let alone =
            batch.tiny.json("run", &["-p", prompt, "--json", "--greedy", "--max-tokens", "8"]);
        // The model may end by itself when it is asked by `run`.
        let alone = alone["text"].as_str().unwrap();
        assert!(said(answer).starts_with(alone), "{alone:?} and {answer}");
        let body = &answer["response"]["body"];
        assert_eq!(body["object"], "chat.completion");
        assert_eq!(body["choices"][0]["finish_reason"], "length");
        assert_eq!(body["choices"][0]["message"]["role"], "assistant");
        assert_eq!(body["usage"]["completion_tokens"], 8);
        assert_eq!(body["usage"]["prompt_tokens"], prompt.len() + "user:;a:".len());
        assert!(body["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
        assert_eq!(
            (&answer["response"]["status_code"], &answer["error"]),
            (&json!(200), &Value::Null)
        );
    }
    assert_eq!(said(&answers["line 0"]), said(&answers["line 3"]));
}

#[test]
fn options_and_policies_change_no_answer() {
    let long = "x".repeat(40);
    let input: Vec<Value> = (0..6)
        .map(|i| {
            let more = json!({"temperature": 1.5, "seed": i, "cache_salt": format!("{}", i % 2),
                              "priority": i % 3});
            chat(&format!("{i}"), &format!("{long}{}", i / 3), &more)
        })
        .collect();
    let batch = Batch::new(&lines(&input));
    let shared = batch.run(&["--max-num-seqs", "2"]);
    let first = batch.by_name();
    // Prompts of 49 tokens: their first two pages are equal.
    assert!(shared["cached_tokens"].as_u64().unwrap() >= 2 * 32, "{shared}");
    for words in [
        &["--no-enable-prefix-caching"][..],
        &["--scheduling-policy", "priority", "--max-num-seqs", "1"],
        &["--scheduling-policy", "fair", "--kv-cache-memory-bytes", "100KiB"],
        &["--kv-cache-memory-bytes", "100KiB", "--swap-space", "1MiB"],
        &["--scheduling-policy", "mlfq", "--max-num-seqs", "2", "--max-num-batched-tokens", "7"],
        &["--scheduling-policy", "prefix", "--eviction-policy", "lfu"],
    ] {
        std::fs::remove_file(batch.path("in.out.jsonl")).unwrap();
        let summary = batch.run(words);
        assert_eq!(summary["answered"], 6, "{words:?}");
        if words.contains(&"--no-enable-prefix-caching") {
            assert_eq!(summary["cached_tokens"], 0);
        }
        for (name, answer) in batch.by_name() {
            assert_eq!(said(&answer), said(&first[&name]), "{words:?}");
        }
    }
}

#[test]
fn bad_lines_are_errors_with_their_numbers() {
    let good = chat("good", "Hello", &json!({}));
    let mut text = format!("{good}\n\n{{\"custom_id\": \"cut\", \n");
    text += &lines(&[
        chat("hot", "Hello", &json!({"temperature": -1})),
        chat("good", "again", &json!({})),
        json!({"custom_id": "where", "url": "/v1/embeddings", "body": {}}),
        json!({"url": "/v1/completions", "body": {"prompt": "x"}}),
        chat("long", &"x".repeat(200), &json!({})),
        chat("longer", "x", &json!({"max_tokens": 500})),
        completion("token", &json!({"prompt": [5, 99_999]})),
        chat("stream", "x", &json!({"stream": true})),
        chat("bias", "x", &json!({"logit_bias": {"99999": 1}})),
    ]);
    text += "not json";
    let batch = Batch::new(&text);
    let summary = batch.run(&[]);
    assert_eq!((&summary["answered"], &summary["errors"]), (&json!(1), &json!(11)));
    let errors: Vec<Value> =
        batch.answers().into_iter().filter(|answer| !answer["error"].is_null()).collect();
    let message = |line: u32| {
        let start = format!("line {line}: ");
        let of_line = |answer: &&Value| {
            answer["error"]["message"].as_str().is_some_and(|message| message.starts_with(&start))
        };
        errors.iter().find(of_line).unwrap_or_else(|| panic!("no error of line {line}: {errors:?}"))
    };
    for (line, name, expect) in [
        (3, None, "not a valid request"),
        (4, Some("hot"), "temperature: -1 must be 0 to 100"),
        (5, None, "custom_id `good` was used before"),
        (6, Some("where"), "url: `/v1/embeddings` is not supported"),
        (7, None, "custom_id is missing"),
        (8, Some("long"), "This model's maximum context length is 128 tokens."),
        (9, Some("longer"), "you requested 500 output tokens"),
        (10, Some("token"), "token 99999 is not in the vocabulary"),
        (11, Some("stream"), "cannot be streamed"),
        (12, Some("bias"), "token 99999 is not in the vocabulary"),
        (13, None, "not a valid request"),
    ] {
        let answer = message(line);
        assert_eq!(answer["custom_id"].as_str(), name, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{answer}");
        match name {
            Some(_) => {
                assert_eq!(answer["response"]["status_code"], 400, "{answer}");
                let body = &answer["response"]["body"]["error"];
                assert_eq!(body["type"], "invalid_request_error", "{answer}");
            }
            None => assert_eq!(answer["response"], Value::Null, "{answer}"),
        }
    }
    // Errors are answers too: nothing is left to do.
    let again = batch.run(&[]);
    assert_eq!(
        (&again["answered"], &again["errors"], &again["skipped"]),
        (&json!(0), &json!(0), &json!(12))
    );
    assert_eq!(batch.answers().len(), 12);
}

#[test]
fn completions_have_several_prompts_and_answers() {
    let more = json!({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "temperature": 2.0,
                      "seed": 5, "logprobs": 2, "ignore_eos": true});
    let tokens = json!({"prompt": [[68, 69]], "max_tokens": 4, "temperature": 0,
                        "ignore_eos": true});
    let text = json!({"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let input = [completion("four", &more), completion("ids", &tokens), completion("text", &text)];
    let batch = Batch::new(&lines(&input));
    batch.run(&[]);
    let answers = batch.by_name();
    let body = &answers["four"]["response"]["body"];
    assert_eq!(body["object"], "text_completion");
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 3);
        let top = logprobs["top_logprobs"][0].as_object().unwrap();
        let own = logprobs["tokens"][0].as_str().unwrap();
        let logprob = |value: &Value| value.as_f64().unwrap();
        let chosen = logprob(&logprobs["token_logprobs"][0]);
        // Special tokens have no text here, and of those with the same text the best is told.
        if !own.is_empty() {
            assert_eq!(logprob(&top[own]), chosen, "the token itself is told too");
            let n_better = top.values().filter(|&other| logprob(other) > chosen).count();
            assert_eq!(top.len(), if n_better < 2 { 2 } else { 3 });
        }
        let whole: String =
            logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        assert_eq!(logprobs["text_offset"][2], whole.chars().count() - 1);
    }
    // Each prompt counts once.
    assert_eq!(body["usage"]["prompt_tokens"], 4);
    assert_eq!(body["usage"]["completion_tokens"], 12);
    // Tokens 68 and 69 spell `ab`.
    assert_eq!(said(&answers["ids"]), said(&answers["text"]));
}

#[test]
fn stops_and_logprobs_are_honoured() {
    let batch = Batch::new(&lines(&[chat("whole", "Hello", &json!({"max_tokens": 30}))]));
    batch.run(&[]);
    let whole = said(&batch.answers()[0]).to_owned();
    let letters: Vec<char> = whole.chars().collect();
    assert!(letters.len() > 6, "the answer has letters to stop at: {whole:?}");
    let stop: String = letters[4..6].iter().collect();
    let more = json!({"max_tokens": 30, "stop": [stop], "logprobs": true, "top_logprobs": 2});
    let included = json!({"max_tokens": 30, "stop": stop, "include_stop_str_in_output": true});
    std::fs::remove_file(batch.path("in.out.jsonl")).unwrap();
    let input = [chat("stopped", "Hello", &more), chat("included", "Hello", &included)];
    batch.tiny.write("in.jsonl", &lines(&input));
    batch.run(&[]);
    let answers = batch.by_name();
    let end = whole.find(&stop).unwrap();
    assert_eq!(said(&answers["stopped"]), &whole[..end]);
    assert_eq!(said(&answers["included"]), &whole[..end + stop.len()]);
    let body = &answers["stopped"]["response"]["body"];
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(body["usage"]["completion_tokens"], content.len());
    for token in content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["token"], token["token"], "greedy takes the best");
        let bytes = token["bytes"].as_array().unwrap();
        assert_eq!(bytes.len(), token["token"].as_str().unwrap().len());
    }
}

#[test]
fn a_batch_that_was_killed_goes_on() {
    let n_lines = 40;
    let line = |i: usize| {
        let more = json!({"max_tokens": 100, "temperature": 1.0});
        chat(&format!("{i}"), &format!("{i}"), &more)
    };
    let input: Vec<Value> = (0..n_lines).map(line).collect();
    let batch = Batch::new(&lines(&input));
    batch.run(&["--max-num-seqs", "2"]);
    let whole = batch.by_name();
    assert_eq!(whole.len(), n_lines);

    std::fs::remove_file(batch.path("in.out.jsonl")).unwrap();
    let input = batch.path("in.jsonl");
    let words = [input.to_str().unwrap(), "--max-num-seqs", "2"];
    let mut child = batch.tiny.spawn("batch", &words);
    // The first answer is there while most are not.
    let len = || std::fs::metadata(batch.path("in.out.jsonl")).map_or(0, |file| file.len());
    while len() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended too soon");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let bytes = std::fs::read(batch.path("in.out.jsonl")).unwrap();
    let n_before = bytes.iter().filter(|&&byte| byte == b'\n').count();
    assert!((1..n_lines).contains(&n_before), "{n_before} lines");
    // As if the power had gone in the middle of a line.
    let half = [&bytes[..], br#"{"id":"batch_req_9","custom_id":"8","respo"#].concat();
    std::fs::write(batch.path("in.out.jsonl"), half).unwrap();

    let summary = batch.run(&["--max-num-seqs", "3"]);
    assert_eq!(summary["skipped"], n_before);
    assert_eq!(summary["answered"], n_lines - n_before);
    assert_eq!(batch.answers().len(), n_lines, "no line twice");
    for (name, answer) in batch.by_name() {
        assert_eq!(said(&answer), said(&whole[&name]));
    }
    let again = batch.run(&[]);
    assert_eq!((&again["answered"], &again["skipped"]), (&json!(0), &json!(n_lines)));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_batch_and_says_how_to_go_on() {
    let more = json!({"max_tokens": 100});
    let input: Vec<Value> =
        (0..200).map(|i| chat(&format!("{i}"), &format!("{i}"), &more)).collect();
    let batch = Batch::new(&lines(&input));
    let input = batch.path("in.jsonl");
    let mut child = batch.tiny.spawn("batch", &[input.to_str().unwrap(), "--max-num-seqs", "2"]);
    let len = || std::fs::metadata(batch.path("in.out.jsonl")).map_or(0, |file| file.len());
    while len() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended too soon");
        std::thread::yield_now();
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let summary = text(&output.stdout);
    assert!(summary.contains("interrupted: the same command goes on"), "{summary}");
    let n_before = batch.answers().len();
    assert!(n_before < 200);
    let again = batch.run(&[]);
    assert_eq!(again["skipped"], n_before);
    assert_eq!(batch.answers().len(), 200);
}

#[test]
fn files_that_cannot_be_used_are_told_before_the_model_is_loaded() {
    let batch = Batch::new(&lines(&[chat("a", "Hello", &json!({"model": "gpt-x"}))]));
    let input = batch.path("in.jsonl");
    let input = input.to_str().unwrap();
    let fails = |words: &[&str], expect: &str| {
        let output = batch.tiny.output("batch", words, "");
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let error = text(&output.stderr);
        assert!(error.contains(expect), "{error}");
    };
    fails(&["missing.jsonl"], "error: cannot read missing.jsonl");
    fails(&[input, "-o", input], "it is the file of the requests");
    batch.tiny.write("other.txt", "my notes\n");
    let other = batch.path("other.txt");
    fails(&[input, "-o", other.to_str().unwrap()], "line 1 is no answer; is this the right file?");
    assert_eq!(std::fs::read_to_string(other).unwrap(), "my notes\n");
    let output = batch.tiny.output("batch", &[input], "");
    let summary = text(&output.stdout);
    assert!(summary.starts_with("1 requests answered in "), "{summary}");
    assert!(summary.contains("1 requests name another model, such as `gpt-x`"), "{summary}");
}
