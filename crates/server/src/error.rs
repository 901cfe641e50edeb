//! Errors as responses.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use nuthatch_wire::{ApiError, ErrorKind};
use serde::Serialize;

/// Seconds after which a refused client may try again. A guess: about one answer's time.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// An error that becomes a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure(pub(crate) ApiError);

/// The result of a handler.
pub(crate) type Handled<T> = Result<T, Failure>;

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Failure(error)
    }
}

impl From<nuthatch_wire::RequestError> for Failure {
    fn from(error: nuthatch_wire::RequestError) -> Self {
        Failure(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let kind = self.0.kind;
        let status = StatusCode::from_u16(kind.status()).unwrap_or(StatusCode::IM_A_TEAPOT);
        let mut response = (status, json(&self.0.body())).into_response();
        if kind == ErrorKind::Overloaded {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }
}

/// A response of JSON.
pub(crate) fn json(body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => {
            let mut response = Response::new(Body::from(bytes));
            let kind = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        Err(error) => {
            tracing::error!(%error, "a response cannot be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// The engine is gone.
pub(crate) fn engine_lost() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "the engine has stopped").with_code("engine_stopped")
}

/// The server is about to end.
pub(crate) fn stopping() -> ApiError {
    ApiError::new(ErrorKind::Overloaded, "the server is stopping").with_code("server_stopping")
}

/// Something that should not have happened, happened.
pub(crate) fn internal() -> ApiError {
    let message = "an error inside the server; the log says more";
    ApiError::new(ErrorKind::Server, message).with_code("internal_error")
}
