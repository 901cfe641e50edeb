//! Times the CUDA kernels on the shapes of Llama-3-8B, with bytes and operations per second.
//!
//!     cargo run --release -p nuthatch-backend-cuda --example cuda_bench FILE.json WORDS
//!
//! The words say what: `start`, `matmul` and `decode` (with `short`, little of them), `prefill`, `coded` for
//! both with keys and values of every type, `draw`,
//! `prompt` for whole prompts, and `step` for whole decode steps (of the models that are named, or all, at the
//! depths that are named, or some), which take up to 120 GB of the device; `topk` for decode steps about which the device decides, at the
//! depths that are named, and `bring` for bringing rows to working sets (random ones, or with `places=FILE`
//! those of a recorded trace), both with pages on the device or,
//! with `host`, on the host, from where `threads=N` bring rows instead of the device, and where rows are in eight
//! bits with `fp8` or `int8`; `chunks` for the time of a long prompt, with copies of `near=N` pages if they are
//! on the host; `breakdown` also times
//! steps without each of their stages, or the kernels of a step with top-k attention one by one. `eager` records
//! nothing, `l2` brings pages to the second-level cache early. Pages lie in a scattered order, or, for
//! `decode` and `bring` with `ordered`, one after the other; with `virtual` too, and attention then needs no table.
//!
//! Kernels are queued back to back and timed together, so that short ones show what queuing costs; for
//! `decode`, attention of as many layers as a model of that shape has, or of `layers=N`, is one recorded pass,
//! as in a step, and a plain read of as many bytes is beside it.
//! Operands are rotated, so that the second-level cache does not serve them.

#![expect(clippy::print_stdout, reason = "a bench prints")]

mod chunks;
mod decode;
mod link;
mod queries;
mod rig;
mod start;
mod step;
mod topk;

use std::error::Error;
use std::fmt::Write as _;

use nuthatch_backend::{Backend, Draw, HostMatrix, RowCode, WeightType, quant};
use nuthatch_backend_cuda::{Cuda, CudaConfig, FarPages, LinkTuning};
use nuthatch_types::{Clock, HeadSet, KvDtype, KvShape, LayerSet, SystemClock};

use rig::Rig;

type Outcome = Result<(), Box<dyn Error>>;

/// Layers that take turns.
const N_LAYERS: u32 = 4;
/// Copies on the device of pages that are on the host.
const NEAR_PAGES: u32 = 256;

/// What was measured, for people and as JSON.
#[derive(Default)]
struct Report {
    text: String,
    /// Bytes that the device reads in a second.
    roof: f64,
    /// Bytes, and the seconds that a plain read of so many takes which is queued as attention is.
    plain: Vec<(usize, f64)>,
    /// Whether steps are taken apart.
    has_breakdown: bool,
}

impl Report {
    fn add(&mut self, name: &str, seconds: f64, bytes: f64, operations: f64) {
        self.add_beside(name, seconds, (bytes, operations), None);
    }

    /// The same, beside the seconds of a plain read of as many bytes.
    fn add_beside(
        &mut self,
        name: &str,
        seconds: f64,
        (bytes, operations): (f64, f64),
        plain: Option<f64>,
    ) {
        let (us, gbs, tflops) = (seconds * 1e6, bytes / seconds / 1e9, operations / seconds / 1e12);
        let share = bytes / seconds / self.roof;
        let of_plain = plain.map(|plain| plain / seconds);
        let beside = of_plain.map_or(String::new(), |x| format!(" {x:>6.3} of a plain read"));
        println!(
            "{name:<44} {us:>9.1} us {gbs:>6.0} GB/s {share:>6.3} {tflops:>7.1} TFLOP/s{beside}"
        );
        let beside = of_plain.map_or(String::new(), |x| format!(", \"of_plain\": {x:.3}"));
        let comma = if self.text.is_empty() { "" } else { ",\n" };
        let _ = write!(
            self.text,
            "{comma}  {{\"name\": \"{}\", \"us\": {us:.2}, \"gb_per_s\": {gbs:.1}, \
             \"of_roof\": {share:.3}, \"tflop_per_s\": {tflops:.2}{beside}}}",
            name.trim_start()
        );
    }

