//! A seeded simulation: scheduler and cache against an executor that notices every mistake.
//!
//! Each seed makes its own world: page length, pools of both tiers, whether sequences may spill, what
//! moving and computing cost, budgets, windows, a policy, arrivals, lengths, priorities, tenants,
//! forks, streams, pins, loads, cancels, device faults and logits that are no numbers.
//!
//! After each step every invariant is checked, and that nobody was put off for longer than the policy
//! says (`overtaken`). At the end every page is back, and each answer is the one that its request
//! gets alone.
//!
//! A failure prints its seed. `SIM_SEEDS=17..18 cargo test --test sim` replays one seed, byte for
//! byte, `SIM_SEEDS=0..10000` tries many.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::time::Duration;

use nuthatch_cache::Eviction::{Lfu, Lineage, Lru, Priority};
use nuthatch_cache::{Cache, Load, Options, Outcome, PinId, Retention, Salt};
use nuthatch_scheduler::{
    Config, Hints, Output, Policy, Scheduler, Source, Submission, SubmitError, Tenant, Usage,
};
use nuthatch_testkit::{FakeExecutor, Rng, answer_alone};
use nuthatch_types::HostReads::{Far, Near, Never};
use nuthatch_types::{FinishReason, Limits, Sampling, SeqId, Streaming, TokenId, Window};

const N_VOCAB: u32 = 50;

/// Seeds that have found something: 1835, a load for a sequence that came back from a swap with a
/// half-full page.
const FOUND: [u64; 1] = [1835];

#[expect(clippy::disallowed_methods, reason = "a knob of this test, not of the program")]
fn seeds() -> Range<u64> {
    let Ok(asked) = std::env::var("SIM_SEEDS") else { return 0..200 };
    let (start, end) = asked.split_once("..").expect("SIM_SEEDS is start..end");
    start.parse().expect("a number")..end.parse().expect("a number")
}

struct Request {
    submission: Submission,
    hints: Hints,
    answer: Vec<TokenId>,
    finished: Option<FinishReason>,
    /// Its place in the order of arrival.
    arrival: u64,
    /// Steps that were planned when it came.
    since: u64,
    /// Whether it ever had pages.
    is_admitted: bool,
    /// Requests that came later and had pages earlier.
    n_overtaken: u32,
}

/// A load that the slow tier has begun.
struct SlowLoad {
    load: Load,
    /// Pages that will come.
    n_pages: u32,
    is_late: bool,
}

