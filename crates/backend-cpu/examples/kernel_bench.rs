//! Times the CPU kernels on the shapes of a small model, with bytes and operations per second.
//!
//! ```text
//! cargo run --release -p nuthatch-backend-cpu --example kernel_bench [threads] [Q4_1|...|attend|choose [depth]]
//! ```

#![expect(clippy::print_stdout, reason = "a bench prints")]

use std::time::Duration;

use nuthatch_backend::{
    Ask, AttnSpec, Backend, BatchLayout, Best, Chooser, Digest, DigestKind, HostMatrix, PlanShape,
    RopeSpec, RopeStyle, ScoreBy, WeightType, quant,
};
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_types::{Clock, KvDtype, KvShape, KvSlots, LayerIdx, LayerSet, Slot, SystemClock};

fn main() -> Result<(), nuthatch_backend::DeviceError> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let cpu = Cpu::new(CpuConfig { threads, isa: None })?;
    let only = std::env::args().nth(2);
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only == name);
    println!("{}", cpu.name());
    for dtype in
        [WeightType::Q4_1, WeightType::Q8_0, WeightType::Q4_K, WeightType::Q6_K, WeightType::BF16]
    {
        if !wanted(&format!("{dtype:?}")) {
            continue;
        }
        for (n, k) in [(3072, 1536), (49152, 768)] {
            for rows in [1, 2, 4, 8, 16, 64, 512] {
                if n * rows <= 3072 * 512 {
                    matmul(&cpu, dtype, n, k, rows)?;
                }
            }
        }
    }
    if wanted("attend") {
        let (int8, fp8) = (KvDtype::Int8(LayerSet::NONE), KvDtype::Fp8(LayerSet::NONE));
        for (depth, rows) in [(128, 1), (2048, 1), (8000, 1), (512, 512), (2048, 512), (8192, 512)]
        {
            for dtype in [KvDtype::F16, KvDtype::Bf16, int8, fp8] {
                attend(&cpu, dtype, depth, rows)?;
            }
        }
    }
    if wanted("choose") {
        let depth: Option<usize> = std::env::args().nth(3).and_then(|n| n.parse().ok());
        if let Some(depth) = depth {
            return choose(&cpu, DigestKind::Nibbles, 32, depth);
        }
        for (kind, width) in [
            (DigestKind::Channels, 16),
            (DigestKind::Channels, 32),
            (DigestKind::Nibbles, 32),
            (DigestKind::Signs, 256),
        ] {
            for depth in [2000, 8000, 32000] {
                choose(&cpu, kind, width, depth)?;
            }
        }
    }
    Ok(())
}

/// Shortest time of several runs.
fn best(mut run: impl FnMut()) -> Duration {
    let clock = SystemClock::start();
    run();
    let begin = clock.now();
    let mut best = Duration::MAX;
    while best == Duration::MAX || clock.now() - begin < Duration::from_millis(400) {
        let start = clock.now();
        run();
        best = best.min(clock.now() - start);
    }
    best
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
    cpu: &Cpu,
    dtype: WeightType,
    n: usize,
    k: usize,
    rows: usize,
) -> Result<(), nuthatch_backend::DeviceError> {
    // Several copies, so that the last-level cache does not serve them.
    let mut row = Vec::new();
    quant::quantize_row(dtype, &random(k), &mut row);
    let bytes = row.repeat(n);
    let copies = (400_000_000 / bytes.len()).clamp(1, 16);
    let matrix = HostMatrix { dtype, rows: n, cols: k, bytes: &bytes, bias: None };
    let weights = (0..copies).map(|_| cpu.load(&[matrix])).collect::<Result<Vec<_>, _>>()?;
    let mut x = cpu.alloc(rows * k)?;
    cpu.write(&mut x, &random(rows * k))?;
    let mut out = cpu.alloc(rows * n)?;
    let mut turn = 0;
    let time = best(|| {
        turn += 1;
        cpu.matmul(&weights[turn % copies], &x, rows, &mut out).expect("runs");
    });
    let s = time.as_secs_f64();
    println!(
        "matmul {dtype:5} {n:5} x {k:4} rows {rows:3}: {:9.1} us {:6.1} GB/s {:8.1} GMAC/s",
        s * 1e6,
        bytes.len() as f64 / s / 1e9,
        (rows * n * k) as f64 / s / 1e9
    );
    Ok(())
}

const LAYERS: u32 = 30;
const KV_HEADS: usize = 3;
const GROUP: usize = 3;
const D: usize = 64;

/// A sequence whose keys and values were appended in all layers.
struct Context {
    plan: <Cpu as Backend>::Plan,
    store: <Cpu as Backend>::Kv,
    qkv: <Cpu as Backend>::Buf,
}

fn spec() -> AttnSpec<'static, Cpu> {
    let (scale, eps, n_heads) = (0.125, 1e-5, (KV_HEADS * GROUP) as u32);
    AttnSpec { n_heads, scale, window: None, owns_kv: true, head_norms: None, eps }
}

