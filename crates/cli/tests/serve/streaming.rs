//! Answers that are longer than the model's context, from a cache that keeps their ends only.

use serde_json::json;

use super::client::Serve;
use super::{CHAT, TEXT, text_of, with};

#[test]
fn an_answer_goes_on_behind_the_context() {
    let serve = Serve::start(&[]);
    let asked = json!({
        "prompt": "Hello", "max_tokens": 300, "temperature": 1.0, "seed": 7, "ignore_eos": true,
    });
    let refused = serve.post(TEXT, &asked);
    assert_eq!(refused.status, 400, "300 tokens are more than the context has");
    let streaming = json!({"streaming": {"window": 64}});
    let answer = serve.post(TEXT, &with(&asked, &streaming)).json();
    assert_eq!(answer["usage"]["completion_tokens"], 300);
    let long = json!({"prompt": "Hello".repeat(40), "max_tokens": 5});
    let of_long = serve.post(TEXT, &with(&with(&asked, &streaming), &long)).json();
    let usage = &of_long["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(200), &json!(5)));
    let endless = with(&asked, &json!({"max_tokens": 3000, "streaming": {"window": 64}}));
    assert_eq!(serve.post(TEXT, &endless).status, 400, "sixteen contexts at most");
    // As long as nothing is dropped, it is the same answer.
    let short = serve.post(TEXT, &with(&asked, &json!({"max_tokens": 40}))).json();
    let (whole, short) = (text_of(&answer), text_of(&short));
    assert!(short.len() > 10 && whole.starts_with(&short), "{short:?} {whole:?}");
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": true});
    let answer = serve.post(CHAT, &with(&chat, &streaming)).json();
    assert_eq!(answer["usage"]["completion_tokens"], 128, "as many as the context, if nobody says");
    let refused = serve.post(CHAT, &with(&chat, &json!({"streaming": {"window": 4000}})));
    assert_eq!(refused.status, 400, "{}", refused.json());
}
