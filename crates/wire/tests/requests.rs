//! What clients may send, what comes of it, and that no bytes at all do harm.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use nuthatch_types::{FinishReason, TokenId};
use nuthatch_wire::{
    ApiError, AssistantMessage, BatchAnswered, BatchLine, BatchOutput, BatchResponse, ChatChoice,
    ChatCompletion, ChatLogprobs, ChatRequest, CompletionRequest, DetokenizeRequest,
    EmbeddingsRequest, ErrorKind, Format, PromptInput, Request, RequestError, ResponsesRequest,
    TokenLogprob, TokenizeInput, TokenizeRequest, ToolChoice, TopLogprob, Usage, caps,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn chat(fields: &Value) -> Result<ChatRequest, RequestError> {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    ChatRequest::parse(body.to_string().as_bytes())
}

fn completion(prompt: &Value) -> Result<CompletionRequest, RequestError> {
    CompletionRequest::parse(json!({ "prompt": prompt }).to_string().as_bytes())
}

#[test]
fn every_field_is_read() {
    let request = chat(&json!({
        "model": "m", "n": 3, "max_tokens": 9, "max_completion_tokens": 7, "min_tokens": 2,
        "ignore_eos": true, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.5, "frequency_penalty": -0.5, "presence_penalty": 1,
        "logit_bias": {"17": -100, "3": 2.5}, "seed": -1, "stop": "end",
        "include_stop_str_in_output": true, "stop_token_ids": [4, 5],
        "skip_special_tokens": false, "logprobs": true, "top_logprobs": 5, "stream": true,
        "stream_options": {"include_usage": true}, "cache_salt": "s", "priority": -3,
        "user": "u", "something_else": {"deep": [1, 2, {"er": null}]},
        "response_format": {"type": "text"}, "tools": [],
    }));
    let options = request.unwrap().options;
    assert_eq!((options.model.as_deref(), options.n), (Some("m"), 3));
    assert_eq!((options.max_tokens, options.min_tokens), (Some(7), 2));
    assert!(options.ignore_eos && options.include_stop && !options.skip_special);
    assert_eq!(options.stop, ["end"]);
    assert_eq!(options.stop_tokens, [TokenId(4), TokenId(5)]);
    assert_eq!(options.logprobs, Some(5));
    assert!(options.stream && options.include_usage);
    assert_eq!((options.cache_salt.as_deref(), options.user.as_deref()), (Some("s"), Some("u")));
    assert_eq!((options.priority, options.urgency()), (-3, 131));
    let sampling = options.sampling.apply(nuthatch_types::Sampling::default());
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, 0, 0.9));
    assert_eq!((sampling.min_p, sampling.repetition_penalty), (0.1, 1.5));
    assert_eq!((sampling.frequency_penalty, sampling.presence_penalty), (-0.5, 1.0));
    assert_eq!(sampling.seed, u64::MAX);
    let mut bias = sampling.logit_bias;
    bias.sort_by_key(|&(token, _)| token);
    assert_eq!(bias, [(TokenId(3), 2.5), (TokenId(17), -100.0)]);
}

#[test]
fn absent_and_null_are_the_same() {
    let nulls = json!({
        "model": null, "n": null, "max_tokens": null, "temperature": null, "stop": null,
        "logprobs": null, "top_logprobs": null, "seed": null, "logit_bias": null, "tools": null,
        "cache_salt": null, "priority": null, "stream_options": null, "response_format": null,
    });
    let options = chat(&nulls).unwrap().options;
    assert_eq!(options, chat(&json!({})).unwrap().options);
    assert_eq!((options.n, options.max_tokens, options.urgency()), (1, None, 128));
    assert!(options.skip_special && !options.stream);
}

