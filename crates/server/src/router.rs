//! Who answers what; and what happens to every request on its way in and out.

use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use nuthatch_engine::Tenant;
use nuthatch_wire::{ApiError, ErrorKind, RequestError, caps};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::answer::unique;
use crate::app::{App, BODY_UNIT};
use crate::error::{Failure, Handled, internal, stopping};
use crate::metrics::Metrics;
use crate::{completions, conversations, dashboard, embeddings, metrics, service};

/// By which a request is recognised in logs; clients may choose it.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Bytes of an id that a client chose.
const REQUEST_ID_BYTES: usize = 128;

/// Paths that need no key: whether the server lives, and the page that asks for the key.
const OPEN: [&str; 4] = ["/", "/health", "/ping", "/v1/health"];

/// Everything that the server answers.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(completions::responses))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/models", get(service::models))
        .route("/v1/models/{*name}", get(service::model))
        .route("/v1/sessions", get(conversations::list))
        .route(
            "/v1/sessions/{name}",
            get(conversations::export).put(conversations::import).delete(conversations::delete),
        )
        .route("/tokenize", post(service::tokenize))
        .route("/detokenize", post(service::detokenize))
        .route("/health", get(service::health))
        .route("/v1/health", get(service::health))
        .route("/ping", get(service::health).post(service::health))
        .route("/version", get(service::version))
        .route("/metrics", get(metrics::page))
        .route("/reset_prefix_cache", post(service::reset_prefix_cache))
        .route("/kv_cache_blocks", get(service::kv_cache_blocks))
        .route("/", get(dashboard::page))
        .route("/dashboard.json", get(dashboard::data))
        .fallback(|| async { Failure(not_found()) })
        .method_not_allowed_fallback(|| async { Failure(wrong_method()) })
        .layer(from_fn_with_state(Arc::clone(&app), around))
        .with_state(app)
}

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// By which the request is recognised.
    pub(crate) id: String,
    /// Who pays.
    pub(crate) tenant: Tenant,
}

impl Caller {
    /// Who sent a request that came through [`around`].
    pub(crate) fn of(request: &Request) -> Self {
        let caller = request.extensions().get::<Caller>().cloned();
        caller.unwrap_or_else(|| Caller { id: request_id(None), tenant: Tenant::default() })
    }
}

/// What happens to every request: it gets an id, its key is looked at, and a panic fails it alone.
async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers().get(&REQUEST_ID));
    let is_open = OPEN.contains(&request.uri().path());
    let admitted = if is_open {
        Ok(Tenant::default())
    } else if app.is_stopping() && request.uri().path() != "/metrics" {
        Err(stopping())
    } else {
        app.keys.admit(request.headers())
    };
    let mut response = match admitted {
        Err(error) => Failure(error).into_response(),
        Ok(tenant) => {
            request.extensions_mut().insert(Caller { id: id.clone(), tenant });
            unpanicked(&app.metrics, &id, next.run(request)).await
        }
    };
    app.metrics.responded(response.status().as_u16());
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The response of a handler, or an error if it panics.
async fn unpanicked(
    metrics: &Metrics,
    id: &str,
    handler: impl Future<Output = Response>,
) -> Response {
    let mut handler = pin!(handler);
    let polled = std::future::poll_fn(|cx| {
        let poll = std::panic::catch_unwind(AssertUnwindSafe(|| handler.as_mut().poll(cx)));
        match poll {
            Ok(poll) => poll.map(Ok),
            Err(_) => std::task::Poll::Ready(Err(())),
        }
    });
    polled.await.unwrap_or_else(|()| {
        tracing::error!(id, "a panic while a request was handled");
        metrics.panicked();
        Failure(internal()).into_response()
    })
}

/// The id that the client chose, if it can be repeated, or one of ours.
fn request_id(chosen: Option<&HeaderValue>) -> String {
    let chosen = chosen.and_then(|value| value.to_str().ok());
    let is_fine = |id: &&str| !id.is_empty() && id.len() <= REQUEST_ID_BYTES;
    chosen.filter(is_fine).map_or_else(|| format!("{:016x}", unique()), str::to_owned)
}

/// A body that was read. Its bytes count as long as it is there.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

/// Reads a request's body, within bounds of length and time.
///
/// A body that says how long it is waits until there is room for all of it. One that does not is given room
/// as it comes, and refused where there is no more: what is half read must not wait for other halves.
pub(crate) async fn read_body(app: &Arc<App>, request: Request) -> Handled<Received> {
    receive(&app.bodies, app.config.limits.body_time, request).await
}

