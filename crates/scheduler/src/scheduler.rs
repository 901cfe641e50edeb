//! The facade: submit, plan, commit, cancel.

use std::collections::BTreeSet;
use std::time::Duration;

use nuthatch_cache::{Cache, Event, Load, PinId, Retention, Salt};
use nuthatch_types::{
    FastMap, FinishReason, Limits, Sampling, SamplingError, SeqId, StepPlan, Streaming, TokenId,
};
use thiserror::Error;

use crate::admit::Blocked;
use crate::cost::Meter;
use crate::kept::Stream;
use crate::policy::{Arrival, Policy, Queue, Rank, Tenant};
use crate::sequence::{Loss, Place, Sequence};
use crate::step::InFlight;
use crate::verify::{self, Fault};
use crate::{Config, ConfigError, Counters, Output, Rates, Stats};

/// Decides what each step computes. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) cache: Cache,
    pub(crate) seqs: FastMap<SeqId, Sequence>,
    /// Sequences that wait for their turn, swapped ones included.
    pub(crate) queue: Box<dyn Queue>,
    /// Sequences that wait for the one that they fork, in order of arrival.
    pub(crate) held: Vec<SeqId>,
    /// Sequences of the queue whose pages are on the host, by the rank with which they wait.
    pub(crate) swapped: BTreeSet<(Rank, SeqId)>,
    /// Sequences with their pages on the device, in order of rank.
    pub(crate) running: Vec<SeqId>,
    /// Whether a rank in `running` changed.
    pub(crate) is_unsorted: bool,
    /// Sequences that the executor knows.
    pub(crate) n_started: u32,
    /// Sequences whose tokens the caller chooses.
    pub(crate) n_guided: u32,
    /// Those of them that have given their pages up until the caller has chosen.
    pub(crate) n_parked: u32,
    /// Running sequences that the executor does not know, because they have been loading so far.
    pub(crate) n_unstarted: u32,
    /// Sequences of which the executor knows and that it has not been told to forget.
    pub(crate) ended: Vec<SeqId>,
    /// The step that is being executed.
    pub(crate) in_flight: Option<InFlight>,
    pub(crate) counters: Counters,
    pub(crate) looks_ahead: bool,
    /// Spare places of all sequences.
    pub(crate) n_spare: u32,
    /// What it costs to move and to compute.
    pub(crate) meter: Meter,
    /// Time that may be spent on bringing pages of spilled sequences to the device.
    pub(crate) unspill_nanos: f64,
    /// Loads that were decided and not yet handed out.
    pub(crate) loads: Vec<Load>,
    /// Whether something slower than the host may hold pages.
    pub(crate) has_slow_tier: bool,
    /// The request that did not fit when it was its turn.
    pub(crate) blocked: Option<Blocked>,
    pub(crate) n_arrivals: u64,
}

/// A request, in tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// The sequence's id, never used before.
    pub seq: SeqId,
    /// The prompt; at least one token.
    pub prompt: Vec<TokenId>,
    /// How the answer's tokens are chosen.
    pub sampling: Sampling,
    /// When the answer ends.
    pub limits: Limits,
}