struct World {
    rng: Rng,
    loads: Vec<SlowLoad>,
    now: Duration,
    config: Config,
    policy: Policy,
    scheduler: Scheduler,
    executor: FakeExecutor,
    /// Every plan and every output, if they are kept.
    log: Option<String>,
    requests: BTreeMap<SeqId, Request>,
    n_to_submit: u32,
    max_prompt: u32,
    max_answer: u32,
    has_faults: bool,
    /// What many prompts begin with.
    openings: Vec<Vec<TokenId>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let page_len = 1 << rng.range(0..5);
        // A few requests of full length fill the cache.
        let max_prompt = rng.range(2..120);
        let max_answer = rng.range(2..60);
        let longest = max_prompt + max_answer;
        let n_pages = rng.range(longest / 2..longest * 3).div_ceil(page_len).max(2);
        let max_seqs = rng.range(1..12);
        let config = Config {
            max_seqs,
            max_batched_tokens: max_seqs + rng.range(0..40),
            max_waiting: rng.range(1..40),
            max_context: rng.range(2..400),
            window: rng.one_in(3).then(|| rng.range(1..60)),
        };
        let options = Options {
            prefix: !rng.one_in(4),
            eviction: [Lru, Lfu, Priority, Lineage][rng.range(0..4) as usize],
            max_pinned: rng.range(0..n_pages / 4 + 1),
            // Over a link more happens than beside it: pages come back, and sequences rest.
            host_reads: [Never, Near, Far, Far][rng.range(0..4) as usize],
            ..Options::default()
        };
        let n_host_pages = if rng.one_in(3) { 0 } else { rng.range(0..2 * n_pages) };
        let sizes = nuthatch_cache::Config { page_len, n_pages, n_host_pages };
        // Swapping a sequence costs less than computing it again, or more, or that depends.
        let page_nanos = u64::from(rng.range(1..3000));
        let cache = Cache::with_options(sizes, options).expect("valid sizes");
        let policy = match rng.range(0..5) {
            0 => Policy::Fcfs,
            1 => Policy::Priority { boost: rng.range(0..20) },
            2 => Policy::Prefix { ageing: rng.range(1..50), window: rng.range(1..20) },
            3 => Policy::Fair,
            _ => Policy::Mlfq {
                levels: rng.range(1..5) as u8,
                quantum: rng.range(1..40),
                max_wait: rng.range(1..200),
                max_running: rng.range(1..12),
            },
        };
        let opening = |rng: &mut Rng| {
            let n_tokens = rng.range(0..max_prompt);
            (0..n_tokens).map(|_| TokenId(rng.range(0..N_VOCAB))).collect()
        };
        let mut scheduler = Scheduler::with_policy(config, cache, policy).expect("valid limits");
        let looks_ahead = seed % 2 == 1;
        if looks_ahead {
            scheduler.look_ahead();
        }
        // Loads are cheap, so that all are tried.
        scheduler.loaded(Source::Disk, 1, 1);
        World {
            loads: Vec::new(),
            log: None,
            config,
            policy,
            scheduler,
            executor: FakeExecutor::new(page_len, n_pages, N_VOCAB)
                .with_host(n_host_pages)
                .with_spill(options.host_reads != Never)
                .with_costs(page_nanos, 1000)
                .with_window(config.window)
                .with_look_ahead(looks_ahead),
            requests: BTreeMap::new(),
            n_to_submit: rng.range(10..60),
            max_prompt,
            max_answer,
            has_faults: rng.one_in(4),
            openings: (0..3).map(|_| opening(&mut rng)).collect(),
            rng,
            now: Duration::ZERO,
        }
    }

    /// The most tokens of a sequence that does not stream.
    fn capacity(&self) -> u32 {
        let cache = self.scheduler.cache();
        let page_len = cache.config().page_len;
        let max_context = self.config.max_context;
        let fits = self.config.window.is_some_and(|n_tokens| {
            let window = Window { n_tokens, max_chunk: self.config.max_batched_tokens };
            window.pages_max(max_context, page_len) <= cache.capacity() / page_len
        });
        if fits { max_context } else { max_context.min(cache.capacity()) }
    }

    /// Whether what a streaming sequence keeps fits.
    fn streams(&self, streaming: Streaming) -> bool {
        let cache = self.scheduler.cache();
        let page_len = cache.config().page_len;
        streaming.window > 0
            && streaming.max_len(page_len) <= self.config.max_context
            && streaming.pages_max(page_len) <= cache.device_capacity() / page_len
    }

    fn submit(&mut self) {
        self.n_to_submit -= 1;
        let (prompt, mut hints) = self.prompt();
        let n_prompt = prompt.len() as u32;
        if self.rng.one_in(2) {
            hints.n_stored = self.rng.range(0..n_prompt + 1);
        }
        let n_stop = self.rng.range(0..3);
        let limits = Limits {
            max_tokens: self.rng.range(0..self.max_answer),
            stop_tokens: (0..n_stop).map(|_| TokenId(self.rng.range(0..N_VOCAB))).collect(),
            min_tokens: self.rng.range(0..10),
        };
        let sampling = Sampling { seed: self.rng.bits(), ..Sampling::default() };
        let seq = SeqId(u64::from(self.n_to_submit) * 7 + 1);
        let submission = Submission { seq, prompt, sampling, limits };
        let nuthatch_scheduler::Stats { waiting, counters, .. } = self.scheduler.stats();
        let streaming = hints.streaming;
        match self.scheduler.submit_with(submission.clone(), hints) {
            Ok(()) => {
                assert!(n_prompt > 0);
                match streaming {
                    Some(streaming) => {
                        assert!(self.streams(streaming));
                        self.executor.expect_streaming(seq, streaming);
                    }
                    None => assert!(n_prompt < self.capacity()),
                }
                let request = Request {
                    submission,
                    hints,
                    answer: vec![],
                    finished: None,
                    arrival: counters.submitted,
                    since: counters.steps,
                    is_admitted: false,
                    n_overtaken: 0,
                };
                self.requests.insert(seq, request);
            }
            Err(SubmitError::EmptyPrompt) => assert_eq!(n_prompt, 0),
            Err(SubmitError::NoAnswer) => assert_eq!(submission.limits.max_tokens, 0),
            Err(SubmitError::ExceedsContext { prompt, max_context }) => {
                assert!(prompt == n_prompt && prompt >= max_context);
            }
            Err(SubmitError::ExceedsCache { needed, n_pages, .. }) => assert!(needed > n_pages),
            Err(SubmitError::NoStreamingWindow | SubmitError::StreamingExceeds { .. }) => {
                assert!(streaming.is_some_and(|streaming| !self.streams(streaming)));
            }
            Err(SubmitError::QueueFull { .. }) => assert!(waiting >= self.config.max_waiting),
            Err(error) => panic!("{error}"),
        }
    }

    /// A prompt: new, or like others at its beginning, or what an earlier request said and heard,
    /// or a fork.
    fn prompt(&mut self) -> (Vec<TokenId>, Hints) {
        let retention = Retention {
            priority: self.rng.range(0..3) as u8,
            until: self.rng.one_in(2).then(|| self.now + Duration::from_secs(20)),
        };
        let salt = if self.rng.one_in(5) {
            self.scheduler.cache().salt(b"someone", b"")
        } else {
            Salt::default()
        };
        let priority = self.rng.range(0..4) as u8;
        let tenant = Tenant(u64::from(self.rng.range(0..4)));
        let streaming = self.rng.one_in(4).then(|| Streaming {
            n_sinks: self.rng.range(0..self.max_prompt / 4 + 2),
            window: self.rng.range(0..self.max_prompt / 2 + 2),
        });
        let mut hints = Hints {
            salt,
            retention,
            fork_of: None,
            n_stored: 0,
            n_remote: 0,
            priority,
            tenant,
            streaming,
            computes_all: self.rng.one_in(6),
        };
        let mut prompt = match self.rng.range(0..4) {
            0 => Vec::new(),
            1 | 2 => self.openings[self.rng.range(0..3) as usize].clone(),
            _ => {
                let all: Vec<_> = self.requests.keys().copied().collect();
                let Some(seq) = self.any_of(&all) else { return (Vec::new(), hints) };
                hints.fork_of = (!self.rng.one_in(3)).then_some(seq);
                let earlier = &self.requests[&seq];
                [earlier.submission.prompt.as_slice(), &earlier.answer].concat()
            }
        };
        let n_prompt = self.rng.range(0..self.max_prompt) as usize;
        let n_kept = self.rng.range(0..prompt.len() as u32 + 1) as usize;
        prompt.truncate(n_prompt.max(n_kept));
        while prompt.len() < n_prompt {
            prompt.push(TokenId(self.rng.range(0..N_VOCAB)));
        }
        (prompt, hints)
    }

    fn any_of(&mut self, seqs: &[SeqId]) -> Option<SeqId> {
        (!seqs.is_empty()).then(|| seqs[self.rng.range(0..seqs.len() as u32) as usize])
    }

    fn cancel_one(&mut self) {
        let alive: Vec<_> =
            self.requests.iter().filter(|(_, r)| r.finished.is_none()).map(|(&s, _)| s).collect();
        let Some(seq) = self.any_of(&alive) else { return };
        let had_pages = self.scheduler.cache().contains(seq);
        let n_used = |stats: nuthatch_cache::Stats| stats.pages_used + stats.host_used;
        let used = n_used(self.scheduler.stats().cache);
        let output = self.scheduler.cancel(seq).expect("the sequence is alive");
        assert!(!self.scheduler.cache().contains(seq));
        let used_after = n_used(self.scheduler.stats().cache);
        assert!(used_after <= used, "pages are given back at once");
        assert!(had_pages || used_after == used);
        assert_eq!(self.scheduler.cancel(seq), None);
        self.take(vec![output]);
    }

    /// Lets the slow tier bring what was asked for: all of it, the beginning of it, nothing, or too
    /// late. It writes until the end, whoever still waits.
    fn load(&mut self) {
        for load in self.scheduler.take_loads() {
            let n_asked = load.slots.len() as u32;
            let n_pages = if self.rng.one_in(3) { self.rng.range(0..n_asked) } else { n_asked };
            self.loads.push(SlowLoad { load, n_pages, is_late: false });
        }
        for mut slow in std::mem::take(&mut self.loads) {
            let SlowLoad { load, n_pages, .. } = &slow;
            if self.rng.one_in(6) {
                let prompt = &self.requests[&load.seq].submission.prompt;
                self.executor.fill(prompt, load.start, &load.slots[..*n_pages as usize]);
                let ended = Outcome::Ended { n_pages: *n_pages };
                self.scheduler.complete_load(load.id, ended);
            } else {
                if !slow.is_late && self.rng.one_in(12) {
                    self.scheduler.complete_load(load.id, Outcome::Late);
                    slow.is_late = true;
                }
                self.loads.push(slow);
            }
            self.scheduler.verify().expect("sound after a load");
        }
    }

    fn pin_or_unpin(&mut self) {
        let pin = PinId(u64::from(self.rng.range(0..3)));
        if self.rng.one_in(2) {
            let opening = self.openings[self.rng.range(0..3) as usize].clone();
            self.scheduler.pin(pin, Salt::default(), &opening);
        } else {
            self.scheduler.unpin(pin);
        }
    }

    fn step(&mut self) -> bool {
        let Some(plan) = self.scheduler.plan() else { return false };
        let n_tokens: usize = plan.seqs.n_tokens();
        assert!(n_tokens <= self.config.max_batched_tokens as usize);
        assert!(plan.seqs.len() <= self.config.max_seqs as usize);
        self.scheduler.verify().expect("sound while a step is in flight");
        if let Some(log) = &mut self.log {
            writeln!(log, "{plan:?}").expect("a string takes everything");
        }
        self.check_turns();
        if self.has_faults && self.rng.one_in(100) {
            let outputs = self.scheduler.fail_all();
            let cache = self.scheduler.stats().cache;
            self.load();
            let n_loading: usize = self.loads.iter().map(|slow| slow.load.slots.len()).sum();
            let cache_after = self.scheduler.stats().cache;
            assert_eq!(cache_after.pages_used as usize, n_loading);
            assert_eq!(cache.pages_idle, 0);
            assert_eq!((cache.host_used, cache.host_idle), (0, 0));
            self.take(outputs);
            self.executor.fail();
            return true;
        }
        let mut result = self.executor.run(&plan);
        if self.has_faults && !result.sampled.is_empty() && self.rng.one_in(50) {
            let unlucky = self.rng.range(0..result.sampled.len() as u32) as usize;
            result.failed.push(result.sampled.remove(unlucky).seq);
        }
        assert!(
            self.executor.n_seqs() <= self.config.max_seqs as usize,
            "more than it has room for"
        );
        if self.rng.one_in(20) {
            self.cancel_one();
        }
        let outputs = self.scheduler.commit(result);
        self.take(outputs);
        true
    }

    /// Nobody who got pages in this plan was put before others for longer than the policy says.
    fn check_turns(&mut self) {
        let is_waiting =
            |request: &&mut Request| !request.is_admitted && request.finished.is_none();
        let mut waiting: Vec<&mut Request> =
            self.requests.values_mut().filter(is_waiting).collect();
        let step = self.scheduler.stats().counters.steps;
        let (mut admitted, mut late) = (Vec::new(), Vec::new());
        for request in &mut waiting {
            if self.scheduler.cache().contains(request.submission.seq) {
                request.is_admitted = true;
                admitted.push((request.arrival, request.submission.seq));
            }
        }
        for (arrival, seq) in admitted {
            // A fork waits for its source besides.
            let is_overtaken = |early: &Request| {
                let is_put_off = !early.is_admitted && early.hints.fork_of.is_none();
                is_put_off && early.arrival < arrival
            };
            for early in waiting.iter_mut().filter(|early| is_overtaken(early)) {
                early.n_overtaken += 1;
                late.push((early.submission.seq, seq));
            }
        }
        for (early, late) in late {
            self.check_overtaken(&self.requests[&early], &self.requests[&late], step);
        }
    }

    /// Checks that a request which waits may be overtaken by one that came later: how long, each
    /// policy says.
    fn check_overtaken(&self, early: &Request, late: &Request, step: u64) {
        let seqs = (early.submission.seq, late.submission.seq);
        match self.policy {
            Policy::Fcfs => panic!("{seqs:?}: first come, first served"),
            Policy::Priority { boost } => {
                let n_steps = u64::from(late.hints.priority.saturating_sub(early.hints.priority));
                let n_arrivals = late.arrival - early.arrival;
                assert!(n_arrivals < u64::from(boost) * n_steps, "{seqs:?} are in order");
            }
            Policy::Prefix { ageing, window } => {
                // What is found at most makes up for so many turns, and at that time the window is
                // full of others who may have waited as long.
                let longest = self.requests.values().map(|r| r.submission.prompt.len()).max();
                let longest = longest.expect("there are requests") as u32;
                let most = longest.div_ceil(ageing) + window;
                assert!(early.n_overtaken <= most, "{seqs:?}: {} turns", early.n_overtaken);
            }
            Policy::Fair => {
                assert_ne!(early.hints.tenant, late.hints.tenant, "{seqs:?}: of one tenant");
            }
            Policy::Mlfq { max_wait, .. } => {
                let has_waited = step - early.since >= u64::from(max_wait);
                let is_longer = (late.since, seqs.1) < (early.since, seqs.0);
                assert!(!has_waited || is_longer, "{seqs:?} in step {step}");
            }
        }
    }

    fn take(&mut self, outputs: Vec<Output>) {
        if let Some(log) = &mut self.log {
            writeln!(log, "{outputs:?}").expect("a string takes everything");
        }
        for output in outputs {
            let request = self.requests.get_mut(&output.seq()).expect("a known sequence");
            assert_eq!(request.finished, None, "no news after the last");
            match output {
                Output::Token(sampled) => request.answer.push(sampled.token),
                Output::Candidates { .. } => panic!("nobody asked to choose"),
                Output::Finished { reason, usage, .. } => {
                    request.finished = Some(reason);
                    let expected = Usage {
                        prompt_tokens: request.submission.prompt.len() as u32,
                        cached_tokens: usage.cached_tokens,
                        completion_tokens: request.answer.len() as u32,
                    };
                    assert_eq!(usage, expected);
                }
            }
        }
    }

    fn run(&mut self) {
        // Each step computes at least one token, and what is computed again is bounded, so an end
        // that is not reached by now is never reached.
        for n_steps in 0.. {
            assert!(n_steps < 200_000, "no end in sight: {:?}", self.scheduler.stats());
            if self.n_to_submit > 0 && (self.rng.one_in(3) || self.scheduler.is_idle()) {
                self.submit();
            }
            if self.rng.one_in(60) {
                self.cancel_one();
            }
            if self.rng.one_in(30) {
                self.pin_or_unpin();
            }
            self.now += Duration::from_secs(1);
            self.scheduler.set_now(self.now);
            let stepped = self.step();
            self.scheduler.verify().expect("sound after each step");
            self.scheduler.verify_sample(n_steps).expect("each sample is sound too");
            let is_loading = self.scheduler.cache().n_loads() > 0;
            assert!(stepped || self.scheduler.is_idle() || is_loading, "work is waiting");
            self.load();
            let is_done = self.scheduler.is_idle() && self.loads.is_empty();
            if self.n_to_submit == 0 && is_done {
                break;
            }
        }
    }

    /// No page leaked, and every answer is the one that the request gets alone.
    fn check(&mut self) {
        for pin in 0..3 {
            self.scheduler.unpin(PinId(pin));
        }
        let stats = self.scheduler.stats();
        assert_eq!((stats.waiting, stats.running, stats.cache.seqs), (0, 0, 0));
        assert_eq!(stats.swapped, 0);
        assert_eq!(stats.cache.host_free + stats.cache.host_idle, stats.cache.host_total);
        assert_eq!(stats.cache.pages_free + stats.cache.pages_idle, stats.cache.pages_total);
        assert_eq!(stats.cache.pages_used, 0);
        assert_eq!(stats.cache.tokens_stored, 0);
        for (seq, request) in &self.requests {
            let Submission { prompt, sampling, limits, .. } = &request.submission;
            let page_len = self.scheduler.cache().config().page_len;
            let streaming = request.hints.streaming.map(|streaming| (streaming, page_len));
            let max_len = streaming.map_or(self.capacity() as usize, |_| usize::MAX);
            let alone = answer_alone(prompt, sampling, limits, max_len, N_VOCAB, streaming);
            match request.finished.expect("every accepted request ends") {
                FinishReason::Cancelled | FinishReason::Failed => {
                    assert!(alone.starts_with(&request.answer), "{seq:?}");
                }
                reason @ (FinishReason::Stop | FinishReason::Length) => {
                    assert_eq!(request.answer, alone, "{seq:?}");
                    let is_full = alone.len() == limits.max_tokens as usize
                        || prompt.len() + alone.len() == max_len;
                    assert_eq!(is_full, reason == FinishReason::Length, "{seq:?}");
                }
            }
        }
    }
}

