//! Tokens that a device chooses are those that the engine would have chosen.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_backend::{BatchLayout, DeviceError, Draw};
use nuthatch_cache::{Cache, Options};
use nuthatch_engine::{
    Attachment, Engine, Execute, Executor, Forward, Pages, PromptReader, PromptScores, Submission,
};
use nuthatch_scheduler::{Policy, Scheduler};
use nuthatch_testkit::Rng;
use nuthatch_types::{
    FinishReason, Limits, PageCopy, PageShift, Sampling, SeqId, SeqStart, SeqStep, Slot, StepPlan,
    TableChange, TokenId,
};

use crate::echo::{Answer, CAPACITY, Echo, HandClock, Script, VOCAB, collect_all, submission};

/// What waiting for a pass takes.
const PASS_MS: u64 = 3;

/// A model whose device chooses, by sums in `f64` over sorted tokens, and may be ahead of its host.
pub(crate) struct Drawing {
    echo: Echo,
    runs_ahead: bool,
    /// What the passes chose that nobody has asked for.
    queued: VecDeque<Vec<Option<u32>>>,
    /// Passes that followed another before its tokens were known.
    pub(crate) n_ahead: u64,
    /// Goes on while a pass is awaited, and while rows are looked back on.
    clock: Arc<HandClock>,
    /// Tokens of each table's sequence, after its last pass.
    lens: BTreeMap<u32, u32>,
    /// Tokens that decoding sequences had computed before.
    n_again: u64,
}

impl Drawing {
    pub(crate) fn new(echo: Echo, runs_ahead: bool) -> Self {
        Drawing {
            echo,
            runs_ahead,
            queued: VecDeque::new(),
            n_ahead: 0,
            clock: Arc::default(),
            lens: BTreeMap::new(),
            n_again: 0,
        }
    }

    fn compute(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        for (i, rows) in layout.query_start.windows(2).enumerate() {
            let (row, len) = (layout.table_row[i], layout.kv_len[i]);
            let is_again = self.lens.insert(row, len) == Some(len) && rows[1] - rows[0] == 1;
            self.n_again += u64::from(is_again);
        }
        self.echo.forward(layout, logits)
    }
}

impl Pages for Drawing {}

impl Forward for Drawing {
    fn vocab(&self) -> u32 {
        self.echo.vocab()
    }

    fn begin(&mut self, row: u32, _: u32) {
        self.lens.remove(&row);
    }

    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError> {
        self.echo.write_table(row, start, slots)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError> {
        self.echo.copy_pages(copies)
    }

    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError> {
        self.echo.shift_pages(shifts)
    }

    fn forward(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        self.clock.advance_ms(PASS_MS);
        self.compute(layout, logits)
    }

    fn hidden_len(&self) -> usize {
        self.echo.hidden_len()
    }

    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        self.echo.hidden(hidden)
    }

    fn look_back(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        self.clock.advance_ms(100);
        self.echo.look_back(layout, logits)
    }

    fn draws(&self) -> bool {
        true
    }

    fn runs_ahead(&self) -> bool {
        self.runs_ahead
    }

    fn queue(
        &mut self,
        layout: &BatchLayout,
        draws: &[Draw],
        follows: bool,
    ) -> Result<(), DeviceError> {
        let mut layout = layout.clone();
        if follows {
            let last = self.queued.back().expect("it follows a pass");
            assert_eq!(last.len(), layout.tokens.len(), "its rows are the others' outputs");
            // What is no token stands for some token.
            layout.tokens = last.iter().map(|token| token.unwrap_or(VOCAB - 2)).collect();
            self.n_ahead += 1;
        }
        let mut logits = vec![0.0; draws.len() * VOCAB as usize];
        self.compute(&layout, &mut logits)?;
        let rows = logits.chunks_exact_mut(VOCAB as usize).zip(draws);
        self.queued.push_back(rows.map(|(row, draw)| choose(row, draw)).collect());
        assert!(self.queued.len() <= 2, "one pass ahead");
        Ok(())
    }

    fn drawn(&mut self, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        self.clock.advance_ms(PASS_MS);
        tokens.copy_from_slice(&self.queued.pop_front().expect("a pass was queued"));
        Ok(())
    }
}