async fn receive(
    bodies: &Arc<Semaphore>,
    body_time: Duration,
    request: Request,
) -> Handled<Received> {
    let max = caps::BODY_BYTES;
    let claimed = content_length(request.headers());
    if let Some(len) = claimed.filter(|&len| len > max) {
        return Err(RequestError::BodyTooLong { len, max }.into());
    }
    let reading = async {
        let n_claimed = permits_for(claimed.unwrap_or(0));
        let permits = Arc::clone(bodies).acquire_many_owned(n_claimed).await;
        let mut permit = permits.map_err(|_| internal())?;
        let mut bytes = BytesMut::with_capacity(claimed.unwrap_or(0));
        let mut body = request.into_body();
        while let Some(piece) = next_piece(&mut body).await? {
            let len = bytes.len() + piece.len();
            if len > max {
                return Err(RequestError::BodyTooLong { len, max }.into());
            }
            let more = permits_for(len).saturating_sub(permit.num_permits() as u32);
            permit.merge(Arc::clone(bodies).try_acquire_many_owned(more).map_err(|_| {
                let message = "too many requests are being read";
                ApiError::new(ErrorKind::Overloaded, message).with_code("bodies_full")
            })?);
            bytes.extend_from_slice(&piece);
        }
        Ok(Received { bytes: bytes.freeze(), _permit: permit })
    };
    match timeout(body_time, reading).await {
        Ok(received) => received,
        Err(_) => {
            let message = "the body did not come in time";
            let error = ApiError::new(ErrorKind::Timeout, message).with_code("request_timeout");
            Err(Failure(error))
        }
    }
}

/// Permits that a body of so many bytes needs.
fn permits_for(bytes: usize) -> u32 {
    bytes.div_ceil(BODY_UNIT).max(1) as u32
}

/// What comes next of a body.
async fn next_piece(body: &mut Body) -> Result<Option<Bytes>, ApiError> {
    loop {
        match std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            // What follows the data is nobody's.
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    return Ok(Some(piece));
                }
            }
            Some(Err(_)) => {
                let message = "the body did not come whole";
                let kind = ErrorKind::InvalidRequest;
                return Err(ApiError::new(kind, message).with_code("body_broken"));
            }
        }
    }
}

fn content_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

fn not_found() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "there is nothing at this path").with_code("not_found")
}

fn wrong_method() -> ApiError {
    let message = "the path takes another method";
    ApiError::new(ErrorKind::Method, message).with_code("method_not_allowed")
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_body_takes_room_as_it_comes() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let bodies = Arc::new(Semaphore::new(4));
        let ask = |body: Body, claimed: Option<usize>| {
            let mut request = Request::new(body);
            if let Some(len) = claimed {
                request.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(len));
            }
            let received = receive(&bodies, Duration::from_millis(50), request);
            runtime.block_on(received).map_err(|Failure(error)| error.code)
        };
        let body = |len: usize| Body::from(vec![7; len]);
        // One that does not say its length takes no more than it is long, whatever the longest may be.
        let first = ask(body(BODY_UNIT + 1), None).unwrap();
        assert_eq!((first.bytes.len(), bodies.available_permits()), (BODY_UNIT + 1, 2));
        let second = ask(body(2 * BODY_UNIT), Some(2 * BODY_UNIT)).unwrap();
        assert_eq!(bodies.available_permits(), 0);
        // One with a length waits for room, and one without is refused when it has none.
        assert_eq!(ask(body(9), Some(9)).unwrap_err(), Some("request_timeout"));
        drop(second);
        assert_eq!(ask(body(2 * BODY_UNIT + 1), None).unwrap_err(), Some("bodies_full"));
        assert_eq!(bodies.available_permits(), 2);
        let len = caps::BODY_BYTES + 1;
        assert_eq!(ask(body(0), Some(len)).unwrap_err(), Some("request_too_large"));
        drop(first);
        assert_eq!(ask(body(0), None).unwrap().bytes.len(), 0);
        assert_eq!(bodies.available_permits(), 4);
    }

    #[test]
    fn a_panic_fails_one_request_and_not_the_others() {
        let runtime = Builder::new_current_thread().build().unwrap();
        let metrics = Metrics::new("tiny", Duration::ZERO);
        let ask = |is_wrong: bool| {
            let handler = async move {
                tokio::task::yield_now().await;
                assert!(!is_wrong, "this request panics, as the test wants");
                StatusCode::OK.into_response()
            };
            runtime.block_on(unpanicked(&metrics, "id", handler)).status()
        };
        assert_eq!(ask(false), StatusCode::OK);
        assert_eq!(ask(true), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(ask(false), StatusCode::OK);
        assert_eq!(metrics.counts().panics, 1);
    }
}