#[test]
fn priorities_are_vllms_upside_down() {
    for (priority, urgency) in [(0, 128), (1, 127), (-1, 129), (128, 0), (-127, 255)] {
        assert_eq!(chat(&json!({"priority": priority})).unwrap().options.urgency(), urgency);
    }
    assert_eq!(chat(&json!({"priority": i64::MAX})).unwrap().options.urgency(), 0);
    assert_eq!(chat(&json!({"priority": i64::MIN})).unwrap().options.urgency(), 255);
}

#[test]
fn messages_are_texts_or_parts() {
    let body = json!({"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": null},
        {"role": "user", "name": "x", "content": ""},
    ]});
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    let said: Vec<_> = request.messages.iter().map(|m| (&m.role[..], &m.content[..])).collect();
    let expect = [("system", "Be brief."), ("user", "one\ntwo"), ("assistant", ""), ("user", "")];
    assert_eq!(said, expect);
}

#[test]
fn prompts_are_texts_or_tokens_or_lists() {
    let text = |text: &str| PromptInput::Text(text.to_owned());
    let tokens = |ids: &[u32]| PromptInput::Tokens(ids.iter().copied().map(TokenId).collect());
    for (prompt, expect) in [
        (json!("Hi"), vec![text("Hi")]),
        (json!(["a", "b"]), vec![text("a"), text("b")]),
        (json!([1, 2]), vec![tokens(&[1, 2])]),
        (json!([[1], [2, 3]]), vec![tokens(&[1]), tokens(&[2, 3])]),
    ] {
        assert_eq!(completion(&prompt).unwrap().prompts, expect, "{prompt}");
    }
    for prompt in
        [json!([]), json!(""), json!([""]), json!([[]]), json!(7), json!([1, "a"]), json!([-1])]
    {
        assert_eq!(completion(&prompt).unwrap_err().param(), Some("prompt"), "{prompt}");
    }
}

#[test]
fn errors_name_the_parameter() {
    for (fields, message) in [
        (json!({"temperature": "hot"}), "temperature: invalid type: string \"hot\", expected f32"),
        (json!({"temperature": -1}), "temperature: -1 must be 0 to 100"),
        (json!({"top_p": 0}), "top_p: 0 must be above 0, at most 1"),
        (json!({"n": 0}), "n: 0 is out of range, it must be from 1 to 128"),
        (
            json!({"max_tokens": 0}),
            "max_tokens: 0 is out of range, it must be from 1 to 4294967295",
        ),
        (json!({"top_logprobs": 2}), "top_logprobs: needs logprobs to be true"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias: `x` is not the number of a token"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias: 101 must be -100 to 100"),
        (json!({"cache_salt": ""}), "cache_salt: is empty"),
        (json!({"messages": []}), "messages: has no message"),
        (json!({"messages": null}), "messages is missing"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages: a part of type `image_url` is not supported",
        ),
        (json!({"tools": [{}]}), "tools: a tool that is no function is not supported"),
        (json!({"tool_choice": "required"}), "tool_choice: there is no such tool"),
        (json!({"n": 3, "best_of": 2}), "best_of: 2 is less than n, which is 3"),
        (
            json!({"prompt_logprobs": 0}),
            "prompt_logprobs: probabilities of the prompt is not supported",
        ),
        (json!({"retention": {"ttl": -1}}), "retention: ttl must be 0 to 31536000 seconds"),
        (json!({"streaming": {"window": 0}}), "streaming: window must be at least 1"),
        (
            json!({"streaming": {"window": 64}, "use_beam_search": true}),
            "streaming: a search shares what this drops",
        ),
        (
            json!({"use_beam_search": true, "length_penalty": 99}),
            "length_penalty: 99 must be -10 to 10",
        ),
        (
            json!({"guided_regex": "a", "guided_choice": ["b"]}),
            "response_format: only one form can be asked for",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format: json_schema.schema is missing",
        ),
    ] {
        let error = chat(&fields).unwrap_err();
        assert_eq!(error.to_string(), message, "{fields}");
        let error = ApiError::from(error);
        assert_eq!(error.kind.status(), 400);
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["param"], message.split([':', ' ']).next().unwrap());
    }
    let error = ApiError::from(ChatRequest::parse(b"{\"messages\": [").unwrap_err());
    assert_eq!((error.param, error.code), (None, Some("json_parse_error")));
}

