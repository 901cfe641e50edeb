//! Pages that are far: the same answers from less memory, and every row that comes is counted.

use std::path::PathBuf;
use std::sync::Arc;

use nuthatch_backend::{Backend, RowCode};
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_backend_cuda::{Cuda, CudaConfig, FarPages, LinkTuning, OpenError};
use nuthatch_engine::topk::Counts;
use nuthatch_engine::{
    Engine, EngineHandle, EngineOptions, Executor, LoadedModel, Offload, SharedClock, Submission,
    TopKOptions,
};
use nuthatch_model::kv_shape;
use nuthatch_testkit::Rng;
use nuthatch_types::{HeadSet, KvDtype, LayerSet, Sampling, TokenId};

use crate::echo::{Answer, HandClock, collect_all, receive_all};
use crate::golden::{Pool, folder, golden, load_on, request};

const POOL: Pool = Pool { kv_pages: 24, host_pages: 0, spill: false, max_seqs: 4 };

/// What a sequence needs is far from all of it.
pub(crate) const POLICIES: [&str; 12] = [
    "hata:64,k=12,sinks=4,recent=8",
    "hata:64,k=12,sinks=4,recent=8,refresh=whole",
    "loki:4,k=6,sinks=0,recent=1,working_set=2,refresh=whole",
    "quest,k=12,sinks=4,recent=8,reuse=qsac(eta=0.8,p=3,max_age=5)",
    "exact,k=8,recent=4,working_set=1.5,reuse=qsac(eta=0.95,thresholds=fixed)",
    "hata:64,k=6,sinks=3,recent=2,working_set=3,reuse=qsac(eta=0.5,p=3,max_age=3)",
    "hata:64,k=10,sinks=4,recent=8,speculate=on",
    "loki:4,k=5%,k_min=4,recent=3,working_set=2,reuse=qsac(eta=0.9,floor=0.5),speculate=on",
    "hata:64,k=12,sinks=4,recent=8,reuse=qsac(eta=0.95,floor=0.9,soft=-1)",
    "loki:4,k=6,recent=2,working_set=2,reuse=qsac(eta=1,thresholds=fixed,soft=0.3)",
    "hata:64,k=12,sinks=4,recent=8,reuse=lru(page=4,capacity=2)",
    "hata:64,k=12,sinks=4,recent=8,working_set=2.5,reuse=lru(page=4,capacity=2)",
];

/// Where pages are.
#[derive(Clone, Copy, Debug)]
enum Far {
    Host,
    Disk,
}

fn load(
    pool: Pool,
    max_rows: u32,
    policy: &str,
    far: Option<(Far, Offload)>,
) -> Result<Engine<Executor<LoadedModel<Cpu>>>, String> {
    let topk = TopKOptions { offload: far.map(|(_, offload)| offload), ..topk(policy) };
    let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap();
    let cpu = match far {
        Some((Far::Disk, _)) => cpu.with_kv_file(std::env::temp_dir()),
        Some((Far::Host, _)) | None => cpu,
    };
    // Time stands still, so that what the scheduler decides depends on nothing but the requests.
    let clock: SharedClock = Arc::new(HandClock::default());
    let options = EngineOptions::default();
    let steps = (max_rows, KvDtype::F32);
    load_on((cpu, clock), &folder("llama3"), pool, &options, steps, Some(&topk))
        .map_err(|error| error.to_string())
}

pub(crate) fn topk(policy: &str) -> TopKOptions {
    let text = (0..64).map(|i| TokenId(i * 7 % 90)).collect();
    let policies = vec![policy.parse().unwrap()];
    TopKOptions { policies, profile: None, text, offload: None }
}

fn spawn(pool: Pool, max_rows: u32, policy: &str, far: Option<(Far, Offload)>) -> EngineHandle {
    load(pool, max_rows, policy, far).unwrap().spawn().unwrap()
}

pub(crate) fn least() -> Offload {
    Offload { budget: None, keeps_heads: false }
}

