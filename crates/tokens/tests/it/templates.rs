//! Chat templates as they come with models, and as they should not.

use nuthatch_tokens::{ChatTemplate, Message, RenderOptions, TemplateError};
use serde_json::json;

const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != \
    'system' %}{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + \
    message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if \
    add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn options() -> RenderOptions {
    RenderOptions {
        add_generation_prompt: true,
        bos_token: "<s>".into(),
        eos_token: "</s>".into(),
        ..RenderOptions::default()
    }
}

#[track_caller]
fn check(source: &str, expect: &str) {
    let messages = [Message::new("user", " Hi <you> "), Message::new("assistant", "Ho")];
    let text = ChatTemplate::new(source).unwrap().render(&messages, &options()).unwrap();
    assert_eq!(text, expect);
}

#[track_caller]
fn fail(source: &str) -> TemplateError {
    let messages = [Message::new("user", "Hi")];
    match ChatTemplate::new(source).and_then(|template| template.render(&messages, &options())) {
        Ok(text) => panic!("rendered {} bytes", text.len()),
        Err(error) => error,
    }
}

#[test]
fn chatml() {
    let template = ChatTemplate::new(CHATML).unwrap();
    let text = template.render(&[Message::new("user", "Hi")], &options()).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    let plain = RenderOptions { add_generation_prompt: false, ..options() };
    let text = template.render(&[Message::new("system", "Be long")], &plain).unwrap();
    assert_eq!(text, "<|im_start|>system\nBe long<|im_end|>\n");
}

#[test]
fn whitespace_is_trimmed_as_in_transformers() {
    check("{{ bos_token }}\n  {% if true %}\nx\n  {% endif %}\ny\n", "<s>\nx\ny");
    check("a {%- for m in messages %} {{ m.role }} {%- endfor %} b", "a user assistant b");
}

#[test]
fn python_methods_work() {
    check(
        "{{ messages[0].content.strip() }}|{{ messages[0]['content'] | trim }}",
        "Hi <you>|Hi <you>",
    );
    check("{{ 'abc'.startswith('ab') }} {{ 'a,b'.split(',')[-1] }} {{ 'x'.upper() }}", "True b X");
    check(
        "{% for k, v in {'a': 1, 'b': none}.items() %}{{ k }}={{ v }};{% endfor %}",
        "a=1;b=None;",
    );
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "2",
    );
    check(
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "Ho",
    );
    check(
        "{{ messages[::-1][0].role }} {{ tools is none }} {{ none is iterable }}",
        "assistant True False",
    );
}

#[test]
fn tojson_is_python_s() {
    check(
        "{{ {'b': [1, 2.0, none, true], 'a': '<é\"\\n'} | tojson }}",
        "{\"b\": [1, 2.0, null, true], \"a\": \"<é\\\"\\n\"}",
    );
    check(
        "{{ {'b': 1, 'a': []} | tojson(indent=2, sort_keys=true) }}",
        "{\n  \"a\": [],\n  \"b\": 1\n}",
    );
    check("{{ ['é😀'] | tojson(ensure_ascii=true) }}", "[\"\\u00e9\\ud83d\\ude00\"]");
    check("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", "[1,{\"a\":2}]");
}

#[test]
fn generation_tags_leave_the_text_between_them() {
    check("a\n{% generation %}\nb\n{%- endgeneration -%}\n c", "a\nbc");
}

#[test]
fn the_clock_is_the_caller_s() {
    let source =
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no{% endif %}";
    check(source, "no");
    let template = ChatTemplate::new(source).unwrap();
    let options = RenderOptions { now: Some(1_721_994_300), ..options() };
    assert_eq!(template.render(&[], &options).unwrap(), "26 Jul 2024");
}

#[test]
fn tools_and_variables_keep_their_order() {
    let source = "{{ tools[0] | tojson }}{% if enable_thinking %}T{% endif %}{{ messages[0].tool_calls[0].name }}";
    let mut options = options();
    options.tools = Some(vec![json!({"z": 1, "a": {"y": 2, "b": 3}})]);
    options.vars.insert("enable_thinking".into(), json!(true));
    let messages = [json!({"role": "assistant", "tool_calls": [{"name": "f"}]})];
    let text = ChatTemplate::new(source).unwrap().render_json(&messages, &options).unwrap();
    assert_eq!(text, "{\"z\": 1, \"a\": {\"y\": 2, \"b\": 3}}Tf");
}

#[test]
fn a_template_may_refuse() {
    let error = fail("{{ raise_exception('Roles must alternate') }}");
    assert_eq!(error.to_string(), "the chat template refuses the messages: Roles must alternate");
    let nested = "{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}";
    assert!(matches!(fail(nested), TemplateError::Raised { .. }));
}

#[test]
fn what_is_wrong_is_an_error_that_says_where() {
    assert!(matches!(fail("a\n{% if %}"), TemplateError::Syntax { line: 2, .. }));
    assert!(matches!(fail("a\n\n{{ messages.nope.nope }}"), TemplateError::Render { line: 3, .. }));
    assert!(matches!(fail("{{ nope() }}"), TemplateError::Render { .. }));
    assert!(matches!(fail("{% include 'x' %}"), TemplateError::Render { .. }));
    // The template library panics here.
    assert!(matches!(fail("{{ [][::-1] | list }}"), TemplateError::Render { .. }));
}

#[test]
fn endless_templates_end() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
    assert!(matches!(fail(nested), TemplateError::OutOfFuel { .. }));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(matches!(fail(recursive), TemplateError::Render { .. }));
    let verbose = "{% set x = 'x' * 1000000 %}{% for a in range(100) %}{{ x }}{% endfor %}";
    assert!(matches!(fail(verbose), TemplateError::OutputTooLong { .. }));
    let deep = format!("{}1{}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(matches!(fail(&format!("{{{{ {deep} }}}}")), TemplateError::Syntax { .. }));
    let long = " ".repeat(2 << 20);
    assert!(matches!(fail(&long), TemplateError::SourceTooLong { .. }));
}

#[test]
fn arguments_that_are_too_deep_are_refused() {
    let mut deep = json!(1);
    for _ in 0..500 {
        deep = json!([deep]);
    }
    let template = ChatTemplate::new("{{ messages | tojson }}").unwrap();
    let error = template.render_json(&[deep], &options()).unwrap_err();
    assert!(matches!(error, TemplateError::TooDeep { argument: "messages", .. }));
}