#[test]
fn lists_and_strings_have_caps() {
    let many = |n: usize| Value::from(vec![Value::from("x"); n]);
    assert!(chat(&json!({"stop": many(caps::STOPS)})).is_ok());
    assert!(chat(&json!({"stop": many(caps::STOPS + 1)})).is_err());
    assert!(chat(&json!({"stop": "x".repeat(caps::STOP_BYTES)})).is_ok());
    assert!(chat(&json!({"stop": "x".repeat(caps::STOP_BYTES + 1)})).is_err());
    assert!(chat(&json!({"model": "x".repeat(caps::NAME_BYTES + 1)})).is_err());
    assert!(chat(&json!({"n": caps::N + 1})).is_err());
    assert!(chat(&json!({"logprobs": true, "top_logprobs": caps::TOP_LOGPROBS + 1})).is_err());
    let message = json!({"role": "user", "content": ""});
    let messages = |n: usize| json!({"messages": vec![message.clone(); n]});
    assert!(chat(&messages(caps::MESSAGES)).is_ok());
    let error = chat(&messages(caps::MESSAGES + 1)).unwrap_err();
    assert_eq!(error.to_string(), format!("messages: more than {} entries", caps::MESSAGES));
    let biases = |n: u32| -> Value {
        json!({"logit_bias": (0..n).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>()})
    };
    assert!(chat(&biases(caps::LOGIT_BIASES as u32)).is_ok());
    assert!(chat(&biases(caps::LOGIT_BIASES as u32 + 1)).is_err());
    assert!(completion(&many(caps::PROMPTS)).is_ok());
    assert!(completion(&many(caps::PROMPTS + 1)).is_err());
    let body = json!({"prompt": many(caps::PROMPTS), "n": 5});
    let error = CompletionRequest::parse(body.to_string().as_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "prompt: 1280 answers, but at most 1024 are allowed");
    let long = vec![b' '; caps::BODY_BYTES + 1];
    assert!(matches!(ChatRequest::parse(&long), Err(RequestError::BodyTooLong { .. })));
}

#[test]
fn forms_are_asked_for_in_three_ways() {
    let schema = json!({"type": "object"});
    let wrapped = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let json_schema = Format::JsonSchema(schema.to_string());
    for (fields, expect) in [
        (json!({}), Format::Text),
        (json!({"response_format": {"type": "text"}}), Format::Text),
        (json!({"response_format": {"type": "json_object"}}), Format::JsonObject),
        (json!({ "response_format": wrapped }), json_schema.clone()),
        (json!({"structured_outputs": {"json": schema}}), json_schema.clone()),
        (json!({"guided_json": schema.to_string()}), json_schema),
        (json!({"structured_outputs": {"regex": "a+"}}), Format::Regex("a+".to_owned())),
        (json!({"guided_grammar": "start: \"a\""}), Format::Grammar("start: \"a\"".to_owned())),
        (json!({"guided_choice": ["a", "b"]}), Format::Choice(vec!["a".into(), "b".into()])),
    ] {
        assert_eq!(chat(&fields).unwrap().options.format, expect, "{fields}");
    }
    let long = "x".repeat(caps::SCHEMA_BYTES + 1);
    for fields in [
        json!({ "guided_regex": long }),
        json!({ "guided_json": long }),
        json!({"guided_json": {"x": long}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": long}}}}),
        json!({"guided_choice": vec!["x"; caps::ALTERNATIVES + 1]}),
        json!({"guided_choice": []}),
        json!({"response_format": "json"}),
    ] {
        assert!(chat(&fields).is_err());
    }
}

#[test]
fn tools_and_their_calls_are_read() {
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    let tools = json!([{"type": "function", "function": function}]);
    let called = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "7"});
    let request = chat(&json!({"tools": tools, "messages": [called, result]})).unwrap();
    assert_eq!((request.tools[0].name.as_str(), request.tool_choice), ("f", ToolChoice::Auto));
    assert_eq!(request.messages[0].tool_calls[0].arguments, "{}");
    assert_eq!(request.messages[1].tool_call_id.as_deref(), Some("c"));
    for (choice, expect) in [
        (json!("none"), ToolChoice::None),
        (json!("auto"), ToolChoice::Auto),
        (json!("required"), ToolChoice::Required),
        (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Named("f".into())),
        (json!({"type": "function", "name": "f"}), ToolChoice::Named("f".into())),
    ] {
        let request = chat(&json!({"tools": tools, "tool_choice": choice}));
        assert_eq!(request.unwrap().tool_choice, expect);
    }
    let other = json!({"type": "function", "function": {"name": "g"}});
    assert!(chat(&json!({"tools": tools, "tool_choice": other})).is_err());
    let many = vec![tools[0].clone(); caps::TOOLS + 1];
    assert!(chat(&json!({ "tools": many })).is_err());
}

