//! `POST /v1/responses`: a conversation in the words of OpenAI's newer API, without memory on our side.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::fields::{List, Raw, check_len, field, kind_of, name, number, object};
use crate::options::RawOptions;
use crate::request::{RawContent, content, template_vars};
use crate::tools::{self, ToolCall};
use crate::{ChatMessage, ChatRequest, Format, RequestError, caps};

/// A conversation to answer, read from the newer API's words.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponsesRequest {
    /// The same in the older one's.
    pub chat: ChatRequest,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawResponses<'a> {
    #[serde(borrow)]
    input: Raw<'a>,
    #[serde(borrow)]
    instructions: Raw<'a>,
    #[serde(borrow)]
    max_output_tokens: Raw<'a>,
    #[serde(borrow)]
    previous_response_id: Raw<'a>,
    #[serde(borrow)]
    background: Raw<'a>,
    #[serde(borrow)]
    tools: Raw<'a>,
    #[serde(borrow)]
    tool_choice: Raw<'a>,
    #[serde(borrow)]
    chat_template_kwargs: Raw<'a>,
    #[serde(borrow)]
    text: Raw<'a>,
}

#[derive(Debug, Deserialize)]
struct RawItem {
    #[serde(default)]
    r#type: Option<String>,
    #[serde(default)]
    role: Option<String>,
    #[serde(default)]
    content: RawContent,
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<String>,
    #[serde(default)]
    output: RawContent,
}

impl ResponsesRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawResponses<'_> = object(body)?;
        let raw_options: RawOptions<'_> = object(body)?;
        if name(raw.previous_response_id, "previous_response_id")?.is_some() {
            return Err(unsupported("previous_response_id", "remembering a response"));
        }
        if field(raw.background, "background")?.unwrap_or(false) {
            return Err(unsupported("background", "answering later"));
        }
        let instructions: Option<String> = field(raw.instructions, "instructions")?;
        let system = instructions.iter().map(|text| message("system", text.clone()));
        let mut messages: Vec<ChatMessage> = system.collect();
        messages.extend(input(raw.input)?);
        let tools = tools::tools(raw.tools)?;
        let tool_choice = tools::choice(raw.tool_choice, &tools)?;
        let mut options = raw_options.read(1)?;
        options.format = format(raw.text)?;
        if options.format == Format::Text {
            options.format = Format::parse(body)?;
        }
        if options.n != 1 || options.best_of != 1 {
            return Err(RequestError::invalid("n", "a response has one answer"));
        }
        let max_output = number(raw.max_output_tokens, "max_output_tokens", 1..=u32::MAX)?;
        options.max_tokens = max_output.or(options.max_tokens);
        let template_vars = template_vars(raw.chat_template_kwargs)?;
        let chat = ChatRequest { messages, tools, tool_choice, template_vars, options };
        Ok(ResponsesRequest { chat })
    }
}

/// A text, or a list of messages, calls and their results.
fn input(raw: Raw<'_>) -> Result<Vec<ChatMessage>, RequestError> {
    const PARAM: &str = "input";
    let value = raw.ok_or(RequestError::Missing { param: PARAM })?;
    if kind_of(value) == b'"' {
        let text: String = field(raw, PARAM)?.unwrap_or_default();
        return Ok(vec![message("user", text)]);
    }
    let items: Option<List<RawItem, { caps::MESSAGES }>> = field(raw, PARAM)?;
    let items = items.map_or_else(Vec::new, |items| items.0);
    if items.is_empty() {
        return Err(RequestError::invalid(PARAM, "has no message"));
    }
    items.into_iter().map(item).collect()
}

fn item(raw: RawItem) -> Result<ChatMessage, RequestError> {
    const PARAM: &str = "input";
    for name in [&raw.role, &raw.call_id, &raw.name].into_iter().flatten() {
        check_len(name, caps::NAME_BYTES, PARAM)?;
    }
    match raw.r#type.as_deref().unwrap_or("message") {
        "message" => {
            let role = raw.role.ok_or_else(|| RequestError::invalid(PARAM, "has no role"))?;
            // The newer API's name for who makes the rules.
            let role = if role == "developer" { "system".to_owned() } else { role };
            Ok(message(&role, content(raw.content.as_deref(), PARAM)?))
        }
        "function_call" => {
            let (id, name) = (raw.call_id.unwrap_or_default(), raw.name.unwrap_or_default());
            let arguments = raw.arguments.unwrap_or_default();
            check_len(&arguments, caps::SCHEMA_BYTES, PARAM)?;
            let tool_calls = vec![ToolCall { id, name, arguments }];
            Ok(ChatMessage { tool_calls, ..message("assistant", String::new()) })
        }
        "function_call_output" => {
            let output = content(raw.output.as_deref(), PARAM)?;
            Ok(ChatMessage { tool_call_id: raw.call_id, ..message("tool", output) })
        }
        other => {
            let other: String = other.chars().take(32).collect();
            Err(unsupported(PARAM, &format!("an item of type `{other}`")))
        }
    }
}

/// `text.format`, whose schema lies beside its type.
fn format(raw: Raw<'_>) -> Result<Format, RequestError> {
    const PARAM: &str = "text";
    #[derive(Deserialize)]
    struct RawText {
        #[serde(default)]
        format: Option<RawFormat>,
    }
    #[derive(Deserialize)]
    struct RawFormat {
        r#type: String,
        #[serde(default)]
        schema: Option<Box<RawValue>>,
    }
    let text: Option<RawText> = field(raw, PARAM)?;
    let Some(format) = text.and_then(|text| text.format) else { return Ok(Format::Text) };
    match (format.r#type.as_str(), format.schema) {
        ("text", _) => Ok(Format::Text),
        ("json_object", _) => Ok(Format::JsonObject),
        ("json_schema", Some(schema)) => {
            check_len(schema.get(), caps::SCHEMA_BYTES, PARAM)?;
            Ok(Format::JsonSchema(schema.get().to_owned()))
        }
        ("json_schema", None) => Err(RequestError::invalid(PARAM, "format.schema is missing")),
        (other, _) => {
            let other: String = other.chars().take(32).collect();
            Err(unsupported(PARAM, &format!("`{other}`")))
        }
    }
}

fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() }
}

fn unsupported(param: &'static str, what: &str) -> RequestError {
    RequestError::Unsupported { param, what: what.to_owned() }
}

/// A tool as chat templates take it: the newer API has a function's fields beside its type.
pub(crate) fn nested_tool(json: Value) -> Value {
    if json.get("function").is_some() {
        return json;
    }
    let mut function = json;
    if let Some(fields) = function.as_object_mut() {
        fields.remove("type");
        fields.remove("strict");
    }
    serde_json::json!({ "type": "function", "function": function })
}
