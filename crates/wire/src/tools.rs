//! Tools that a model may call, and its calls.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fields::{List, Raw, check_len, field, kind_of};
use crate::responses::nested_tool;
use crate::{RequestError, caps};

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What its arguments are, as a JSON schema.
    pub parameters: Option<Value>,
    /// All that the client says of it, as a chat template takes it.
    pub json: Value,
}

/// Whether the model may call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// It does not know of them.
    None,
    /// If it likes to.
    #[default]
    Auto,
    /// It calls one of them.
    Required,
    /// It calls this one.
    Named(String),
}

impl ToolChoice {
    /// Whether a call must be made.
    pub fn is_forced(&self) -> bool {
        matches!(self, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// One call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// By which its result is recognised.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments, as JSON.
    pub arguments: String,
}

impl Serialize for ToolCall {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Function<'a> {
            name: &'a str,
            arguments: &'a str,
        }
        #[derive(Serialize)]
        struct Call<'a> {
            id: &'a str,
            r#type: &'static str,
            function: Function<'a>,
        }
        let function = Function { name: &self.name, arguments: &self.arguments };
        Call { id: &self.id, r#type: "function", function }.serialize(serializer)
    }
}

/// A call in a message, as it comes.
#[derive(Debug, Deserialize)]
pub(crate) struct RawToolCall {
    #[serde(default)]
    id: Option<String>,
    function: RawFunction,
}

#[derive(Debug, Deserialize)]
struct RawFunction {
    name: String,
    #[serde(default)]
    arguments: Option<String>,
}

impl RawToolCall {
    pub(crate) fn read(self, param: &'static str) -> Result<ToolCall, RequestError> {
        let RawFunction { name, arguments } = self.function;
        let (id, arguments) = (self.id.unwrap_or_default(), arguments.unwrap_or_default());
        check_len(&id, caps::NAME_BYTES, param)?;
        check_len(&name, caps::NAME_BYTES, param)?;
        check_len(&arguments, caps::SCHEMA_BYTES, param)?;
        Ok(ToolCall { id, name, arguments })
    }
}

/// Reads the tools of a request.
pub(crate) fn tools(raw: Raw<'_>) -> Result<Vec<Tool>, RequestError> {
    const PARAM: &str = "tools";
    if let Some(raw) = raw {
        check_len(raw.get(), caps::SCHEMA_BYTES, PARAM)?;
    }
    let list: Option<List<Value, { caps::TOOLS }>> = field(raw, PARAM)?;
    let tool = |json: Value| {
        if json["type"] != "function" {
            let what = "a tool that is no function".to_owned();
            return Err(RequestError::Unsupported { param: PARAM, what });
        }
        // The Responses API has the function's fields beside its type.
        let function = json.get("function").unwrap_or(&json);
        let name = function["name"].as_str().filter(|name| !name.is_empty());
        let detail = "a function without a name";
        let name = name.ok_or_else(|| RequestError::invalid(PARAM, detail))?.to_owned();
        check_len(&name, caps::NAME_BYTES, PARAM)?;
        let parameters = function.get("parameters").filter(|p| !p.is_null()).cloned();
        Ok(Tool { name, parameters, json: nested_tool(json) })
    };
    list.map_or_else(Vec::new, |list| list.0).into_iter().map(tool).collect()
}

/// Reads whether tools may be called.
pub(crate) fn choice(raw: Raw<'_>, tools: &[Tool]) -> Result<ToolChoice, RequestError> {
    const PARAM: &str = "tool_choice";
    let default = if tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto };
    let Some(value) = raw else { return Ok(default) };
    let choice = if kind_of(value) == b'"' {
        match field::<String>(raw, PARAM)?.as_deref() {
            Some("none") => ToolChoice::None,
            Some("auto") => default,
            Some("required") => ToolChoice::Required,
            _ => return Err(RequestError::invalid(PARAM, "must be none, auto or required")),
        }
    } else {
        check_len(value.get(), caps::SCHEMA_BYTES, PARAM)?;
        let json: Value = field(raw, PARAM)?.unwrap_or_default();
        let name = json["function"]["name"].as_str().or_else(|| json["name"].as_str());
        let name = name.ok_or_else(|| RequestError::invalid(PARAM, "names no function"))?;
        ToolChoice::Named(name.to_owned())
    };
    let is_there = match &choice {
        ToolChoice::None | ToolChoice::Auto => true,
        ToolChoice::Required => !tools.is_empty(),
        ToolChoice::Named(name) => tools.iter().any(|tool| tool.name == *name),
    };
    if !is_there {
        return Err(RequestError::invalid(PARAM, "there is no such tool"));
    }
    Ok(choice)
}