/// Room for some whole heads, but not for all.
fn some_heads(policy: &str, pool: Pool) -> Offload {
    let bytes = |offload| {
        let engine = load(pool, 10, policy, Some((Far::Host, offload))).unwrap();
        let (near, _) = engine.executor().forward().near_with_counts().unwrap();
        (near.row_bytes + near.digest_bytes, near.n_resident(), near.is_resident.len())
    };
    let (few, n_none, n_heads) = bytes(least());
    let (all, n_all, _) = bytes(Offload { budget: Some(1 << 30), keeps_heads: true });
    assert_eq!((n_none, n_all), (0, n_heads), "{policy}");
    let offload = Offload { budget: Some(few + (all - few) / 2), keeps_heads: true };
    let (used, n_some, _) = bytes(offload);
    assert!(n_some > 0 && n_some < n_heads && Some(used) <= offload.budget, "{policy}: {n_some}");
    offload
}

/// A long prompt without meaning.
fn prompt(n: u32) -> Vec<TokenId> {
    (0..n).map(|i| TokenId((i * i + 3 * i + 1) % 97 % 90)).collect()
}

/// A request for an answer of so many tokens.
fn answered_long(prompt: &[TokenId], sampling: Sampling, max_tokens: u32) -> Submission {
    let mut request = request(prompt, sampling);
    request.limits.max_tokens = max_tokens;
    request
}

/// What was counted while a prompt was answered.
struct Came {
    /// Rows that came, and rows that were found missing.
    brought: u64,
    filled: u64,
    /// What steps after the prompt read from the file, in rows.
    read: f64,
    /// What the policy says.
    counts: Counts,
}

/// Answers one prompt, step by step.
fn count(pool: Pool, policy: &str, far: (Far, Offload), prompt: &[TokenId]) -> Came {
    let mut engine = load(pool, 10, policy, Some(far)).unwrap();
    let (sender, outputs) = crossbeam_channel::unbounded();
    let now = engine.clock().now();
    engine.submit(request(prompt, Sampling::greedy()), sender, now).unwrap();
    let read = |engine: &Engine<Executor<LoadedModel<Cpu>>>| {
        engine.executor().forward().near_with_counts().unwrap().1.file_bytes
    };
    while engine.stats().scheduler.counters.computed_tokens < prompt.len() as u64 {
        assert!(engine.step().unwrap());
    }
    let of_prompt = read(&engine);
    while engine.step().unwrap() {}
    drop(outputs);
    let of_answer = read(&engine) - of_prompt;
    let model = engine.executor().forward();
    let row_bytes = kv_shape(model.model().config(), KvDtype::F32).row_bytes(0) as f64;
    let (_, came) = model.near_with_counts().unwrap();
    Came {
        brought: came.n_brought,
        filled: came.n_filled,
        read: of_answer as f64 / row_bytes,
        counts: model.topk_stats().unwrap().policies[0],
    }
}

/// The same bits, wherever pages are and however many heads stay; also from pages that were found,
/// and however the prompt was cut.
#[test]
fn far_pages_change_no_answer() {
    let prompt = prompt(180);
    for policy in POLICIES {
        let ask = |max_rows, far| {
            let handle = spawn(POOL, max_rows, policy, far);
            let cold = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
            let cold = Answer::receive(&cold).unwrap();
            let warm = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
            let (warm, _) = receive_all(&warm).unwrap().remove(0);
            assert!(warm.usage.cached_tokens > 0);
            [(cold.tokens, cold.logprobs), (warm.tokens, warm.logprobs)]
        };
        let here = ask(10, None);
        for far in [Far::Host, Far::Disk] {
            for (max_rows, offload) in
                [(10, least()), (64, least()), (10, some_heads(policy, POOL))]
            {
                assert_eq!(ask(max_rows, Some((far, offload))), here, "{policy}, {far:?}");
            }
        }
    }
}

