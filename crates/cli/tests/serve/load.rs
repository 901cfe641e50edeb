//! `bench serve` against a server of ours, and what the server publishes of its cache.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;

use super::client::{LONG, Serve};
use crate::{nuthatch, run, text};

/// Runs the load generator and gives its results.
fn load(serve: &Serve, words: &[&str]) -> Value {
    let url = serve.url();
    let base = ["bench", "serve", "--base-url", &url, "--json", "-", "--random-output-len", "5"];
    let output = run(&[&base[..], words].concat());
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_load_generator_measures_what_it_sends() {
    let serve = Serve::start(&LONG);
    let pid = serve.pid().to_string();
    let words = ["--num-prompts", "7", "--max-concurrency", "3", "--random-input-len", "6"];
    let words = [&words[..], &["--watch-pid", &pid, "--goodput", "ttft:60000"]].concat();
    let json = load(&serve, &words);
    assert_eq!((&json["completed"], &json["failed"]), (&7.into(), &0.into()), "{json}");
    assert_eq!((&json["total_output_tokens"], &json["model_id"]), (&35.into(), &"tiny".into()));
    for name in ["ttft", "tpot", "itl", "e2el"] {
        let of = |which: &str| json[format!("{which}_{name}_ms")].as_f64().unwrap();
        assert!(of("median") <= of("p99") && of("p99") <= of("max"), "{name}: {json}");
    }
    assert!(json["mean_ttft_ms"].as_f64().unwrap() > 0.0);
    assert!(json["mean_e2el_ms"].as_f64() > json["mean_ttft_ms"].as_f64());
    assert_eq!(json["request_goodput"], json["request_throughput"]);
    let samples = json["rss"]["samples"].as_array().unwrap();
    assert!(samples.iter().all(|sample| sample[1].as_u64().unwrap() > 1 << 20), "{json}");
    // The server counted the same; one more request was the warm-up.
    assert_eq!(serve.metric("vllm:request_success_total", ""), 8.0);

    let words = ["--dataset-name", "shared-prefix", "--prefix-len", "20", "--num-prefixes", "2"];
    let more = ["--num-prompts", "6", "--random-input-len", "3", "--max-concurrency", "1"];
    let chat = ["--endpoint", "/v1/chat/completions", "--request-rate", "500"];
    let json = load(&serve, &[&words[..], &more, &chat].concat());
    let cached = json["total_cached_tokens"].as_u64().unwrap();
    assert!(2 * cached > json["total_input_tokens"].as_u64().unwrap(), "{json}");
}

#[test]
fn requests_come_from_files_and_for_a_while() {
    let serve = Serve::start(&LONG);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("requests.jsonl");
    let lines = concat!(
        r#"{"prompt": "Hello", "output_tokens": 3}"#,
        "\n\n",
        r#"{"custom_id": "a", "url": "/v1/chat/completions", "body": {"max_tokens": 4, "#,
        r#""ignore_eos": true, "messages": [{"role": "user", "content": "Hi"}]}}"#,
    );
    std::fs::write(&path, lines).unwrap();
    let words = ["--dataset-path", path.to_str().unwrap(), "--num-warmups", "0"];
    let json = load(&serve, &words);
    assert_eq!(
        (&json["completed"], &json["total_output_tokens"]),
        (&2.into(), &7.into()),
        "{json}"
    );
    let words = ["--duration", "1", "--max-concurrency", "2", "--random-input-len", "2"];
    let json = load(&serve, &words);
    assert!(json["completed"].as_u64().unwrap() >= 2, "{json}");
    assert!(json["duration"].as_f64().unwrap() >= 1.0, "{json}");

    std::fs::write(&path, "{}").unwrap();
    let url = serve.url();
    let words = ["bench", "serve", "--base-url", &url, "--dataset-path", path.to_str().unwrap()];
    let output = nuthatch(dir.path(), &words).output().unwrap();
    assert!(text(&output.stderr).contains("line 1: neither a prompt nor a body"));
    drop(serve);
    let output = nuthatch(dir.path(), &["bench", "serve", "--base-url", &url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "nobody is there");
    let output = run(&["bench", "serve", "--dataset-name", "file"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn a_publisher_greets_and_answers_strangers_within_bounds() {
    let config = r#"{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
                     "replay_endpoint": "tcp://127.0.0.1:0"}"#;
    let serve = Serve::start(&["--kv-events-config", config, "--admin-key", "root"]);
    let listed = serve.ask("GET", "/kv_cache_blocks", &["authorization: Bearer root"], "");
    assert_eq!((listed.status, &listed.json()["blocks"]), (200, &Value::Array(Vec::new())));
    assert_eq!(serve.get("/kv_cache_blocks").status, 401);
    serve.wait_for("nuthatch:kv_event_batches_total", |n| n >= 1.0);
    let place = serve.events.clone().unwrap();
    // Who does not speak the protocol is sent away, and the next one is served.
    for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 64]] {
        let mut stream = TcpStream::connect(&place).unwrap();
        stream.write_all(&[said, &[0; 64]].concat()).unwrap();
        let mut greeting = Vec::new();
        // The connection may end with a reset, because not all was read.
        let _ = stream.read_to_end(&mut greeting);
        assert!(greeting.is_empty() || greeting[..1] == [0xff], "{greeting:?}");
    }
    let mut stream = TcpStream::connect(&place).unwrap();
    let mut greeting = [0; 64];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(
        (greeting[0], greeting[9], greeting[10], &greeting[12..16]),
        (0xff, 0x7f, 3, &b"NULL"[..])
    );
    let wrong = crate::fails(&["serve", "--kv-events-config", r#"{"endpoint": 1}"#], 1);
    assert!(wrong.contains("--kv-events-config"), "{wrong}");
}
