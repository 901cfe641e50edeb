//! A request on its way through the engine.
//!
//! The engine's thread puts what is new into the request's own channel, which is as long as the
//! request's answers and never blocks. A request that is dropped, because its client has left, is
//! cancelled: the engine is told at once and obeys before its next step.

use std::sync::Arc;
use std::task::{Context, Poll};

use nuthatch_engine::{EngineHandle, Output, Sink, Submission, SubmitError};
use nuthatch_types::SeqId;
use nuthatch_wire::ApiError;
use tokio::sync::{mpsc, oneshot};

use crate::app::App;
use crate::metrics::Watch;

/// A request on its way through the engine.
#[derive(Debug)]
pub(crate) struct Flight {
    app: Arc<App>,
    /// The request's first sequence, for each prompt.
    seqs: Vec<SeqId>,
    news: mpsc::UnboundedReceiver<(usize, Output)>,
    /// Answers that have not ended.
    n_open: usize,
    watch: Watch,
}

impl Flight {
    /// Submits a prompt or several: all of them or none.
    pub(crate) async fn submit(
        app: &Arc<App>,
        submissions: Vec<Submission>,
    ) -> Result<Self, ApiError> {
        let n_open = submissions.iter().map(|submission| submission.n as usize).sum();
        let watch = Watch::new(&submissions, app.engine.now());
        let (sender, news) = mpsc::unbounded_channel();
        let mut answers = Vec::with_capacity(submissions.len());
        for (prompt_idx, submission) in submissions.into_iter().enumerate() {
            let sender = sender.clone();
            let sink = Sink::new(move |output| sender.send((prompt_idx, output)).is_ok());
            answers.push(order(&app.engine, submission, sink));
        }
        drop(sender);
        let mut flight = Flight { app: Arc::clone(app), seqs: Vec::new(), news, n_open, watch };
        let mut refused = None;
        for answer in answers {
            let answer = match answer {
                Ok(answer) => app.answer(answer).await,
                Err(error) => Ok(Err(error)),
            };
            match answer {
                Ok(Ok(seq)) => flight.seqs.push(seq),
                Ok(Err(error)) => refused = refused.or(Some(crate::refusal(&error))),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match refused {
            None => Ok(flight),
            Some(error) => {
                flight.cancel();
                flight.n_open = 0;
                Err(error)
            }
        }
    }

    /// The next news and the place of their prompt; `None` after the last, or when the engine is lost.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Output)>> {
        let news = std::task::ready!(self.news.poll_recv(cx));
        if let Some((prompt_idx, output)) = &news {
            let now = self.app.engine.now();
            self.watch.take(*prompt_idx, output, now, &self.app.metrics);
            self.n_open -= usize::from(matches!(output, Output::Finished { .. }));
        }
        Poll::Ready(news)
    }

    /// Like [`Flight::poll_next`].
    pub(crate) async fn next(&mut self) -> Option<(usize, Output)> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Tells the engine that one answer is long enough.
    pub(crate) fn end_answer(&self, prompt_idx: usize, index: u32) {
        if let Some(&seq) = self.seqs.get(prompt_idx) {
            self.app.engine.end_answer(seq, index);
        }
    }

    fn cancel(&self) {
        self.seqs.iter().for_each(|&seq| self.app.engine.cancel(seq));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.n_open > 0 {
            self.cancel();
            if self.app.is_alive() {
                self.app.metrics.client_left(self.n_open);
            }
        }
    }
}

/// Submits one prompt. If nobody waits for the answer any more, the engine is told to forget it.
fn order(
    engine: &EngineHandle,
    submission: Submission,
    sink: Sink,
) -> Result<oneshot::Receiver<Result<SeqId, SubmitError>>, SubmitError> {
    let (sender, answer) = oneshot::channel();
    let handle = engine.clone();
    engine.submit_to(submission, sink, move |result| {
        if let Err(Ok(seq)) = sender.send(result) {
            handle.cancel(seq);
        }
    })?;
    Ok(answer)
}