/// Rows that come are those that the policy moves, and none besides.
#[test]
fn every_row_that_comes_is_one_that_the_policy_moves() {
    let prompt = prompt(180);
    for policy in POLICIES {
        // Choosing by the keys themselves reads them where they are.
        for far in [Far::Host, Far::Disk] {
            let all = count(POOL, policy, (far, least()), &prompt);
            let fewer = count(POOL, policy, (far, some_heads(policy, POOL)), &prompt);
            for came in [&all, &fewer] {
                assert!(came.counts.rows_moved > 0, "{policy}");
                let found = (came.brought, came.filled);
                assert_eq!(found, (came.counts.rows_moved, 0), "{policy}, {far:?}");
                // Keys are compared where they are, and bounds of a page are of all that is in it: those two
                // read more. Nothing else does: appending once read the page that it wrote to, uncounted.
                match far {
                    Far::Host => assert_eq!(came.read, 0.0, "{policy}"),
                    Far::Disk if policy.starts_with("exact") || policy.starts_with("quest") => {
                        assert!(came.read > came.brought as f64, "{policy}");
                    }
                    Far::Disk => assert_eq!(came.read, came.brought as f64, "{policy}"),
                }
            }
            assert!(fewer.brought < all.brought, "{policy}: heads that stay move nothing");
            assert_eq!(fewer.counts.rows_attended, all.counts.rows_attended, "{policy}");
        }
    }
}

/// A context four times as large as what may be near, from a file.
#[test]
fn a_context_of_four_budgets_is_answered_from_a_file() {
    let pool = Pool { kv_pages: 16, max_seqs: 1, ..POOL };
    let prompt = prompt(230);
    let policy =
        "hata:64,k=3%,k_min=1,sinks=2,recent=6,working_set=2,reuse=qsac(eta=0.9,max_age=4)";
    let answer = |far| {
        let handle = spawn(pool, 32, policy, far);
        let ticket = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
        let answer = Answer::receive(&ticket).unwrap();
        (answer.tokens, answer.logprobs)
    };
    let engine = load(pool, 32, policy, Some((Far::Host, least()))).unwrap();
    let (near, _) = engine.executor().forward().near_with_counts().unwrap();
    let budget = near.row_bytes + near.digest_bytes;
    let config = engine.executor().forward().model().config();
    let kv_bytes = (prompt.len() * kv_shape(config, KvDtype::F32).token_bytes()) as u64;
    assert!(4 * budget <= kv_bytes, "{budget} of {kv_bytes}");
    let offload = Offload { budget: Some(budget), keeps_heads: true };
    assert_eq!(answer(Some((Far::Disk, offload))), answer(None));
    let offload = Offload { budget: Some(budget - 1), keeps_heads: true };
    let error = load(pool, 32, policy, Some((Far::Disk, offload))).err().unwrap();
    assert!(error.contains("1 sequences of") && error.contains("for digests, not"), "{error}");
}

/// Sequences in company, which fork each other's pages, give way and come back, and one that nobody
/// waits for: with room for all of them each answers as it does alone.
#[test]
fn company_and_little_room_leave_nothing_behind() {
    let (prompt, _) = golden("llama3");
    // Short prompts and long answers: more begin than can end.
    let asked = |i: usize| answered_long(&prompt[i..i + 20], Sampling::greedy(), 60);
    for policy in POLICIES {
        let far = Some((Far::Disk, least()));
        let alone: Vec<Answer> = (0..6)
            .map(|i| {
                let handle = spawn(POOL, 10, policy, None);
                Answer::receive(&handle.submit(asked(i)).unwrap()).unwrap()
            })
            .collect();
        for (kv_pages, host_pages, spill) in
            [(40, 0, false), (7, 30, false), (7, 30, true), (7, 0, false)]
        {
            let pool = Pool { kv_pages, host_pages, spill, max_seqs: 4 };
            let handle = spawn(pool, 10, policy, far);
            let tickets: Vec<_> = (0..6).map(|i| handle.submit(asked(i)).unwrap()).collect();
            drop(handle.submit(asked(9)).unwrap());
            for (ticket, alone) in tickets.iter().zip(&alone) {
                let together = Answer::receive(ticket).unwrap();
                assert_eq!(together.tokens.len(), alone.tokens.len());
                if kv_pages == 40 {
                    assert_eq!(together.tokens, alone.tokens, "{policy}");
                    assert_eq!(together.logprobs, alone.logprobs, "{policy}");
                }
            }
            let stats = handle.stats().unwrap().scheduler;
            let what = format!("{policy}, {kv_pages} and {host_pages} pages");
            pool.expect_preemptions(&stats.counters, &what);
            assert_eq!(stats.cache.pages_used, 0, "{policy}");
            handle.shutdown().unwrap();
        }
    }
}

