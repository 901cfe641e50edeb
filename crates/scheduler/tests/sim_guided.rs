//! A seeded simulation of sequences whose tokens the caller chooses, beside ordinary ones.
//!
//! Each group of sequences begins as one request and is then forked, driven on and discarded at
//! random: most groups in lockstep, as beam search does it, the others one sequence at a time. The
//! candidates of each sequence must be those that its tokens give alone, whatever was preempted,
//! parked, cancelled or lost with the device meanwhile. `SIM_SEEDS=17..18 cargo test --test
//! sim_guided` replays one seed.

use std::collections::BTreeMap;
use std::ops::Range;

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Hints, Output, Policy, Scheduler, Submission};
use nuthatch_testkit::{FakeExecutor, Rng, answer_alone, candidates_after};
use nuthatch_types::HostReads::{Far, Near, Never};
use nuthatch_types::{
    FinishReason, Limits, PageCopy, Sampled, Sampling, SeqId, StepPlan, TokenId, Window,
};

const N_VOCAB: u32 = 50;

#[expect(clippy::disallowed_methods, reason = "a knob of this test, not of the program")]
fn seeds() -> Range<u64> {
    let Ok(asked) = std::env::var("SIM_SEEDS") else { return 0..200 };
    let (start, end) = asked.split_once("..").expect("SIM_SEEDS is start..end");
    start.parse().expect("a number")..end.parse().expect("a number")
}

/// The sequences that one request was forked into.
struct Group {
    sampling: Sampling,
    width: u32,
    /// Tokens of prompt and answer together.
    max_len: usize,
    in_lockstep: bool,
    /// The tokens of each sequence, and whether it waits to be told its next one.
    members: BTreeMap<SeqId, (Vec<TokenId>, bool)>,
}

struct Ordinary {
    submission: Submission,
    answer: Vec<TokenId>,
}