#[test]
fn responses_are_chats_in_other_words() {
    let parse = |body: &Value| ResponsesRequest::parse(body.to_string().as_bytes());
    let request = parse(&json!({
        "input": [
            {"role": "developer", "content": "rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ],
        "instructions": "brief", "max_output_tokens": 9, "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": true}],
    }))
    .unwrap();
    let roles: Vec<&str> = request.chat.messages.iter().map(|m| m.role.as_str()).collect();
    assert_eq!(roles, ["system", "system", "user", "assistant", "tool"]);
    assert_eq!(request.chat.messages[2].content, "Hi");
    assert_eq!(request.chat.options.max_tokens, Some(9));
    assert!(matches!(request.chat.options.format, Format::JsonSchema(_)));
    assert_eq!(request.chat.tools[0].json["function"]["name"], "f");
    let text = parse(&json!({"input": "Hi"})).unwrap();
    assert_eq!(text.chat.messages.len(), 1);
    for body in [
        json!({}),
        json!({"input": []}),
        json!({"input": "x", "previous_response_id": "y"}),
        json!({"input": "x", "n": 2}),
        json!({"input": [{"type": "item_reference", "id": "x"}]}),
    ] {
        assert!(parse(&body).is_err(), "{body}");
    }
}

#[test]
fn what_becomes_tokens_is_a_text_or_a_chat() {
    let parse = |body: &Value| TokenizeRequest::parse(body.to_string().as_bytes());
    let text =
        |prompt: &str, add_special| TokenizeInput::Text { prompt: prompt.to_owned(), add_special };
    assert_eq!(parse(&json!({"prompt": "x"})).unwrap().input, text("x", true));
    let llama = parse(&json!({"content": "x", "add_special": false})).unwrap();
    assert_eq!(llama.input, text("x", false));
    let chat = parse(&json!({"messages": [{"role": "user", "content": "x"}]})).unwrap();
    assert!(matches!(chat.input, TokenizeInput::Chat(_)));
    assert!(parse(&json!({})).is_err());
    assert!(DetokenizeRequest::parse(b"{\"tokens\": [-1]}").is_err());
}