impl Context {
    /// `depth` tokens, of which the last `rows` are the queries of the plan.
    fn new(
        cpu: &Cpu,
        dtype: KvDtype,
        (depth, rows): (usize, usize),
        digests: &[Digest],
    ) -> Result<Self, nuthatch_backend::DeviceError> {
        let kv = KvShape {
            n_layers: LAYERS,
            n_kv_heads: KV_HEADS as u32,
            head_dim: D as u32,
            page_len: 16,
            dtype,
        };
        let n_pages = depth.div_ceil(16);
        let mut store = cpu.alloc_kv(kv, KvSlots::on_device(n_pages as u32))?;
        if !digests.is_empty() {
            cpu.keep_digests(&mut store, digests)?;
        }
        let mut tables = cpu.alloc_tables(1, n_pages as u32)?;
        let slots: Vec<Slot> = (0..n_pages as u32).map(Slot).collect();
        cpu.write_table(&mut tables, 0, 0, &slots)?;
        let rope =
            RopeSpec { inv_freq: vec![0.01; 32], attention_factor: 1.0, style: RopeStyle::Pairs };
        let n_heads = KV_HEADS * GROUP;
        let shape =
            PlanShape { max_rows: depth, max_seqs: 1, max_context: depth, n_heads, kv, rope };
        let mut plan = cpu.alloc_plan(&shape)?;
        let width = (GROUP + 2) * KV_HEADS * D;
        let mut qkv = cpu.alloc(depth * width)?;
        cpu.write(&mut qkv, &random(depth * width))?;
        let layout = |first: usize, n: usize| BatchLayout {
            tokens: vec![0; n],
            positions: (first as u32..(first + n) as u32).collect(),
            query_start: vec![0, n as u32],
            kv_len: vec![(first + n) as u32],
            table_row: vec![0],
            output_rows: vec![],
        };
        cpu.plan(&mut plan, &tables, &layout(0, depth))?;
        for layer in 0..LAYERS {
            cpu.rope_append(&plan, LayerIdx(layer), &spec(), &mut qkv, &mut store)?;
        }
        cpu.plan(&mut plan, &tables, &layout(depth - rows, rows))?;
        Ok(Context { plan, store, qkv })
    }
}

fn attend(
    cpu: &Cpu,
    dtype: KvDtype,
    depth: usize,
    rows: usize,
) -> Result<(), nuthatch_backend::DeviceError> {
    let Context { plan, store, qkv } = Context::new(cpu, dtype, (depth, rows), &[])?;
    let mut out = cpu.alloc(rows * KV_HEADS * GROUP * D)?;
    let time = best(|| {
        for layer in 0..LAYERS {
            cpu.attend(&plan, LayerIdx(layer), &spec(), &qkv, &store, &mut out).expect("runs");
        }
    });
    let s = time.as_secs_f64();
    let keys: usize = (depth - rows..depth).map(|p| p + 1).sum();
    let token_bytes = 2 * D * KV_HEADS * LAYERS as usize * dtype.bytes();
    println!(
        "attend {dtype:4} depth {depth:5} rows {rows:3}, 30 layers: {:9.1} us {:6.1} GB/s {:8.1} \
         GFMA/s",
        s * 1e6,
        (token_bytes * depth) as f64 / s / 1e9,
        (keys * 9 * 64 * 2 * 30) as f64 / s / 1e9
    );
    Ok(())
}

/// One selection of 4 % at a time, by turns of all heads and with a product of 8 MiB between them, so
/// that each finds its digest and its memory as far away as in a step of a model.
fn choose(
    cpu: &Cpu,
    kind: DigestKind,
    width: usize,
    depth: usize,
) -> Result<(), nuthatch_backend::DeviceError> {
    let mean = if kind == DigestKind::Signs { vec![0.0; 90 * D] } else { vec![] };
    let digest = Digest { kind, width, frame: random(width * D), mean, weights: vec![] };
    let bytes = depth.div_ceil(16) * digest.page_bytes(16, D);
    let Context { plan, store, qkv } = Context::new(cpu, KvDtype::F16, (depth, 1), &[digest])?;
    let (mut scores, mut chosen) = (vec![0; depth], Vec::new());
    let (mut turn, clock) = (0, SystemClock::start());
    let (mut scoring, mut selecting) = (Vec::new(), Vec::new());
    let (rows, cols) = (8192, 1024);
    let between = vec![0; rows * cols / 32 * 34];
    let matrix = HostMatrix { dtype: WeightType::Q8_0, rows, cols, bytes: &between, bias: None };
    let weight = cpu.load(&[matrix])?;
    let (x, mut y) = (cpu.alloc(cols)?, cpu.alloc(rows)?);
    while scoring.len() < 90 * 20 {
        turn += 1;
        cpu.matmul(&weight, &x, 1, &mut y)?;
        let (layer, head) = (LayerIdx(turn % LAYERS), turn / LAYERS % 3);
        let ask = Ask { seq: 0, head, by: ScoreBy::Digest(0), n: depth as u32, at: 0 };
        let begin = clock.now();
        cpu.score(&plan, layer, &spec(), &qkv, &store, &[ask], &mut scores)?;
        let middle = clock.now();
        let best = Best { first: 16, k: depth / 25, fade: 1 << 23 };
        cpu.select(&scores, best, &mut chosen);
        scoring.push(middle - begin);
        selecting.push(clock.now() - middle);
    }
    scoring.sort();
    selecting.sort();
    let (score, select) = (scoring[scoring.len() / 2], selecting[selecting.len() / 2]);
    println!(
        "choose {kind:?} {width:3} of {depth:5}: score {:6.1} us {:5.1} GB/s, select {:5.1} us",
        score.as_secs_f64() * 1e6,
        bytes as f64 / score.as_secs_f64() / 1e9,
        select.as_secs_f64() * 1e6
    );
    Ok(())
}
