//! The remote tier: engines find each other's pages in one store, and whatever the store does, answers
//! are right.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_cache::Options;
use nuthatch_engine::{
    Capacity, DiskIo, DiskOptions, Engine, EngineHandle, EngineOptions, Hints, Objects, Output,
    SlowOptions, Submission,
};
use nuthatch_store::fault::{FaultRates, FaultyObjects, MemoryObjects};
use nuthatch_types::{ColdDtype, ColdKv, Limits, Sampling};
use tempfile::TempDir;

use crate::disk::{POOL, ask, tier};
use crate::echo::{CAPACITY, Script, answers_are_right, engine_with, submission};
use crate::golden::{Pool, folder, golden, load_topk, request};

fn remote(objects: &Arc<MemoryObjects>) -> SlowOptions {
    let objects: Arc<dyn Objects> = Arc::<MemoryObjects>::clone(objects);
    SlowOptions { remote: Some(objects), ..SlowOptions::default() }
}

fn spawn(name: &str, options: &SlowOptions) -> EngineHandle {
    let mut engine = load_topk(&folder(name), POOL, &EngineOptions::default(), 10, None);
    engine.keep_pages(options).unwrap();
    engine.spawn().unwrap()
}

/// What one engine computed another finds, bit for bit, at the same time.
#[test]
fn two_engines_share_a_prefix() {
    let objects = Arc::new(MemoryObjects::default());
    let (prompt, greedy) = golden("llama3");
    let turns = [&prompt[..], &greedy].concat();
    let plain = request(&turns, Sampling::greedy());
    let n_pages = (turns.len() as u32 - 1) / 16;
    let one = spawn("llama3", &remote(&objects));
    let (first, n_cached) = ask(&one, &plain);
    assert_eq!(n_cached, 0);
    // What the engine rests from is saved.
    while (objects.names().len() as u32) < n_pages + 1 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let two = spawn("llama3", &remote(&objects));
    let (second, n_cached) = ask(&two, &plain);
    assert_eq!((second.tokens, second.logprobs), (first.tokens, first.logprobs));
    assert_eq!(n_cached, 16 * n_pages);
    assert_eq!(tier(&two).remote.unwrap().pages_read, u64::from(n_pages));
    // Tenants do not find each other's pages there either.
    let hints = Hints { cache_salt: b"other".to_vec(), ..Hints::default() };
    let (salted, n_cached) = ask(&two, &Submission { hints, ..plain.clone() });
    assert_eq!((salted.tokens, n_cached), (second_tokens(&one, &plain), 0));
    assert_eq!(tier(&two).counters.guesses_missed, 1);
    one.shutdown().unwrap();
    two.shutdown().unwrap();
    // Nor do other models, nor engines that store in fewer bits.
    let other = spawn("qwen3", &remote(&objects));
    assert_eq!(ask(&other, &request(&golden("qwen3").0, Sampling::greedy())).1, 0);
    other.shutdown().unwrap();
    let cold = Some(ColdKv { dtype: ColdDtype::Int8, exact_layers: Vec::new() });
    let coded = spawn("llama3", &SlowOptions { cold, ..remote(&objects) });
    assert_eq!(ask(&coded, &plain).1, 0);
    coded.shutdown().unwrap();
}

fn second_tokens(handle: &EngineHandle, request: &Submission) -> Vec<nuthatch_types::TokenId> {
    ask(handle, request).0.tokens
}

