//! The disk tier: a conversation goes on after a restart with the same bits, and whatever the disk does,
//! answers are right.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_cache::Options;
use nuthatch_engine::{
    Capacity, DiskError, DiskIo, DiskOptions, EngineHandle, EngineOptions, Hints, Output,
    SlowOptions, StoreKey, Submission, TierStats, TopKOptions,
};
use nuthatch_store::disk::SystemFiles;
use nuthatch_store::fault::{FaultRates, FaultyFiles};
use nuthatch_types::{ColdDtype, ColdKv, Limits, Sampling, TokenId};
use tempfile::TempDir;

use crate::echo::{
    Answer, CAPACITY, Script, answers_are_right, collect_all, engine_with, submission,
};
use crate::golden::{Pool, folder, golden, load_topk, request};

pub(crate) const POOL: Pool = Pool { kv_pages: 24, host_pages: 0, spill: false, max_seqs: 4 };

fn disk(dir: &Path) -> SlowOptions {
    sized_disk(dir, 8 << 20)
}

fn sized_disk(dir: &Path, bytes_max: u64) -> SlowOptions {
    let (dir, io) = (dir.join("kv"), DiskIo::default());
    let disk = Some(DiskOptions { dir, bytes_max, io });
    SlowOptions { disk, ..SlowOptions::default() }
}

fn spawn(name: &str, dir: &Path, pool: Pool, topk: Option<&str>) -> EngineHandle {
    let topk = topk.map(|policy| TopKOptions {
        policies: vec![policy.parse().unwrap()],
        profile: None,
        text: (0..64).map(|i| TokenId(i * 7 % 90)).collect(),
        offload: None,
    });
    let options = EngineOptions::default();
    let mut engine = load_topk(&folder(name), pool, &options, 10, topk.as_ref());
    engine.keep_pages(&SlowOptions { by_layers: Some(true), ..disk(dir) }).unwrap();
    engine.spawn().unwrap()
}

/// An answer, and how many tokens of its prompt were cached.
pub(crate) fn ask(handle: &EngineHandle, request: &Submission) -> (Answer, u32) {
    let ticket = handle.submit(request.clone()).unwrap();
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    loop {
        match ticket.recv().unwrap() {
            Output::Token { token, logprob, .. } => {
                tokens.push(token);
                logprobs.push(logprob);
            }
            Output::Finished { reason, usage, .. } => {
                return (Answer { tokens, logprobs, reason, usage }, usage.cached_tokens);
            }
        }
    }
}

pub(crate) fn tier(handle: &EngineHandle) -> TierStats {
    handle.stats().unwrap().tier.unwrap()
}

/// What comes from the disk is what would be computed, bit for bit, and it is counted as cached.
#[test]
fn a_conversation_goes_on_after_a_restart() {
    for (name, topk) in [
        ("llama3", None),
        ("qwen3", None),
        ("kv-shared", None),
        ("mistral-window", None),
        ("kv-shared-window", None),
        ("llama3", Some("hata:64,k=12,sinks=4,recent=8")),
        ("llama3", Some("quest,k=12,sinks=4,recent=8,refresh=whole")),
    ] {
        let dir = TempDir::new().unwrap();
        let (prompt, _) = golden(name);
        let first = request(&prompt, Sampling::greedy());
        let handle = spawn(name, dir.path(), POOL, topk);
        let (cold, n_cached) = ask(&handle, &first);
        assert_eq!(n_cached, 0);
        // The second turn repeats everything, and asks for more.
        let turns = [&prompt[..], &cold.tokens, &prompt[..9]].concat();
        let second = request(&turns, Sampling::greedy());
        let (warm, _) = ask(&handle, &second);
        handle.shutdown().unwrap();

        let handle = spawn(name, dir.path(), POOL, topk);
        let (again, n_cached) = ask(&handle, &second);
        assert_eq!(again.tokens, warm.tokens, "{name}, {topk:?}");
        assert_eq!(again.logprobs, warm.logprobs, "{name}, {topk:?}");
        let n_pages = (turns.len() as u32 - 1) / 16;
        assert_eq!(n_cached, 16 * n_pages, "{name}, {topk:?}");
        let stats = tier(&handle);
        assert_eq!(stats.counters.pages_loaded, u64::from(n_pages), "{name}: {stats:?}");
        // Now it is in memory, and nothing is loaded again.
        assert_eq!(ask(&handle, &first).0.tokens, cold.tokens);
        assert_eq!(tier(&handle).counters.pages_loaded, u64::from(n_pages));
        handle.shutdown().unwrap();
    }
}

