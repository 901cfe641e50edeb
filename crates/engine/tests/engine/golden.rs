//! Real models, tiny ones: the handle streams the tokens that Hugging Face transformers chose.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_backend::Backend;
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_engine::{
    Budget, Engine, EngineHandle, EngineOptions, Eviction, Executor, Hints, LoadedModel, Output,
    Policy, SharedClock, SizeRequest, Sizes, Submission, Tenant, TopKOptions,
};
use nuthatch_model::{LoadError, ModelFiles};
use nuthatch_scheduler::Counters;
use nuthatch_types::{HostReads, KvDtype, Limits, Sampling, SystemClock, TokenId};
use safetensors::SafeTensors;

use crate::echo::{Answer, collect_all};

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/golden").join(name)
}

/// The golden prompt and the sixteen tokens after it.
pub(crate) fn golden(name: &str) -> (Vec<TokenId>, Vec<TokenId>) {
    let bytes = std::fs::read(folder(name).join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = |key: &str| -> Vec<TokenId> {
        let tensor = tensors.tensor(key).unwrap();
        let (words, _) = tensor.data().as_chunks::<4>();
        words.iter().map(|&word| TokenId(u32::from_le_bytes(word))).collect()
    };
    (tokens("prompt"), tokens("greedy"))
}

/// How large an engine is.
#[derive(Clone, Copy)]
pub(crate) struct Pool {
    pub(crate) kv_pages: u32,
    pub(crate) host_pages: u32,
    pub(crate) spill: bool,
    pub(crate) max_seqs: u32,
}

impl Pool {
    /// Where there is little room somebody gave way, to pages of the host if there are any.
    pub(crate) fn expect_preemptions(self, counters: &Counters, what: &str) {
        let gave_way = match (self.kv_pages, self.host_pages) {
            (40, _) => counters.preemptions == 0,
            (_, 0) => counters.preemptions_recompute > 0,
            // A prompt that may begin on the host gives way before it begins.
            (_, _) => counters.preemptions_swap + counters.admissions_spilled > 0,
        };
        assert!(gave_way, "{what}: {counters:?}");
    }
}

fn spawn(path: &Path, kv_pages: u32) -> EngineHandle {
    spawn_with(path, Pool { kv_pages, host_pages: 0, spill: false, max_seqs: 4 })
}

pub(crate) fn spawn_with(path: &Path, pool: Pool) -> EngineHandle {
    load(path, pool).spawn().unwrap()
}

pub(crate) fn load(path: &Path, pool: Pool) -> Engine<Executor<LoadedModel<Cpu>>> {
    load_with(path, pool, &EngineOptions::default())
}

/// Steps of ten tokens, so that every prompt is cut.
fn load_with(
    path: &Path,
    pool: Pool,
    options: &EngineOptions,
) -> Engine<Executor<LoadedModel<Cpu>>> {
    load_topk(path, pool, options, 10, None)
}

/// Steps of `max_rows` tokens, attending to what queries need.
pub(crate) fn load_topk(
    path: &Path,
    pool: Pool,
    options: &EngineOptions,
    max_rows: u32,
    topk: Option<&TopKOptions>,
) -> Engine<Executor<LoadedModel<Cpu>>> {
    let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
    let clock = Arc::new(SystemClock::start());
    load_on((cpu, clock), path, pool, options, (max_rows, KvDtype::F32), topk).unwrap()
}

/// The same on a device and by a clock of the caller's.
pub(crate) fn load_on<B: Backend>(
    (device, clock): (B, SharedClock),
    path: &Path,
    pool: Pool,
    options: &EngineOptions,
    (max_rows, kv_dtype): (u32, KvDtype),
    topk: Option<&TopKOptions>,
) -> Result<Engine<Executor<LoadedModel<B>>>, LoadError> {
    let Pool { kv_pages, host_pages, spill, max_seqs } = pool;
    let files = ModelFiles::open(path).unwrap();
    let request = SizeRequest::for_model(&files, kv_dtype, 1 << 30);
    let bytes = |n_pages: u32| request.kv.page_bytes() as u64 * u64::from(n_pages);
    let (budget, host_bytes) = (Budget::KvBytes(bytes(kv_pages)), bytes(host_pages));
    let host_reads = if spill { HostReads::Near } else { HostReads::Never };
    let request = SizeRequest { max_seqs, max_rows, budget, host_bytes, host_reads, ..request };
    let sizes = Sizes::compute(&request).unwrap();
    Engine::load_topk(Arc::new(device), &files, &sizes, options, clock, topk)
}

pub(crate) fn request(prompt: &[TokenId], sampling: Sampling) -> Submission {
    let limits = Limits { max_tokens: 16, ..Limits::default() };
    let sampling = Sampling { n_logprobs: sampling.n_logprobs.or(Some(0)), ..sampling };
    Submission { prompt: prompt.to_vec(), sampling, limits, ..Submission::default() }
}

#[test]
fn streams_the_golden_tokens() {
    for (name, file) in [
        ("llama3", ""),
        ("mistral-window", ""),
        ("qwen2", ""),
        ("qwen3", ""),
        ("gguf-llama-f16", "model.gguf"),
        ("kv-shared", ""),
        ("kv-shared-window", ""),
        ("kv-shared-map", ""),
    ] {
        let (prompt, greedy) = golden(name);
        let handle = spawn(&folder(name).join(file), 8);
        let ticket = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
        assert_eq!(Answer::receive(&ticket).unwrap().tokens, greedy, "{name}");
        handle.shutdown().unwrap();
    }
}

#[test]
fn company_and_preemption_change_nothing() {
    let (prompt, greedy) = golden("llama3");
    let path = folder("llama3");
    let requests: Vec<Submission> = (0..8)
        .map(|i| match i % 2 {
            0 => request(&prompt, Sampling::greedy()),
            _ => {
                let sampling = Sampling { seed: i, n_logprobs: Some(3), ..Sampling::default() };
                request(&prompt[i as usize..], sampling)
            }
        })
        .collect();
    // Each alone.
    let handle = spawn(&path, 8);
    let alone: Vec<Answer> = requests
        .iter()
        .map(|r| Answer::receive(&handle.submit(r.clone()).unwrap()).unwrap())
        .collect();
    handle.shutdown().unwrap();
    assert_eq!(alone[0].tokens, greedy);
    // All at once, in pages for less than two of them, with little or much room on the host.
    for host_pages in [0, 3, 30] {
        let pool = Pool { kv_pages: 7, host_pages, spill: false, max_seqs: 4 };
        let handle = spawn_with(&path, pool);
        let tickets: Vec<_> = requests.iter().map(|r| handle.submit(r.clone()).unwrap()).collect();
        for (ticket, alone) in tickets.iter().zip(&alone) {
            let together = Answer::receive(ticket).unwrap();
            assert_eq!(together.tokens, alone.tokens);
            assert_eq!(together.logprobs, alone.logprobs, "rows do not see each other");
        }
        let counters = handle.stats().unwrap().scheduler.cache.counters;
        let n_moved = counters.pages_demoted + counters.pages_swapped_out;
        assert_eq!(n_moved > 0, host_pages > 0, "{counters:?}");
        handle.shutdown().unwrap();
    }
}

/// Where the pages are changes no bit: on the device, all but one on the host, or moving while others
/// come and go.
#[test]
fn a_spilled_prompt_gives_the_same_bits() {
    for name in ["llama3", "mistral-window", "kv-shared"] {
        let (prompt, greedy) = golden(name);
        let path = folder(name);
        let requests: Vec<Submission> = (0..4)
            .map(|i| {
                let sampling = Sampling { seed: i, n_logprobs: Some(3), ..Sampling::default() };
                request(&prompt[5 * i as usize..], sampling)
            })
            .chain([request(&prompt, Sampling::greedy())])
            .collect();
        let handle = spawn(&path, 64);
        let alone: Vec<Answer> = requests
            .iter()
            .map(|r| Answer::receive(&handle.submit(r.clone()).unwrap()).unwrap())
            .collect();
        handle.shutdown().unwrap();
        assert_eq!(alone[4].tokens, greedy, "{name}");
        for (kv_pages, max_seqs) in [(1, 1), (1, 4), (7, 4)] {
            let pool = Pool { kv_pages, host_pages: 40, spill: true, max_seqs };
            let mut engine = load(&path, pool);
            let submit = |request: &Submission| {
                let (outputs, receiver) = unbounded();
                engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
                receiver
            };
            let receivers: Vec<_> = requests.iter().map(submit).collect();
            while engine.step().unwrap() {
                engine.verify().unwrap();
            }
            for (receiver, alone) in receivers.iter().zip(&alone) {
                let spilled = &collect_all(receiver.try_iter()).unwrap()[0].0;
                assert_eq!(spilled.tokens, alone.tokens, "{name}, {kv_pages} pages");
                assert_eq!(spilled.logprobs, alone.logprobs, "{name}, {kv_pages} pages");
            }
            let stats = engine.stats().scheduler;
            assert!(stats.counters.admissions_spilled > 0, "{name}: {stats:?}");
            assert!(stats.cache.counters.pages_spilled > 0, "{name}: {stats:?}");
            assert_eq!(stats.cache.spilled, 0, "{name}: everything has ended");
        }
    }
}

/// A chat sends its whole history each time; what was computed is found again, and the answer does
/// not change by a bit.
#[test]
fn a_second_request_finds_the_pages_of_the_first() {
    let (prompt, greedy) = golden("llama3");
    let handle = spawn(&folder("llama3"), 16);
    let ask = || {
        let ticket = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
        let mut answer = Vec::new();
        loop {
            match ticket.recv().unwrap() {
                Output::Token { token, logprob, .. } => {
                    answer.push((token, logprob.map(f32::to_bits)));
                }
                Output::Finished { usage, .. } => return (answer, usage.cached_tokens as usize),
            }
        }
    };
    let (cold, cached) = ask();
    assert_eq!(cached, 0);
    assert_eq!(cold.iter().map(|&(token, _)| token).collect::<Vec<_>>(), greedy);
    let (warm, cached) = ask();
    assert!(cached > prompt.len() - 16, "{cached} of {}", prompt.len());
    assert_eq!(warm, cold);
    handle.shutdown().unwrap();
}

#[test]
fn no_option_changes_an_answer() {
    let (prompt, greedy) = golden("llama3");
    for options in [
        EngineOptions { prefix_caching: false, ..EngineOptions::default() },
        EngineOptions { policy: Policy::Priority { boost: 3 }, ..EngineOptions::default() },
        EngineOptions {
            policy: Policy::Fair,
            eviction: Eviction::Lineage,
            ..EngineOptions::default()
        },
    ] {
        let pool = Pool { kv_pages: 64, host_pages: 0, spill: false, max_seqs: 4 };
        let handle = load_with(&folder("llama3"), pool, &options).spawn().unwrap();
        let ask = |salt: &[u8]| {
            let cache_salt = salt.to_vec();
            let (priority, tenant) = (7, Tenant(3));
            let hints = Hints { cache_salt, priority, tenant, ..Hints::default() };
            let asked = Submission { hints, ..request(&prompt, Sampling::greedy()) };
            let ticket = handle.submit(asked).unwrap();
            let mut tokens = Vec::new();
            loop {
                match ticket.recv().unwrap() {
                    Output::Token { token, .. } => tokens.push(token),
                    Output::Finished { usage, .. } => {
                        assert_eq!(tokens, greedy, "{options:?}");
                        break usage.cached_tokens;
                    }
                }
            }
        };
        // The prompt is cached by the page, and only for the same salt.
        let n_full = (prompt.len() as u32 - 1) / 16 * 16;
        let n_cached = if options.prefix_caching { n_full } else { 0 };
        assert!(n_full > 0, "the prompt fills a page");
        assert_eq!(ask(b""), 0);
        assert_eq!(ask(b"one"), 0, "{options:?}");
        assert_eq!(ask(b"two"), 0, "{options:?}");
        assert!(ask(b"") >= n_cached, "{options:?}");
        assert!(ask(b"one") >= n_cached, "{options:?}");
        if !options.prefix_caching {
            assert_eq!(ask(b"one"), 0);
        }
    }
}

/// Every layer sees 21 tokens, steps have ten: three pages hold what is seen of a sequence of eight.
#[test]
fn a_window_in_its_own_pages_gives_the_golden_tokens() {
    let (prompt, greedy) = golden("mistral-window");
    let path = folder("mistral-window");
    let requests: Vec<Submission> = (0..4)
        .map(|i| {
            let sampling = Sampling { seed: i, n_logprobs: Some(2), ..Sampling::default() };
            let limits = Limits { max_tokens: 50, ..Limits::default() };
            let request = request(&prompt[7 * i as usize..], sampling);
            if i == 0 { request } else { Submission { limits, ..request } }
        })
        .chain([request(&prompt, Sampling::greedy())])
        .collect();
    // Each alone, in pages for all of it.
    let handle = spawn(&path, 32);
    let alone: Vec<Answer> = requests
        .iter()
        .map(|r| Answer::receive(&handle.submit(r.clone()).unwrap()).unwrap())
        .collect();
    handle.shutdown().unwrap();
    assert_eq!(alone[4].tokens, greedy);
    assert!(prompt.len() > 3 * 21);
    // One after the other in pages for the window of one, and all at once in pages for two.
    for (kv_pages, at_once) in [(3, false), (6, true)] {
        let handle = spawn(&path, kv_pages);
        let together: Vec<Answer> = if at_once {
            let tickets: Vec<_> =
                requests.iter().map(|r| handle.submit(r.clone()).unwrap()).collect();
            tickets.iter().map(|ticket| Answer::receive(ticket).unwrap()).collect()
        } else {
            let receive = |r: &Submission| Answer::receive(&handle.submit(r.clone()).unwrap());
            requests.iter().map(|r| receive(r).unwrap()).collect()
        };
        assert_eq!(together, alone, "{kv_pages} pages");
        let stats = handle.stats().unwrap().scheduler.cache;
        assert_eq!((stats.pages_total, stats.pages_used), (kv_pages, 0));
        assert!(stats.counters.pages_out > 10, "{stats:?}");
        handle.shutdown().unwrap();
    }
}