/// What a request says about how it is served. The default says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Whose pages it may share; made by [`Cache::salt`].
    pub salt: Salt,
    /// How long its pages should stay when it is gone.
    pub retention: Retention,
    /// A sequence that begins with the same tokens. The request waits until that one has computed
    /// them, or is gone, and then shares all of them, even those that fill no page.
    pub fork_of: Option<SeqId>,
    /// Tokens at its beginning whose KV something slower than the host holds. What the cache does
    /// not find of them is asked for: see [`Scheduler::take_loads`]. Nothing is asked for a sequence
    /// that does not keep everything.
    pub n_stored: u32,
    /// Pages among those that come from somewhere farther than a disk.
    pub n_remote: u32,
    /// How urgent it is under [`Policy::Priority`]; higher is more.
    pub priority: u8,
    /// Who pays for it under [`Policy::Fair`].
    pub tenant: Tenant,
    /// Keeps only the first and the last tokens in the cache, so that neither the context nor the
    /// cache bounds the answer.
    pub streaming: Option<Streaming>,
    /// Computes every token of the prompt, whatever the cache holds, for somebody who wants to see
    /// what comes out at each of them. Other requests may use what was computed.
    pub computes_all: bool,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("the prompt has no token")]
    EmptyPrompt,
    /// No answer was asked for.
    #[error("max_tokens is 0, but must be at least 1")]
    NoAnswer,
    /// The prompt and one token of the answer are longer than a sequence may be.
    #[error(
        "the prompt has {prompt} tokens; with one more it exceeds the context of {max_context}"
    )]
    ExceedsContext {
        /// Tokens of the prompt.
        prompt: u32,
        /// Most tokens of a sequence.
        max_context: u32,
    },
    /// What is kept of the prompt and one token of the answer does not fit into the empty cache, on
    /// both tiers if sequences may spill.
    #[error(
        "the prompt has {prompt} tokens; with one more it needs {needed} pages of {page_len} \
         tokens, but the cache has {n_pages}"
    )]
    ExceedsCache {
        /// Tokens of the prompt.
        prompt: u32,
        /// Pages it needs.
        needed: u32,
        /// Pages that one sequence may have.
        n_pages: u32,
        /// Tokens of one page.
        page_len: u32,
    },
    /// The answers that are followed at one time do not fit into the empty cache.
    #[error(
        "{width} answers to a prompt of {prompt} tokens, up to {max_len} tokens long with it, need \
         {needed} pages of {page_len} tokens, but the cache has {n_pages}"
    )]
    ExceedsCacheWide {
        /// Tokens of the prompt.
        prompt: u32,
        /// Answers that are followed at one time.
        width: u32,
        /// Most tokens of prompt and answer together.
        max_len: u32,
        /// Pages they need if nothing but the prompt is shared.
        needed: u64,
        /// Pages that they may have.
        n_pages: u32,
        /// Tokens of one page.
        page_len: u32,
    },
    /// More answers than may run at one time are to be followed.
    #[error("{width} answers are to be followed, but only {max_seqs} sequences run at one time")]
    TooWide {
        /// Answers that are followed at one time.
        width: u32,
        /// Sequences that may run at one time.
        max_seqs: u32,
    },
    /// A streaming request that keeps nothing of what it said last.
    #[error("the streaming window is 0, but must be at least 1")]
    NoStreamingWindow,
    /// What a streaming request keeps does not fit.
    #[error(
        "sinks and window keep {kept} tokens in up to {needed} pages, but a sequence may have \
         {max_context} tokens and {n_pages} pages"
    )]
    StreamingExceeds {
        /// Tokens that it keeps, in whole pages.
        kept: u32,
        /// Most tokens of a table.
        max_context: u32,
        /// Pages that it needs.
        needed: u32,
        /// Pages that one sequence may have.
        n_pages: u32,
    },
    /// Too many requests wait. The same request may be accepted later.
    #[error("{waiting} requests are waiting, and no more may")]
    QueueFull {
        /// Requests that wait.
        waiting: u32,
    },
    /// The id belongs to a sequence that has not ended.
    #[error("{seq:?} is already in use")]
    DuplicateSeq {
        /// The id.
        seq: SeqId,
    },
    /// A sampling parameter outside its range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

impl Scheduler {
    /// A scheduler without requests that owns `cache`, which must be empty. First come, first
    /// served.
    pub fn new(config: Config, cache: Cache) -> Result<Self, ConfigError> {
        Scheduler::with_policy(config, cache, Policy::default())
    }

    /// A scheduler without requests that owns `cache`, which must be empty.
    pub fn with_policy(config: Config, cache: Cache, policy: Policy) -> Result<Self, ConfigError> {
        config.validate()?;
        assert!(cache.is_empty(), "the scheduler knows every sequence in its cache");
        Ok(Scheduler {
            config,
            cache,
            seqs: FastMap::default(),
            queue: policy.queue(),
            held: Vec::new(),
            swapped: BTreeSet::new(),
            running: Vec::new(),
            is_unsorted: false,
            n_started: 0,
            n_unstarted: 0,
            n_guided: 0,
            n_parked: 0,
            ended: Vec::new(),
            in_flight: None,
            counters: Counters::default(),
            looks_ahead: false,
            n_spare: 0,
            meter: Meter::default(),
            unspill_nanos: 0.0,
            loads: Vec::new(),
            has_slow_tier: false,
            blocked: None,
            n_arrivals: 0,
        })
    }

    /// Takes a request, or refuses it at once: what is taken will finish.
    ///
    /// The answer is clipped to the context and to what the whole cache holds, unless what is kept
    /// of the sequence always fits; it then ends with [`FinishReason::Length`].
    pub fn submit(&mut self, submission: Submission) -> Result<(), SubmitError> {
        self.submit_with(submission, Hints::default())
    }

