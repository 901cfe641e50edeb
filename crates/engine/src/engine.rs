//! The loop: plan, run, commit; and the way of the scheduler's news to the requests.

mod disk;
mod stats;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::{Event, Salt};
use nuthatch_scheduler::{Output as News, Scheduler};
use nuthatch_types::{
    BeamParams, Clock, FinishReason, Limits, Sampled, Sampling, SeqId, StepPlan, StepResult,
    TokenId,
};

use crate::beam::{BeamSearch, Move};
use crate::executor::Execute;
use crate::requests::{Gone, Member, Request, Requests};
use crate::tier::Tier;
use crate::{
    Attachment, EngineError, Form, Hints, Pooling, PromptReader, Sink, Submission, SubmitError,
};

pub use self::disk::{DiskOptions, SlowOptions};
pub use self::stats::{CachePicture, EngineStats, TopKStats};

/// A clock that the engine and its callers read.
pub type SharedClock = Arc<dyn Clock + Send + Sync>;

/// Takes the changes of the cache, after each step that made some, on the engine's thread. It must
/// not wait for anything.
pub type CacheListener = Box<dyn FnMut(Vec<Event>) + Send>;

/// Scheduler and executor, and the requests whose tokens they compute.
///
/// Belongs to one thread; [`Engine::spawn`](Engine::spawn) gives it its own.
pub struct Engine<E> {
    scheduler: Scheduler,
    executor: E,
    clock: SharedClock,
    requests: Requests,
    next_seq: u64,
    /// Time spent in steps, and the executor's part of it.
    step_time: Duration,
    execute_time: Duration,
    /// Sampled checks made so far.
    n_checks: u64,
    pub(crate) shares_pages: bool,
    listener: Option<CacheListener>,
    /// Pages on a disk, if there is one.
    tier: Option<Tier>,
    error: Option<EngineError>,
}

impl<E> Engine<E> {
    /// The same engine with another executor around its own: for those who choose a device at run
    /// time, and want one type of engine for all of them.
    pub fn map_executor<F>(self, wrap: impl FnOnce(E) -> F) -> Engine<F> {
        Engine {
            scheduler: self.scheduler,
            executor: wrap(self.executor),
            clock: self.clock,
            requests: self.requests,
            next_seq: self.next_seq,
            n_checks: self.n_checks,
            shares_pages: self.shares_pages,
            listener: self.listener,
            tier: self.tier,
            step_time: self.step_time,
            execute_time: self.execute_time,
            error: self.error,
        }
    }
}

impl<E: Execute> Engine<E> {
    /// An engine without requests.
    pub fn new(scheduler: Scheduler, executor: E, clock: SharedClock) -> Self {
        assert!(scheduler.is_idle(), "the engine knows every request of its scheduler");
        Engine {
            scheduler,
            executor,
            clock,
            requests: Requests::default(),
            next_seq: 0,
            step_time: Duration::ZERO,
            execute_time: Duration::ZERO,
            n_checks: 0,
            shares_pages: true,
            listener: None,
            tier: None,
            error: None,
        }
    }

