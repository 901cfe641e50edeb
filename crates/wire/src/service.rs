//! The small endpoints: which models there are, and text to tokens and back.

use nuthatch_types::TokenId;
use serde::{Deserialize, Serialize};

use crate::fields::{List, Raw, field, name, object};
use crate::{ChatRequest, RequestError, caps};

/// `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The models, or rather the names of the one model.
    pub data: Vec<ModelCard>,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelCard {
    /// Its name.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Seconds since 1970 when it was loaded.
    pub created: u64,
    /// `nuthatch`.
    pub owned_by: &'static str,
    /// The name that answers to all others.
    pub root: String,
    /// Always null: there are no adapters.
    pub parent: Option<String>,
    /// Most tokens of prompt and answer together.
    pub max_model_len: u32,
    /// Which hidden state is the vector of a text: `last` or `mean`.
    pub pooling: &'static str,
}

/// `POST /tokenize`.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The model that is asked for.
    pub model: Option<String>,
    /// What becomes tokens.
    pub input: TokenizeInput,
    /// Whether the tokens' texts are told too.
    pub with_texts: bool,
}

/// What becomes tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// A text.
    Text {
        /// The text.
        prompt: String,
        /// Whether the vocabulary's begin token is put before it.
        add_special: bool,
    },
    /// A conversation, written as the model's template does.
    Chat(Box<ChatRequest>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawTokenize<'a> {
    #[serde(borrow)]
    model: Raw<'a>,
    #[serde(borrow)]
    prompt: Raw<'a>,
    #[serde(borrow)]
    content: Raw<'a>,
    #[serde(borrow)]
    messages: Raw<'a>,
    #[serde(borrow)]
    add_special_tokens: Raw<'a>,
    #[serde(borrow)]
    add_special: Raw<'a>,
    #[serde(borrow)]
    return_token_strs: Raw<'a>,
}

impl TokenizeRequest {
    /// Reads and checks a body, in vLLM's words or llama-server's.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawTokenize<'_> = object(body)?;
        let input = if raw.messages.is_some() {
            TokenizeInput::Chat(Box::new(ChatRequest::parse(body)?))
        } else {
            let prompt = field(raw.prompt.or(raw.content), "prompt")?;
            let prompt = prompt.ok_or(RequestError::Missing { param: "prompt" })?;
            let special = raw.add_special_tokens.or(raw.add_special);
            let add_special = field(special, "add_special_tokens")?.unwrap_or(true);
            TokenizeInput::Text { prompt, add_special }
        };
        Ok(TokenizeRequest {
            model: name(raw.model, "model")?,
            input,
            with_texts: field(raw.return_token_strs, "return_token_strs")?.unwrap_or(false),
        })
    }
}

/// The answer to a [`TokenizeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tokenized {
    /// How many tokens.
    pub count: usize,
    /// Most tokens of prompt and answer together.
    pub max_model_len: u32,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Their texts, if they were asked for.
    pub token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model that is asked for.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<TokenId>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawDetokenize<'a> {
    #[serde(borrow)]
    model: Raw<'a>,
    #[serde(borrow)]
    tokens: Raw<'a>,
}

impl DetokenizeRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        const PARAM: &str = "tokens";
        let raw: RawDetokenize<'_> = object(body)?;
        let tokens: Option<List<u32, { caps::PROMPT_TOKENS }>> = field(raw.tokens, PARAM)?;
        let tokens = tokens.ok_or(RequestError::Missing { param: PARAM })?.0;
        let tokens = tokens.into_iter().map(TokenId).collect();
        Ok(DetokenizeRequest { model: name(raw.model, "model")?, tokens })
    }
}

/// The answer to a [`DetokenizeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Detokenized {
    /// The text.
    pub prompt: String,
}
