//! Sequences that drop what they do not keep, against a reference that computes it the long way.
//!
//! The reference keeps keys before rotation, and at every token rotates all of them to their places
//! among those that are kept: what StreamingLLM's paper says, in `f64`, with plain loops. The engine
//! never touches the keys of the window and turns the sinks instead.

use std::path::Path;
use std::sync::Arc;

use nuthatch_backend::RopeSpec;
use nuthatch_backend::quant::dequantize_row;
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_engine::{
    Budget, Engine, EngineHandle, EngineOptions, Output, SizeRequest, Sizes, Submission,
};
use nuthatch_model::{ModelConfig, ModelFiles, TensorName};
use nuthatch_types::{FinishReason, KvDtype, Limits, Sampling, Streaming, SystemClock, TokenId};

use crate::golden::folder;

const PAGE_LEN: usize = 16;

/// How far the logarithm of any token's probability may be from the reference's. Keys and values
/// are f32 here, so what is left is the rounding of f32 sums. Measured: 2.9e-5.
const TOLERANCE: f64 = 1e-4;

/// Matrices are `[output][input]`.
struct Layer {
    attn_norm: Vec<f64>,
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    o: Vec<Vec<f64>>,
    ffn_norm: Vec<f64>,
    gate: Vec<Vec<f64>>,
    up: Vec<Vec<f64>>,
    down: Vec<Vec<f64>>,
}

struct Reference {
    config: ModelConfig,
    rope: RopeSpec,
    embedding: Vec<Vec<f64>>,
    layers: Vec<Layer>,
    norm: Vec<f64>,
    output: Vec<Vec<f64>>,
    /// `[layer][kept token]` keys before rotation, and values.
    kept: Vec<Vec<(Vec<f64>, Vec<f64>)>>,
}

fn matrix(files: &ModelFiles, name: TensorName) -> Vec<Vec<f64>> {
    let view = files.tensor(name).unwrap();
    let row_bytes = view.bytes.len() / view.shape[0];
    let mut row = vec![0.0; view.shape[1]];
    let rows = view.bytes.chunks_exact(row_bytes).map(|bytes| {
        dequantize_row(view.dtype, bytes, &mut row);
        row.iter().map(|&x| f64::from(x)).collect()
    });
    rows.collect()
}

fn vector(files: &ModelFiles, name: TensorName) -> Vec<f64> {
    files.vector(name).unwrap().into_iter().map(f64::from).collect()
}

