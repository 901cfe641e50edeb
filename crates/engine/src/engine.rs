//! The loop: plan, run, commit; and the way of each output to its request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use nuthatch_backend::DeviceError;
use nuthatch_cache::Salt;
use nuthatch_scheduler::Scheduler;
use nuthatch_types::{Clock, FastMap, FinishReason, SeqId, StepPlan, StepResult, TokenId};

use crate::executor::{Execute, is_failed};
use crate::output::Milestones;
use crate::{EngineError, Hints, Output, Submission, SubmitError};

/// A clock that the engine and its callers read.
pub type SharedClock = Arc<dyn Clock + Send + Sync>;

/// Scheduler and executor, and the requests whose tokens they compute.
///
/// Belongs to one thread; [`Engine::spawn`](Engine::spawn) gives it its own.
pub struct Engine<E> {
    scheduler: Scheduler,
    executor: E,
    clock: SharedClock,
    requests: FastMap<SeqId, Request>,
    next_seq: u64,
    /// Time spent in steps, and the executor's part of it.
    step_time: Duration,
    execute_time: Duration,
    /// Sampled checks made so far.
    n_checks: u64,
    error: Option<EngineError>,
}

/// Who waits for a sequence's tokens.
struct Request {
    outputs: Sender<Output>,
    milestones: Milestones,
}

/// What the engine holds and what it did, as plain numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// The scheduler's and the cache's own numbers.
    pub scheduler: nuthatch_scheduler::Stats,
    /// Time spent in steps.
    pub step_time: Duration,
    /// The executor's part of `step_time`; the rest is planning, bookkeeping and streaming.
    pub execute_time: Duration,
    /// Why the engine does no more work, if it does not.
    pub error: Option<String>,
}

impl<E: Execute> Engine<E> {
    /// An engine without requests.
    pub fn new(scheduler: Scheduler, executor: E, clock: SharedClock) -> Self {
        assert!(scheduler.is_idle(), "the engine knows every request of its scheduler");
        Engine {
            scheduler,
            executor,
            clock,
            requests: FastMap::default(),
            next_seq: 0,
            step_time: Duration::ZERO,
            execute_time: Duration::ZERO,
            n_checks: 0,
            error: None,
        }
    }

    /// Takes a request whose news go to `outputs`, or refuses it at once.
    ///
    /// Sending never blocks the engine: `outputs` should be unbounded, and gets at most as many
    /// tokens as the request's limit, and one [`Output::Finished`]. A receiver that is dropped
    /// cancels the request. `submitted` is when the caller began to wait.
    pub fn submit(
        &mut self,
        submission: Submission,
        outputs: Sender<Output>,
        submitted: Duration,
    ) -> Result<SeqId, SubmitError> {
        if let Some(error) = &self.error {
            return Err(SubmitError::Failed { reason: error.to_string() });
        }
        let Submission { prompt, sampling, limits, hints } = submission;
        let vocab = self.executor.vocab();
        let bias = sampling.logit_bias.iter().map(|&(token, _)| token);
        if let Some(token) = prompt.iter().copied().chain(bias).find(|token| token.0 >= vocab) {
            return Err(SubmitError::UnknownToken { token, vocab });
        }
        let seq = SeqId(self.next_seq);
        let hints = self.hints(&hints);
        let submission = nuthatch_scheduler::Submission { seq, prompt, sampling, limits };
        self.scheduler.submit_with(submission, hints)?;
        self.next_seq += 1;
        let milestones = Milestones::submitted(submitted);
        self.requests.insert(seq, Request { outputs, milestones });
        Ok(seq)
    }

    /// Computes one step; false when there is nothing to compute.
    ///
    /// After an error, [`Engine::fail`] must follow.
    pub fn step(&mut self) -> Result<bool, DeviceError> {
        let begin = self.clock.now();
        let Some(plan) = self.scheduler.plan() else { return Ok(false) };
        let result = self.execute(&plan)?;
        self.end_failed(&result);
        let outputs = self.scheduler.commit(result);
        self.route(outputs);
        self.step_time += self.clock.now().saturating_sub(begin);
        Ok(true)
    }

    /// Ends a request at once. Nothing happens if it has already ended.
    pub fn cancel(&mut self, seq: SeqId) {
        let output = self.scheduler.cancel(seq);
        self.route(output);
    }

