//! Lines of OpenAI's batch files.

use serde::{Deserialize, Serialize};

use crate::fields::{Raw, name, object};
use crate::{ChatRequest, CompletionRequest, Request, RequestError};

/// One line of a batch file.
#[derive(Clone, Copy, Debug)]
pub struct BatchLine<'a> {
    raw: RawLine<'a>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct RawLine<'a> {
    #[serde(borrow)]
    custom_id: Raw<'a>,
    #[serde(borrow)]
    method: Raw<'a>,
    #[serde(borrow)]
    url: Raw<'a>,
    #[serde(borrow)]
    body: Raw<'a>,
}

impl<'a> BatchLine<'a> {
    /// Cuts a line into its fields.
    pub fn parse(line: &'a [u8]) -> Result<Self, RequestError> {
        Ok(BatchLine { raw: object(line)? })
    }

    /// The name by which the client will find the answer.
    pub fn custom_id(&self) -> Result<String, RequestError> {
        const PARAM: &str = "custom_id";
        match name(self.raw.custom_id, PARAM)? {
            None => Err(RequestError::Missing { param: PARAM }),
            Some(id) if id.is_empty() => Err(RequestError::invalid(PARAM, "is empty")),
            Some(id) => Ok(id),
        }
    }

    /// The request inside, checked.
    pub fn request(&self) -> Result<Request, RequestError> {
        let method = name(self.raw.method, "method")?;
        if method.as_deref().is_some_and(|method| method != "POST") {
            return Err(RequestError::invalid("method", "must be POST"));
        }
        let url = name(self.raw.url, "url")?.ok_or(RequestError::Missing { param: "url" })?;
        let body = self.raw.body.ok_or(RequestError::Missing { param: "body" })?;
        let body = body.get().as_bytes();
        match url.as_str() {
            "/v1/chat/completions" => ChatRequest::parse(body).map(Request::Chat),
            "/v1/completions" => CompletionRequest::parse(body).map(Request::Completion),
            _ => Err(RequestError::Unsupported { param: "url", what: format!("`{url}`") }),
        }
    }
}

/// One line of a batch's output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchOutput<'a, B> {
    /// Unique.
    pub id: String,
    /// The line's own name, if it had one.
    pub custom_id: Option<&'a str>,
    /// What the endpoint would have sent.
    pub response: Option<BatchResponse<B>>,
    /// Why there is no answer.
    pub error: Option<BatchError>,
}

/// What the endpoint would have sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchResponse<B> {
    /// Status of the HTTP response.
    pub status_code: u16,
    /// Unique.
    pub request_id: String,
    /// Body of the HTTP response.
    pub body: B,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BatchError {
    /// For programs.
    pub code: &'static str,
    /// For people.
    pub message: String,
}

/// What is read of an output file to know what was answered.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct BatchAnswered {
    /// See [`BatchOutput::id`].
    pub id: String,
    /// See [`BatchOutput::custom_id`].
    pub custom_id: Option<String>,
}

impl BatchAnswered {
    /// Reads a line of an output file.
    pub fn parse(line: &[u8]) -> Result<Self, RequestError> {
        object(line)
    }
}