#[test]
fn depth_costs_nothing() {
    for n in [10, 200, 100_000] {
        let deep = format!("{}{}", "[".repeat(n), "]".repeat(n));
        let known = format!(r#"{{"messages": {deep}}}"#);
        assert!(ChatRequest::parse(known.as_bytes()).is_err(), "{n}");
        let unknown = format!(
            r#"{{"extra": {deep}, "messages": [{{"role": "user", "content": "", "x": {deep}}}]}}"#
        );
        // What is not known is skipped without recursion.
        assert!(ChatRequest::parse(unknown.as_bytes()).is_ok(), "{n}");
        assert!(CompletionRequest::parse(format!(r#"{{"prompt": {deep}}}"#).as_bytes()).is_err());
        let tools = format!(r#"{{"tools": {deep}, "messages": [{{"role": "user"}}]}}"#);
        assert!(ChatRequest::parse(tools.as_bytes()).is_err(), "{n}");
    }
}

#[test]
fn batch_lines_are_requests_with_names() {
    let line = |line: &Value| {
        let text = line.to_string();
        let parsed = BatchLine::parse(text.as_bytes())?;
        Ok::<_, RequestError>((parsed.custom_id()?, parsed.request()?))
    };
    let body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let good = json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
                      "body": body});
    let (id, request) = line(&good).unwrap();
    assert_eq!(id, "a");
    assert!(matches!(request, Request::Chat(_)));
    for (key, value, param) in [
        ("custom_id", json!(null), "custom_id"),
        ("custom_id", json!(""), "custom_id"),
        ("custom_id", json!(7), "custom_id"),
        ("method", json!("GET"), "method"),
        ("url", json!("/v1/embeddings"), "url"),
        ("body", json!(null), "body"),
        ("body", json!({}), "messages"),
    ] {
        let mut bad = good.clone();
        bad[key] = value;
        assert_eq!(line(&bad).unwrap_err().param(), Some(param), "{bad}");
    }
    assert!(BatchLine::parse(b"[]").is_err());
}

#[test]
fn answers_have_openais_form() {
    let top = TopLogprob { token: "Hi".to_owned(), logprob: -0.5, bytes: b"Hi".to_vec() };
    let token = TokenLogprob { token: top.clone(), top_logprobs: vec![top] };
    let completion = ChatCompletion {
        id: "chatcmpl-1".to_owned(),
        object: ChatCompletion::OBJECT,
        created: 7,
        model: "m".to_owned(),
        choices: vec![ChatChoice {
            index: 0,
            message: AssistantMessage::new("Hi".to_owned()),
            logprobs: Some(ChatLogprobs { content: vec![token] }),
            finish_reason: FinishReason::Length.into(),
        }],
        usage: Usage::new(10, 4, 3),
    };
    let response = BatchResponse { status_code: 200, request_id: "r".to_owned(), body: completion };
    let output = BatchOutput {
        id: "batch_req_1".to_owned(),
        custom_id: Some("a"),
        response: Some(response),
        error: None,
    };
    let text = serde_json::to_string(&output).unwrap();
    let expect = json!({
        "id": "batch_req_1", "custom_id": "a", "error": null,
        "response": {"status_code": 200, "request_id": "r", "body": {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 7, "model": "m",
            "choices": [{
                "index": 0, "finish_reason": "length",
                "message": {"role": "assistant", "content": "Hi", "refusal": null},
                "logprobs": {"content": [{
                    "token": "Hi", "logprob": -0.5, "bytes": [72, 105],
                    "top_logprobs": [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}],
                }]},
            }],
            "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13,
                      "prompt_tokens_details": {"cached_tokens": 4}},
        }},
    });
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expect);
    let answered = BatchAnswered::parse(text.as_bytes()).unwrap();
    assert_eq!((answered.id.as_str(), answered.custom_id.as_deref()), ("batch_req_1", Some("a")));
}

#[test]
fn a_full_context_is_told_in_the_words_that_programs_look_for() {
    let error = ApiError::context_length(8192, 8000, Some(500));
    assert_eq!(
        (error.kind, error.code),
        (ErrorKind::InvalidRequest, Some("context_length_exceeded"))
    );
    assert!(error.message.starts_with("This model's maximum context length is 8192 tokens. "));
    assert!(error.message.contains("for a total of 8500 tokens"));
    assert!(ApiError::context_length(10, 10, None).message.contains("10 input tokens"));
}