fn times(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn add(x: &mut [f64], more: &[f64]) {
    x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

fn norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

/// `x - ln(sum(exp(x)))`.
fn log_softmax(x: &[f64]) -> Vec<f64> {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total = x.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
    x.iter().map(|x| x - total).collect()
}

impl Reference {
    fn open(path: &Path, max_context: usize) -> Self {
        use TensorName as Name;
        let files = ModelFiles::open(path).unwrap();
        let config = files.config().clone();
        let layer = |l: u32| Layer {
            attn_norm: vector(&files, Name::AttnNorm(l)),
            q: matrix(&files, Name::Q(l)),
            k: matrix(&files, Name::K(l)),
            v: matrix(&files, Name::V(l)),
            o: matrix(&files, Name::O(l)),
            ffn_norm: vector(&files, Name::FfnNorm(l)),
            gate: matrix(&files, Name::Gate(l)),
            up: matrix(&files, Name::Up(l)),
            down: matrix(&files, Name::Down(l)),
        };
        Reference {
            rope: config.rope_spec(max_context),
            embedding: matrix(&files, Name::Embedding),
            layers: (0..config.n_layers).map(layer).collect(),
            norm: vector(&files, Name::OutputNorm),
            output: matrix(&files, Name::Output),
            kept: vec![Vec::new(); config.n_layers as usize],
            config,
        }
    }

    /// Drops what is between the sinks and the window if nothing more has room, and computes the
    /// logarithms of the probabilities after one more token.
    fn step(&mut self, token: TokenId, streaming: Streaming) -> Vec<f64> {
        let n_sinks = streaming.sink_pages(PAGE_LEN as u32) as usize * PAGE_LEN;
        if self.kept[0].len() == streaming.max_len(PAGE_LEN as u32) as usize {
            self.kept.iter_mut().for_each(|kept| drop(kept.drain(n_sinks..n_sinks + PAGE_LEN)));
        }
        let eps = f64::from(self.config.norm_eps);
        let mut x = self.embedding[token.0 as usize].clone();
        for (l, layer) in self.layers.iter().enumerate() {
            let h = norm(&x, &layer.attn_norm, eps);
            self.kept[l].push((times(&layer.k, &h), times(&layer.v, &h)));
            let attended = self.attend(&times(&layer.q, &h), &self.kept[l]);
            add(&mut x, &times(&layer.o, &attended));
            let h = norm(&x, &layer.ffn_norm, eps);
            let gated = times(&layer.gate, &h).into_iter().zip(times(&layer.up, &h));
            let gated: Vec<f64> = gated.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(&mut x, &times(&layer.down, &gated));
        }
        log_softmax(&times(&self.output, &norm(&x, &self.norm, eps)))
    }

    /// One query token over the kept ones, all rotated to their places among them.
    fn attend(&self, q: &[f64], kept: &[(Vec<f64>, Vec<f64>)]) -> Vec<f64> {
        let d = self.config.head_dim as usize;
        let group = (self.config.n_heads / self.config.n_kv_heads) as usize;
        let scale = 1.0 / (d as f64).sqrt();
        let mut out = vec![0.0; q.len()];
        for (head, q) in q.chunks_exact(d).enumerate() {
            let q = self.rotate(q, kept.len() - 1);
            let own = head / group * d..(head / group + 1) * d;
            let scores: Vec<f64> = kept
                .iter()
                .enumerate()
                .map(|(place, (k, _))| {
                    let k = self.rotate(&k[own.clone()], place);
                    q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale
                })
                .collect();
            for (log, (_, v)) in log_softmax(&scores).iter().zip(kept) {
                let out = &mut out[head * d..(head + 1) * d];
                out.iter_mut().zip(&v[own.clone()]).for_each(|(out, v)| *out += log.exp() * v);
            }
        }
        out
    }

    /// A head at a place; element `i` turns with the one half a head on.
    fn rotate(&self, head: &[f64], place: usize) -> Vec<f64> {
        let half = head.len() / 2;
        let mut turned = head.to_vec();
        for (i, &inv_freq) in self.rope.inv_freq.iter().enumerate() {
            let (sin, cos) = (place as f64 * f64::from(inv_freq)).sin_cos();
            turned[i] = head[i] * cos - head[i + half] * sin;
            turned[i + half] = head[i + half] * cos + head[i] * sin;
        }
        turned
    }
}

/// An engine with exactly this many pages, and steps of `max_rows` tokens.
fn spawn(name: &str, n_pages: u32, max_rows: u32) -> EngineHandle {
    let files = ModelFiles::open(&folder(name)).unwrap();
    let request = SizeRequest::for_model(&files, KvDtype::F32, 1 << 30);
    let budget = Budget::KvBytes(request.kv.page_bytes() as u64 * u64::from(n_pages));
    let request = SizeRequest { max_seqs: 4, max_rows, budget, ..request };
    let sizes = Sizes::compute(&request).unwrap();
    assert_eq!(sizes.n_pages, n_pages);
    let backend = Arc::new(Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap());
    Engine::load(backend, &files, &sizes, &EngineOptions::default(), Arc::new(SystemClock::start()))
        .unwrap()
        .spawn()
        .unwrap()
}

fn prompt(seed: u32, n_tokens: u32) -> Vec<TokenId> {
    (0..n_tokens).map(|i| TokenId((seed + i * i * 7 + i / 3) % 163)).collect()
}

fn request(seed: u32, n_prompt: u32, max_tokens: u32, streaming: Streaming) -> Submission {
    Submission {
        prompt: prompt(seed, n_prompt),
        // Every token's probability comes with each token.
        sampling: Sampling { seed: seed.into(), n_logprobs: Some(163), ..Sampling::default() },
        limits: Limits { max_tokens, ..Limits::default() },
        streaming: Some(streaming),
        ..Submission::default()
    }
}

/// Tokens with the bits of all probabilities.
type Answer = Vec<(TokenId, Vec<(TokenId, u32)>)>;

fn receive(handle: &EngineHandle, submission: Submission) -> Answer {
    let ticket = handle.submit(submission).unwrap();
    let mut answer = Vec::new();
    loop {
        match ticket.recv().unwrap() {
            Output::Token { token, top, .. } => {
                let bits = |(token, log): (TokenId, f32)| (token, log.to_bits());
                answer.push((token, top.into_iter().map(bits).collect()));
            }
            Output::Finished { reason, usage, .. } => {
                assert_eq!(reason, FinishReason::Length);
                assert_eq!(usage.completion_tokens as usize, answer.len());
                return answer;
            }
        }
    }
}

/// The same probabilities as the long way, far beyond the model's context, in pages for what is kept
/// and no more.
#[test]
fn sinks_and_window_are_seen_where_they_stand() {
    for (n_sinks, window, max_rows) in [(4, 40, 10), (17, 16, 64), (0, 33, 7)] {
        let streaming = Streaming { n_sinks, window };
        let mut reference = Reference::open(&folder("llama3"), 256);
        let handle = spawn("llama3", streaming.pages_max(PAGE_LEN as u32), max_rows);
        let submission = request(n_sinks, 90, 300, streaming);
        let prompt = submission.prompt.clone();
        let answer = receive(&handle, submission);
        let stats = handle.stats().unwrap().scheduler.cache;
        handle.shutdown().unwrap();
        assert_eq!(answer.len(), 300);
        assert!(stats.counters.pages_dropped >= 19, "{stats:?}");

        let mut expected = Vec::new();
        prompt.iter().for_each(|&token| expected = reference.step(token, streaming));
        let mut worst = 0.0_f64;
        for (token, top) in answer {
            assert_eq!(top.len(), expected.len());
            for (token, bits) in top {
                let off = f64::from(f32::from_bits(bits)) - expected[token.0 as usize];
                worst = worst.max(off.abs());
            }
            expected = reference.step(token, streaming);
        }
        println!("{streaming:?}: off by at most {worst:.1e}");
        assert!(worst < TOLERANCE, "{streaming:?}: off by {worst:e}");
    }
}

/// The same bits however a sequence is cut into steps, whoever runs beside it, and after it lost its
/// pages and was computed again.
#[test]
fn company_and_preemption_change_nothing() {
    let streaming = Streaming { n_sinks: 5, window: 24 };
    let requests: Vec<Submission> =
        (0..5).map(|i| request(i, 20 + 30 * i, 60, streaming)).collect();
    let alone: Vec<Answer> = requests
        .iter()
        .map(|request| {
            let handle = spawn("llama3", 5, 64);
            let answer = receive(&handle, request.clone());
            handle.shutdown().unwrap();
            answer
        })
        .collect();
    // Pages for two of them.
    let handle = spawn("llama3", 10, 11);
    std::thread::scope(|scope| {
        for (request, alone) in requests.iter().zip(&alone) {
            let handle = &handle;
            scope.spawn(move || assert!(receive(handle, request.clone()) == *alone));
        }
    });
    let stats = handle.stats().unwrap().scheduler;
    handle.shutdown().unwrap();
    assert!(stats.cache.counters.pages_dropped > 0);
    assert_eq!(stats.cache.pages_used, 0);
}

/// What is computed before anything is dropped can be found by others, and nothing after it.
#[test]
fn only_what_saw_everything_is_shared() {
    let streaming = Streaming { n_sinks: 1, window: 48 };
    let handle = spawn("llama3", 32, 64);
    let long = request(3, 150, 8, streaming);
    receive(&handle, long.clone());
    let plain = Submission { streaming: None, ..long.clone() };
    let cold = {
        let handle = spawn("llama3", 32, 64);
        let answer = receive(&handle, plain.clone());
        handle.shutdown().unwrap();
        answer
    };
    let ticket = handle.submit(plain).unwrap();
    let mut tokens = Vec::new();
    let cached = loop {
        match ticket.recv().unwrap() {
            Output::Token { token, .. } => tokens.push(token),
            Output::Finished { usage, .. } => break usage.cached_tokens,
        }
    };
    // Four pages were filled before the first was dropped.
    assert_eq!(cached, 64);
    assert_eq!(tokens, cold.iter().map(|&(token, _)| token).collect::<Vec<_>>());
    handle.shutdown().unwrap();
}