    /// Takes a request that says how it is served. See [`Scheduler::submit`].
    pub fn submit_with(&mut self, submission: Submission, hints: Hints) -> Result<(), SubmitError> {
        let checked = self.check(&submission, &hints);
        match checked {
            Ok(_) => self.counters.submitted += 1,
            Err(_) => self.counters.refused += 1,
        }
        let max_len = checked?;
        let Submission { seq, prompt, sampling, limits } = submission;
        // Only a sequence that is there can be forked; it is older, so no two wait for each other.
        let source = hints.fork_of.and_then(|source| self.seqs.get(&source));
        let is_alike = |source: &&Sequence| {
            source.hints.salt == hints.salt
                && source.hints.streaming.is_some() == hints.streaming.is_some()
        };
        let source = source.filter(is_alike);
        let n_common = source.map_or(0, |source| common(&prompt, source));
        let hints = Hints { fork_of: source.map(|source| source.id), ..hints };
        self.n_arrivals += 1;
        let n_prompt = prompt.len() as u32;
        let place = if n_common > 0 { Place::Held } else { Place::Waiting };
        let sequence = Sequence {
            id: seq,
            rank: self.queue.rank(Arrival::nth(self.n_arrivals), &hints, n_prompt),
            n_since_rank: 0,
            place,
            since: self.counters.steps,
            n_prompt,
            newest: prompt.last().copied().unwrap_or_default(),
            tokens: prompt.into(),
            computed: 0,
            dropped: 0,
            cached: 0,
            computed_max: 0,
            loss: Loss::PagesShort,
            n_spare: 0,
            table_known: 0,
            n_loading: 0,
            max_len,
            limits,
            hints: Box::new(hints),
            stream: hints.streaming.map(|s| Stream::new(s, self.cache.config().page_len)),
            n_common,
            is_guided: sampling.n_candidates > 0,
            sampling: Box::new(sampling),
            is_started: false,
            is_spilled: false,
            protected: false,
            last_step: 0,
        };
        match place {
            Place::Held => self.held.push(seq),
            Place::Waiting | Place::Swapped | Place::Running | Place::Parked => {
                self.queue.push(sequence.waiter());
            }
        }
        self.n_guided += u32::from(sequence.is_guided);
        self.seqs.insert(seq, sequence);
        Ok(())
    }

    /// Decides the next step, or `None` when there is nothing to compute, or nothing before a load has
    /// ended.
    ///
    /// The plan must be executed and its result given to [`Scheduler::commit`], or the fault told
    /// by [`Scheduler::fail_all`], before the next plan is made.
    pub fn plan(&mut self) -> Option<StepPlan> {
        assert!(self.in_flight.is_none(), "one step at a time");
        self.plan_step()
    }

    /// Ends a sequence at once, wherever it is, and frees everything it has. The next plan tells
    /// the executor to forget it. `None` when there is no such sequence.
    pub fn cancel(&mut self, seq: SeqId) -> Option<Output> {
        let output = self.end(seq, FinishReason::Cancelled)?;
        self.running.retain(|&running| running != seq);
        self.counters.cancelled += 1;
        Some(output)
    }