/// What came of a simulation.
#[derive(Debug, PartialEq)]
pub(crate) struct Simulated {
    /// Of requests that were not cancelled.
    pub(crate) answers: Vec<Vec<Answer>>,
    /// How often sequences gave way, by swapping and by computing again.
    gave_way: [u64; 2],
}

/// What a seed makes of an engine: requests with common beginnings, some for several answers, some
/// cancelled, in little room. If they want no logarithms, a device chooses tokens. The engine comes with it, to look at.
pub(crate) fn simulate<B: Backend>(
    seed: u64,
    n_logprobs: Option<u32>,
    load: impl Fn(Pool, u32) -> Engine<Executor<LoadedModel<B>>>,
) -> (Simulated, Engine<Executor<LoadedModel<B>>>) {
    let mut random = Rng::new(seed);
    let pool = Pool {
        kv_pages: random.range(14..30),
        host_pages: if random.one_in(2) { 30 } else { 0 },
        spill: random.one_in(2),
        max_seqs: random.range(2..5),
    };
    let mut engine = load(pool, random.range(6..40));
    let common = prompt(90);
    let mut asked = Vec::new();
    for _ in 0..160 {
        if asked.len() < 14 && random.one_in(5) {
            let mut prompt = common[..random.range(1..90) as usize].to_vec();
            prompt.extend((0..random.range(0..40)).map(|_| TokenId(random.range(0..90))));
            let sampling = Sampling { seed: random.bits(), ..Sampling::default() };
            let n = if random.one_in(4) { 2 } else { 1 };
            let max_tokens = random.range(8..80);
            let mut submission = Submission { n, ..answered_long(&prompt, sampling, max_tokens) };
            submission.sampling.n_logprobs = n_logprobs;
            let (sender, outputs) = crossbeam_channel::unbounded();
            let now = engine.clock().now();
            if let Ok(seq) = engine.submit(submission, sender, now) {
                asked.push((seq, Some(outputs)));
            }
        } else if !asked.is_empty() && random.one_in(25) {
            let i = random.range(0..asked.len() as u32) as usize;
            engine.cancel(asked[i].0);
            asked[i].1 = None;
        } else {
            engine.step().unwrap();
            engine.verify().unwrap();
        }
    }
    while engine.step().unwrap() {}
    engine.verify().unwrap();
    let stats = engine.stats().scheduler;
    assert_eq!(stats.cache.pages_used, 0);
    let gave_way = [stats.counters.preemptions_swap, stats.counters.preemptions_recompute];
    let answers = asked.iter().filter_map(|(_, outputs)| outputs.as_ref());
    let answers = answers.map(|outputs| collect_all(outputs.try_iter()).unwrap());
    let answers = answers.map(|all| all.into_iter().map(|(answer, _)| answer).collect());
    (Simulated { answers: answers.collect(), gave_way }, engine)
}

/// As for the scheduler's simulation: `SIM_SEEDS=17..18` replays one.
#[expect(clippy::disallowed_methods, reason = "which seeds to try is the tester's choice")]
pub(crate) fn seeds() -> std::ops::Range<u64> {
    let Ok(asked) = std::env::var("SIM_SEEDS") else { return 0..24 };
    let (start, end) = asked.split_once("..").expect("SIM_SEEDS is start..end");
    start.parse().unwrap()..end.parse().unwrap()
}