    /// Ends every request, because the engine is going away.
    pub fn cancel_all(&mut self) {
        let mut seqs: Vec<SeqId> = self.requests.keys().copied().collect();
        seqs.sort_unstable();
        for seq in seqs {
            self.cancel(seq);
        }
    }

    /// Tells every request that the engine has failed; no work is taken from now on.
    pub fn fail(&mut self, error: EngineError) {
        tracing::error!(%error, requests = self.requests.len(), "the engine has failed");
        let outputs = self.scheduler.fail_all();
        self.route(outputs);
        assert!(self.requests.is_empty(), "every request was told");
        self.error.get_or_insert(error);
    }

    /// Checks a sample of the invariants of scheduler and cache, another one each time, in about
    /// constant time: for idle times in production.
    pub fn verify_sample(&mut self) -> Result<(), EngineError> {
        self.n_checks += 1;
        Ok(self.scheduler.verify_sample(self.n_checks)?)
    }

    /// Checks every invariant of scheduler and cache. Linear in pages and sequences: for tests.
    pub fn verify(&self) -> Result<(), EngineError> {
        Ok(self.scheduler.verify()?)
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// What the engine holds and what it did.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            scheduler: self.scheduler.stats(),
            step_time: self.step_time,
            execute_time: self.execute_time,
            error: self.error.as_ref().map(ToString::to_string),
        }
    }

    /// The clock that requests are timed by.
    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    /// Why the engine does no more work, if it does not.
    pub fn into_error(self) -> Option<EngineError> {
        self.error
    }

    fn hints(&self, hints: &Hints) -> nuthatch_scheduler::Hints {
        let Hints { cache_salt, retention, priority, tenant } = hints;
        let (retention, priority, tenant) = (*retention, *priority, *tenant);
        // All who give no salt share with each other.
        let salt = if cache_salt.is_empty() {
            Salt::default()
        } else {
            self.scheduler.cache().salt(cache_salt, b"")
        };
        nuthatch_scheduler::Hints { salt, retention, priority, tenant, ..Default::default() }
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, DeviceError> {
        let begin = self.clock.now();
        for start in &plan.started {
            let request = self.requests.get_mut(&start.seq).expect("the engine submitted it");
            request.milestones.started = Some(begin);
        }
        let result = self.executor.run(plan);
        self.execute_time += self.clock.now().saturating_sub(begin);
        result
    }

    /// Ends the sequences for which no token could be chosen. The others do not notice.
    fn end_failed(&mut self, result: &StepResult) {
        for sampled in result.sampled.iter().filter(|sampled| is_failed(sampled)) {
            let Some(output) = self.scheduler.cancel(sampled.seq) else { continue };
            let nuthatch_scheduler::Output::Finished { seq, usage, .. } = output else {
                unreachable!("a cancelled sequence has finished");
            };
            let reason = FinishReason::Failed;
            self.route([nuthatch_scheduler::Output::Finished { seq, reason, usage }]);
        }
    }

    /// Sends each output to its request.
    fn route(&mut self, outputs: impl IntoIterator<Item = nuthatch_scheduler::Output>) {
        let now = self.clock.now();
        for output in outputs {
            match output {
                nuthatch_scheduler::Output::Token { seq, token, logprob, top } => {
                    self.send_token(seq, (token, logprob, top), now);
                }
                nuthatch_scheduler::Output::Finished { seq, reason, usage } => {
                    // A request whose receiver is gone was removed when that was seen.
                    let Some(request) = self.requests.remove(&seq) else { continue };
                    let timings = request.milestones.timings(now);
                    // Nobody may be listening any more, and nobody needs to.
                    let _ = request.outputs.send(Output::Finished { reason, usage, timings });
                }
            }
        }
    }

    fn send_token(
        &mut self,
        seq: SeqId,
        (token, logprob, top): (TokenId, f32, Vec<(TokenId, f32)>),
        now: Duration,
    ) {
        let Some(request) = self.requests.get_mut(&seq) else { return };
        request.milestones.first_token.get_or_insert(now);
        if request.outputs.send(Output::Token { token, logprob, top }).is_err() {
            // The receiver is gone, so that this is as good as a cancellation.
            self.requests.remove(&seq);
            self.scheduler.cancel(seq);
        }
    }
}

impl<E> fmt::Debug for Engine<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("scheduler", &self.scheduler.stats())
            .field("requests", &self.requests.len())
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}
