//! `serve` on the tiny model, over real connections.

mod client;
mod load;
mod panic;
mod score;
mod sessions;
mod streaming;

use std::io::{Read as _, Write as _};

use serde_json::{Value, json};

use client::{LONG, Serve, receive};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// The body with more fields.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 7,
           "temperature": 1.0, "ignore_eos": true})
}

fn text_of(answer: &Value) -> String {
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str());
    text.unwrap_or_else(|| panic!("no text: {answer}")).to_owned()
}

#[test]
fn a_streamed_answer_is_the_whole_one_a_token_a_chunk() {
    let serve = Serve::start(&[]);
    let whole = serve.post(CHAT, &hello());
    assert_eq!(whole.status, 200, "{}", whole.body);
    let whole = whole.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "tiny");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    assert_eq!(whole["usage"]["prompt_tokens"], "user:Hello;a:".len());
    assert!(whole["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());

    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let response = serve.post(CHAT, &with(&hello(), &more));
    assert!(response.header("content-type").unwrap().starts_with("text/event-stream"));
    let mut events = response.events();
    let usage = events.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(12)));
    assert_eq!(events.len(), 13, "twelve tokens and an end");
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[12]["choices"][0]["finish_reason"], "length");
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, text_of(&whole));
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
}

#[test]
fn prompts_are_texts_or_tokens_and_come_in_lists() {
    let serve = Serve::start(&[]);
    let base = json!({"max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let one = |prompt: Value| serve.post(TEXT, &with(&base, &json!({ "prompt": prompt }))).json();
    let tokens = serve.post("/tokenize", &json!({"prompt": "Hello", "return_token_strs": true}));
    let tokens = tokens.json();
    assert_eq!((&tokens["count"], &tokens["token_strs"][0]), (&json!(5), &json!("H")));
    let back = serve.post("/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(back["prompt"], "Hello");
    let hello = text_of(&one(json!("Hello")));
    assert_eq!(text_of(&one(tokens["tokens"].clone())), hello);
    let both = one(json!(["Hello", "Hi"]));
    assert_eq!(both["choices"].as_array().unwrap().len(), 2);
    assert_eq!(
        (both["choices"][0]["text"].as_str(), &both["usage"]["prompt_tokens"]),
        (Some(&hello[..]), &json!(7))
    );
    let echo = serve.post(TEXT, &with(&base, &json!({"prompt": "Hello", "echo": true}))).json();
    assert_eq!(text_of(&echo), format!("Hello{hello}"));
    let more = json!({"prompt": ["Hello", "Hi"], "stream": true, "n": 2, "temperature": 1});
    let mut n_chunks = vec![0; 4];
    for event in serve.post(TEXT, &with(&base, &more)).events() {
        n_chunks[event["choices"][0]["index"].as_u64().unwrap() as usize] += 1;
    }
    assert_eq!(n_chunks, [7; 4], "six tokens and an end for each answer");
}

#[test]
fn several_answers_are_what_their_seeds_give_and_end_on_their_own() {
    let serve = Serve::start(&[]);
    let alone =
        |seed: u64| text_of(&serve.post(CHAT, &with(&hello(), &json!({"seed": seed}))).json());
    let texts: Vec<String> = (7..10).map(alone).collect();
    let three = serve.post(CHAT, &with(&hello(), &json!({"n": 3}))).json();
    let content = |i: usize| three["choices"][i]["message"]["content"].as_str().unwrap();
    assert_eq!([content(0), content(1), content(2)], [&texts[0][..], &texts[1], &texts[2]]);
    assert_eq!(three["usage"]["completion_tokens"], 36);

    // A stop string of one answer ends that one.
    let letters: Vec<char> = texts[1].chars().collect();
    let stop: String = letters[3..6].iter().collect();
    let stopped = serve.post(CHAT, &with(&hello(), &json!({"n": 3, "stop": [stop]}))).json();
    for (i, text) in texts.iter().enumerate() {
        let choice = &stopped["choices"][i];
        let (expect, reason) = match text.find(&stop) {
            Some(end) => (&text[..end], "stop"),
            None => (&text[..], "length"),
        };
        assert_eq!(
            (choice["message"]["content"].as_str(), choice["finish_reason"].as_str()),
            (Some(expect), Some(reason))
        );
    }
    let n_tokens = stopped["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(n_tokens < 36, "what comes after a stop string does not count");
}

#[test]
fn the_best_of_several_has_the_highest_mean() {
    let serve = Serve::start(&[]);
    let more = json!({"n": 4, "logprobs": true, "top_logprobs": 2});
    let all = serve.post(CHAT, &with(&hello(), &more)).json();
    let mean = |choice: &Value| {
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert!(tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
        tokens.iter().map(|t| t["logprob"].as_f64().unwrap()).sum::<f64>() / tokens.len() as f64
    };
    let choices = all["choices"].as_array().unwrap();
    let best = choices.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap();
    let one = serve.post(CHAT, &with(&hello(), &json!({"n": 1, "best_of": 4}))).json();
    assert_eq!(text_of(&one), best["message"]["content"]);
    assert_eq!(one["usage"]["completion_tokens"], 48, "what is not shown was computed too");

    let more = json!({"n": 2, "best_of": 4, "use_beam_search": true, "logprobs": true});
    let beams = serve.post(CHAT, &with(&hello(), &more)).json();
    let sum = |i: usize| {
        let tokens = beams["choices"][i]["logprobs"]["content"].as_array().unwrap();
        tokens.iter().map(|t| t["logprob"].as_f64().unwrap()).sum::<f64>()
    };
    assert!(sum(0) >= sum(1), "{beams}");
    let streamed = with(&hello(), &json!({"n": 1, "best_of": 2, "stream": true}));
    assert_eq!(serve.post(CHAT, &streamed).status, 400);
}

#[test]
fn answers_keep_the_form_that_is_asked_for() {
    let serve = Serve::start(&[&["--tool-call-parser", "llama3_json"], &LONG[..]].concat());
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
                        "required": ["a"], "additionalProperties": false});
    let json_schema =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let base = with(&hello(), &json!({"max_tokens": 1000, "temperature": 2}));
    let ask = |more: &Value| serve.post(CHAT, &with(&base, more)).json();
    for seed in 0..4 {
        let text = |more: Value| text_of(&ask(&with(&more, &json!({ "seed": seed }))));
        let digits = text(json!({"guided_regex": "[0-9]{3}x"}));
        let is_fine = digits.len() == 4 && digits[..3].bytes().all(|byte| byte.is_ascii_digit());
        assert!(is_fine && digits.ends_with('x'), "{digits}");
        let choice = text(json!({"structured_outputs": {"choice": ["yes", "no \"way\""]}}));
        assert!(["yes", "no \"way\""].contains(&choice.as_str()), "{choice}");
        let json = text(json!({ "response_format": json_schema }));
        let object: Value = serde_json::from_str(&json).unwrap();
        assert!(object["a"].is_boolean() && object.as_object().unwrap().len() == 1, "{json}");
        assert_eq!(
            text(json!({"guided_grammar": "start: \"a\" b\nb: \"c\" | \"c\" \"c\""}))[..2],
            *"ac"
        );
    }
    // Several answers, and a stream, keep it too.
    let three = ask(&json!({"n": 3, "guided_regex": "[ab]{5}"}));
    for choice in three["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(text.len() == 5 && text.bytes().all(|byte| b"ab".contains(&byte)), "{text}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let call = ask(&json!({"tools": [tool], "tool_choice": "required"}));
    let message = &call["choices"][0]["message"];
    assert_eq!(call["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(
        (&message["content"], &message["tool_calls"][0]["function"]["name"]),
        (&Value::Null, &json!("f"))
    );
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(arguments).unwrap()["a"].is_boolean());
    let streamed =
        with(&base, &json!({"tools": [tool], "tool_choice": "required", "stream": true}));
    let events = serve.post(CHAT, &streamed).events();
    let calls: Vec<_> = events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"]).collect();
    assert_eq!(calls.iter().filter(|calls| !calls.is_null()).count(), 1, "one chunk has the call");

    let bad = serve.post(CHAT, &with(&base, &json!({"guided_regex": "("})));
    assert_eq!((bad.status, bad.json()["error"]["code"].as_str()), (400, Some("invalid_format")));
    let both = with(&base, &json!({"guided_regex": "a", "use_beam_search": true}));
    assert_eq!(serve.post(CHAT, &both).status, 400);
}

#[test]
fn responses_and_embeddings_answer_in_their_own_words() {
    let serve = Serve::start(&[]);
    let body =
        json!({"input": "Hello", "max_output_tokens": 6, "temperature": 0, "ignore_eos": true});
    let whole = serve.post("/v1/responses", &body).json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["usage"]["output_tokens"], 6);
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    let streamed = serve.post("/v1/responses", &with(&body, &json!({"stream": true}))).body;
    let events: Vec<Value> = streamed
        .split("\n\n")
        .filter_map(|event| event.split_once("data: "))
        .map(|(_, data)| serde_json::from_str(data).unwrap())
        .collect();
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, text);
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    assert!((0..).zip(&events).all(|(i, event)| event["sequence_number"] == i));

    let body = json!({"input": ["Hello", "Hello", "Something else"]});
    let floats = serve.post("/v1/embeddings", &body).json();
    let vector = |i: usize| -> Vec<f64> {
        let numbers = floats["data"][i]["embedding"].as_array().unwrap();
        numbers.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let product =
        |a: usize, b: usize| -> f64 { vector(a).iter().zip(vector(b)).map(|(x, y)| x * y).sum() };
    assert!((product(0, 0) - 1.0).abs() < 1e-5, "vectors have length 1");
    assert_eq!(vector(0), vector(1), "equal texts have equal vectors, cached or not");
    assert!(product(0, 2) < 0.999);
    assert_eq!(floats["usage"]["prompt_tokens"], 24);
    let coded = serve.post("/v1/embeddings", &with(&body, &json!({"encoding_format": "base64"})));
    let coded = coded.json()["data"][0]["embedding"].as_str().unwrap().len();
    assert_eq!(coded, (vector(0).len() * 4).div_ceil(3) * 4);
    let error = serve.post("/v1/embeddings", &with(&body, &json!({"dimensions": 3})));
    assert_eq!(error.status, 400);
    // More than wait in the engine's queue at a time, as many as OpenAI takes.
    let many: Vec<String> = (0..2048).map(|i| format!("{}", i % 7)).collect();
    let all = serve.post("/v1/embeddings", &json!({"input": many})).json();
    let vectors: Vec<&Value> =
        all["data"].as_array().unwrap().iter().map(|x| &x["embedding"]).collect();
    assert_eq!(vectors.len(), 2048);
    assert!((7..2048).all(|i| vectors[i] == vectors[i - 7]), "in the order of their texts");
}

#[test]
fn errors_have_the_shape_and_the_codes_of_openai() {
    let serve = Serve::start(&[]);
    let chat = |more: &Value| serve.post(CHAT, &with(&hello(), more));
    for (more, status, code, param) in [
        (json!({"model": "gpt-4"}), 404, "model_not_found", json!("model")),
        (json!({"temperature": "hot"}), 400, "invalid_value", json!("temperature")),
        (json!({"messages": null}), 400, "missing_required_parameter", json!("messages")),
        (json!({"n": 1000}), 400, "invalid_value", json!("n")),
        (json!({"max_tokens": 999}), 400, "context_length_exceeded", json!("input_tokens")),
        (json!({"logit_bias": {"4096": 1}}), 400, "unknown_token", Value::Null),
        (
            json!({"n": 1, "best_of": 64, "use_beam_search": true}),
            400,
            "cache_exceeded",
            Value::Null,
        ),
    ] {
        let response = chat(&more);
        let error = &response.json()["error"];
        assert_eq!((response.status, error["code"].as_str()), (status, Some(code)), "{error}");
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].is_string() && error["type"].is_string());
    }
    let long = chat(&json!({"max_tokens": 999})).json();
    let message = long["error"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("This model's maximum context length is 128 tokens. However, you ")
    );

    for (method, path, body, status, code) in [
        ("POST", CHAT, "{", 400, "json_parse_error"),
        ("POST", CHAT, "[]", 400, "json_parse_error"),
        ("POST", CHAT, "\u{0}\u{fffd}", 400, "json_parse_error"),
        ("GET", CHAT, "", 405, "method_not_allowed"),
        ("GET", "/nothing", "", 404, "not_found"),
        ("POST", "/detokenize", "{\"tokens\": [99999]}", 400, "unknown_token"),
        ("POST", "/reset_prefix_cache", "", 401, "invalid_api_key"),
        ("GET", "/v1/models/other", "", 404, "model_not_found"),
    ] {
        let response = serve.ask(method, path, &[], body);
        let code_found = response.json()["error"]["code"].clone();
        assert_eq!((response.status, code_found), (status, json!(code)), "{method} {path} {body}");
    }
    let huge = format!("content-length: {}", u64::MAX / 2);
    let mut stream = serve.connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{huge}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    assert_eq!(receive(stream).status, 413);
    assert_eq!(serve.post(CHAT, &hello()).status, 200, "and it still answers");
}

#[test]
fn small_endpoints_answer() {
    let serve = Serve::start(&["--served-model-name", "alias", "--admin-key", "root"]);
    for path in ["/health", "/ping", "/v1/health"] {
        let response = serve.get(path);
        assert_eq!((response.status, &response.body[..]), (200, ""), "{path}");
    }
    assert!(serve.get("/version").json()["version"].is_string());
    let models = serve.get("/v1/models").json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    assert_eq!(names, ["tiny", "alias"]);
    assert_eq!(models["data"][1]["max_model_len"], 128);
    assert_eq!(serve.get("/v1/models/alias").json()["root"], "tiny");
    assert_eq!(serve.post(CHAT, &with(&hello(), &json!({"model": "alias"}))).status, 200);

    let id = serve.ask("GET", "/version", &["x-request-id: mine"], "");
    assert_eq!(id.header("x-request-id"), Some("mine"));

    // The same prompt is found again, unless it is forgotten or salted.
    let prompt = json!({"prompt": "The same forty characters at its beginning.", "max_tokens": 2});
    let cached = |more: &Value| {
        let answer = serve.post(TEXT, &with(&prompt, more)).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(&json!({})), 0);
    assert!(cached(&json!({})) >= 32);
    assert_eq!(cached(&json!({"cache_salt": "s"})), 0);
    assert!(cached(&json!({"retention": {"priority": 3, "ttl": 60}})) >= 32);
    let reset = serve.ask("POST", "/reset_prefix_cache", &["authorization: Bearer root"], "");
    assert!(reset.json()["pages_freed"].as_u64().unwrap() > 0, "{}", reset.body);
    assert_eq!(cached(&json!({})), 0);
}

#[test]
fn keys_guard_everything_but_health() {
    let serve = Serve::start(&["--api-key", "one", "--api-key", "two", "--isolate-tenants"]);
    for path in ["/v1/models", "/metrics", "/version", "/dashboard.json", "/nothing"] {
        assert_eq!(serve.get(path).status, 401, "{path}");
    }
    assert_eq!(serve.post(CHAT, &hello()).status, 401);
    assert_eq!((serve.get("/health").status, serve.get("/").status), (200, 200));
    let body = json!({"prompt": "The same forty characters at its beginning.", "max_tokens": 2});
    let cached = |key: &str| {
        let key = format!("Authorization: Bearer {key}");
        let response = serve.ask("POST", TEXT, &[&key], &body.to_string());
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert_eq!(cached("one"), Some(0));
    assert!(cached("one") > Some(30));
    assert_eq!(cached("two"), Some(0), "tenants are isolated");
    assert_eq!(cached("three"), None);
}

#[test]
fn metrics_and_dashboard_tell_what_was_done() {
    let serve = Serve::start(&["--swap-space", "1MiB"]);
    for _ in 0..2 {
        assert_eq!(serve.post(CHAT, &with(&hello(), &json!({"max_tokens": 40}))).status, 200);
    }
    assert_eq!(serve.metric("vllm:request_success_total", "finished_reason=\"length\""), 2.0);
    assert_eq!(serve.metric("vllm:generation_tokens_total", "model_name=\"tiny\""), 80.0);
    assert_eq!(serve.metric("vllm:prompt_tokens_total", ""), 26.0);
    assert_eq!(serve.metric("vllm:num_requests_running", ""), 0.0);
    assert_eq!(serve.metric("vllm:time_to_first_token_seconds_count", ""), 2.0);
    assert_eq!(serve.metric("vllm:inter_token_latency_seconds_count", ""), 78.0);
    let same = |a: &str, b: &str| assert_eq!(serve.metric(a, ""), serve.metric(b, ""), "{a}");
    same("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc");
    same("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total");
    assert_eq!(serve.metric("vllm:cache_config_info", "block_size=\"16\""), 1.0);
    assert!(serve.metric("nuthatch:kv_pages", "tier=\"host\"") > 0.0);
    let data = serve.get("/dashboard.json").json();
    assert_eq!((&data["generation_tokens"], &data["answers"][1]), (&json!(80), &json!(2)));
    let map = data["pages"]["map"]["device"].as_str().unwrap();
    assert!(map.contains('i') && map.contains('.'), "{map}");
    assert!(serve.get("/").body.contains("<title>nuthatch</title>"));
}

#[test]
fn a_client_that_leaves_frees_its_place() {
    let serve = Serve::start(&LONG);
    let endless = with(&hello(), &json!({"max_tokens": 30000, "stream": true}));
    let mut stream = serve.send("POST", CHAT, &[], &endless.to_string());
    let mut first = [0; 64];
    stream.read_exact(&mut first).unwrap();
    serve.wait_for("vllm:num_requests_running", |n| n == 1.0);
    drop(stream);
    serve.wait_for("vllm:num_requests_running", |n| n == 0.0);
    assert_eq!(serve.metric("nuthatch:clients_left_total", ""), 1.0);

    // One that waits for a whole answer is noticed too.
    let whole = with(&endless, &json!({"stream": false}));
    let stream = serve.send("POST", CHAT, &[], &whole.to_string());
    serve.wait_for("vllm:num_requests_running", |n| n == 1.0);
    drop(stream);
    serve.wait_for("vllm:num_requests_running", |n| n == 0.0);
    assert_eq!(serve.metric("nuthatch:clients_left_total", ""), 2.0);
    assert_eq!(serve.metric("vllm:request_success_total", "finished_reason=\"abort\""), 2.0);
    let tokens = serve.metric("vllm:generation_tokens_total", "");
    assert!(tokens < 59000.0, "{tokens} tokens were computed for nobody");
}

#[test]
fn a_full_queue_refuses_with_a_time_to_come_back() {
    let words = ["--max-num-seqs", "1", "--max-num-queued-reqs", "1"];
    let serve = Serve::start(&[&words[..], &LONG].concat());
    let endless = with(&hello(), &json!({"max_tokens": 30000})).to_string();
    let running = serve.send("POST", CHAT, &[], &endless);
    serve.wait_for("vllm:num_requests_running", |n| n == 1.0);
    let waiting = serve.send("POST", CHAT, &[], &endless);
    serve.wait_for("vllm:num_requests_waiting", |n| n == 1.0);
    let refused = serve.post(CHAT, &hello());
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    drop((running, waiting));
    serve.wait_for("vllm:num_requests_waiting", |n| n == 0.0);
    serve.wait_for("vllm:num_requests_running", |n| n == 0.0);
    assert_eq!(serve.post(CHAT, &hello()).status, 200);
}

#[test]
fn slow_clients_do_not_stay() {
    let serve = Serve::start(&["--client-timeout", "1"]);
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n");
    // Nothing, half a head, and half a body.
    for sent in [String::new(), head.clone(), format!("{head}\r\n{{\"messages\"")] {
        let mut stream = serve.connect();
        stream.write_all(sent.as_bytes()).unwrap();
        let mut rest = String::new();
        let _ = stream.read_to_string(&mut rest);
        let is_told = rest.is_empty() || rest.starts_with("HTTP/1.1 408");
        assert!(is_told, "{sent:?} got {rest:?}");
    }
    assert_eq!(serve.post(CHAT, &hello()).status, 200);
}

#[test]
fn a_server_drains_before_it_ends() {
    let serve = Serve::start(&LONG);
    let body = with(&hello(), &json!({"max_tokens": 300, "stream": true})).to_string();
    let mut stream = serve.send("POST", CHAT, &[], &body);
    let mut first = [0; 16];
    stream.read_exact(&mut first).unwrap();
    serve.terminate();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"));
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("for this machine only"), "{log}");
}

#[test]
fn what_has_no_more_time_is_cancelled_with_a_reason() {
    let serve = Serve::start(&[&["--shutdown-timeout", "1"], &LONG[..]].concat());
    let body = with(&hello(), &json!({"max_tokens": 32000, "n": 8, "stream": true})).to_string();
    let mut stream = serve.send("POST", CHAT, &[], &body);
    let mut first = [0; 16];
    stream.read_exact(&mut first).unwrap();
    serve.terminate();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"code\":\"server_stopping\"") && rest.contains("[DONE]"));
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(130), "{log}");
}

#[test]
fn a_port_is_had_once_and_nonsense_is_refused() {
    let serve = Serve::start(&[]);
    let port = serve.connect().peer_addr().unwrap().port().to_string();
    let tiny = crate::tiny::Tiny::new();
    let error = |words: &[&str]| {
        let output = tiny.output("serve", words, "");
        (output.status.code(), crate::text(&output.stderr))
    };
    let (code, message) = error(&["--port", &port]);
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{message}");
    for words in [
        &["--ssl-certfile", "x.pem"][..],
        &["--api-key", ""],
        &["--max-num-queued-reqs", "0"],
        &["--gpu-memory-utilization", "1.5"],
        &["--config", "nowhere.yaml"],
    ] {
        assert_eq!(error(words).0, Some(2), "{words:?}");
    }
}