/// A request that waits for its turn finds its pages fetched when it comes.
#[test]
fn what_waits_in_the_queue_is_fetched() {
    let objects = Arc::new(MemoryObjects::default());
    let (prompt, greedy) = golden("llama3");
    let turns = [&prompt[..], &greedy].concat();
    let stored = request(&turns, Sampling::greedy());
    let n_pages = (turns.len() as u64 - 1) / 16;
    let one = spawn("llama3", &remote(&objects));
    ask(&one, &stored);
    one.shutdown().unwrap();

    let pool = Pool { max_seqs: 1, ..POOL };
    let mut engine = load_topk(&folder("llama3"), pool, &EngineOptions::default(), 10, None);
    engine.keep_pages(&remote(&objects)).unwrap();
    let (sink, outputs) = unbounded();
    let limits = Limits { max_tokens: 64, ..Limits::default() };
    let long = Submission { limits, ..request(&prompt[..3], Sampling::greedy()) };
    engine.submit(long, sink.clone(), Duration::ZERO).unwrap();
    engine.step().unwrap();
    engine.submit(stored, sink, Duration::ZERO).unwrap();
    // While the first is answered, and the second has no place yet.
    let pages_read = |engine: &Engine<_>| engine.stats().tier.unwrap().remote.unwrap().pages_read;
    let mut n_steps = 0;
    while pages_read(&engine) < n_pages {
        engine.step().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        n_steps += 1;
        assert!(n_steps < 50, "{:?}", engine.stats());
    }
    assert_eq!(engine.stats().tier.unwrap().counters.loads, 0);
    while engine.step().unwrap() {}
    let stats = engine.stats().tier.unwrap();
    assert_eq!((stats.counters.loads, stats.counters.pages_loaded), (1, n_pages));
    assert_eq!(stats.remote.unwrap().pages_read, n_pages, "each was read once");
    let cached = |output: &Output| match output {
        Output::Finished { usage, .. } => Some(u64::from(usage.cached_tokens)),
        Output::Token { .. } => None,
    };
    let cached: Vec<u64> = outputs.try_iter().filter_map(|output| cached(&output)).collect();
    assert_eq!(cached, [0, 16 * n_pages]);
}

