//! A model's words: its tokenizer, its chat template, and the tokens that end an answer.

use std::sync::Arc;

use nuthatch_types::TokenId;
use serde_json::{Map, Value as Json};

use crate::{
    ChatTemplate, EncodeOptions, Message, RenderOptions, TemplateError, Tokenizer, TokenizerError,
};

/// A model's words.
#[derive(Clone, Debug)]
pub struct Words {
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens that end an answer.
    pub ends: Vec<TokenId>,
    /// How a conversation is written, if the model can chat.
    pub template: Option<Arc<ChatTemplate>>,
}

/// A conversation as a template takes it.
#[derive(Clone, Debug)]
pub enum Conversation {
    /// Roles and texts.
    Plain(Vec<Message>),
    /// Messages with more than that.
    Rich {
        /// The messages, as Hugging Face's templates expect them.
        messages: Vec<Json>,
        /// Tools that the model may call, as JSON schemas.
        tools: Option<Vec<Json>>,
        /// Further variables, such as `enable_thinking`.
        vars: Map<String, Json>,
        /// Ends the text with the begin of the assistant's answer.
        add_generation_prompt: bool,
    },
}

/// Why a text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum WordsError {
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template does not take the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer does not take the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl Words {
    /// The tokens of a conversation, up to where the answer begins.
    pub fn conversation(&self, conversation: &Conversation) -> Result<Vec<TokenId>, WordsError> {
        let template = self.template.as_ref().ok_or(WordsError::NoTemplate)?;
        let spelling = |id: Option<TokenId>| id.map_or_else(String::new, |id| self.piece(id));
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: spelling(self.tokenizer.bos()),
            eos_token: spelling(self.tokenizer.eos()),
            // Without a clock the same words give the same tokens on any day.
            ..RenderOptions::default()
        };
        let text = match conversation {
            Conversation::Plain(messages) => template.render(messages, &options)?,
            Conversation::Rich { messages, tools, vars, add_generation_prompt } => {
                let (tools, vars) = (tools.clone(), vars.clone());
                let add_generation_prompt = *add_generation_prompt;
                let options = RenderOptions { tools, vars, add_generation_prompt, ..options };
                template.render_json(messages, &options)?
            }
        };
        let encode = EncodeOptions { special: true, ..EncodeOptions::default() };
        Ok(self.tokenizer.encode(&text, encode)?)
    }

    /// The tokens of a text that the model is to continue as it is. Spellings of special tokens
    /// count as these tokens, so that a conversation can be written by hand.
    pub fn raw(&self, text: &str) -> Result<Vec<TokenId>, WordsError> {
        let add_bos = self.tokenizer.adds_bos();
        let options = EncodeOptions { special: true, add_bos, ..EncodeOptions::default() };
        Ok(self.tokenizer.encode(text, options)?)
    }

    /// One token for people; bytes that are no text become U+FFFD.
    pub fn piece(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
    }
}
