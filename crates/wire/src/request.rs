//! The two kinds of request: a conversation to answer, and texts to continue.

use nuthatch_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::fields::{List, Raw, check_len, field, kind_of, number, object};
use crate::options::RawOptions;
use crate::{Options, RequestError, caps};

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
    /// Everything else.
    pub options: Options,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: String,
    /// What is said; parts are joined by newlines.
    pub content: String,
}

/// Texts to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The texts, at least one.
    pub prompts: Vec<PromptInput>,
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
}

#[derive(Debug, Deserialize)]
struct RawMessage {
    role: String,
    #[serde(default)]
    content: Option<Box<RawValue>>,
    #[serde(default)]
    tool_calls: Option<List<IgnoredAny, { caps::PARTS }>>,
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
    #[serde(borrow)]
    best_of: Raw<'a>,
}

impl ChatRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawChat<'_> = object(body)?;
        let raw_options: RawOptions<'_> = object(body)?;
        let messages = messages(raw.messages)?;
        let tools: Option<List<IgnoredAny, { caps::PARTS }>> = field(raw.tools, "tools")?;
        if tools.is_some_and(|tools| !tools.0.is_empty()) {
            return Err(unsupported("tools", "calling tools"));
        }
        let mut options = raw_options.read()?;
        let wants = field(raw_options.logprobs, "logprobs")?.unwrap_or(false);
        let top = number(raw_options.top_logprobs, "top_logprobs", 0..=caps::TOP_LOGPROBS)?;
        if top.is_some() && !wants {
            let detail = "needs logprobs to be true";
            return Err(RequestError::invalid("top_logprobs", detail));
        }
        options.logprobs = wants.then(|| top.unwrap_or(0));
        Ok(ChatRequest { messages, options })
    }
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
    if raw.tool_calls.is_some_and(|calls| !calls.0.is_empty()) {
        return Err(unsupported(PARAM, "a message with tool calls"));
    }
    let content = match raw.content.as_deref() {
        None => String::new(),
        Some(raw) if kind_of(raw) == b'[' => {
            let parts: Option<List<RawPart, { caps::PARTS }>> = field(Some(raw), PARAM)?;
            let parts = parts.map_or_else(Vec::new, |parts| parts.0);
            parts.into_iter().map(part).collect::<Result<Vec<String>, _>>()?.join("\n")
        }
        Some(raw) => field(Some(raw), PARAM)?.unwrap_or_default(),
    };
    Ok(ChatMessage { role: raw.role, content })
}

fn part(raw: RawPart) -> Result<String, RequestError> {
    match (raw.r#type.as_str(), raw.text) {
        ("text", Some(text)) => Ok(text),
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
        let prompts = prompts(raw.prompt)?;
        if field(raw.echo, "echo")?.unwrap_or(false) {
            return Err(unsupported("echo", "repeating the prompt"));
        }
        if field::<String>(raw.suffix, "suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(unsupported("suffix", "filling in"));
        }
        let mut options = raw_options.read()?;
        if number(raw.best_of, "best_of", 1..=caps::N)?.is_some_and(|best| best != options.n) {
            return Err(unsupported("best_of", "choosing among more answers than n"));
        }
        options.logprobs = number(raw_options.logprobs, "logprobs", 0..=caps::TOP_LOGPROBS)?;
        let n_choices = prompts.len() * options.n as usize;
        if n_choices > caps::CHOICES {
            let detail = format!("{n_choices} answers, but at most {} are allowed", caps::CHOICES);
            return Err(RequestError::invalid("prompt", detail));
        }
        Ok(CompletionRequest { prompts, options })
    }
}

/// A text, tokens, or a list of either.
fn prompts(raw: Raw<'_>) -> Result<Vec<PromptInput>, RequestError> {
    const PARAM: &str = "prompt";
    type Tokens = List<u32, { caps::PROMPT_TOKENS }>;
    let tokens = |ids: Tokens| PromptInput::Tokens(ids.0.into_iter().map(TokenId).collect());
    let value = raw.ok_or(RequestError::Missing { param: PARAM })?;
    let inner = value.get().trim_start().strip_prefix('[').map(str::trim_start);
    let prompts = match inner.map(|inner| inner.bytes().next().unwrap_or(b' ')) {
        None => field(raw, PARAM)?.map(PromptInput::Text).into_iter().collect(),
        Some(b'"') => {
            let texts: Option<List<String, { caps::PROMPTS }>> = field(raw, PARAM)?;
            texts.map_or_else(Vec::new, |t| t.0.into_iter().map(PromptInput::Text).collect())
        }
        Some(b'[') => {
            let lists: Option<List<Tokens, { caps::PROMPTS }>> = field(raw, PARAM)?;
            lists.map_or_else(Vec::new, |lists| lists.0.into_iter().map(tokens).collect())
        }
        Some(_) => field(raw, PARAM)?.map(tokens).into_iter().collect(),
    };
    let is_empty = |prompt: &PromptInput| match prompt {
        PromptInput::Text(text) => text.is_empty(),
        PromptInput::Tokens(tokens) => tokens.is_empty(),
    };
    if prompts.is_empty() || prompts.iter().any(is_empty) {
        return Err(RequestError::invalid(PARAM, "is empty"));
    }
    Ok(prompts)
}

fn unsupported(param: &'static str, what: impl Into<String>) -> RequestError {
    RequestError::Unsupported { param, what: what.into() }
}
