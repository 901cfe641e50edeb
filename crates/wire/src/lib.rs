//! The OpenAI surface as plain data: what clients send, checked; what they get, ready to print.
//!
//! ```text
//!   bytes --ChatRequest::parse, CompletionRequest::parse--> request --> (the caller's engine)
//!   bytes --BatchLine::parse--> a line of a batch file, with one of the two inside
//!   (the caller's answer) --> ChatCompletion, TextCompletion, ErrorBody, BatchOutput --> JSON
//! ```
//!
//! Clients are not trusted: [`caps`] bounds every list, string and number before it is stored, and
//! bad bytes are an error that names the parameter. Fields that are not known are ignored, as
//! OpenAI does; a known field that asks for what there is not is an error, because an answer
//! without it would be a wrong one.
//!
//! The crate knows no engine, no tokenizer and no socket. What a request means for the engine is
//! the caller's to say.
//!
//! ```
//! use nuthatch_wire::ChatRequest;
//!
//! let body = br#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "n": 2}"#;
//! let request = ChatRequest::parse(body)?;
//! assert_eq!(request.messages[0].content, "Hi");
//! assert_eq!((request.options.max_tokens, request.options.n), (Some(5), 2));
//!
//! let error = ChatRequest::parse(br#"{"messages": [], "temperature": "hot"}"#).unwrap_err();
//! assert_eq!(error.param(), Some("messages"));
//! # Ok::<(), nuthatch_wire::RequestError>(())
//! ```

mod batch;
pub mod caps;
mod embeddings;
mod error;
mod fields;
mod format;
mod options;
mod request;
mod response;
mod responses;
mod service;
mod stream;
mod tools;

pub use batch::{BatchAnswered, BatchError, BatchLine, BatchOutput, BatchResponse};
pub use embeddings::{Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage, Vector};
pub use error::{ApiError, ErrorBody, ErrorDetail, ErrorKind, RequestError};
pub use format::Format;
pub use options::{Options, RetentionFields, SamplingFields};
pub use request::{ChatMessage, ChatRequest, CompletionRequest, PromptInput, Request};
pub use response::{
    AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs, Finish, PromptTokensDetails,
    TextChoice, TextCompletion, TextLogprobs, TokenLogprob, TopLogprob, Usage,
};
pub use responses::ResponsesRequest;
pub use service::{
    DetokenizeRequest, Detokenized, ModelCard, ModelList, TokenizeInput, TokenizeRequest, Tokenized,
};
pub use stream::{ChatChunkChoice, ChatDelta, Chunk, TextChunkChoice, ToolCallDelta};
pub use tools::{Tool, ToolCall, ToolChoice};