/// Prefix hits, forks, preemption by swap and by recomputing, cancelling and cut prompts, as seeds
/// will have it: where pages are changes no bit of any answer.
#[test]
fn far_pages_change_nothing_in_simulations() {
    let mut gave_way = [0; 2];
    for seed in seeds() {
        let policy = POLICIES[seed as usize % POLICIES.len()];
        let (here, _) =
            simulate(seed, Some(0), |pool, max_rows| load(pool, max_rows, policy, None).unwrap());
        assert!(!here.answers.is_empty());
        gave_way = [0, 1].map(|i| gave_way[i] + here.gave_way[i]);
        for far in [Far::Host, Far::Disk] {
            for keeps_heads in [false, true] {
                let (found, _) = simulate(seed, Some(0), |pool, max_rows| {
                    let offload = if keeps_heads { some_heads(policy, pool) } else { least() };
                    load(pool, max_rows, policy, Some((far, offload))).unwrap()
                });
                assert_eq!(found, here, "seed {seed}, {policy}, {far:?}");
            }
        }
    }
    // One seed alone may have room for all.
    assert!(seeds().count() == 1 || gave_way.iter().all(|&n| n > 0), "{gave_way:?}");
}

/// Few copies, no whole layers, and rows that the device brings as they are.
pub(crate) const FAR: FarPages = FarPages {
    n_near: 2,
    resident: LayerSet::NONE,
    n_threads: 0,
    code: None,
    coded_here: HeadSet::NONE,
    fails_after: None,
};

/// A thread that fails while a step waits for it: the step's answers are right all the same, and the next
/// step is an error. Without a driver nothing is judged, and the output shows it.
#[test]
fn a_thread_that_fails_ends_the_engine_and_spoils_nothing_before() {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    let prompt = prompt(180);
    let run = |far: FarPages| {
        let config = CudaConfig { cache_dir: cache_dir.clone(), ..CudaConfig::default() };
        let cuda = match Cuda::open(0, CudaConfig { far: Some(far), ..config }) {
            Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
                println!("SKIPPED: {error}");
                return None;
            }
            cuda => cuda.unwrap(),
        };
        let device = (cuda, Arc::new(HandClock::default()) as SharedClock);
        let (path, options, steps) =
            (folder("llama3"), EngineOptions::default(), (64, KvDtype::F16));
        let topk = topk("hata:64,k=12,sinks=4,recent=8,refresh=whole");
        let mut engine = load_on(device, &path, POOL, &options, steps, Some(&topk)).unwrap();
        let (sender, outputs) = crossbeam_channel::unbounded();
        let now = engine.clock().now();
        engine.submit(request(&prompt, Sampling::greedy()), sender, now).unwrap();
        let end = loop {
            match engine.step() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error.to_string()),
            }
        };
        let tokens = outputs.try_iter().map(|output| format!("{output:?}")).collect::<Vec<_>>();
        Some((tokens, end))
    };
    let n_threads = 3;
    let Some((whole, Ok(()))) = run(FarPages { n_threads, ..FAR }) else { return };
    for n_orders in [0, 1, 5] {
        let far = FarPages { n_threads, fails_after: Some(n_orders), ..FAR };
        let (part, end) = run(far).unwrap();
        let error = end.expect_err("a thread has failed");
        assert!(error.contains("a thread that brings KV rows"), "{error}");
        assert!(!part.is_empty() && part.len() < whole.len(), "{n_orders}: {}", part.len());
        assert_eq!(part, whole[..part.len()], "{n_orders}");
        println!("{n_orders} orders: {} outputs of {}, then: {error}", part.len(), whole.len());
    }
}

