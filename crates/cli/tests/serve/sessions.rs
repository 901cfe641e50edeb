//! Conversations that outlive the server.

use serde_json::{Value, json};

use super::client::Serve;
use super::{CHAT, text_of, with};

fn say(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "session_id": "birds",
           "max_tokens": 6, "temperature": 0, "ignore_eos": true})
}

fn messages(serve: &Serve) -> Vec<(String, String)> {
    let session = serve.get("/v1/sessions/birds").json();
    let said = session["messages"].as_array().unwrap_or_else(|| panic!("{session}"));
    let part = |said: &Value, key| said[key].as_str().unwrap().to_owned();
    said.iter().map(|said| (part(said, "role"), part(said, "content"))).collect()
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("kept");
    let words = ["--session-dir", path.to_str().unwrap()];
    let serve = Serve::start(&words);
    let system = json!({"role": "system", "content": "be brief"});
    let mut first = say("one");
    first["messages"].as_array_mut().unwrap().insert(0, system.clone());
    let one = text_of(&serve.post(CHAT, &first).json());
    assert_eq!(serve.get("/v1/sessions").json()["data"][0]["messages"], 2);
    drop(serve);

    // Another server says what one would that is told everything, streamed or not.
    let serve = Serve::start(&words);
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let told = json!({"session_id": null,
                      "messages": [system, user("one"), assistant(&one), user("two")]});
    let expected = text_of(&serve.post(CHAT, &with(&say("two"), &told)).json());
    let streamed = serve.post(CHAT, &with(&say("two"), &json!({"stream": true})));
    let delta = |event: &Value| {
        event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    let two: String = streamed.events().iter().map(delta).collect();
    assert_eq!(two, expected);
    let pair = |role: &str, text: &str| (role.to_owned(), text.to_owned());
    let said = [pair("user", "one"), pair("assistant", &one), pair("user", "two")];
    assert_eq!(messages(&serve), [&said[..], &[pair("assistant", &two)]].concat());

    // Who sends answers too sends the whole conversation, and what was kept goes.
    let whole = json!({"messages": [user("x"), assistant("y"), user("z")]});
    let three = text_of(&serve.post(CHAT, &with(&say(""), &whole)).json());
    let said = [pair("user", "x"), pair("assistant", "y"), pair("user", "z")];
    assert_eq!(messages(&serve), [&said[..], &[pair("assistant", &three)]].concat());

    let exported = serve.get("/v1/sessions/birds").body;
    assert_eq!(serve.ask("PUT", "/v1/sessions/birds", &[], &exported).status, 400);
    assert_eq!(serve.ask("PUT", "/v1/sessions/more", &[], &exported).status, 200);
    assert_eq!(serve.ask("PUT", "/v1/sessions/odd", &[], "{}").status, 400);
    assert_eq!(serve.ask("DELETE", "/v1/sessions/birds", &[], "").status, 200);
    assert_eq!(serve.ask("DELETE", "/v1/sessions/birds", &[], "").status, 404);
    let list = serve.get("/v1/sessions").json();
    assert_eq!(
        (&list["data"][0]["id"], list["data"].as_array().unwrap().len()),
        (&json!("more"), 1)
    );
    assert_eq!(serve.get("/v1/sessions/more").body, exported);
}

#[test]
fn sessions_have_owners_and_bounds() {
    let dir = tempfile::TempDir::new().unwrap();
    let words = ["--session-dir", dir.path().to_str().unwrap(), "--api-key", "a", "--api-key", "b"];
    let serve = Serve::start(&words);
    let [a, b] = ["authorization: Bearer a", "authorization: Bearer b"];
    let body = say("a secret").to_string();
    assert_eq!(serve.ask("POST", CHAT, &[a], &body).status, 200);
    assert_eq!(serve.ask("GET", "/v1/sessions/birds", &[a], "").status, 200);
    for method in ["GET", "DELETE"] {
        assert_eq!(serve.ask(method, "/v1/sessions/birds", &[b], "").status, 404);
    }
    assert_eq!(serve.ask("GET", "/v1/sessions", &[b], "").json()["data"], json!([]));
    assert_eq!(serve.ask("GET", "/v1/sessions", &[], "").status, 401);
    for (more, status) in [
        (json!({"session_id": "../birds"}), 400),
        (json!({"session_id": "a/b"}), 400),
        (json!({"n": 2}), 400),
        (json!({"session_id": 7}), 400),
    ] {
        let body = with(&say("x"), &more).to_string();
        assert_eq!(serve.ask("POST", CHAT, &[a], &body).status, status, "{more}");
    }
    assert_eq!(serve.ask("GET", "/v1/sessions/..%2Fbirds", &[a], "").status, 400);

    let without = Serve::start(&[]);
    assert_eq!(without.get("/v1/sessions").status, 404);
    assert_eq!(without.post(CHAT, &say("x")).status, 200, "there it is a hint");
}