    /// Takes a request whose news go to `outputs`, or refuses it at once.
    ///
    /// `outputs` gets at most as many tokens as the request's limits allow, and one
    /// [`Output::Finished`](crate::Output::Finished) for each answer. `submitted` is when the caller
    /// began to wait. The request is known by the sequence that is returned, its first one.
    pub fn submit(
        &mut self,
        submission: Submission,
        outputs: impl Into<Sink>,
        submitted: Duration,
    ) -> Result<SeqId, SubmitError> {
        if let Some(error) = &self.error {
            return Err(SubmitError::Failed { reason: error.to_string() });
        }
        let Submission {
            prompt,
            sampling,
            limits,
            n,
            beam,
            streaming,
            form,
            hidden,
            scores,
            hints,
        } = submission;
        let (mean, hidden) = match hidden {
            Some(sink) if sink.pooling() == Pooling::Mean => (Some(sink), None),
            hidden => (None, hidden),
        };
        let reads_prompt = mean.is_some() || scores.is_some();
        if n == 0 {
            return Err(SubmitError::NoAnswers);
        }
        if !self.shares_pages && (beam.is_some() || streaming.is_some()) {
            return Err(SubmitError::NoSharing);
        }
        if beam.is_some() && streaming.is_some() {
            return Err(SubmitError::StreamingBeams);
        }
        if beam.is_some() && form.is_some() {
            return Err(SubmitError::FormOfBeams);
        }
        if beam.is_some() && reads_prompt {
            return Err(SubmitError::PromptOfBeams);
        }
        let vocab = self.executor.vocab();
        let bias = sampling.logit_bias.iter().map(|&(token, _)| token);
        if let Some(token) = prompt.iter().copied().chain(bias).find(|token| token.0 >= vocab) {
            return Err(SubmitError::UnknownToken { token, vocab });
        }
        let seq = SeqId(self.next_seq);
        let mut reader = reads_prompt.then(|| PromptReader::new(prompt.clone(), scores, mean));
        let submission = nuthatch_scheduler::Submission { seq, prompt, sampling, limits };
        let hints = self.scheduler_hints(&hints);
        // Only plain samples begin with what is stored. Nothing is fetched for those that are refused.
        let is_plain =
            beam.is_none() && streaming.is_none() && !reads_prompt && self.room_to_wait() >= n;
        let (n_stored, n_remote) =
            if is_plain { self.n_stored(hints.salt, &submission.prompt) } else { (0, 0) };
        let computes_all = reads_prompt;
        let hints =
            nuthatch_scheduler::Hints { streaming, computes_all, n_stored, n_remote, ..hints };
        let search = match beam {
            Some(params) => Some(self.submit_beams(submission, hints, params, n)?),
            None => {
                self.submit_samples(&submission, hints, n)?;
                None
            }
        };
        if form.is_some() || hidden.is_some() || reader.is_some() {
            for index in 0..u64::from(n) {
                let constraint = form.as_ref().map(Form::constraint);
                let hidden = hidden.clone().filter(|_| index == 0);
                let attachment = Attachment { constraint, hidden, prompt: reader.take() };
                self.executor.attach(SeqId(seq.0 + index), attachment);
            }
        }
        self.requests.insert(seq, Request::new(outputs.into(), n, submitted, search));
        Ok(seq)
    }

    /// Computes one step, or waits a moment for what is needed to compute one; false when there is
    /// nothing to compute.
    ///
    /// After an error, [`Engine::fail`] must follow.
    pub fn step(&mut self) -> Result<bool, DeviceError> {
        let begin = self.clock.now();
        self.scheduler.set_now(begin);
        self.take_loaded()?;
        let Some(plan) = self.scheduler.plan() else { return self.await_loads() };
        let result = self.execute(&plan)?;
        self.finish_step(result, begin)?;
        Ok(true)
    }

    /// Takes in what a step computed that began then.
    fn finish_step(&mut self, result: StepResult, begin: Duration) -> Result<(), DeviceError> {
        let news = self.scheduler.commit(result);
        self.route(news);
        self.tell_listener();
        let took = self.clock.now().saturating_sub(begin);
        self.step_time += took;
        self.tend_tier(took)
    }

    /// Ends a request at once, all its answers. Nothing happens if it has already ended.
    pub fn cancel(&mut self, request: SeqId) {
        for seq in self.requests.seqs(request) {
            let news = self.scheduler.cancel(seq);
            self.route(news);
        }
    }

    /// Ends one answer of a request at once, and the others go on. Nothing happens if it has already
    /// ended, or if the request is a beam search, whose answers come when all have ended.
    pub fn end_answer(&mut self, request: SeqId, index: u32) {
        if let Some(seq) = self.requests.seq_of(request, index) {
            let news = self.scheduler.cancel(seq);
            self.route(news);
        }
    }

    /// Gives up what is cached and nobody uses, and returns how many pages that were.
    pub fn forget_idle(&mut self) -> u32 {
        let n_pages = self.scheduler.forget_idle();
        self.tell_listener();
        n_pages
    }