/// The same on a GPU, whose pages are far, but perhaps those of the first layers, and of which few, or many, have
/// copies on the device. Without a driver nothing is judged, and the output shows it.
#[test]
fn far_pages_change_nothing_on_a_gpu() {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    let open = |far: Option<FarPages>| {
        let cache_dir = cache_dir.clone();
        // Sequences are long from the beginning, become so, or stay short; attention to pages that are here waits.
        let (short, early) = match far.map_or(0, |far| far.n_near) {
            0 => (u32::MAX, 0),
            5 => (0, 1),
            64 => (100, 1),
            _ => (u32::MAX, 1),
        };
        let tuning = LinkTuning { short, early, ..LinkTuning::default() };
        Cuda::open(0, CudaConfig { cache_dir, far, tuning, ..CudaConfig::default() })
    };
    if let Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) = open(None) {
        println!("SKIPPED: {error}");
        return;
    }
    let (mut n_answers, mut n_rounded) = (0, 0);
    for seed in seeds() {
        let policy = POLICIES[seed as usize % POLICIES.len()];
        for kv_dtype in [KvDtype::F32, KvDtype::F16] {
            let run = |far| {
                simulate(seed, Some(0), |pool, max_rows| {
                    let (pool, clock) = (Pool { spill: false, ..pool }, HandClock::default());
                    let device = (open(far).unwrap(), Arc::new(clock) as SharedClock);
                    let (path, options) = (folder("llama3"), EngineOptions::default());
                    let (steps, offload) = ((max_rows, kv_dtype), far.map(|_| least()));
                    let topk = TopKOptions { offload, ..topk(policy) }.on_link();
                    load_on(device, &path, pool, &options, steps, Some(&topk)).unwrap()
                })
                .0
            };
            let here = run(None);
            assert!(!here.answers.is_empty());
            n_answers += here.answers.len();
            // The last with threads of the host that bring rows.
            let shapes = [(2, &[][..], 0), (5, &[1], 0), (64, &[], 0), (2, &[], 3)];
            for (n_near, resident, n_threads) in shapes {
                let resident = LayerSet::of(resident).unwrap();
                let far = FarPages { n_near, resident, n_threads, ..FAR };
                assert!(run(Some(far)) == here, "seed {seed}, {policy}, {kv_dtype}, {far:?}");
            }
            // In eight bits rows are rounded, whoever brings them and whatever has copies.
            let code = Some(RowCode::ALL[seed as usize % 2]);
            let coded = run(Some(FarPages { code, ..FAR }));
            n_rounded += u32::from(coded != here);
            let some = HeadSet::of([0, 3]);
            for (n_near, n_threads, coded_here) in
                [(64, 0, HeadSet::NONE), (2, 3, some), (2, 0, some)]
            {
                let far = FarPages { n_near, n_threads, code, coded_here, ..FAR };
                assert!(run(Some(far)) == coded, "seed {seed}, {policy}, {kv_dtype}, {far:?}");
            }
            let all_stay = FarPages { resident: LayerSet::first(99), code, ..FAR };
            assert!(run(Some(all_stay)) == here, "seed {seed}, {policy}: nothing comes");
        }
        println!("seed {seed}, {policy}: the same answers");
    }
    println!("{n_answers} requests, each ten times; rounding was seen in {n_rounded} runs");
    assert!(n_rounded > 0, "rows in eight bits are not the rows");
}

/// What a GPU that decides ahead answers is what a CPU answers but for rounding, so its attention sees what was
/// decided in the same step. Without a driver nothing is judged, and the output shows it.
#[test]
fn deciding_ahead_on_a_gpu_answers_as_a_cpu_does() {
    fn ask<B: Backend>(device: B, policy: &str, kv_dtype: KvDtype) -> Answer {
        let device = (device, Arc::new(HandClock::default()) as SharedClock);
        let (path, options) = (folder("llama3"), EngineOptions::default());
        let topk = topk(policy).on_link();
        let mut engine =
            load_on(device, &path, POOL, &options, (64, kv_dtype), Some(&topk)).unwrap();
        let (sender, outputs) = crossbeam_channel::unbounded();
        let now = engine.clock().now();
        engine.submit(request(&prompt(120), Sampling::greedy()), sender, now).unwrap();
        while engine.step().unwrap() {}
        collect_all(outputs.try_iter()).unwrap().remove(0).0
    }
    // Working sets of one page, and of several, which attention asks for before the kernel before it has ended.
    for (k, kv_dtype) in [(8, KvDtype::F32), (8, KvDtype::F16), (40, KvDtype::F16)] {
        let cpu = || Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap();
        let policy = format!("exact,k={k},sinks=4,recent=8");
        let ahead = format!("{policy},speculate=on");
        let expected = ask(cpu(), &ahead, kv_dtype);
        let shown = farthest(&expected, &ask(cpu(), &policy, kv_dtype));
        assert!(shown > 0.1, "what is decided shows in answers: {shown} with {k} rows");
        for (short, early) in [(0, 1), (u32::MAX, 0), (u32::MAX, 1)] {
            let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
            let tuning = LinkTuning { short, early, ..LinkTuning::default() };
            let config = CudaConfig { cache_dir, is_exact: true, tuning, ..CudaConfig::default() };
            let cuda = match Cuda::open(0, config) {
                Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
                    println!("SKIPPED: {error}");
                    break;
                }
                cuda => cuda.unwrap(),
            };
            let found = ask(cuda, &ahead, kv_dtype);
            let what = format!("{ahead}, {kv_dtype}, short up to {short}, early {early}");
            assert_eq!(found.tokens, expected.tokens, "{what}");
            let off = farthest(&found, &expected);
            assert!(off < 0.02, "{what}: {off} off");
        }
    }
}