/// Prints the seed when a world panics.
struct Seed(u64);

impl Drop for Seed {
    #[expect(clippy::print_stderr, reason = "the seed must reach whoever reads the failure")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failing seed: {}", self.0);
        }
    }
}

/// Adds up what happened in all worlds.
#[derive(Default)]
struct Totals {
    counters: nuthatch_scheduler::Counters,
    cache: nuthatch_cache::Counters,
}

impl Totals {
    fn add(&mut self, stats: &nuthatch_scheduler::Stats) {
        let (all, one) = (&mut self.counters, stats.counters);
        all.preemptions_short += one.preemptions_short;
        all.preemptions_swap += one.preemptions_swap;
        all.preemptions_recompute += one.preemptions_recompute;
        all.displacements += one.displacements;
        all.swaps_dropped += one.swaps_dropped;
        all.admissions_spilled += one.admissions_spilled;
        all.rests += one.rests;
        all.failed += one.failed;
        assert_eq!(one.preemptions, one.preemptions_short + one.displacements);
        assert_eq!(one.preemptions, one.preemptions_swap + one.preemptions_recompute);
        let causes = one.recomputed_short + one.recomputed_displaced + one.recomputed_dropped;
        assert_eq!(one.recomputed_tokens, causes);
        let (all, one) = (&mut self.cache, stats.cache.counters);
        all.tokens_shared += one.tokens_shared;
        all.tokens_copied += one.tokens_copied;
        all.pages_merged += one.pages_merged;
        all.pages_evicted += one.pages_evicted;
        all.pages_out += one.pages_out;
        all.pages_dropped += one.pages_dropped;
        all.pages_demoted += one.pages_demoted;
        all.pages_promoted += one.pages_promoted;
        all.pages_swapped_out += one.pages_swapped_out;
        all.pages_swapped_in += one.pages_swapped_in;
        all.pages_spilled += one.pages_spilled;
        all.pages_unspilled += one.pages_unspilled;
        all.pages_loaded += one.pages_loaded;
        all.pages_not_loaded += one.pages_not_loaded;
    }

