//! A seeded simulation: scheduler and cache against an executor that notices every mistake.
//!
//! Each seed makes its own world: page length, pool, budgets, arrivals, lengths, cancels, device
//! faults. A failure prints its seed. `SIM_SEEDS=17..18 cargo test --test sim` replays one seed,
//! `SIM_SEEDS=0..10000` tries many.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use nuthatch_cache::Eviction::{Lfu, Lineage, Lru, Priority};
use nuthatch_cache::{Cache, Options, PinId, Retention, Salt};
use nuthatch_scheduler::{
    Config, Hints, Output, Policy, Scheduler, Submission, SubmitError, Tenant, Usage,
};
use nuthatch_testkit::{FakeExecutor, Rng, answer_alone};
use nuthatch_types::{FinishReason, Limits, Sampling, SeqId, TokenId};

const N_VOCAB: u32 = 50;

#[expect(clippy::disallowed_methods, reason = "a knob of this test, not of the program")]
fn seeds() -> Range<u64> {
    let Ok(asked) = std::env::var("SIM_SEEDS") else { return 0..200 };
    let (start, end) = asked.split_once("..").expect("SIM_SEEDS is start..end");
    start.parse().expect("a number")..end.parse().expect("a number")
}

struct Request {
    submission: Submission,
    answer: Vec<TokenId>,
    finished: Option<FinishReason>,
}

struct World {
    rng: Rng,
    now: Duration,
    config: Config,
    scheduler: Scheduler,
    executor: FakeExecutor,
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
        };
        let options = Options {
            prefix: !rng.one_in(4),
            eviction: [Lru, Lfu, Priority, Lineage][rng.range(0..4) as usize],
            max_pinned: rng.range(0..n_pages / 4 + 1),
            ..Options::default()
        };
        let sizes = nuthatch_cache::Config { page_len, n_pages };
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
        World {
            config,
            scheduler: Scheduler::with_policy(config, cache, policy).expect("valid limits"),
            executor: FakeExecutor::new(page_len, n_pages, N_VOCAB),
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

    fn capacity(&self) -> u32 {
        self.config.max_context.min(self.scheduler.cache().capacity())
    }

    fn submit(&mut self) {
        self.n_to_submit -= 1;
        let (prompt, hints) = self.prompt();
        let n_prompt = prompt.len() as u32;
        let n_stop = self.rng.range(0..3);
        let limits = Limits {
            max_tokens: self.rng.range(0..self.max_answer),
            stop_tokens: (0..n_stop).map(|_| TokenId(self.rng.range(0..N_VOCAB))).collect(),
            min_tokens: self.rng.range(0..10),
        };
        let sampling = Sampling { seed: self.rng.bits(), ..Sampling::default() };
        let seq = SeqId(u64::from(self.n_to_submit) * 7 + 1);
        let submission = Submission { seq, prompt, sampling, limits };
        let waiting = self.scheduler.stats().waiting;
        match self.scheduler.submit_with(submission.clone(), hints) {
            Ok(()) => {
                assert!(n_prompt > 0 && n_prompt < self.capacity());
                let request = Request { submission, answer: Vec::new(), finished: None };
                self.requests.insert(seq, request);
            }
            Err(SubmitError::EmptyPrompt) => assert_eq!(n_prompt, 0),
            Err(SubmitError::NoAnswer) => assert_eq!(submission.limits.max_tokens, 0),
            Err(SubmitError::ExceedsContext { prompt, max_context }) => {
                assert!(prompt == n_prompt && prompt >= max_context);
            }
            Err(SubmitError::ExceedsCache { needed, n_pages, .. }) => assert!(needed > n_pages),
            Err(SubmitError::QueueFull { .. }) => assert!(waiting >= self.config.max_waiting),
            Err(error @ (SubmitError::DuplicateSeq { .. } | SubmitError::Sampling(_))) => {
                panic!("{error}")
            }
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
        let mut hints = Hints { salt, retention, fork_of: None, priority, tenant };
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
        let used = self.scheduler.stats().cache.pages_used;
        let output = self.scheduler.cancel(seq).expect("the sequence is alive");
        assert!(!self.scheduler.cache().contains(seq));
        let used_after = self.scheduler.stats().cache.pages_used;
        assert!(used_after <= used, "pages are given back at once");
        assert!(had_pages || used_after == used);
        assert_eq!(self.scheduler.cancel(seq), None);
        self.take(vec![output]);
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
        let n_tokens: usize = plan.seqs.iter().map(|step| step.tokens.len()).sum();
        assert!(n_tokens <= self.config.max_batched_tokens as usize);
        assert!(plan.seqs.len() <= self.config.max_seqs as usize);
        self.scheduler.verify().expect("sound while a step is in flight");
        if self.has_faults && self.rng.one_in(100) {
            let outputs = self.scheduler.fail_all();
            assert_eq!(self.scheduler.stats().cache.pages_used, 0);
            self.take(outputs);
            self.executor.fail();
            return true;
        }
        let result = self.executor.run(&plan);
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

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let request = self.requests.get_mut(&output.seq()).expect("a known sequence");
            assert_eq!(request.finished, None, "no news after the last");
            match output {
                Output::Token { token, .. } => request.answer.push(token),
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
            assert!(stepped || self.scheduler.is_idle(), "work is waiting");
            if !stepped && self.n_to_submit == 0 {
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
        assert_eq!(stats.cache.pages_free + stats.cache.pages_idle, stats.cache.pages_total);
        assert_eq!(stats.cache.pages_used, 0);
        assert_eq!(stats.cache.tokens_stored, 0);
        for (seq, request) in &self.requests {
            let Submission { prompt, sampling, limits, .. } = &request.submission;
            let max_len = self.capacity() as usize;
            let alone = answer_alone(prompt, sampling, limits, max_len, N_VOCAB);
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

#[test]
fn every_request_gets_the_answer_it_gets_alone() {
    let (mut preemptions, mut displacements) = (0, 0);
    let mut cache = nuthatch_cache::Counters::default();
    for seed in seeds() {
        let guard = Seed(seed);
        let mut world = World::new(seed);
        world.run();
        world.check();
        let stats = world.scheduler.stats();
        preemptions += stats.counters.preemptions;
        displacements += stats.counters.displacements;
        cache.tokens_shared += stats.cache.counters.tokens_shared;
        cache.tokens_copied += stats.cache.counters.tokens_copied;
        cache.pages_merged += stats.cache.counters.pages_merged;
        cache.pages_evicted += stats.cache.counters.pages_evicted;
        drop(guard);
    }
    // The worlds must be tight enough to mean something.
    if seeds().count() >= 200 {
        assert!(preemptions > 200, "only {preemptions} preemptions");
        assert!(displacements > 50, "only {displacements} displacements");
        assert!(cache.tokens_shared > 10_000, "{cache:?}");
        assert!(cache.tokens_copied > 2_000, "{cache:?}");
        assert!(cache.pages_merged > 100, "{cache:?}");
        assert!(cache.pages_evicted > 1_000, "{cache:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let mut world = World::new(seed);
        world.run();
        world.scheduler.stats()
    };
    for seed in seeds().take(20) {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