fn choose(logits: &mut [f32], draw: &Draw) -> Option<u32> {
    if logits.iter().any(|x| x.is_nan()) {
        return None;
    }
    for moved in draw.moved.iter() {
        let logit = &mut logits[moved.token as usize];
        *logit = moved.apply(*logit);
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if draw.temperature == 0.0 {
        return Some(order[0] as u32);
    }
    let max = logits[order[0]];
    let weight = |i: usize| (f64::from(logits[i] - max) / f64::from(draw.temperature)).exp();
    order.truncate(if draw.top_k > 0 { draw.top_k as usize } else { usize::MAX });
    let limit = f64::from(draw.top_p) * order.iter().map(|&i| weight(i)).sum::<f64>();
    let mut before = 0.0;
    order.retain(|&i| {
        let is_kept = draw.top_p == 1.0 || before < limit;
        before += weight(i);
        is_kept && weight(i) >= f64::from(draw.min_p)
    });
    order.sort_unstable();
    let mut left = draw.uniform * order.iter().map(|&i| weight(i)).sum::<f64>();
    let found = order.iter().find(|&&i| {
        left -= weight(i);
        left < 0.0
    });
    found.or(order.last()).map(|&i| i as u32)
}

/// Every kind of request, alone; and beside one that wants logarithms for some steps, which the
/// engine has to choose for then.
#[test]
fn a_device_that_chooses_gives_the_same_tokens() {
    const N_TOKENS: u32 = 12;
    for seed in 0..24 {
        let request = submission(seed, 6, N_TOKENS);
        let sampling = Sampling { n_logprobs: None, ..request.sampling.clone() };
        let mut here = Executor::new(Echo::new(CAPACITY, Script::default()), CAPACITY);
        let mut there =
            Executor::new(Drawing::new(Echo::new(CAPACITY, Script::default()), true), CAPACITY);
        let mut plan = StepPlan {
            started: vec![start(1, &sampling, &request.prompt)],
            seqs: [step(1, 0, &request.prompt, &[1, 2, 3, 4, 5].map(Slot))].into(),
            ..StepPlan::default()
        };
        let other = Sampling { n_logprobs: Some(2), ..Sampling::greedy() };
        for i in 0..N_TOKENS {
            let (expected, got) = (here.run(&plan).unwrap(), there.run(&plan).unwrap());
            assert_eq!(got, expected, "token {i} of {sampling:?}");
            let next = expected.sampled[0].token;
            plan = StepPlan::default();
            plan.seqs.push(step(1, 6 + i, &[next], &[1, 2, 3, 4, 5].map(Slot)));
            if i == 4 {
                plan.started.push(start(2, &other, &request.prompt));
            }
            if (4..7).contains(&i) {
                plan.seqs.push(step(2, i - 4, &request.prompt[..1], &[6, 7].map(Slot)));
            }
            if i == 7 {
                plan.ended.push(SeqId(2));
            }
        }
    }
}

fn start(seq: u64, sampling: &Sampling, prompt: &[TokenId]) -> SeqStart {
    let (sampling, history, n_prompt) = (sampling.clone(), prompt.to_vec(), prompt.len() as u32);
    SeqStart { seq: SeqId(seq), sampling, history, n_prompt }
}

fn step<'a>(seq: u64, start: u32, tokens: &'a [TokenId], push: &'a [Slot]) -> SeqStep<'a> {
    let (seq, table) = (SeqId(seq), TableChange { keep: 0, push });
    SeqStep { seq, start, shift: 0, tokens, table, sample: true }
}

/// An engine that is ahead, in little room, and how it chooses whom to serve.
fn little_room(seed: u64, rng: &mut Rng) -> (Policy, Engine<Executor<Drawing>>) {
    let n_pages = rng.range(12..16);
    let n_host_pages = CAPACITY.n_slots - n_pages;
    let cache = nuthatch_cache::Config { page_len: CAPACITY.page_len, n_pages, n_host_pages };
    let options = Options { prefix: rng.one_in(2), ..Options::default() };
    let config = nuthatch_scheduler::Config {
        max_batched_tokens: CAPACITY.max_rows,
        max_seqs: CAPACITY.max_seqs,
        max_waiting: 64,
        max_context: CAPACITY.max_context,
        window: None,
    };
    let cache = Cache::with_options(cache, options).unwrap();
    let policy = match seed % 4 {
        0 => Policy::Priority { boost: 3 },
        1 => Policy::Mlfq { levels: 3, quantum: 16, max_wait: 40, max_running: 60 },
        _ => Policy::Fcfs,
    };
    let mut scheduler = Scheduler::with_policy(config, cache, policy).unwrap();
    scheduler.look_ahead();
    let device = Drawing::new(Echo::new(CAPACITY, Script::default()), true);
    let clock = Arc::new(HandClock::default());
    (policy, Engine::new(scheduler, Executor::new(device, CAPACITY), clock))
}

/// Random requests over a device that is ahead of its host: some end early, some late, some are
/// cancelled, some give way, some want what only the host can choose. Answers are those of a request that
/// is alone in the world, many passes were queued before they were planned, and each token is computed once.
#[test]
fn passes_that_are_queued_early_change_no_answer() {
    let (mut n_ahead, mut n_steps, mut n_preempted) = (0, 0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let (policy, mut engine) = little_room(seed, &mut rng);
        let mut waiting = Vec::new();
        for i in 0..8 {
            let mut request = submission(seed * 10 + i, rng.range(1..20), rng.range(4..28));
            request.hints.priority = rng.range(0..3) as u8;
            if !rng.one_in(4) {
                let temperature = if rng.one_in(2) { 0.0 } else { 0.8 };
                request.sampling = Sampling { temperature, seed: i, ..Sampling::default() };
            }
            let (outputs, receiver) = unbounded();
            let seq = engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
            let end = rng.one_in(5).then(|| rng.range(0..20));
            waiting.push((request, receiver, seq, end));
            for _ in 0..rng.range(0..6) {
                engine.step().unwrap();
                engine.verify().unwrap();
            }
        }
        let mut step = 0;
        while engine.step().unwrap() {
            engine.verify().unwrap();
            for (_, _, seq, _) in waiting.iter().filter(|(.., end)| *end == Some(step)) {
                engine.cancel(*seq);
            }
            step += 1;
        }
        for (request, receiver, _, _) in waiting {
            let got = &collect_all(receiver.try_iter()).unwrap()[0].0;
            let expected = Answer::of(&request, CAPACITY.max_context);
            if got.reason == FinishReason::Cancelled {
                assert!(expected.tokens.starts_with(&got.tokens), "seed {seed}");
            } else {
                assert_eq!(
                    (&got.tokens, got.reason),
                    (&expected.tokens, expected.reason),
                    "seed {seed}"
                );
            }
        }
        let stats = engine.stats().scheduler;
        n_preempted += stats.counters.preemptions;
        n_steps += stats.counters.steps;
        let device = engine.executor().forward();
        n_ahead += device.n_ahead;
        // What top-k attention decided is not decided again, unless a sequence was displaced meanwhile.
        let is_again = device.n_again > 0 && policy == Policy::Fcfs;
        assert!(!is_again, "seed {seed}: steps that were queued early came again");
    }
    assert!(n_preempted > 30, "{n_preempted} sequences gave way");
    assert!(4 * n_ahead > n_steps, "{n_ahead} of {n_steps} passes were queued early");
}

/// One sequence that decodes: every pass but the first two is queued early, over ends of pages too.
#[test]
fn a_sequence_alone_is_always_ahead() {
    let cache = nuthatch_cache::Config {
        page_len: CAPACITY.page_len,
        n_pages: CAPACITY.n_slots,
        n_host_pages: 0,
    };
    let config = nuthatch_scheduler::Config {
        max_batched_tokens: CAPACITY.max_rows,
        max_seqs: CAPACITY.max_seqs,
        max_context: CAPACITY.max_context,
        ..nuthatch_scheduler::Config::default()
    };
    let mut scheduler = Scheduler::new(config, Cache::new(cache).unwrap()).unwrap();
    scheduler.look_ahead();
    let device = Drawing::new(Echo::new(CAPACITY, Script::default()), true);
    let mut engine =
        Engine::new(scheduler, Executor::new(device, CAPACITY), Arc::new(HandClock::default()));
    let limits = Limits { max_tokens: 40, ..Limits::default() };
    let request = Submission { limits, sampling: Sampling::greedy(), ..submission(0, 5, 40) };
    let (outputs, receiver) = unbounded();
    engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
    let mut n_steps = 0;
    while engine.step().unwrap() {
        engine.verify().unwrap();
        n_steps += 1;
    }
    let got = &collect_all(receiver.try_iter()).unwrap()[0].0;
    assert_eq!(got.tokens, Answer::of(&request, CAPACITY.max_context).tokens);
    assert_eq!(n_steps, 40);
    // Each of 39 decoding steps queues the one after it, but for the last, which has no place to go.
    assert_eq!(engine.executor().forward().n_ahead, 38);
}

/// Neither looking back on a prompt's rows nor choosing is a pass, and what a plan has of a pass that was queued
/// early is.
#[test]
fn passes_are_measured_and_nothing_else_is() {
    let device = Drawing::new(Echo::new(CAPACITY, Script::default()), true);
    let clock = Arc::clone(&device.clock);
    let mut executor = Executor::new(device, CAPACITY).with_clock(clock);
    let ms = |executor: &mut Executor<Drawing>, plan: &StepPlan| {
        let result = executor.run(plan).unwrap();
        (result.compute_nanos / 1_000_000, result.sampled)
    };
    let prompt = [1, 2, 3, 4, 5].map(TokenId);
    let mut plan = StepPlan {
        started: vec![start(1, &Sampling::greedy(), &prompt)],
        seqs: [step(1, 0, &prompt, &[1, 2, 3].map(Slot))].into(),
        ..StepPlan::default()
    };
    let reader = PromptReader::new(prompt.to_vec(), Some(PromptScores::new(0)), None);
    executor.attach(SeqId(1), Attachment { prompt: Some(reader), ..Attachment::default() });
    let (took, mut sampled) = ms(&mut executor, &plan);
    assert_eq!(took, PASS_MS, "without what the reader of the prompt took");
    executor.detach(SeqId(1));
    let other = start(2, &Sampling::greedy(), &prompt);
    for (i, n_passes) in [(5, 1), (6, 1), (7, 2)] {
        let token = [sampled[0].token];
        plan = StepPlan {
            seqs: [step(1, i, &token, &[1, 2, 3].map(Slot))].into(),
            ..StepPlan::default()
        };
        if i == 7 {
            plan.started.push(other.clone());
            plan.seqs.push(step(2, 0, &prompt, &[4, 5].map(Slot)));
        }
        let took;
        (took, sampled) = ms(&mut executor, &plan);
        assert_eq!(took, n_passes * PASS_MS, "token {i}");
    }
    assert_eq!(executor.forward().n_ahead, 2, "the last one has come with a pass of its own");
}