    /// The worlds must be tight enough to mean something.
    fn check(&self) {
        let Totals { counters, cache } = self;
        assert!(counters.preemptions_short > 200, "{counters:?}");
        assert!(counters.displacements > 50, "{counters:?}");
        assert!(counters.preemptions_swap > 100, "{counters:?}");
        assert!(counters.preemptions_recompute > 100, "{counters:?}");
        assert!(counters.admissions_spilled > 200 && counters.rests > 50, "{counters:?}");
        assert!(counters.failed > 50, "{counters:?}");
        assert!(cache.tokens_shared > 10_000, "{cache:?}");
        assert!(cache.tokens_copied > 2_000, "{cache:?}");
        assert!(cache.pages_merged > 100, "{cache:?}");
        assert!(cache.pages_evicted > 1_000, "{cache:?}");
        assert!(cache.pages_out > 1_000 && cache.pages_dropped > 1_000, "{cache:?}");
        assert!(cache.pages_demoted > 1_000 && cache.pages_promoted > 200, "{cache:?}");
        assert!(cache.pages_loaded > 200 && cache.pages_not_loaded > 100, "{cache:?}");
        assert!(cache.pages_spilled > 1_000 && cache.pages_unspilled > 200, "{cache:?}");
        assert!(cache.pages_swapped_out > 200 && cache.pages_swapped_in > 100, "{cache:?}");
    }
}

#[test]
fn every_request_gets_the_answer_it_gets_alone() {
    let mut totals = Totals::default();
    for seed in seeds().chain(FOUND) {
        let guard = Seed(seed);
        let mut world = World::new(seed);
        world.run();
        world.check();
        totals.add(&world.scheduler.stats());
        drop(guard);
    }
    if seeds().count() >= 200 {
        totals.check();
    }
    // Rare: it takes a swapped sequence that shared pages with one that has ended.
    if seeds().count() >= 2000 {
        assert!(totals.counters.swaps_dropped > 0);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let mut world = World::new(seed);
        world.log = Some(String::new());
        world.run();
        (world.log, world.scheduler.stats())
    };
    for seed in seeds().take(20) {
        // Two logs are too long to be printed.
        assert!(run(seed) == run(seed), "seed {seed}");
    }
}