/// How far logarithms of two answers are from each other.
fn farthest(one: &Answer, other: &Answer) -> f32 {
    let pairs = one.logprobs.iter().zip(&other.logprobs);
    pairs.map(|(a, b)| (a.unwrap() - b.unwrap()).abs()).fold(0.0, f32::max)
}

/// Rows that come in eight bits are rounded, in the same way wherever pages are and in whatever company;
/// what stays near whole is not.
#[test]
fn rows_in_eight_bits_are_rounded_and_nothing_else_is() {
    let prompt = prompt(180);
    let policy = POLICIES[0];
    for kv_dtype in [KvDtype::F32, KvDtype::F16] {
        let ask = |far: Option<(Far, Offload)>, code: Option<RowCode>, max_rows| {
            let topk = TopKOptions { offload: far.map(|(_, offload)| offload), ..topk(policy) };
            let mut cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap();
            if let Some((Far::Disk, _)) = far {
                cpu = cpu.with_kv_file(std::env::temp_dir());
            }
            if let Some(code) = code {
                cpu = cpu.with_far_code(code);
            }
            let device = (cpu, Arc::new(HandClock::default()) as SharedClock);
            let (options, steps) = (EngineOptions::default(), (max_rows, kv_dtype));
            let engine =
                load_on(device, &folder("llama3"), POOL, &options, steps, Some(&topk)).unwrap();
            let handle = engine.spawn().unwrap();
            let answer = || {
                let ticket = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
                let answer = Answer::receive(&ticket).unwrap();
                (answer.tokens, answer.logprobs)
            };
            [answer(), answer()]
        };
        let exact = ask(None, None, 10);
        let all = Offload { budget: Some(1 << 30), keeps_heads: true };
        for code in RowCode::ALL {
            let rounded = ask(Some((Far::Host, least())), Some(code), 10);
            assert_ne!(rounded, exact, "{code}");
            // The first token comes of the prompt.
            assert_eq!(rounded[0].1[0], exact[0].1[0], "{code}");
            for (far, max_rows) in [(Far::Host, 64), (Far::Disk, 10)] {
                assert_eq!(ask(Some((far, least())), Some(code), max_rows), rounded, "{code}");
            }
            assert_eq!(ask(Some((Far::Host, all)), Some(code), 10), exact, "{code}");
        }
        let far = |code| ask(Some((Far::Host, least())), Some(code), 10);
        assert_ne!(far(RowCode::Fp8), far(RowCode::Int8));
    }
}

#[test]
fn what_cannot_be_far_is_refused() {
    let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
    let cpu = cpu.with_kv_file(PathBuf::from("/nowhere/at/all"));
    let (options, clock) = (EngineOptions::default(), Arc::new(HandClock::default()));
    let error = {
        let steps = (10, KvDtype::F32);
        load_on((cpu, clock), &folder("llama3"), POOL, &options, steps, None).err().unwrap()
    };
    assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
}
