//! Text to tokens and back: tokenizer, detokenizer, chat template, stop strings.
//!
//! ```text
//! messages --ChatTemplate--> text --Tokenizer--> tokens ... model ...
//! ... model ... --> token --Detokenizer--> text --StopMatcher--> what the user sees
//! ```
//!
//! Knows no device, no weights and no cache, reads no file and no clock. Files that describe a
//! vocabulary or a template are not trusted: a bad one is an error.
//!
//! ```
//! use std::sync::Arc;
//! use nuthatch_tokens::{
//!     ChatTemplate, DecodeOptions, Detokenizer, EncodeOptions, Message, RenderOptions,
//!     StopMatcher, TokenKind, Tokenizer, Vocab,
//! };
//!
//! // A byte-level vocabulary as a GGUF file would embed it, but tiny.
//! let tokens = ["<|end|>", "h", "i", "hi", "\u{120}", "!"].map(String::from);
//! let vocab = Vocab {
//!     model: "gpt2".into(),
//!     pre: "gpt-2".into(),
//!     kinds: vec![
//!         TokenKind::Control, TokenKind::Normal, TokenKind::Normal,
//!         TokenKind::Normal, TokenKind::Normal, TokenKind::Normal,
//!     ],
//!     tokens: tokens.into(),
//!     merges: vec!["h i".into()],
//!     ..Vocab::default()
//! };
//! let tokenizer = Arc::new(Tokenizer::from_vocab(&vocab)?);
//!
//! let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")?;
//! let text = template.render(&[Message::new("user", "hi !")], &RenderOptions::default())?;
//! assert_eq!(text, "hi !<|end|>");
//!
//! let options = EncodeOptions { special: true, ..EncodeOptions::default() };
//! let ids = tokenizer.encode(&text, options)?;
//! assert_eq!(ids.iter().map(|id| id.0).collect::<Vec<_>>(), [3, 4, 5, 0]);
//!
//! let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), DecodeOptions::default());
//! let mut stops = StopMatcher::new(&["!"], false);
//! let mut answer = String::new();
//! for id in ids {
//!     answer += &stops.push(&detokenizer.push(id)).text;
//! }
//! assert_eq!(answer, "hi ");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod byte_level;
mod config;
mod detokenizer;
mod guard;
mod pieces;
mod stop;
mod template;
mod tokenizer;
mod vocab;
mod words;

pub use answer::AnswerText;
pub use config::TokenizerConfig;
pub use detokenizer::{DecodeOptions, Detokenizer};
pub use stop::{StopMatcher, StopOutput};
pub use template::{ChatTemplate, Message, RenderOptions, TemplateError};
pub use tokenizer::{EncodeOptions, TEXT_LEN_MAX, Tokenizer, TokenizerError};
pub use vocab::{TokenKind, VOCAB_LEN_MAX, Vocab};
pub use words::{Conversation, Words, WordsError};
