//! The two kinds of request: a conversation to answer, and texts to continue.

use nuthatch_types::TokenId;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::fields::{List, Raw, check_len, field, kind_of, number, object};
use crate::options::RawOptions;
use crate::tools::{self, RawToolCall, Tool, ToolCall, ToolChoice};
use crate::{Format, Options, RequestError, caps};

/// A request of either kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// `POST /v1/chat/completions`
    Chat(ChatRequest),
    /// `POST /v1/completions`
    Completion(CompletionRequest),
}

impl Request {
    /// What both kinds say besides their prompt.
    pub fn options(&self) -> &Options {
        match self {
            Request::Chat(chat) => &chat.options,
            Request::Completion(completion) => &completion.options,
        }
    }
}

/// A conversation to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The conversation, at least one message.
    pub messages: Vec<ChatMessage>,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may, or must.
    pub tool_choice: ToolChoice,
    /// Further variables for the model's chat template.
    pub template_vars: Map<String, Value>,
    /// Everything else.
    pub options: Options,
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: String,
    /// What is said; parts are joined by newlines.
    pub content: String,
    /// Tools that the model called with this message.
    pub tool_calls: Vec<ToolCall>,
    /// The call that this message is the result of.
    pub tool_call_id: Option<String>,
    /// Who speaks, by name, or the tool that gave this result.
    pub name: Option<String>,
}

/// Texts to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The texts, at least one.
    pub prompts: Vec<PromptInput>,
    /// Whether an answer begins with its prompt.
    pub echo: bool,
    /// Everything else.
    pub options: Options,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptInput {
    /// As text.
    Text(String),
    /// As tokens, at least one.
    Tokens(Vec<TokenId>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawChat<'a> {
    #[serde(borrow)]
    messages: Raw<'a>,
    #[serde(borrow)]
    tools: Raw<'a>,
    #[serde(borrow)]
    tool_choice: Raw<'a>,
    #[serde(borrow)]
    chat_template_kwargs: Raw<'a>,
}

/// A text or parts of one, as they come.
pub(crate) type RawContent = Option<Box<RawValue>>;

#[derive(Debug, Deserialize)]
struct RawMessage {
    role: String,
    #[serde(default)]
    content: RawContent,
    #[serde(default)]
    tool_calls: Option<List<RawToolCall, { caps::TOOL_CALLS }>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RawPart {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawCompletion<'a> {
    #[serde(borrow)]
    prompt: Raw<'a>,
    #[serde(borrow)]
    echo: Raw<'a>,
    #[serde(borrow)]
    suffix: Raw<'a>,
}

impl ChatRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawChat<'_> = object(body)?;
        let raw_options: RawOptions<'_> = object(body)?;
        let messages = messages(raw.messages)?;
        let tools = tools::tools(raw.tools)?;
        let tool_choice = tools::choice(raw.tool_choice, &tools)?;
        let mut options = raw_options.read(1)?;
        options.format = Format::parse(body)?;
        if options.format != Format::Text && tool_choice.is_forced() {
            let detail = "a call that must be made leaves no room for another form";
            return Err(RequestError::invalid("response_format", detail));
        }
        let wants = field(raw_options.logprobs, "logprobs")?.unwrap_or(false);
        let top = number(raw_options.top_logprobs, "top_logprobs", 0..=caps::TOP_LOGPROBS)?;
        if top.is_some() && !wants {
            let detail = "needs logprobs to be true";
            return Err(RequestError::invalid("top_logprobs", detail));
        }
        options.logprobs = wants.then(|| top.unwrap_or(0));
        let template_vars = template_vars(raw.chat_template_kwargs)?;
        Ok(ChatRequest { messages, tools, tool_choice, template_vars, options })
    }
}

/// Further variables of a template.
pub(crate) fn template_vars(raw: Raw<'_>) -> Result<Map<String, Value>, RequestError> {
    const PARAM: &str = "chat_template_kwargs";
    if let Some(raw) = raw {
        check_len(raw.get(), caps::SCHEMA_BYTES, PARAM)?;
    }
    Ok(field(raw, PARAM)?.unwrap_or_default())
}

fn messages(raw: Raw<'_>) -> Result<Vec<ChatMessage>, RequestError> {
    const PARAM: &str = "messages";
    let list: Option<List<RawMessage, { caps::MESSAGES }>> = field(raw, PARAM)?;
    let list = list.ok_or(RequestError::Missing { param: PARAM })?.0;
    if list.is_empty() {
        return Err(RequestError::invalid(PARAM, "has no message"));
    }
    list.into_iter().map(message).collect()
}

