//! `POST /v1/embeddings`: the hidden state of a text's last token, or the mean over all, of length 1.
//!
//! The last token has seen the whole text, and it is computed even if the cache holds all others, so
//! that a text that begins like an earlier one costs little. A mean over all tokens has to compute
//! them all.

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Request, State};
use axum::response::Response;
use nuthatch_engine::{HiddenSink, Output, Submission, Tenant};
use nuthatch_types::{FinishReason, Limits, Sampling};
use nuthatch_wire::{
    ApiError, Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage, ErrorKind, PromptInput,
    RequestError, Vector,
};

use crate::app::App;
use crate::error::{Handled, engine_lost, internal, json, stopping};
use crate::flight::Flight;
use crate::router::{Caller, read_body};

/// Vectors as they come, in the order of the texts.
type Vectors = Arc<Mutex<Vec<Vec<f32>>>>;

/// Texts of one request that wait for the engine at a time: more than run at once, and few enough that the queue
/// has room for others.
const N_TOGETHER: usize = 128;

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Handled<Response> {
    let caller = Caller::of(&request);
    let body = read_body(&app, request).await?;
    let (shared, tenant) = (Arc::clone(&app), caller.tenant);
    let task = move || prepare(&shared, &body.bytes, tenant);
    let prepared = tokio::task::spawn_blocking(task).await.map_err(|_| internal())?;
    let (request, mut submissions, vectors) = prepared?;
    let mut n_tokens = 0;
    while !submissions.is_empty() {
        let rest = submissions.split_off(submissions.len().min(N_TOGETHER));
        n_tokens += compute(&app, std::mem::replace(&mut submissions, rest)).await?;
    }
    let vectors = std::mem::take(&mut *vectors.lock().unwrap_or_else(PoisonError::into_inner));
    let data = (0..).zip(vectors).map(|(index, vector)| embedding(&request, index, vector));
    Ok(json(&Embeddings {
        object: "list",
        data: data.collect::<Result<_, _>>()?,
        model: app.model().to_owned(),
        usage: EmbeddingsUsage { prompt_tokens: n_tokens, total_tokens: n_tokens },
    }))
}

/// Computes some texts, and counts their tokens.
async fn compute(app: &Arc<App>, submissions: Vec<Submission>) -> Handled<u32> {
    let (mut n_left, mut n_tokens) = (submissions.len(), 0);
    let mut flight = Flight::submit(app, submissions).await?;
    while n_left > 0 {
        match flight.next().await {
            None => return Err(engine_lost().into()),
            Some((_, Output::Token { .. })) => {}
            Some((_, Output::Finished { reason, usage, .. })) => {
                if reason == FinishReason::Cancelled {
                    return Err(stopping().into());
                }
                n_left -= 1;
                n_tokens += usage.prompt_tokens;
            }
        }
    }
    Ok(n_tokens)
}

fn prepare(
    app: &App,
    body: &[u8],
    tenant: Tenant,
) -> Result<(EmbeddingsRequest, Vec<Submission>, Vectors), ApiError> {
    let request = EmbeddingsRequest::parse(body)?;
    app.check_model(request.model.as_deref())?;
    let vectors: Vectors = Arc::new(Mutex::new(vec![Vec::new(); request.inputs.len()]));
    let endpoint = &app.config.endpoint;
    let mut submissions = Vec::with_capacity(request.inputs.len());
    for (index, input) in request.inputs.iter().enumerate() {
        let prompt = match input {
            PromptInput::Text(text) => endpoint.text_prompt(text)?,
            PromptInput::Tokens(tokens) => tokens.clone(),
        };
        if prompt.len() >= endpoint.max_context as usize {
            return Err(ApiError::context_length(endpoint.max_context, prompt.len(), None));
        }
        let vectors = Arc::clone(&vectors);
        let hidden = HiddenSink::new(move |hidden| {
            vectors.lock().unwrap_or_else(PoisonError::into_inner)[index] = hidden.to_vec();
        });
        let mut submission = Submission {
            prompt,
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: 1, ..Limits::default() },
            hidden: Some(hidden.with_pooling(app.config.pooling)),
            ..Submission::default()
        };
        submission.hints.tenant = tenant;
        if app.config.isolates_tenants {
            submission.hints.cache_salt.extend(tenant.0.to_le_bytes());
        }
        submissions.push(submission);
    }
    Ok((request, submissions, vectors))
}

/// One vector, of length 1.
fn embedding(
    request: &EmbeddingsRequest,
    index: u32,
    vector: Vec<f32>,
) -> Result<Embedding, ApiError> {
    let len = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if vector.is_empty() || !len.is_finite() || len == 0.0 {
        let message = "the engine gave no vector";
        return Err(ApiError::new(ErrorKind::Server, message).with_code("engine_failed"));
    }
    if let Some(asked) = request.dimensions.filter(|&asked| asked as usize != vector.len()) {
        let what = format!("{asked} numbers, where the model has {},", vector.len());
        return Err(RequestError::Unsupported { param: "dimensions", what }.into());
    }
    let vector: Vec<f32> = vector.iter().map(|&x| (f64::from(x) / len) as f32).collect();
    let embedding = if request.as_base64 { Vector::Base64(vector) } else { Vector::Floats(vector) };
    Ok(Embedding { object: "embedding", index, embedding })
}