/// A request that is refused because the queue is full costs the store nothing.
#[test]
fn nothing_is_fetched_for_those_that_are_refused() {
    let objects = Arc::new(MemoryObjects::default());
    let (prompt, greedy) = golden("llama3");
    let stored = request(&[&prompt[..], &greedy].concat(), Sampling::greedy());
    let one = spawn("llama3", &remote(&objects));
    ask(&one, &stored);
    one.shutdown().unwrap();

    let pool = Pool { max_seqs: 1, ..POOL };
    let options = EngineOptions { max_waiting: Some(1), ..EngineOptions::default() };
    let mut engine = load_topk(&folder("llama3"), pool, &options, 10, None);
    engine.keep_pages(&remote(&objects)).unwrap();
    let (sink, _outputs) = unbounded();
    let limits = Limits { max_tokens: 24, ..Limits::default() };
    let long = Submission { limits, ..request(&prompt[..3], Sampling::greedy()) };
    engine.submit(long.clone(), sink.clone(), Duration::ZERO).unwrap();
    engine.step().unwrap();
    engine.submit(long, sink.clone(), Duration::ZERO).unwrap();
    engine.submit(stored, sink, Duration::ZERO).unwrap_err();
    while engine.step().unwrap() {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(engine.stats().tier.unwrap().remote.unwrap().pages_read, 0);
}

/// What is on the disk comes from there, the rest from the store; and what comes from the store goes
/// to the disk.
#[test]
fn a_disk_and_a_store_work_together() {
    let objects = Arc::new(MemoryObjects::default());
    let (prompt, greedy) = golden("llama3");
    let turns = [&prompt[..], &greedy].concat();
    let plain = request(&turns, Sampling::greedy());
    let n_pages = (turns.len() as u32 - 1) / 16;
    let (here, there) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let both = |dir: &TempDir| {
        let disk = Some(DiskOptions {
            dir: dir.path().join("kv"),
            bytes_max: 8 << 20,
            io: DiskIo::default(),
        });
        SlowOptions { disk, ..remote(&objects) }
    };
    let handle = spawn("llama3", &both(&here));
    let first = ask(&handle, &plain).0;
    handle.shutdown().unwrap();
    let (mut from_disk, mut from_store) = (Vec::new(), Vec::new());
    for dir in [&here, &there, &there] {
        let handle = spawn("llama3", &both(dir));
        let (again, n_cached) = ask(&handle, &plain);
        assert_eq!((&again.tokens, &again.logprobs), (&first.tokens, &first.logprobs));
        assert_eq!(n_cached, 16 * n_pages);
        let stats = tier(&handle);
        from_disk.push(stats.disk.unwrap().counters.pages_read);
        from_store.push(stats.remote.unwrap().pages_read);
        handle.shutdown().unwrap();
    }
    let n_pages = u64::from(n_pages);
    assert_eq!((from_disk, from_store), (vec![n_pages, 0, n_pages], vec![0, n_pages, 0]));
    // What was there was not written again.
    let n_objects = objects.names().len() as u64;
    let handle = spawn("llama3", &both(&there));
    ask(&handle, &plain);
    handle.shutdown().unwrap();
    assert_eq!(objects.names().len() as u64, n_objects);
}

/// Many requests of few beginnings, and two engines on one store that fails in every way.
#[test]
fn whatever_the_store_does_answers_are_right() {
    let capacity = Capacity { n_slots: 28, ..CAPACITY };
    let (mut n_loaded, mut n_faults) = (0, 0);
    for seed in 0..12 {
        let objects = Arc::new(MemoryObjects::default());
        let rates = match seed % 4 {
            0 => FaultRates::default(),
            1 => FaultRates { error: 200, ..FaultRates::default() },
            2 => FaultRates { flip: 100, short: 100, ..FaultRates::default() },
            _ => FaultRates { error: 30, short: 20, full: 20, flip: 20, slow: 100 },
        };
        let faulty =
            FaultyObjects::new(Arc::<MemoryObjects>::clone(&objects), FaultRates::default(), seed);
        for round in 0..4 {
            faulty.set_rates(FaultRates::default());
            let (mut engine, clock) = engine_with(capacity, Script::default(), Options::default());
            let store: Arc<dyn Objects> = Arc::new(faulty.clone());
            let options = SlowOptions { remote: Some(store), ..SlowOptions::default() };
            engine.keep_pages(&options).unwrap();
            faulty.set_rates(rates);
            let max_context = capacity.max_context;
            answers_are_right(&mut engine, &clock, max_context, (seed, round), 4);
            engine.flush().unwrap();
            n_loaded += engine.stats().tier.unwrap().counters.pages_loaded;
        }
        n_faults += faulty.n_faults();
    }
    assert!(n_loaded > 50 && n_faults > 100, "{n_loaded} pages, {n_faults} faults");
}

/// A store that has gone is asked less and less, and costs no answer.
#[test]
fn a_store_that_fails_is_let_in_peace() {
    let objects = Arc::new(MemoryObjects::default());
    let faulty = FaultyObjects::new(objects, FaultRates::default(), 1);
    let (mut engine, clock) = engine_with(CAPACITY, Script::default(), Options::default());
    let store: Arc<dyn Objects> = Arc::new(faulty.clone());
    engine.keep_pages(&SlowOptions { remote: Some(store), ..SlowOptions::default() }).unwrap();
    faulty.set_rates(FaultRates { error: 1000, ..FaultRates::default() });
    let mut ask = |i: u32| {
        let (outputs, _news) = unbounded();
        let request = submission(u64::from(i), 40, 3);
        engine.submit(request, outputs, Duration::ZERO).unwrap();
        while engine.step().unwrap() {}
        while engine.rest().unwrap() {}
        engine.stats().tier.unwrap().remote.unwrap()
    };
    for i in 0..8 {
        ask(i);
    }
    let n_before = faulty.n_faults();
    for i in 8..16 {
        let counters = ask(i);
        assert!(counters.saves_refused > 0, "{counters:?}");
    }
    assert_eq!(faulty.n_faults(), n_before, "nothing is asked of it");
    faulty.set_rates(FaultRates::default());
    clock.advance_ms(100_000);
    let saved = |i| ask(i).pages_saved;
    let mut saved = saved;
    assert!(saved(16) > 0);
}