    /// Bytes, by what they are for.
    fn keep(&mut self, of: &str, memory: &[(&str, usize)]) {
        for (name, bytes) in memory {
            println!("{of}: {name:<60} {:>8.3} GB", *bytes as f64 / 1e9);
            let comma = if self.text.is_empty() { "" } else { ",\n" };
            let _ =
                write!(self.text, "{comma}  {{\"name\": \"{of}: {name}\", \"bytes\": {bytes}}}");
        }
    }
}

fn main() -> Outcome {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let has = |word: &str| words.iter().any(|found| found == word);
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    let l2_prefetch = if has("l2") { 3 } else { 0 };
    let (is_eager, kv_virtual) = (has("eager"), has("virtual"));
    let resident = resident(&words)?;
    let n_threads = number(&words, "threads").unwrap_or(0) as u32;
    let code = RowCode::ALL.into_iter().find(|code| has(&code.to_string()));
    let n_near = number(&words, "near").map_or(NEAR_PAGES, |n| n as u32);
    let coded_here = coded_here(&words)?;
    let far = FarPages { n_near, resident, n_threads, code, coded_here, fails_after: None };
    let far = has("host").then_some(far);
    let is_exact = false;
    let tuning = tuning(&words);
    let config = CudaConfig { cache_dir, is_exact, l2_prefetch, is_eager, far, kv_virtual, tuning };
    let cuda = Cuda::open(0, config.clone())?;
    println!("{} {words:?}", cuda.name());
    let mut report = Report { has_breakdown: has("breakdown"), ..Report::default() };
    roof(&cuda, &mut report)?;
    if has("start") {
        start::start(&config, &mut report)?;
    }
    if has("matmul") {
        matmuls(&cuda, &mut report, has("short"))?;
    }
    if has("decode") {
        decode::decodes(&cuda, &mut report, &words)?;
    }
    if has("prefill") {
        for (depth, rows) in [(0, 512), (0, 4096), (7680, 512), (30720, 2048)] {
            prefill(&cuda, &mut report, (depth, rows), KvDtype::F16)?;
        }
    }
    if has("coded") {
        let coded = [KvDtype::Int8(LayerSet::NONE), KvDtype::Fp8(LayerSet::NONE)];
        for dtype in [KvDtype::Bf16, KvDtype::F16].into_iter().chain(coded) {
            let batches = [(1, 8192), (1, 32768), (1, 131_072), (32, 8192)];
            decode::decode(&cuda, &mut report, (32, 8, 128, dtype), (&batches, &words))?;
            prefill(&cuda, &mut report, (7680, 512), dtype)?;
        }
    }
    if has("prompt") {
        step::prompts(&cuda, &mut report)?;
    }
    if has("draw") {
        draws(&cuda, &mut report)?;
    }
    if has("step") {
        step::steps(&cuda, &mut report, &words)?;
    }
    if has("topk") {
        topk::steps(&cuda, &mut report, &words)?;
    }
    if has("chunks") {
        chunks::chunks(&cuda, &mut report, &words)?;
    }
    if has("bring") {
        link::bring(&cuda, &mut report, &words)?;
    }
    if has("beside") {
        link::beside(&cuda, &mut report, &words)?;
    }
    if let Some(path) = std::env::args().nth(1) {
        let (device, kernels) = (cuda.name(), report.text);
        let text = format!(
            "{{\"device\": \"{device}\", \"words\": {words:?}, \"kernels\": [\n{kernels}\n]}}\n"
        );
        std::fs::write(path, text)?;
    }
    Ok(())
}

/// The layers that stay on the device: the first `resident=N`, or, of a trace, those of which most rows come.
fn resident(words: &[String]) -> Result<LayerSet, Box<dyn Error>> {
    let n = number(words, "resident").unwrap_or(0);
    let Some(traced) = topk::traced(words)? else { return Ok(LayerSet::first(n as u32)) };
    let shape = step::named(words);
    let layers = traced.hardest(&shape, shape.n_kv_heads);
    Ok(LayerSet::of(&layers[..n.min(layers.len())]).unwrap_or_default())
}