/// Everything that reads bytes from a client. What is accepted is within the caps.
fn read_all(bytes: &[u8]) {
    if let Ok(request) = ChatRequest::parse(bytes) {
        let n = request.messages.len();
        assert!((1..=caps::MESSAGES).contains(&n), "{n} messages");
        check(&Request::Chat(request));
    }
    if let Ok(request) = CompletionRequest::parse(bytes) {
        assert!(!request.prompts.is_empty());
        check(&Request::Completion(request));
    }
    if let Ok(line) = BatchLine::parse(bytes) {
        let _ = line.custom_id();
        let _ = line.request();
    }
    let _ = BatchAnswered::parse(bytes);
    if let Ok(request) = ResponsesRequest::parse(bytes) {
        assert!((1..=caps::MESSAGES + 1).contains(&request.chat.messages.len()));
        check(&Request::Chat(request.chat));
    }
    if let Ok(request) = DetokenizeRequest::parse(bytes) {
        assert!(request.tokens.len() <= caps::PROMPT_TOKENS);
    }
    let _ = TokenizeRequest::parse(bytes);
    if let Ok(request) = EmbeddingsRequest::parse(bytes) {
        assert!((1..=caps::INPUTS).contains(&request.inputs.len()));
    }
}

fn check(request: &Request) {
    let options = request.options();
    let sampling = options.sampling.apply(nuthatch_types::Sampling::default());
    sampling.validate().unwrap();
    assert!((1..=caps::N).contains(&options.n));
    assert!((options.n..=caps::N).contains(&options.best_of));
    if let Request::Chat(chat) = request {
        assert!(chat.tools.len() <= caps::TOOLS);
    }
    assert!(options.max_tokens != Some(0) && options.stop.len() <= caps::STOPS);
    assert!(options.logprobs.is_none_or(|n| n <= caps::TOP_LOGPROBS));
}

const WHOLE: &str = r#"{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "\u00e9"}]}],
    "prompt": [[1, 2], [3]], "temperature": 0.7, "top_k": 40, "seed": 18446744073709551615,
    "logit_bias": {"5": -1.5}, "stop": ["a", "b"], "n": 2, "logprobs": 3, "max_tokens": 16,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "input": [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}],
    "retention": {"priority": 3, "ttl": 1.5}, "best_of": 2, "tokens": [1, 2],
    "streaming": {"window": 64, "sinks": 2},
    "body": {"messages": [{"role": "user", "content": "x"}], "priority": -2}}"#;

proptest! {
    #[test]
    fn any_bytes_are_a_request_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        read_all(&bytes);
    }

    #[test]
    fn a_damaged_request_is_a_request_or_an_error(
        edits in prop::collection::vec((0..WHOLE.len(), any::<u8>(), 0..3u8), 1..6),
    ) {
        let mut bytes = WHOLE.as_bytes().to_vec();
        for (at, byte, kind) in edits {
            let at = at.min(bytes.len().saturating_sub(1));
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => bytes.truncate(at.max(1)),
            }
        }
        read_all(&bytes);
    }

    #[test]
    fn any_value_in_any_field_is_accepted_or_refused(
        key in prop::sample::select(vec![
            "model", "n", "max_tokens", "temperature", "top_k", "seed", "stop", "logit_bias",
            "logprobs", "top_logprobs", "priority", "cache_salt", "messages", "prompt",
            "stop_token_ids", "stream_options", "response_format", "min_tokens", "user", "body",
            "tools", "tool_choice", "structured_outputs", "guided_json", "guided_choice", "input",
            "retention", "best_of", "use_beam_search", "early_stopping", "echo", "text", "tokens",
            "session_id", "streaming", "chat_template_kwargs", "instructions", "add_special_tokens", "max_output_tokens",
        ]),
        value in value(),
    ) {
        let mut whole: Value = serde_json::from_str(WHOLE).unwrap();
        whole[key] = value;
        read_all(whole.to_string().as_bytes());
    }
}

/// Any JSON.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        Just(json!(1e300)),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z0-9]{0,3}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<Value>()),
        ]
    })
}