    /// Ends every request, because the engine is going away.
    pub fn cancel_all(&mut self) {
        for request in self.requests.all() {
            self.cancel(request);
        }
    }

    /// Tells every request that the engine has failed; no work is taken from now on.
    pub fn fail(&mut self, error: EngineError) {
        tracing::error!(%error, requests = self.requests.len(), "the engine has failed");
        let news = self.scheduler.fail_all();
        self.route(news);
        if let Some(tier) = &mut self.tier {
            tier.abandon(&mut self.scheduler);
        }
        assert!(self.requests.is_empty(), "every request was told");
        self.error.get_or_insert(error);
        self.tell_listener();
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
            tier: self.tier.as_ref().map(Tier::stats),
            topk: self.executor.topk(),
            error: self.error.as_ref().map(ToString::to_string),
        }
    }

    /// Tells `listener` what changes in the cache from now on, instead of whom it told so far. What
    /// there is already, [`Engine::cached_pages`] says.
    pub fn listen(&mut self, listener: CacheListener) {
        self.scheduler.watch_cache();
        self.tell_listener();
        self.listener = Some(listener);
    }

    /// Tells who listens what has changed in the cache.
    pub(crate) fn tell_listener(&mut self) {
        let Some(listener) = &mut self.listener else { return };
        let events = self.scheduler.take_cache_events();
        if !events.is_empty() {
            listener(events);
        }
    }

    /// The clock that requests are timed by.
    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    /// What carries out the plans, to look at.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// Why the engine does no more work, if it does not.
    pub fn into_error(self) -> Option<EngineError> {
        self.error
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, DeviceError> {
        let begin = self.clock.now();
        for start in &plan.started {
            self.requests.start(start.seq, begin);
        }
        let result = self.executor.run(plan);
        self.execute_time += self.clock.now().saturating_sub(begin);
        result
    }

    fn scheduler_hints(&self, hints: &Hints) -> nuthatch_scheduler::Hints {
        let Hints { cache_salt, retention, priority, tenant } = hints;
        let (retention, priority, tenant) = (*retention, *priority, *tenant);
        // All who give no salt share with each other.
        let salt = if cache_salt.is_empty() {
            Salt::default()
        } else {
            self.scheduler.cache().salt(cache_salt, b"")
        };
        nuthatch_scheduler::Hints {
            salt,
            retention,
            priority,
            tenant,
            ..nuthatch_scheduler::Hints::default()
        }
    }

    fn room_to_wait(&self) -> u32 {
        self.scheduler.config().max_waiting.saturating_sub(self.scheduler.stats().waiting)
    }

    /// Submits `n` sequences, of which all but the first fork the first: all of them or none.
    fn submit_samples(
        &mut self,
        first: &nuthatch_scheduler::Submission,
        hints: nuthatch_scheduler::Hints,
        n: u32,
    ) -> Result<(), SubmitError> {
        let room = self.room_to_wait();
        if n > 1 && n > room {
            return Err(SubmitError::TooManyAnswers { n, room });
        }
        for index in 0..u64::from(n) {
            let seq = SeqId(first.seq.0 + index);
            let seed = first.sampling.seed.wrapping_add(index);
            let sampling = Sampling { seed, n_candidates: 0, ..first.sampling.clone() };
            let submission = nuthatch_scheduler::Submission { seq, sampling, ..first.clone() };
            let fork_of = (index > 0 && self.shares_pages).then_some(first.seq);
            // The others share what the first computes.
            let computes_all = hints.computes_all && index == 0;
            let n_stored = if index == 0 { hints.n_stored } else { 0 };
            let hints = nuthatch_scheduler::Hints { fork_of, computes_all, n_stored, ..hints };
            let taken = self.scheduler.submit_with(submission, hints);
            assert!(taken.is_ok() || index == 0, "what is taken once is taken again");
            taken?;
            self.next_seq += 1;
        }
        Ok(())
    }

    /// Submits the sequence with which a beam search begins.
    fn submit_beams(
        &mut self,
        mut submission: nuthatch_scheduler::Submission,
        hints: nuthatch_scheduler::Hints,
        params: BeamParams,
        n: u32,
    ) -> Result<BeamSearch, SubmitError> {
        params.validate().map_err(nuthatch_scheduler::SubmitError::Sampling)?;
        let width = params.width;
        if n > width {
            return Err(SubmitError::TooManyBeams { n, width });
        }
        let (seq, limits) = (submission.seq, submission.limits.clone());
        submission.sampling.n_candidates = params.n_candidates(limits.stop_tokens.len());
        let max_tokens = self.scheduler.submit_wide(submission, hints, width)?;
        self.next_seq += 1;
        Ok(BeamSearch::new(params, Limits { max_tokens, ..limits }, seq))
    }

    /// Takes each of the scheduler's news to its request.
    fn route(&mut self, news: impl IntoIterator<Item = News>) {
        let now = self.clock.now();
        for news in news {
            match news {
                News::Token(Sampled { seq, token, logprob, top }) => {
                    let sent = self.requests.send(seq, (token, logprob, top), now);
                    if let Err(Gone(request)) = sent {
                        self.forget(request);
                    }
                }
                News::Candidates { seq, top } => self.search(seq, top, now),
                News::Finished { seq, reason, usage } => {
                    let Some(member) = self.leave(seq) else { continue };
                    if self.is_search(member.request) {
                        self.end_search(member.request, reason, now);
                    } else {
                        self.requests.finish(member, reason, usage, now);
                    }
                }
            }
        }
    }

    /// Ends a request to which nobody listens: that is as good as a cancellation.
    fn forget(&mut self, request: SeqId) {
        for seq in self.requests.seqs(request) {
            self.leave(seq);
            self.scheduler.cancel(seq);
        }
        self.requests.remove(request);
    }

    /// Takes a sequence out of its request, for good.
    fn leave(&mut self, seq: SeqId) -> Option<Member> {
        self.executor.detach(seq);
        self.requests.leave(seq)
    }

    /// Tells a beam search what may follow one of its sequences. When that is known for all of
    /// them, the search goes a step further.
    fn search(&mut self, seq: SeqId, candidates: Vec<(TokenId, f32)>, now: Duration) {
        let Some(member) = self.requests.member(seq) else { return };
        if let Some(usage) = self.scheduler.usage(seq) {
            self.requests.first_step(seq, usage, now);
        }
        let request = self.requests.get_mut(member.request);
        let Some(search) = request.and_then(|request| request.search.as_mut()) else { return };
        if !search.take(seq, candidates) {
            return;
        }
        let next_seq = &mut self.next_seq;
        let moves = search.advance(|| {
            *next_seq += 1;
            SeqId(*next_seq - 1)
        });
        let is_over = search.seqs().next().is_none();
        for step in moves {
            self.make(step, member);
        }
        if is_over {
            self.requests.finish_search(member.request, FinishReason::Failed, now);
        }
    }

    /// Carries out one move of a beam search.
    fn make(&mut self, step: Move, member: Member) {
        match step {
            Move::Discard(seq) => {
                self.requests.leave(seq);
                self.scheduler.discard(seq);
            }
            Move::Fork { source, seq, token } => {
                self.requests.join(seq, member);
                self.scheduler.fork(source, seq, token);
            }
            Move::Proceed { seq, token } => self.scheduler.proceed(seq, token),
        }
    }

    /// Ends a beam search of which a sequence has ended that was not to.
    fn end_search(&mut self, request: SeqId, reason: FinishReason, now: Duration) {
        for seq in self.requests.seqs(request) {
            self.requests.leave(seq);
            self.scheduler.cancel(seq);
        }
        self.requests.finish_search(request, reason, now);
    }

    fn is_search(&mut self, request: SeqId) -> bool {
        self.requests.get_mut(request).is_some_and(|request| request.search.is_some())
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