/// With a key nothing that was said is in the files, and nobody without it finds anything.
#[test]
fn a_conversation_is_encrypted() {
    let dir = TempDir::new().unwrap();
    let (prompt, greedy) = golden("llama3");
    let turns = [&prompt[..], &greedy].concat();
    let request = request(&turns, Sampling::greedy());
    let start = |key: Option<u8>, by_layers: bool| {
        let mut engine = load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, None);
        let key = key.map(|byte| StoreKey::read(&[byte; 32]).unwrap());
        let by_layers = Some(by_layers);
        engine.keep_pages(&SlowOptions { key, by_layers, ..disk(dir.path()) }).unwrap();
        engine.spawn().unwrap()
    };
    let mut answers = Vec::new();
    let n_cached = 16 * ((turns.len() as u32 - 1) / 16);
    for (key, n) in
        [(Some(1), 0), (Some(1), n_cached), (Some(2), 0), (None, 0), (Some(1), n_cached)]
    {
        // The last comes layer by layer.
        let handle = start(key, answers.len() == 4);
        let (answer, n_cached) = ask(&handle, &request);
        assert_eq!(n_cached, n, "{key:?}");
        answers.push((answer.tokens, answer.logprobs));
        handle.shutdown().unwrap();
        if answers.len() > 2 {
            continue;
        }
        let tokens: Vec<u8> = turns[..16].iter().flat_map(|token| token.0.to_le_bytes()).collect();
        for entry in std::fs::read_dir(dir.path().join("kv")).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            assert!(!bytes.windows(64).any(|window| window == tokens), "what was said shows");
        }
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

/// In fewer bits a conversation goes on nearly as it would, takes less room, and is not taken for one
/// of all bits.
#[test]
fn a_conversation_in_fewer_bits_goes_on_nearly_as_it_would() {
    let (prompt, greedy) = golden("llama3");
    let turns = [&prompt[..], &greedy].concat();
    let request = request(&turns, Sampling::greedy());
    let exact_layers: Vec<u32> = (0..2).collect();
    let mut bytes_before = u64::MAX;
    for (dtype, exact_layers, bound) in [
        (ColdDtype::Int8, exact_layers, 0.0),
        (ColdDtype::Int8, vec![], 0.05),
        (ColdDtype::Fp8, vec![], 0.4),
        (ColdDtype::Int4, vec![], 0.8),
    ] {
        let dir = TempDir::new().unwrap();
        let cold = ColdKv { dtype, exact_layers };
        let start = |by_layers| {
            let by_layers = Some(by_layers);
            let options = SlowOptions { cold: Some(cold.clone()), by_layers, ..disk(dir.path()) };
            let mut engine =
                load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, None);
            engine.keep_pages(&options).unwrap();
            engine.spawn().unwrap()
        };
        let handle = start(false);
        let (before, n_cached) = ask(&handle, &request);
        assert_eq!(n_cached, 0);
        handle.shutdown().unwrap();
        let handle = start(false);
        let (after, n_cached) = ask(&handle, &request);
        assert_eq!(n_cached, 16 * ((turns.len() as u32 - 1) / 16), "{cold}");
        handle.shutdown().unwrap();
        // Layer by layer with the same bits.
        let handle = start(true);
        let (again, again_cached) = ask(&handle, &request);
        assert_eq!((again.tokens, again.logprobs), (after.tokens.clone(), after.logprobs.clone()));
        assert_eq!(again_cached, n_cached, "{cold}");
        let logprob = |answer: &Answer| answer.logprobs[0].unwrap();
        let far = (logprob(&before) - logprob(&after)).abs();
        assert!(far <= bound, "{cold}: {far}");
        let bytes = tier(&handle).disk.unwrap().bytes;
        assert!(bytes < bytes_before || dtype == ColdDtype::Fp8, "{cold}: {bytes}");
        bytes_before = bytes;
        handle.shutdown().unwrap();
        // What others keep exactly is another's.
        let handle = spawn("llama3", dir.path(), POOL, None);
        assert_eq!(ask(&handle, &request).1, 0);
        handle.shutdown().unwrap();
    }
    let mut engine = load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, None);
    let dir = TempDir::new().unwrap();
    let cold = ColdKv { dtype: ColdDtype::Int8, exact_layers: vec![99] };
    let error = engine.keep_pages(&SlowOptions { cold: Some(cold), ..disk(dir.path()) });
    assert!(matches!(error, Err(DiskError::NoCodec(_))));
}