fn message(raw: RawMessage) -> Result<ChatMessage, RequestError> {
    const PARAM: &str = "messages";
    check_len(&raw.role, caps::ROLE_BYTES, PARAM)?;
    for name in raw.name.iter().chain(&raw.tool_call_id) {
        check_len(name, caps::NAME_BYTES, PARAM)?;
    }
    let calls = raw.tool_calls.map_or_else(Vec::new, |calls| calls.0);
    let tool_calls = calls.into_iter().map(|call| call.read(PARAM)).collect::<Result<_, _>>()?;
    let content = content(raw.content.as_deref(), PARAM)?;
    let (role, tool_call_id, name) = (raw.role, raw.tool_call_id, raw.name);
    Ok(ChatMessage { role, content, tool_calls, tool_call_id, name })
}

/// A text, or parts of one, joined by newlines.
pub(crate) fn content(raw: Raw<'_>, param: &'static str) -> Result<String, RequestError> {
    match raw {
        Some(raw) if kind_of(raw) == b'[' => {
            let parts: Option<List<RawPart, { caps::PARTS }>> = field(Some(raw), param)?;
            let parts = parts.map_or_else(Vec::new, |parts| parts.0);
            Ok(parts.into_iter().map(part).collect::<Result<Vec<String>, _>>()?.join("\n"))
        }
        raw => Ok(field(raw, param)?.unwrap_or_default()),
    }
}

fn part(raw: RawPart) -> Result<String, RequestError> {
    match (raw.r#type.as_str(), raw.text) {
        ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
        (kind, _) => {
            let kind: String = kind.chars().take(32).collect();
            Err(unsupported("messages", format!("a part of type `{kind}`")))
        }
    }
}

impl CompletionRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawCompletion<'_> = object(body)?;
        let raw_options: RawOptions<'_> = object(body)?;
        let prompts = prompts::<{ caps::PROMPTS }>(raw.prompt, "prompt")?;
        let echo = field(raw.echo, "echo")?.unwrap_or(false);
        if field::<String>(raw.suffix, "suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(unsupported("suffix", "filling in"));
        }
        // A prompt that is only repeated needs no answer.
        let mut options = raw_options.read(u32::from(!echo))?;
        options.format = Format::parse(body)?;
        options.logprobs = number(raw_options.logprobs, "logprobs", 0..=caps::TOP_LOGPROBS)?;
        let n_choices = prompts.len() * options.best_of as usize;
        if n_choices > caps::CHOICES {
            let detail = format!("{n_choices} answers, but at most {} are allowed", caps::CHOICES);
            return Err(RequestError::invalid("prompt", detail));
        }
        Ok(CompletionRequest { prompts, echo, options })
    }
}

/// A text, tokens, or a list of either.
pub(crate) fn prompts<const MAX: usize>(
    raw: Raw<'_>,
    param: &'static str,
) -> Result<Vec<PromptInput>, RequestError> {
    type Tokens = List<u32, { caps::PROMPT_TOKENS }>;
    let tokens = |ids: Tokens| PromptInput::Tokens(ids.0.into_iter().map(TokenId).collect());
    let value = raw.ok_or(RequestError::Missing { param })?;
    let inner = value.get().trim_start().strip_prefix('[').map(str::trim_start);
    let prompts = match inner.map(|inner| inner.bytes().next().unwrap_or(b' ')) {
        None => field(raw, param)?.map(PromptInput::Text).into_iter().collect(),
        Some(b'"') => {
            let texts: Option<List<String, MAX>> = field(raw, param)?;
            texts.map_or_else(Vec::new, |t| t.0.into_iter().map(PromptInput::Text).collect())
        }
        Some(b'[') => {
            let lists: Option<List<Tokens, MAX>> = field(raw, param)?;
            lists.map_or_else(Vec::new, |lists| lists.0.into_iter().map(tokens).collect())
        }
        Some(_) => field(raw, param)?.map(tokens).into_iter().collect(),
    };
    let is_empty = |prompt: &PromptInput| match prompt {
        PromptInput::Text(text) => text.is_empty(),
        PromptInput::Tokens(tokens) => tokens.is_empty(),
    };
    if prompts.is_empty() || prompts.iter().any(is_empty) {
        return Err(RequestError::invalid(param, "is empty"));
    }
    Ok(prompts)
}

fn unsupported(param: &'static str, what: impl Into<String>) -> RequestError {
    RequestError::Unsupported { param, what: what.into() }
}
