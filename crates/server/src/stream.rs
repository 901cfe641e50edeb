//! An answer that is sent as it grows, as server-sent events: one for each token.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use nuthatch_wire::{ApiError, Finish, Options};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, Sleep, sleep};

use crate::app::App;
use crate::completions::take;
use crate::conversations::Turn;
use crate::error::{engine_lost, internal, stopping};
use crate::flight::Flight;
use crate::{Event, Heading, Job};

/// How long nothing is sent before a comment is, so that a client that is gone is noticed and
/// whatever is between does not lose patience.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// An answer that is sent as it grows.
pub(crate) struct EventStream {
    app: Arc<App>,
    job: Job,
    heading: Heading,
    /// Gone when the stream has ended.
    flight: Option<Flight>,
    events: VecDeque<Bytes>,
    with_usage: bool,
    with_usage_always: bool,
    keep_alive: Pin<Box<Sleep>>,
    /// The session that the answer belongs to, until it has ended.
    turn: Option<Turn>,
    /// The answer on its way to the session's file: a client that knows its answer's end can go on.
    keeping: Option<JoinHandle<()>>,
}

impl EventStream {
    pub(crate) fn new(
        app: &Arc<App>,
        options: &Options,
        job: Job,
        heading: Heading,
        flight: Flight,
    ) -> Self {
        let mut job = job;
        let opening = job.opening(&heading).into_iter().map(|e| Bytes::from(e.into_bytes()));
        EventStream {
            app: Arc::clone(app),
            events: opening.collect(),
            job,
            heading,
            flight: Some(flight),
            with_usage: options.include_usage,
            with_usage_always: options.continuous_usage,
            keep_alive: Box::pin(sleep(KEEP_ALIVE)),
            turn: None,
            keeping: None,
        }
    }

    /// The same in a session.
    pub(crate) fn in_session(self, turn: Option<Turn>) -> Self {
        EventStream { turn, ..self }
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                self.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
                return Poll::Ready(Some(event));
            }
            if let Some(keeping) = &mut self.keeping {
                ready!(Pin::new(keeping).poll(cx)).unwrap_or_default();
                self.keeping = None;
                self.end();
                continue;
            }
            let Some(flight) = &mut self.flight else { return Poll::Ready(None) };
            match flight.poll_next(cx) {
                Poll::Ready(Some((prompt_idx, output))) => {
                    let piece = take(&mut self.job, flight, prompt_idx, output);
                    if piece.is_news() {
                        let with_usage = self.with_usage_always;
                        let events = self.job.events(&self.heading, piece, with_usage);
                        self.push(events);
                    }
                    if self.job.is_done() {
                        let is_whole = self.job.finishes().all(|finish| finish != Finish::Abort);
                        let is_fine = is_whole && self.job.failure().is_none();
                        match self.turn.take().filter(|_| is_fine) {
                            Some(turn) => {
                                let answer = self.job.text();
                                self.keeping = Some(spawn_blocking(move || turn.end(&answer)));
                            }
                            None => self.end(),
                        }
                    }
                }
                Poll::Ready(None) => self.fail(&engine_lost()),
                Poll::Pending => {
                    if self.keep_alive.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    self.events.push_back(Bytes::from_static(b": keep-alive\n\n"));
                }
            }
        }
    }

    /// Says the last words of a stream whose answers have ended.
    fn end(&mut self) {
        let is_cut = self.app.is_stopping() && self.job.finishes().any(|f| f == Finish::Abort);
        if let Some(error) = self.job.failure() {
            return self.fail(&error);
        }
        if is_cut {
            return self.fail(&stopping());
        }
        let events = self.job.closing(&self.heading, self.with_usage);
        self.push(events);
        self.flight = None;
    }

    /// Says why there is no more.
    fn fail(&mut self, error: &ApiError) {
        let events = self.job.failing(error);
        self.push(events);
        self.flight = None;
    }

    fn push(&mut self, events: Vec<Event>) {
        self.events.extend(events.into_iter().map(|event| Bytes::from(event.into_bytes())));
    }
}

impl http_body::Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let polled = catch_unwind(AssertUnwindSafe(|| self.poll_event(cx)));
        let event = polled.unwrap_or_else(|_| {
            tracing::error!(id = self.heading.id, "a panic while an answer was sent");
            self.app.metrics.panicked();
            self.events.clear();
            self.fail(&internal());
            Poll::Ready(self.events.pop_front())
        });
        event.map(|event| event.map(|bytes| Ok(Frame::data(bytes))))
    }
}

impl IntoResponse for EventStream {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::new(self));
        let headers = response.headers_mut();
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        headers.insert(header::CONTENT_TYPE, kind);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Some proxies collect answers unless they are told not to.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }
}