#[test]
fn another_salt_another_model_and_another_policy_find_nothing() {
    let dir = TempDir::new().unwrap();
    let (prompt, greedy) = golden("llama3");
    let plain = request(&prompt, Sampling::greedy());
    let salted = |salt: &[u8]| {
        let hints = Hints { cache_salt: salt.to_vec(), ..Hints::default() };
        Submission { hints, ..plain.clone() }
    };
    let handle = spawn("llama3", dir.path(), POOL, None);
    ask(&handle, &salted(b"one"));
    handle.shutdown().unwrap();
    let handle = spawn("llama3", dir.path(), POOL, None);
    for (request, is_cached) in
        [(salted(b"two"), false), (plain.clone(), false), (salted(b"one"), true)]
    {
        let (answer, n_cached) = ask(&handle, &request);
        assert_eq!(answer.tokens, greedy);
        assert_eq!(n_cached > 0, is_cached);
    }
    handle.shutdown().unwrap();
    let topk = Some("exact,k=100%");
    for (name, topk) in [("llama2-mha", None), ("llama3", topk)] {
        let handle = spawn(name, dir.path(), POOL, topk);
        let request = request(&golden(name).0, Sampling::greedy());
        assert_eq!(ask(&handle, &request).1, 0, "{name}");
        assert!(tier(&handle).disk.unwrap().counters.segments_foreign > 0);
        handle.shutdown().unwrap();
    }
    // What others kept meanwhile did no harm.
    let handle = spawn("llama3", dir.path(), POOL, None);
    assert!(ask(&handle, &salted(b"two")).1 > 0);
    handle.shutdown().unwrap();
}

#[test]
fn a_directory_belongs_to_one_engine() {
    let dir = TempDir::new().unwrap();
    let handle = spawn("llama3", dir.path(), POOL, None);
    let mut other = load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, None);
    let error = other.keep_pages(&disk(dir.path())).unwrap_err();
    assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    handle.shutdown().unwrap();
    other.keep_pages(&disk(dir.path())).unwrap();
}

/// Many requests of few beginnings in a small cache, and an engine that is started again and again on
/// a disk that fails in every way.
#[test]
fn whatever_the_disk_does_answers_are_right() {
    let capacity = Capacity { n_slots: 28, ..CAPACITY };
    let (mut n_loaded, mut n_faults, mut n_late) = (0, 0, 0);
    for seed in 0..16 {
        let dir = TempDir::new().unwrap();
        let rates = match seed % 4 {
            0 => FaultRates::default(),
            1 => FaultRates { error: 40, short: 100, ..FaultRates::default() },
            2 => FaultRates { flip: 60, full: 10, ..FaultRates::default() },
            _ => FaultRates { error: 10, short: 20, full: 2, flip: 10, slow: 40 },
        };
        // Seeds go through all faults with each way of reading and writing.
        let way = if seed % 8 < 4 { "threads" } else { "auto" };
        let system = SystemFiles::new(way.parse().unwrap()).unwrap();
        let files = FaultyFiles::new(Arc::new(system), rates, seed);
        for round in 0..4 {
            let (mut engine, clock) = engine_with(capacity, Script::default(), Options::default());
            let disk = sized_disk(dir.path(), 6_000);
            if engine.keep_pages_in(&disk, Arc::new(files.clone())).is_err() {
                continue;
            }
            let max_context = capacity.max_context;
            answers_are_right(&mut engine, &clock, max_context, (seed, round), 7);
            if round % 2 == 0 {
                engine.flush().unwrap();
            }
            let stats = engine.stats().tier.unwrap();
            assert!(stats.disk.unwrap().bytes <= 6_000, "{stats:?}");
            n_loaded += stats.counters.pages_loaded;
            n_late += stats.counters.loads_late;
        }
        n_faults += files.n_faults();
    }
    assert!(n_loaded > 50 && n_faults > 200, "{n_loaded} pages, {n_faults} faults, {n_late} late");
}

