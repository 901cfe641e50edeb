//! Prompts that are read whole: probabilities of their tokens, as evaluation harnesses ask for them,
//! and vectors that are means.

use serde_json::{Value, json};

use super::client::Serve;
use super::{TEXT, text_of, with};

#[test]
fn a_prompt_that_is_repeated_comes_with_its_probabilities() {
    let serve = Serve::start(&[]);
    let base = json!({"prompt": "Hello", "temperature": 0, "ignore_eos": true});
    let ask = |more: Value| {
        let response = serve.post(TEXT, &with(&base, &more));
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()
    };
    let scored = ask(json!({"echo": true, "logprobs": 1, "max_tokens": 3}));
    let plain = ask(json!({"logprobs": 1, "max_tokens": 3}));
    assert_eq!(text_of(&scored), format!("Hello{}", text_of(&plain)));
    let usage = &scored["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(5), &json!(3)));
    let lists = &scored["choices"][0]["logprobs"];
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[key].as_array().unwrap().len(), 8, "{key}");
    }
    let letters: Vec<&str> =
        lists["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(letters[..5], ["H", "e", "l", "l", "o"]);
    assert_eq!(&lists["text_offset"].as_array().unwrap()[..6], [0, 1, 2, 3, 4, 5]);
    // Before the first token there is nothing.
    assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null());
    // The answer's own are what they are without the prompt.
    for i in 0..3 {
        let alone = &plain["choices"][0]["logprobs"];
        assert_eq!(lists["token_logprobs"][5 + i], alone["token_logprobs"][i]);
        assert_eq!(lists["top_logprobs"][5 + i], alone["top_logprobs"][i]);
    }

    // Each is what the model says when it is made to continue with that token.
    let tokens = serve.post("/tokenize", &json!({"prompt": "Hello"})).json()["tokens"].clone();
    for i in 1..5 {
        let before = &tokens.as_array().unwrap()[..i];
        let bias = json!({tokens[i].to_string(): 100});
        let one =
            ask(json!({"prompt": before, "logit_bias": bias, "logprobs": 1, "max_tokens": 1}));
        let one = &one["choices"][0]["logprobs"];
        assert_eq!(one["tokens"][0], letters[i]);
        assert_eq!(lists["token_logprobs"][i], one["token_logprobs"][0]);
        let top = lists["top_logprobs"][i].as_object().unwrap();
        assert_eq!(top[letters[i]], lists["token_logprobs"][i], "the token itself is told too");
        for (text, logprob) in one["top_logprobs"][0].as_object().unwrap() {
            assert_eq!(&top[text], logprob);
        }
        assert!((1..=2).contains(&top.len()));
    }
}

#[test]
fn a_harness_needs_no_answer() {
    let serve = Serve::start(&[]);
    let base = json!({"prompt": ["Hello", "Hi"], "echo": true, "logprobs": 1, "max_tokens": 0});
    let both = serve.post(TEXT, &base).json();
    assert_eq!(both["usage"]["completion_tokens"], 0);
    for (i, text) in ["Hello", "Hi"].into_iter().enumerate() {
        let choice = &both["choices"][i];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("length")));
        let list = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(list.len(), text.len());
        assert!(list[1..].iter().all(|logprob| logprob.as_f64().unwrap() <= 0.0));
    }
    // The same with one token, of which the harness takes no note, and as a stream.
    let one = serve.post(TEXT, &with(&base, &json!({"max_tokens": 1, "n": 2}))).json();
    for i in 0..4 {
        let (got, of) = (&one["choices"][i]["logprobs"], &both["choices"][i / 2]["logprobs"]);
        let n = of["tokens"].as_array().unwrap().len();
        assert_eq!(got["tokens"].as_array().unwrap().len(), n + 1);
        let list = got["token_logprobs"].as_array().unwrap();
        assert_eq!(list[..n], of["token_logprobs"].as_array().unwrap()[..]);
        assert_eq!(got["text_offset"][n], n);
    }
    let events = serve.post(TEXT, &with(&base, &json!({"stream": true}))).events();
    assert_eq!(events.len(), 2, "one for each prompt");
    for event in &events {
        let choice = &event["choices"][0];
        let whole = &both["choices"][choice["index"].as_u64().unwrap() as usize];
        assert_eq!((&choice["text"], &choice["logprobs"]), (&whole["text"], &whole["logprobs"]));
    }
    // The prompt is repeated without probabilities too; without it, an answer has a token.
    let text = serve.post(TEXT, &json!({"prompt": "Hello", "echo": true, "max_tokens": 0})).json();
    assert_eq!(
        (text_of(&text), &text["choices"][0]["logprobs"]),
        ("Hello".to_owned(), &Value::Null)
    );
    let refused = serve.post(TEXT, &json!({"prompt": "Hello", "max_tokens": 0}));
    assert_eq!(refused.status, 400, "{}", refused.body);
    let more = json!({"use_beam_search": true, "n": 2, "max_tokens": 1});
    let refused = serve.post(TEXT, &with(&base, &more));
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("a beam search does not tell"), "{}", refused.body);
}

#[test]
fn a_vector_is_the_last_tokens_or_a_mean() {
    let vectors = |pooling: &str| {
        let serve = Serve::start(&["--pooling", pooling]);
        let card = serve.get("/v1/models").json();
        assert_eq!(card["data"][0]["pooling"], pooling);
        // The second and the third find pages of the first, if they look.
        let text = "Something that fills a page, and more than one of them";
        let body = json!({"input": [text, text, format!("{text}."), "H"]});
        let answer = serve.post("/v1/embeddings", &body).json();
        [0, 1, 2, 3].map(|i| -> Vec<f64> {
            let numbers = answer["data"][i]["embedding"].as_array().unwrap();
            numbers.iter().map(|number| number.as_f64().unwrap()).collect()
        })
    };
    let product = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
    let (last, mean) = (vectors("last"), vectors("mean"));
    assert_eq!((&last[0], &mean[0]), (&last[1], &mean[1]), "equal texts have equal vectors");
    assert_eq!(last[3], mean[3], "of one token, both are the same");
    assert!(product(&last[0], &mean[0]) < 0.999, "of several they are not");
    assert!((product(&mean[0], &mean[0]) - 1.0).abs() < 1e-5, "vectors have length 1");
    // One more token moves a mean less than it moves the last state.
    assert!(product(&mean[0], &mean[2]) > product(&last[0], &last[2]));
}
