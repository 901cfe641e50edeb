//! What is wrong with a request, and how a client is told.

use serde::Serialize;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The bytes are no JSON object of the expected form.
    #[error("the body is not a valid request: {detail}")]
    Json {
        /// What the parser says.
        detail: String,
    },
    /// More bytes than a body may have.
    #[error("the body has {len} bytes, but at most {max} are allowed")]
    BodyTooLong {
        /// Bytes of the body.
        len: usize,
        /// The most that is allowed.
        max: usize,
    },
    /// A parameter that must be there is not.
    #[error("{param} is missing")]
    Missing {
        /// The parameter.
        param: &'static str,
    },
    /// A parameter has the wrong type, is too long or out of range.
    #[error("{param}: {detail}")]
    Invalid {
        /// The parameter.
        param: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// A parameter asks for something that there is not.
    #[error("{param}: {what} is not supported")]
    Unsupported {
        /// The parameter.
        param: &'static str,
        /// What it asks for.
        what: String,
    },
}

impl RequestError {
    /// The parameter that is at fault, if it is one.
    pub fn param(&self) -> Option<&'static str> {
        match *self {
            RequestError::Json { .. } | RequestError::BodyTooLong { .. } => None,
            RequestError::Missing { param }
            | RequestError::Invalid { param, .. }
            | RequestError::Unsupported { param, .. } => Some(param),
        }
    }

    pub(crate) fn invalid(param: &'static str, detail: impl Into<String>) -> Self {
        RequestError::Invalid { param, detail: detail.into() }
    }
}

/// Whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client's: the same request will fail again.
    InvalidRequest,
    /// The client may not do this, or has not said who it is.
    Unauthorized,
    /// Something that the client names is not there.
    NotFound,
    /// The endpoint takes another method.
    Method,
    /// The client took too long to send its request.
    Timeout,
    /// Another request has what this one needs, for now.
    Conflict,
    /// The request is too long.
    TooLarge,
    /// Nobody's: the same request may work later.
    Overloaded,
    /// Ours: no request will be answered any more.
    Unavailable,
    /// Ours.
    Server,
}

impl ErrorKind {
    /// The status of the HTTP response.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::InvalidRequest => 400,
            ErrorKind::Unauthorized => 401,
            ErrorKind::NotFound => 404,
            ErrorKind::Method => 405,
            ErrorKind::Timeout => 408,
            ErrorKind::Conflict => 409,
            ErrorKind::TooLarge => 413,
            ErrorKind::Overloaded | ErrorKind::Unavailable => 503,
            ErrorKind::Server => 500,
        }
    }

    fn name(self) -> &'static str {
        match self {
            ErrorKind::InvalidRequest
            | ErrorKind::Method
            | ErrorKind::Timeout
            | ErrorKind::Conflict
            | ErrorKind::TooLarge => "invalid_request_error",
            ErrorKind::Unauthorized => "authentication_error",
            ErrorKind::NotFound => "not_found_error",
            ErrorKind::Overloaded => "overloaded_error",
            ErrorKind::Unavailable => "unavailable_error",
            ErrorKind::Server => "server_error",
        }
    }
}

/// An error as a client is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
    /// The parameter that is at fault, if it is one.
    pub param: Option<&'static str>,
    /// For programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// An error that is about no parameter.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        ApiError { kind, message: message.into(), param: None, code: None }
    }

    /// The same error with a code for programs.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        ApiError { code: Some(code), ..self }
    }

    /// The same error about a parameter.
    #[must_use]
    pub fn about(self, param: &'static str) -> Self {
        ApiError { param: Some(param), ..self }
    }

    /// Prompt and answer are longer than a sequence may be. Programs that shorten their prompts
    /// look for the first sentence.
    pub fn context_length(max_context: u32, n_prompt: usize, n_answer: Option<u32>) -> Self {
        let message = match n_answer {
            Some(n_answer) => format!(
                "This model's maximum context length is {max_context} tokens. However, you \
                 requested {n_answer} output tokens and your prompt contains {n_prompt} input \
                 tokens, for a total of {} tokens. Please reduce the length of the input prompt or \
                 the number of requested output tokens.",
                n_prompt as u64 + u64::from(n_answer),
            ),
            None => format!(
                "This model's maximum context length is {max_context} tokens. However, your prompt \
                 contains {n_prompt} input tokens, which leaves no room for an answer. Please \
                 reduce the length of the input prompt."
            ),
        };
        let (kind, code) = (ErrorKind::InvalidRequest, Some("context_length_exceeded"));
        ApiError { kind, message, param: Some("input_tokens"), code }
    }

    /// The body of the response.
    pub fn body(&self) -> ErrorBody {
        let ApiError { kind, message, param, code } = self.clone();
        ErrorBody { error: ErrorDetail { message, kind: kind.name(), param, code } }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let param = error.param();
        let (kind, code) = match error {
            RequestError::Json { .. } => (ErrorKind::InvalidRequest, "json_parse_error"),
            RequestError::BodyTooLong { .. } => (ErrorKind::TooLarge, "request_too_large"),
            RequestError::Missing { .. } => {
                (ErrorKind::InvalidRequest, "missing_required_parameter")
            }
            RequestError::Invalid { .. } => (ErrorKind::InvalidRequest, "invalid_value"),
            RequestError::Unsupported { .. } => (ErrorKind::InvalidRequest, "unsupported_value"),
        };
        ApiError { kind, message: error.to_string(), param, code: Some(code) }
    }
}

/// The body of a response that is an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// An error on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorDetail {
    /// For people.
    pub message: String,
    /// Whose fault it is.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The parameter that is at fault.
    pub param: Option<&'static str>,
    /// For programs.
    pub code: Option<&'static str>,
}
