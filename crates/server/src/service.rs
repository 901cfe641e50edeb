//! The small endpoints.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use nuthatch_engine::CachedPage;
use nuthatch_tokens::{DecodeOptions, EncodeOptions};
use nuthatch_types::TokenId;
use nuthatch_wire::{
    ApiError, DetokenizeRequest, Detokenized, ErrorKind, ModelCard, ModelList, TokenizeInput,
    TokenizeRequest, Tokenized,
};
use serde_json::{Value, json as object};

use crate::app::App;
use crate::error::{Failure, Handled, engine_lost, internal, json, stopping};
use crate::events::medium;
use crate::router::read_body;

/// `GET /health` and `/ping`: nothing if all is well.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Handled<Response> {
    if !app.is_alive() {
        return Err(Failure(engine_lost()));
    }
    if app.is_stopping() {
        return Err(Failure(stopping()));
    }
    Ok(StatusCode::OK.into_response())
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json(&object!({ "version": env!("CARGO_PKG_VERSION"), "engine": "nuthatch" }))
}

/// `GET /v1/models`.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    let data = app.config.names.iter().map(|name| card(&app, name)).collect();
    json(&ModelList { object: "list", data })
}

/// `GET /v1/models/NAME`.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Handled<Response> {
    app.check_model(Some(&name))?;
    Ok(json(&card(&app, &name)))
}

fn card(app: &App, name: &str) -> ModelCard {
    ModelCard {
        id: name.to_owned(),
        object: "model",
        created: app.started,
        owned_by: "nuthatch",
        root: app.model().to_owned(),
        parent: None,
        max_model_len: app.config.endpoint.max_context,
        pooling: app.config.pooling.name(),
    }
}

/// `POST /tokenize`.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Handled<Response> {
    let body = read_body(&app, request).await?;
    aside(app, move |app| tokenized(app, &body.bytes)).await
}

/// Runs what may take a while where it keeps nobody else waiting.
async fn aside(
    app: Arc<App>,
    task: impl FnOnce(&App) -> Handled<Response> + Send + 'static,
) -> Handled<Response> {
    let shared = Arc::clone(&app);
    tokio::task::spawn_blocking(move || task(&shared)).await.map_err(|error| {
        tracing::error!(%error, "a request cannot be answered");
        app.metrics.panicked();
        internal()
    })?
}

fn tokenized(app: &App, body: &[u8]) -> Handled<Response> {
    let request = TokenizeRequest::parse(body)?;
    app.check_model(request.model.as_deref())?;
    let endpoint = &app.config.endpoint;
    let words = &endpoint.words;
    let tokens = match &request.input {
        TokenizeInput::Chat(chat) => endpoint.chat_prompt(chat)?,
        TokenizeInput::Text { prompt, add_special } => {
            let add_bos = *add_special && words.tokenizer.adds_bos();
            let options = EncodeOptions { special: true, add_bos, ..EncodeOptions::default() };
            words.tokenizer.encode(prompt, options).map_err(|error| {
                ApiError::new(ErrorKind::InvalidRequest, error.to_string())
                    .with_code("tokenizer_error")
            })?
        }
    };
    let texts = || tokens.iter().map(|&token| words.piece(token)).collect();
    Ok(json(&Tokenized {
        count: tokens.len(),
        max_model_len: endpoint.max_context,
        token_strs: request.with_texts.then(texts),
        tokens: tokens.iter().map(|token| token.0).collect(),
    }))
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Handled<Response> {
    let body = read_body(&app, request).await?;
    aside(app, move |app| detokenized(app, &body.bytes)).await
}

fn detokenized(app: &App, body: &[u8]) -> Handled<Response> {
    let request = DetokenizeRequest::parse(body)?;
    app.check_model(request.model.as_deref())?;
    let tokenizer = &app.config.endpoint.words.tokenizer;
    let is_unknown = |token: &&TokenId| token.0 as usize >= tokenizer.vocab_size();
    if let Some(token) = request.tokens.iter().find(is_unknown) {
        let message = format!("token {} is not in the vocabulary", token.0);
        let error = ApiError::new(ErrorKind::InvalidRequest, message);
        return Err(Failure(error.about("tokens").with_code("unknown_token")));
    }
    let options = DecodeOptions { skip_special: false, continuing: false };
    Ok(json(&Detokenized { prompt: tokenizer.decode(&request.tokens, options) }))
}

/// `POST /reset_prefix_cache`: forgets what is cached and nobody uses.
pub(crate) async fn reset_prefix_cache(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Handled<Response> {
    app.keys.admit_admin(&headers)?;
    let n_pages = app.ask(|reply| app.engine.forget_idle(reply)).await?;
    Ok(json(&object!({ "pages_freed": n_pages })))
}

/// `GET /kv_cache_blocks`: every page that can be found by its tokens, by the names that KV events
/// use.
pub(crate) async fn kv_cache_blocks(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Handled<Response> {
    app.keys.admit_admin(&headers)?;
    let pages = app.ask(|reply| app.engine.ask_cached(reply)).await?;
    let block = |page: &CachedPage| {
        object!({
            "block_hash": page.id.0,
            "parent_block_hash": page.parent.map(|parent| parent.0),
            "medium": medium(page.tier),
        })
    };
    let blocks: Vec<Value> = pages.iter().map(block).collect();
    Ok(json(&object!({ "block_size": app.config.sizes.page_len, "blocks": blocks })))
}
