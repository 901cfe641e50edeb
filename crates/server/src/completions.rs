//! `POST /v1/chat/completions` and `/v1/completions`.

use std::sync::Arc;

use axum::extract::{Request as HttpRequest, State};
use axum::response::{IntoResponse as _, Response};
use nuthatch_engine::{Output, Submission, Tenant};
use nuthatch_wire::{
    ApiError, ChatRequest, CompletionRequest, Finish, Request, RequestError, ResponsesRequest,
};

use crate::app::App;
use crate::conversations::Turn;
use crate::error::{Handled, engine_lost, internal, json, stopping};
use crate::flight::Flight;
use crate::router::{Caller, read_body};
use crate::stream::EventStream;
use crate::{Heading, Job, Origin};

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(state: State<Arc<App>>, request: HttpRequest) -> Handled<Response> {
    let parse: Parse = |body| ChatRequest::parse(body).map(Request::Chat);
    respond(state, request, parse, |job| job).await
}

/// `POST /v1/completions`.
pub(crate) async fn completions(state: State<Arc<App>>, request: HttpRequest) -> Handled<Response> {
    let parse: Parse = |body| CompletionRequest::parse(body).map(Request::Completion);
    respond(state, request, parse, |job| job).await
}

/// `POST /v1/responses`.
pub(crate) async fn responses(state: State<Arc<App>>, request: HttpRequest) -> Handled<Response> {
    let parse: Parse =
        |body| ResponsesRequest::parse(body).map(|request| Request::Chat(request.chat));
    respond(state, request, parse, Job::into_responses).await
}

type Parse = fn(&[u8]) -> Result<Request, RequestError>;

async fn respond(
    State(app): State<Arc<App>>,
    request: HttpRequest,
    parse: Parse,
    style: fn(Job) -> Job,
) -> Handled<Response> {
    let caller = Caller::of(&request);
    let body = read_body(&app, request).await?;
    // Making tokens of a long prompt takes a while, in which others are to be served.
    let (shared, tenant) = (Arc::clone(&app), caller.tenant);
    let task = move || Prepared::new(&shared, &body.bytes, tenant, parse);
    let prepared = tokio::task::spawn_blocking(task).await.map_err(|error| {
        tracing::error!(%error, id = caller.id, "a request cannot be prepared");
        app.metrics.panicked();
        internal()
    })??;
    let Prepared { request, submissions, job, turn } = prepared;
    let job = style(job);
    let flight = Flight::submit(&app, submissions).await?;
    let heading = Heading {
        id: format!("{}{}", job.id_prefix(), caller.id),
        created: (app.config.unix_seconds)(),
        model: app.model().to_owned(),
    };
    if request.options().stream {
        let stream = EventStream::new(&app, request.options(), job, heading, flight);
        return Ok(stream.in_session(turn).into_response());
    }
    let job = finish(&app, job, flight).await?;
    if let Some(turn) = turn {
        let answer = job.text();
        tokio::task::spawn_blocking(move || turn.end(&answer)).await.map_err(|_| internal())?;
    }
    Ok(json(&job.body(&heading)))
}

/// A request that was understood, in tokens.
struct Prepared {
    request: Request,
    submissions: Vec<Submission>,
    job: Job,
    turn: Option<Turn>,
}

impl Prepared {
    fn new(app: &App, body: &[u8], tenant: Tenant, parse: Parse) -> Result<Self, ApiError> {
        let mut request = parse(body)?;
        app.check_model(request.options().model.as_deref())?;
        let turn = match &mut request {
            Request::Chat(chat) => Turn::begin(app, tenant, chat)?,
            Request::Completion(_) => None,
        };
        let endpoint = &app.config.endpoint;
        let origin = Origin { seed: crate::answer::unique(), tenant, now: app.engine.now() };
        let mut submissions = endpoint.submissions(&request, &origin)?;
        if app.config.isolates_tenants {
            for submission in &mut submissions {
                submission.hints.cache_salt.extend(tenant.0.to_le_bytes());
            }
        }
        let mut job = Job::new(&request, endpoint, &submissions);
        if turn.is_some() {
            job.keep_text();
        }
        Ok(Prepared { request, submissions, job, turn })
    }
}

/// Waits for all answers.
async fn finish(app: &App, mut job: Job, mut flight: Flight) -> Result<Job, ApiError> {
    while !job.is_done() {
        let (prompt_idx, output) = flight.next().await.ok_or_else(engine_lost)?;
        take(&mut job, &flight, prompt_idx, output);
    }
    match job.failure() {
        Some(error) => Err(error),
        // Nobody but a server that stops ends answers that no client has let go.
        None if app.is_stopping() && job.finishes().any(|f| f == Finish::Abort) => Err(stopping()),
        None => Ok(job),
    }
}

/// Takes in what is new, and ends the answer in which a stop string was found.
pub(crate) fn take(
    job: &mut Job,
    flight: &Flight,
    prompt_idx: usize,
    output: Output,
) -> crate::Piece {
    let (Output::Token { index, .. } | Output::Finished { index, .. }) = output;
    let piece = job.take(prompt_idx, output);
    if piece.is_stopped {
        flight.end_answer(prompt_idx, index);
    }
    piece
}