struct World {
    rng: Rng,
    config: Config,
    scheduler: Scheduler,
    executor: FakeExecutor,
    groups: Vec<Group>,
    ordinary: BTreeMap<SeqId, Ordinary>,
    n_to_submit: u32,
    next_seq: u64,
    has_faults: bool,
    n_forks: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let page_len = 1 << rng.range(0..5);
        let n_pages = rng.range(40..300).div_ceil(page_len).max(4);
        let max_seqs = rng.range(1..12);
        let config = Config {
            max_seqs,
            max_batched_tokens: max_seqs + rng.range(0..40),
            max_waiting: 100,
            max_context: 400,
            window: rng.one_in(3).then(|| rng.range(1..40)),
        };
        let prefix = !rng.one_in(3);
        let host_reads = [Never, Near, Far][rng.range(0..3) as usize];
        let options = Options { prefix, host_reads, ..Options::default() };
        let n_host_pages = if rng.one_in(2) { 0 } else { rng.range(1..60) };
        let sizes = nuthatch_cache::Config { page_len, n_pages, n_host_pages };
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
        World {
            config,
            scheduler: Scheduler::with_policy(config, cache, policy).expect("valid limits"),
            executor: FakeExecutor::new(page_len, n_pages, N_VOCAB)
                .with_host(n_host_pages)
                .with_spill(host_reads != Never)
                .with_costs(u64::from(rng.range(1..20_000)), u64::from(rng.range(1..5_000)))
                .with_window(config.window),
            groups: Vec::new(),
            ordinary: BTreeMap::new(),
            n_to_submit: rng.range(4..25),
            next_seq: 0,
            has_faults: rng.one_in(4),
            n_forks: 0,
            rng,
        }
    }

    fn new_seq(&mut self) -> SeqId {
        self.next_seq += 1;
        SeqId(self.next_seq)
    }

    fn submit(&mut self) {
        self.n_to_submit -= 1;
        let is_guided = self.rng.one_in(2);
        let n_prompt = self.rng.range(1..60);
        let sampling = Sampling {
            seed: self.rng.bits(),
            n_candidates: if is_guided { self.rng.range(1..9) } else { 0 },
            ..Sampling::default()
        };
        let submission = Submission {
            seq: self.new_seq(),
            prompt: (0..n_prompt).map(|_| TokenId(self.rng.range(0..N_VOCAB))).collect(),
            sampling: sampling.clone(),
            limits: Limits { max_tokens: self.rng.range(1..40), ..Limits::default() },
        };
        let hints = Hints { priority: self.rng.range(0..4) as u8, ..Hints::default() };
        let seq = submission.seq;
        if is_guided {
            let width = self.rng.range(1..9);
            let prompt = submission.prompt.clone();
            // What does not fit is refused, and that is all.
            let Ok(max_tokens) = self.scheduler.submit_wide(submission, hints, width) else {
                return;
            };
            self.groups.push(Group {
                sampling,
                width,
                max_len: prompt.len() + max_tokens as usize,
                in_lockstep: !self.rng.one_in(4),
                members: BTreeMap::from([(seq, (prompt, false))]),
            });
        } else if self.scheduler.submit_with(submission.clone(), hints).is_ok() {
            self.ordinary.insert(seq, Ordinary { submission, answer: Vec::new() });
        }
    }

    fn step(&mut self) -> bool {
        let Some(plan) = self.scheduler.plan() else { return false };
        self.scheduler.verify().expect("sound while a step is in flight");
        self.check_plan(&plan);
        if self.has_faults && self.rng.one_in(100) {
            self.scheduler.fail_all();
            self.executor.fail();
            self.groups.clear();
            self.ordinary.clear();
            return true;
        }
        let mut result = self.executor.run(&plan);
        assert!(self.executor.n_seqs() <= self.config.max_seqs as usize);
        if self.has_faults && !result.sampled.is_empty() && self.rng.one_in(50) {
            let n_sampled = result.sampled.len() as u32;
            let unlucky = result.sampled.remove(self.rng.range(0..n_sampled) as usize);
            result.failed.push(unlucky.seq);
        }
        if self.rng.one_in(20) {
            self.cancel_one();
        }
        for output in self.scheduler.commit(result) {
            self.take(output);
        }
        self.scheduler.verify().expect("sound after a commit");
        true
    }

    /// A sequence that gets its first pages copies at most one, besides what comes from the host.
    fn check_plan(&self, plan: &StepPlan) {
        assert!(plan.seqs.len() <= self.config.max_seqs as usize);
        let n_device = self.scheduler.cache().config().n_pages;
        let is_inside = |copy: &&PageCopy| copy.source.0.max(copy.target.0) < n_device;
        let n_copied = plan.copies.iter().filter(is_inside).count();
        let n_admitted = plan.seqs.iter().filter(|step| step.table.keep == 0).count();
        assert!(n_copied <= n_admitted, "{plan:?}");
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Token(Sampled { seq, token, .. }) => {
                self.ordinary.get_mut(&seq).expect("it is alive").answer.push(token);
            }
            Output::Candidates { seq, top } => {
                let group = self.groups.iter_mut().find(|group| group.members.contains_key(&seq));
                let group = group.expect("it is alive");
                let (tokens, waits) = group.members.get_mut(&seq).expect("it was found");
                assert_eq!(top, candidates_after(tokens, &group.sampling, N_VOCAB), "{seq:?}");
                assert!(!std::mem::replace(waits, true), "{seq:?} pauses once");
            }
            Output::Finished { seq, reason, .. } => {
                let Some(Ordinary { submission, answer }) = self.ordinary.remove(&seq) else {
                    return self.forget(seq);
                };
                let Submission { prompt, sampling, limits, .. } = submission;
                let max_len = self.max_len() as usize;
                let alone = answer_alone(&prompt, &sampling, &limits, max_len, N_VOCAB, None);
                match reason {
                    FinishReason::Failed => assert!(alone.starts_with(&answer), "{seq:?}"),
                    FinishReason::Stop | FinishReason::Length => {
                        assert_eq!(answer, alone, "{seq:?}");
                    }
                    FinishReason::Cancelled => {
                        panic!("{seq:?} was forgotten when it was cancelled")
                    }
                }
            }
        }
    }

    /// The most tokens of a sequence.
    fn max_len(&self) -> u32 {
        let Config { max_context, max_batched_tokens: max_chunk, window, .. } = self.config;
        let cache = self.scheduler.cache();
        let page_len = cache.config().page_len;
        let pages = |n_tokens| Window { n_tokens, max_chunk }.pages_max(max_context, page_len);
        let fits = window.is_some_and(|window| pages(window) <= cache.capacity() / page_len);
        if fits { max_context } else { max_context.min(cache.capacity()) }
    }

    fn forget(&mut self, seq: SeqId) {
        for group in &mut self.groups {
            group.members.remove(&seq);
        }
        self.groups.retain(|group| !group.members.is_empty());
    }

    fn cancel_one(&mut self) {
        let guided = self.groups.iter().flat_map(|group| group.members.keys().copied());
        let alive: Vec<SeqId> = guided.chain(self.ordinary.keys().copied()).collect();
        if alive.is_empty() {
            return;
        }
        let seq = alive[self.rng.range(0..alive.len() as u32) as usize];
        self.scheduler.cancel(seq).expect("it is alive");
        self.ordinary.remove(&seq);
        self.forget(seq);
    }

    /// Tells groups how to go on: those in lockstep when all their sequences wait, the others when
    /// chance wills. With `must`, all that can.
    fn decide(&mut self, must: bool) {
        for i in 0..self.groups.len() {
            let group = &self.groups[i];
            let waiting: Vec<SeqId> =
                group.members.iter().filter(|(_, member)| member.1).map(|(&seq, _)| seq).collect();
            let is_whole = waiting.len() == group.members.len();
            if group.in_lockstep && is_whole {
                self.move_group(i, &waiting);
            } else if !group.in_lockstep {
                for seq in waiting {
                    if must || self.rng.one_in(3) {
                        self.move_group(i, &[seq]);
                    }
                }
            }
        }
        self.groups.retain(|group| !group.members.is_empty());
    }

    /// Replaces sequences that wait by others: some go on, some are forked, some end.
    fn move_group(&mut self, i: usize, waiting: &[SeqId]) {
        let n_others = (self.groups[i].members.len() - waiting.len()) as u32;
        let n_next = match self.rng.range(0..25) {
            0 => 0,
            _ => self.rng.range(1..self.groups[i].width - n_others + 1),
        };
        let mut children: BTreeMap<SeqId, Vec<TokenId>> = BTreeMap::new();
        for _ in 0..n_next {
            let parent = waiting[self.rng.range(0..waiting.len() as u32) as usize];
            let group = &self.groups[i];
            let (tokens, _) = &group.members[&parent];
            // The last token is never computed.
            if tokens.len() + 2 <= group.max_len {
                let candidates = candidates_after(tokens, &group.sampling, N_VOCAB);
                let choice = self.rng.range(0..candidates.len() as u32) as usize;
                children.entry(parent).or_default().push(candidates[choice].0);
            }
        }
        for &parent in waiting.iter().filter(|parent| !children.contains_key(parent)) {
            self.scheduler.discard(parent);
            self.groups[i].members.remove(&parent);
            self.scheduler.verify().expect("sound after a discard");
        }
        for (parent, tokens) in children {
            for &token in &tokens[1..] {
                let seq = self.new_seq();
                self.scheduler.fork(parent, seq, token);
                self.scheduler.verify().expect("sound after a fork");
                self.n_forks += 1;
                let mut history = self.groups[i].members[&parent].0.clone();
                history.push(token);
                self.groups[i].members.insert(seq, (history, false));
            }
            self.scheduler.proceed(parent, tokens[0]);
            self.scheduler.verify().expect("sound after going on");
            let (history, waits) = self.groups[i].members.get_mut(&parent).expect("alive");
            history.push(tokens[0]);
            *waits = false;
        }
    }

    fn run(&mut self) {
        for n_steps in 0.. {
            assert!(n_steps < 100_000, "no end in sight: {:?}", self.scheduler.stats());
            if self.n_to_submit > 0 && (self.rng.one_in(3) || self.scheduler.is_idle()) {
                self.submit();
            }
            if self.rng.one_in(60) {
                self.cancel_one();
            }
            let stepped = self.step();
            if !stepped && self.n_to_submit == 0 && self.scheduler.is_idle() {
                break;
            }
            // Whoever does not run waits for us; nobody waits for anybody else.
            self.decide(!stepped);
            if !stepped {
                let is_told = self.scheduler.is_idle() || self.scheduler.stats().waiting > 0;
                assert!(is_told || self.has_pending(), "{:?}", self.scheduler.stats());
            }
        }
        let stats = self.scheduler.stats();
        assert_eq!((stats.waiting, stats.running, stats.parked), (0, 0, 0));
        assert_eq!((stats.cache.pages_used, stats.cache.host_used), (0, 0), "a page leaked");
        assert_eq!(stats.counters.forks, self.n_forks);
        assert!(self.groups.is_empty() && self.ordinary.is_empty());
    }

    fn has_pending(&self) -> bool {
        self.groups.iter().flat_map(|group| group.members.values()).any(|&(_, waits)| !waits)
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
fn every_sequence_gets_the_candidates_it_gets_alone() {
    let (mut forks, mut preemptions, mut copied, mut spilled) = (0, 0, 0, 0);
    for seed in seeds() {
        let guard = Seed(seed);
        let mut world = World::new(seed);
        world.run();
        let stats = world.scheduler.stats();
        forks += stats.counters.forks;
        preemptions += stats.counters.preemptions;
        copied += stats.cache.counters.tokens_copied;
        spilled += stats.counters.admissions_spilled;
        drop(guard);
    }
    // The worlds must be tight enough to mean something.
    if seeds().count() >= 200 {
        assert!(forks > 2_000, "only {forks} forks");
        assert!(preemptions > 500, "only {preemptions} preemptions");
        assert!(copied > 5_000, "only {copied} tokens copied");
        assert!(spilled > 100, "only {spilled} spilled");
    }
}