/// The heads whose rows in eight bits are on the device: `heads_here=N` of a trace, those of which most rows come.
fn coded_here(words: &[String]) -> Result<HeadSet, Box<dyn Error>> {
    let n = number(words, "heads_here").unwrap_or(0);
    let shape = step::named(words);
    let heads = topk::traced(words)?.map_or_else(Vec::new, |traced| traced.hardest(&shape, 1));
    Ok(HeadSet::of(heads.into_iter().take(n)))
}

/// How rows are brought, with `gather_threads=`, `gather_ring=`, `blocks=`, `decided=`, `expanding=`,
/// `alone=`, `deciding=`, `late_blocks=`, `short=` and `early=` otherwise than usually.
fn tuning(words: &[String]) -> LinkTuning {
    let usual = LinkTuning::default();
    let or = |name, usual| number(words, name).map_or(usual, |n| n as u32);
    LinkTuning {
        threads: or("gather_threads", usual.threads),
        ring: or("gather_ring", usual.ring),
        blocks: or("blocks", usual.blocks),
        blocks_decided: or("decided", usual.blocks_decided),
        blocks_expanding: or("expanding", usual.blocks_expanding),
        blocks_alone: or("alone", usual.blocks_alone),
        blocks_deciding: or("deciding", usual.blocks_deciding),
        late_blocks: or("late_blocks", usual.late_blocks),
        short: or("short", usual.short),
        early: or("early", usual.early),
    }
}

/// The number of a word such as `batch=16`.
pub(crate) fn number(words: &[String], name: &str) -> Option<usize> {
    let value = |word: &String| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    words.iter().find_map(value)
}

/// How fast the device reads when it does nothing else.
fn roof(cuda: &Cuda, report: &mut Report) -> Outcome {
    const LEN: usize = 1 << 29;
    let (source, mut out) = (cuda.alloc(LEN)?, cuda.alloc(1)?);
    let seconds = time(cuda, |_| Ok(cuda.read_all(&source, &mut out)?))?;
    report.roof = 4.0 * LEN as f64 / seconds;
    report.add("read 2 GiB", seconds, 4.0 * LEN as f64, 0.0);
    Ok(())
}

fn matmuls(cuda: &Cuda, report: &mut Report, is_short: bool) -> Outcome {
    let all = [
        (WeightType::BF16, 6144, 4096),
        (WeightType::BF16, 4096, 4096),
        (WeightType::BF16, 28672, 4096),
        (WeightType::BF16, 4096, 14336),
        (WeightType::Q8_0, 28672, 4096),
        (WeightType::Q4_K, 28672, 4096),
    ];
    let all_rows = [1, 2, 8, 16, 32, 64, 128, 512, 2048, 8192];
    let (shapes, rows) =
        if is_short { (&all[..4], &all_rows[7..]) } else { (&all[..], &all_rows[..]) };
    for &(dtype, n, k) in shapes {
        matmul(cuda, report, dtype, (n, k), rows)?;
    }
    Ok(())
}