    /// Ends every sequence after a device fault. What the device held is lost.
    ///
    /// The next plan tells the executor to forget all sequences, also those of the step that
    /// failed, of which the executor may never have heard.
    pub fn fail_all(&mut self) -> Vec<Output> {
        if let Some(in_flight) = self.in_flight.take() {
            self.ended.extend(in_flight.ended);
        }
        let mut all: Vec<SeqId> = self.seqs.keys().copied().collect();
        all.sort_unstable_by_key(|&seq| self.seq(seq).rank.arrival);
        self.running.clear();
        self.counters.failed += all.len() as u64;
        let outputs =
            all.into_iter().filter_map(|seq| self.end(seq, FinishReason::Failed)).collect();
        self.cache.clear();
        outputs
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// The limits of the scheduler.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tells the time by which retention is measured. It never runs backwards.
    pub fn set_now(&mut self, now: Duration) {
        self.cache.set_now(now);
    }

    /// Sets what a tenant's share is worth under [`Policy::Fair`]; 1 is ordinary.
    pub fn set_weight(&mut self, tenant: Tenant, weight: u32) {
        self.queue.set_weight(tenant, weight);
    }

    /// Pins what is cached of the beginning of `tokens`. See [`Cache::pin`].
    pub fn pin(&mut self, pin: PinId, salt: Salt, tokens: &[TokenId]) -> u32 {
        self.cache.pin(pin, salt, tokens)
    }

    /// Takes a pin away. See [`Cache::unpin`].
    pub fn unpin(&mut self, pin: PinId) -> bool {
        self.cache.unpin(pin)
    }

    /// Gives up what is cached and nobody uses. See [`Cache::forget_idle`].
    pub fn forget_idle(&mut self) -> u32 {
        assert!(self.in_flight.is_none(), "between steps");
        self.cache.forget_idle()
    }

    /// Tells what changes of what can be found by its tokens. See [`Cache::watch`].
    pub fn watch_cache(&mut self) {
        self.cache.watch();
    }

    /// What changed. See [`Cache::take_events`].
    pub fn take_cache_events(&mut self) -> Vec<Event> {
        self.cache.take_events()
    }

    /// What moving and computing cost, as far as it was measured.
    pub fn rates(&self) -> Rates {
        self.meter.rates()
    }

    /// The cache, to look at.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What the scheduler holds now, and what it did so far; constant time.
    pub fn stats(&self) -> Stats {
        let mut cache = self.cache.stats();
        // Spare places have no token yet.
        cache.tokens_stored -= self.n_spare;
        cache.tokens_wasted += self.n_spare;
        Stats {
            waiting: self.n_waiting(),
            swapped: self.swapped.len() as u32,
            running: self.running.len() as u32,
            parked: self.n_parked,
            cache,
            counters: self.counters,
        }
    }

    /// Checks every invariant of scheduler and cache; linear in pages and sequences.
    pub fn verify(&self) -> Result<(), Fault> {
        verify::verify(self)
    }

    /// Checks one sequence, one page and one table, in about constant time, for production: which
    /// ones, `k` says, so that rising numbers check everything in turn.
    pub fn verify_sample(&self, k: u64) -> Result<(), Fault> {
        verify::verify_sample(self, k)
    }

    /// The most tokens that the request's sequence may have, or why it is refused.
    pub(crate) fn check(&self, submission: &Submission, hints: &Hints) -> Result<u32, SubmitError> {
        submission.sampling.validate()?;
        if submission.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if submission.limits.max_tokens == 0 {
            return Err(SubmitError::NoAnswer);
        }
        let prompt = u32::try_from(submission.prompt.len()).unwrap_or(u32::MAX);
        let max_len = self.max_len(prompt, hints)?;
        if self.seqs.contains_key(&submission.seq) {
            return Err(SubmitError::DuplicateSeq { seq: submission.seq });
        }
        let waiting = self.n_waiting();
        if waiting >= self.config.max_waiting {
            return Err(SubmitError::QueueFull { waiting });
        }
        let asked = prompt.saturating_add(submission.limits.max_tokens);
        Ok(asked.min(max_len))
    }

    /// Forgets a sequence and frees its pages. `running` is left to the caller, who may be walking
    /// along it.
    pub(crate) fn end(&mut self, seq: SeqId, reason: FinishReason) -> Option<Output> {
        let sequence = self.seqs.remove(&seq)?;
        self.n_spare -= sequence.n_spare;
        match sequence.place {
            Place::Held => self.held.retain(|&held| held != seq),
            Place::Waiting => self.queue.remove(&sequence.waiter()),
            Place::Swapped => {
                self.queue.remove(&sequence.waiter());
                self.swapped.remove(&(sequence.rank, seq));
                self.cache.release(seq);
            }
            Place::Running => {
                self.n_unstarted -= u32::from(!sequence.is_started);
                self.cache.release(seq);
            }
            Place::Parked => self.n_parked -= 1,
        }
        self.n_guided -= u32::from(sequence.is_guided);
        if sequence.is_started {
            self.n_started -= 1;
            self.ended.push(seq);
        }
        Some(Output::Finished { seq, reason, usage: sequence.usage() })
    }

    fn n_waiting(&self) -> u32 {
        (self.queue.len() + self.held.len()) as u32
    }

    /// A sequence that has not ended.
    pub(crate) fn seq(&self, seq: SeqId) -> &Sequence {
        self.seqs.get(&seq).expect("a queued sequence has not ended")
    }

    /// A sequence that has not ended, to change.
    pub(crate) fn seq_mut(&mut self, seq: SeqId) -> &mut Sequence {
        self.seqs.get_mut(&seq).expect("a queued sequence has not ended")
    }
}

/// How many tokens two sequences begin with in common, without the last of the first one: that one
/// is always computed, because it gives the logits.
fn common(fork: &[TokenId], source: &Sequence) -> u32 {
    let fork = &fork[..fork.len().saturating_sub(1)];
    fork.iter().zip(source.tokens.iter()).take_while(|(a, b)| a == b).count() as u32
}