/// A request that is alone is computed while its pages come, encrypted or not; when some do not come, or
/// come wrong, it is computed without them.
#[test]
fn a_lone_request_begins_before_its_pages_are_there() {
    let (mut early, mut undone) = (0, 0);
    for seed in 0..24 {
        let dir = TempDir::new().unwrap();
        let slow = FaultRates { slow: 1000, ..FaultRates::default() };
        let rates = match seed % 4 {
            0 => slow,
            1 => FaultRates { flip: 40, ..slow },
            2 => FaultRates { error: 40, ..slow },
            _ => FaultRates { short: 200, ..slow },
        };
        let system = SystemFiles::new("threads".parse().unwrap()).unwrap();
        let files = FaultyFiles::new(Arc::new(system), FaultRates::default(), seed);
        let (mut engine, _) = engine_with(CAPACITY, Script::default(), Options::default());
        let key = (seed % 8 >= 4).then(|| StoreKey::read(&[5; 32]).unwrap());
        let options = SlowOptions { by_layers: Some(true), key, ..disk(dir.path()) };
        engine.keep_pages_in(&options, Arc::new(files.clone())).unwrap();
        for round in 0..3 {
            let request = submission(seed + round, 40, 3);
            let expected = Answer::of(&request, CAPACITY.max_context);
            for rates in [FaultRates::default(), rates] {
                files.set_rates(rates);
                let (outputs, news) = unbounded();
                engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
                while engine.step().unwrap() {
                    engine.verify().unwrap();
                }
                let got = &collect_all(news.try_iter()).unwrap()[0].0;
                assert_eq!((&got.tokens, got.reason), (&expected.tokens, expected.reason));
                files.set_rates(FaultRates::default());
                engine.flush().unwrap();
                engine.forget_idle();
            }
        }
        let counters = engine.stats().tier.unwrap().counters;
        early += counters.loads_early;
        undone += counters.loads_undone;
    }
    assert!(early > 20 && undone > 2, "{early} early, {undone} of them undone");
}

/// What is cancelled while it loads leaves nothing behind.
#[test]
fn a_load_for_nobody_ends() {
    let dir = TempDir::new().unwrap();
    let (mut engine, _) = engine_with(CAPACITY, Script::default(), Options::default());
    engine.keep_pages(&disk(dir.path())).unwrap();
    let request = submission(1, 40, 3);
    let (outputs, _news) = unbounded();
    engine.submit(request.clone(), outputs.clone(), Duration::ZERO).unwrap();
    while engine.step().unwrap() {}
    engine.flush().unwrap();
    engine.forget_idle();
    for n_steps in 0..4 {
        let seq = engine.submit(request.clone(), outputs.clone(), Duration::ZERO).unwrap();
        for _ in 0..n_steps {
            engine.step().unwrap();
            engine.verify().unwrap();
        }
        engine.cancel(seq);
        while engine.rest().unwrap() {}
        engine.verify().unwrap();
        engine.forget_idle();
        let cache = engine.stats().scheduler.cache;
        assert_eq!(cache.pages_free, cache.pages_total, "after {n_steps} steps");
    }
    let limits = Limits { max_tokens: 0, ..Limits::default() };
    let refused = Submission { limits, ..request };
    assert!(engine.submit(refused, outputs, Duration::ZERO).is_err());
}