/// Choosing tokens of a large vocabulary.
fn draws(cuda: &Cuda, report: &mut Report) -> Outcome {
    const VOCAB: usize = 128_256;
    let (n_kv_heads, head_dim, dtype) = (8, 128, KvDtype::F16);
    let kv = KvShape { n_layers: 1, n_kv_heads, head_dim, page_len: 16, dtype };
    let mut rig = Rig::new(cuda, (kv, 32), (1, 16, 1))?;
    let greedy = Draw {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0.5,
        moved: std::sync::Arc::default(),
    };
    let plain = Draw { temperature: 0.8, ..greedy.clone() };
    let top_p = Draw { top_p: 0.95, ..plain.clone() };
    let top_k = Draw { top_k: 40, ..top_p.clone() };
    for (name, draw) in
        [("greedy", greedy), ("plain", plain), ("top-p", top_p), ("top-k, top-p", top_k)]
    {
        for rows in [1, 32] {
            let mut logits = cuda.alloc(rows * VOCAB)?;
            let values: Vec<f32> = random(rows * VOCAB).iter().map(|x| x * 12.0).collect();
            cuda.write(&mut logits, &values)?;
            let (draws, mut tokens) = (vec![draw.clone(); rows], vec![None; rows]);
            let seconds = time(cuda, |_| {
                cuda.plan_draws(&mut rig.plan, &draws)?;
                cuda.draw(&rig.plan, &mut logits, VOCAB)?;
                cuda.end_pass(&mut rig.plan)?;
                Ok(cuda.drawn(&mut rig.plan, &mut tokens)?)
            })?;
            let bytes = (4 * rows * VOCAB) as f64;
            report.add(&format!("draw {name}, {rows} rows"), seconds, bytes, 0.0);
        }
    }
    Ok(())
}

/// Mean time of one call, of the best of several rounds.
fn time(cuda: &Cuda, mut run: impl FnMut(usize) -> Outcome) -> Result<f64, Box<dyn Error>> {
    let clock = SystemClock::start();
    for i in 0..3 {
        run(i)?;
    }
    cuda.wait()?;
    let begin = clock.now();
    run(0)?;
    cuda.wait()?;
    let once = (clock.now() - begin).as_secs_f64();
    let n = ((0.02 / once) as usize).clamp(2, 400);
    let mut best = f64::MAX;
    for _ in 0..3 {
        let begin = clock.now();
        for i in 0..n {
            run(i)?;
        }
        cuda.wait()?;
        best = best.min((clock.now() - begin).as_secs_f64() / n as f64);
    }
    Ok(best)
}

fn random(len: usize) -> Vec<f32> {
    let mut state = 7u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn matmul(
    cuda: &Cuda,
    report: &mut Report,
    dtype: WeightType,
    (n, k): (usize, usize),
    all_rows: &[usize],
) -> Outcome {
    let mut some = Vec::new();
    for row in random(64 * k).chunks_exact(k) {
        quant::quantize_row(dtype, row, &mut some);
    }
    let bytes = some.repeat(n / 64);
    let copies = (300_000_000 / bytes.len()).clamp(1, 8);
    let matrix = HostMatrix { dtype, rows: n, cols: k, bytes: &bytes, bias: None };
    let weights = (0..copies).map(|_| cuda.load(&[matrix])).collect::<Result<Vec<_>, _>>()?;
    for &rows in all_rows {
        let mut x = cuda.alloc(rows * k)?;
        cuda.write(&mut x, &random(rows * k))?;
        let mut out = cuda.alloc(rows * n)?;
        let seconds = time(cuda, |i| Ok(cuda.matmul(&weights[i % copies], &x, rows, &mut out)?))?;
        let name = format!("matmul {dtype} {n} x {k}, {rows} rows");
        report.add(&name, seconds, bytes.len() as f64, (2 * rows * n * k) as f64);
    }
    Ok(())
}

fn prefill(
    cuda: &Cuda,
    report: &mut Report,
    (depth, rows): (usize, usize),
    dtype: KvDtype,
) -> Outcome {
    let kv = KvShape { n_layers: N_LAYERS, n_kv_heads: 8, head_dim: 128, page_len: 16, dtype };
    let mut rig = Rig::new(cuda, (kv, 32), (1, depth + rows, rows))?;
    rig.lay_out(&[(0, depth, rows)])?;
    let seconds = rig.time(rows)?;
    let keys = rows as f64 * (depth as f64 + rows as f64 / 2.0);
    let bytes = ((depth + rows) * kv.token_bytes()) as f64 / f64::from(kv.n_layers);
    let operations = 4.0 * keys * f64::from(32 * kv.head_dim);
    report.add(&format!("prefill {dtype} d 128, {rows} at {depth}"), seconds, bytes, operations);
    Ok(())
}
