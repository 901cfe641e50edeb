//! Times the CUDA kernels on the shapes of Llama-3-8B, with bytes and operations per second.
//!
//!     cargo run --release -p nuthatch-backend-cuda --example kernel_bench [FILE.json]
//!
//! Kernels are queued back to back and timed together, so that short ones show what queuing costs.
//! Operands are rotated, so that the second-level cache does not serve them.

#![expect(clippy::print_stdout, reason = "a bench prints")]

use std::error::Error;
use std::fmt::Write as _;

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, HostMatrix, PlanShape, RopeSpec, RopeStyle, WeightType, quant,
};
use nuthatch_backend_cuda::{Cuda, CudaConfig};
use nuthatch_types::{Clock, KvDtype, KvShape, LayerIdx, Slot, SystemClock};

type Outcome = Result<(), Box<dyn Error>>;

const N_HEADS: u32 = 32;
const PAGE_LEN: usize = 16;

/// What was measured, for people and as JSON.
#[derive(Default)]
struct Report(String);

impl Report {
    fn add(&mut self, name: &str, seconds: f64, bytes: f64, operations: f64) {
        let (us, gbs, tflops) = (seconds * 1e6, bytes / seconds / 1e9, operations / seconds / 1e12);
        println!("{name:<44} {us:>9.1} us {gbs:>8.0} GB/s {tflops:>7.1} TFLOP/s");
        let comma = if self.0.is_empty() { "" } else { ",\n" };
        let _ = write!(
            self.0,
            "{comma}  {{\"name\": \"{name}\", \"us\": {us:.2}, \"gb_per_s\": {gbs:.1}, \
             \"tflop_per_s\": {tflops:.2}}}"
        );
    }
}

fn main() -> Outcome {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    let cuda = Cuda::open(0, CudaConfig { cache_dir, is_exact: false })?;
    println!("{}", cuda.name());
    let mut report = Report::default();
    for (dtype, n, k) in [
        (WeightType::BF16, 6144, 4096),
        (WeightType::BF16, 4096, 4096),
        (WeightType::BF16, 28672, 4096),
        (WeightType::BF16, 4096, 14336),
        (WeightType::Q8_0, 28672, 4096),
        (WeightType::Q4_1, 28672, 4096),
        (WeightType::Q4_K, 28672, 4096),
        (WeightType::Q6_K, 28672, 4096),
        (WeightType::F16, 28672, 4096),
    ] {
        matmul(&cuda, &mut report, dtype, (n, k))?;
    }
    for (group, d, dtype) in [
        (4, 128, KvDtype::F16),
        (4, 128, KvDtype::Bf16),
        (8, 128, KvDtype::F16),
        (4, 64, KvDtype::F16),
    ] {
        decode(&cuda, &mut report, (group, d, dtype))?;
    }
    for (depth, rows) in [(0, 512), (0, 4096), (7680, 512), (30720, 2048)] {
        prefill(&cuda, &mut report, depth, rows)?;
    }
    if let Some(path) = std::env::args().nth(1) {
        let device = cuda.name();
        std::fs::write(
            path,
            format!("{{\"device\": \"{device}\", \"kernels\": [\n{}\n]}}\n", report.0),
        )?;
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

fn matmul(cuda: &Cuda, report: &mut Report, dtype: WeightType, (n, k): (usize, usize)) -> Outcome {
    let mut some = Vec::new();
    for row in random(64 * k).chunks_exact(k) {
        quant::quantize_row(dtype, row, &mut some);
    }
    let bytes = some.repeat(n / 64);
    let copies = (300_000_000 / bytes.len()).clamp(1, 8);
    let matrix = HostMatrix { dtype, rows: n, cols: k, bytes: &bytes, bias: None };
    let weights = (0..copies).map(|_| cuda.load(&[matrix])).collect::<Result<Vec<_>, _>>()?;
    for rows in [1, 2, 8, 16, 32, 64, 128, 512, 2048] {
        let mut x = cuda.alloc(rows * k)?;
        cuda.write(&mut x, &random(rows * k))?;
        let mut out = cuda.alloc(rows * n)?;
        let seconds = time(cuda, |i| Ok(cuda.matmul(&weights[i % copies], &x, rows, &mut out)?))?;
        let name = format!("matmul {dtype} {n} x {k}, {rows} rows");
        report.add(&name, seconds, bytes.len() as f64, (2 * rows * n * k) as f64);
    }
    Ok(())
}

/// An arena with filled pages, and what is needed to attend to them.
struct Rig<'a> {
    cuda: &'a Cuda,
    shape: KvShape,
    kv: <Cuda as Backend>::Kv,
    tables: <Cuda as Backend>::Tables,
    plan: <Cuda as Backend>::Plan,
    n_seqs: usize,
    n_heads: u32,
}

/// Layers that take turns.
const N_LAYERS: u32 = 4;

impl<'a> Rig<'a> {
    /// Sequences of `depth` random tokens, on pages in a scattered order.
    fn new(
        cuda: &'a Cuda,
        (shape, n_heads): (KvShape, u32),
        (n_seqs, depth, rows): (usize, usize, usize),
    ) -> Result<Self, Box<dyn Error>> {
        const FILL: usize = 1024;
        let context = (depth + rows).next_multiple_of(PAGE_LEN);
        let pages = context / PAGE_LEN;
        let n_slots = n_seqs * pages;
        let rope = RopeSpec {
            inv_freq: vec![0.01; shape.head_dim as usize / 2],
            attention_factor: 1.0,
            style: RopeStyle::Halves,
        };
        let plan_shape = PlanShape {
            max_rows: rows.max(FILL).max(n_seqs),
            max_seqs: n_seqs,
            max_context: context,
            n_heads: n_heads as usize,
            kv: shape,
            rope,
        };
        let mut tables = cuda.alloc_tables(n_seqs as u32, pages as u32)?;
        // A step that is prime to the number of slots visits each of them once.
        let step =
            [7919, 7907, 7901].into_iter().find(|p| !n_slots.is_multiple_of(*p)).unwrap_or(1);
        for seq in 0..n_seqs {
            let slot = |page: usize| Slot(((seq * pages + page) * step % n_slots) as u32);
            let slots: Vec<Slot> = (0..pages).map(slot).collect();
            cuda.write_table(&mut tables, seq as u32, 0, &slots)?;
        }
        let kv = cuda.alloc_kv(shape, n_slots as u32)?;
        let plan = cuda.alloc_plan(&plan_shape)?;
        let mut rig = Rig { cuda, shape, kv, tables, plan, n_seqs, n_heads };
        let width = (n_heads + 2 * shape.n_kv_heads) as usize * shape.head_dim as usize;
        let mut qkv = cuda.alloc(FILL * width)?;
        cuda.write(&mut qkv, &random(FILL * width))?;
        for seq in 0..n_seqs {
            for start in (0..depth).step_by(FILL) {
                let n = FILL.min(depth - start);
                rig.lay_out(&[(seq, start, n)])?;
                for layer in 0..shape.n_layers {
                    let spec = spec(n_heads, shape.head_dim);
                    cuda.rope_append(&rig.plan, LayerIdx(layer), &spec, &mut qkv, &mut rig.kv)?;
                }
            }
        }
        Ok(rig)
    }

    /// Plans a batch of sequences, first rows and numbers of rows.
    fn lay_out(&mut self, parts: &[(usize, usize, usize)]) -> Outcome {
        let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
        for &(seq, start, n) in parts {
            layout.tokens.extend(std::iter::repeat_n(0, n));
            layout.positions.extend((start..start + n).map(|position| position as u32));
            layout.query_start.push(layout.tokens.len() as u32);
            layout.kv_len.push((start + n) as u32);
            layout.table_row.push(seq as u32);
        }
        Ok(self.cuda.plan(&mut self.plan, &self.tables, &layout)?)
    }

    /// Times attention of the batch that was laid out, layers taking turns.
    fn time(&self, rows: usize) -> Result<f64, Box<dyn Error>> {
        let width = (self.n_heads + 2 * self.shape.n_kv_heads) * self.shape.head_dim;
        let mut qkv = self.cuda.alloc(rows * width as usize)?;
        self.cuda.write(&mut qkv, &random(rows * width as usize))?;
        let mut out = self.cuda.alloc(rows * (self.n_heads * self.shape.head_dim) as usize)?;
        let spec = spec(self.n_heads, self.shape.head_dim);
        time(self.cuda, |i| {
            let layer = LayerIdx(i as u32 % self.shape.n_layers);
            Ok(self.cuda.attend(&self.plan, layer, &spec, &qkv, &self.kv, &mut out)?)
        })
    }
}

fn spec(n_heads: u32, head_dim: u32) -> AttnSpec<'static, Cuda> {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttnSpec { n_heads, scale, window: None, head_norms: None, eps: 1e-6 }
}

fn decode(cuda: &Cuda, report: &mut Report, (group, d, dtype): (u32, u32, KvDtype)) -> Outcome {
    let n_kv_heads = N_HEADS / group;
    let kv = KvShape { n_layers: N_LAYERS, n_kv_heads, head_dim: d, page_len: 16, dtype };
    for (n_seqs, depth) in [(1, 1024), (1, 8192), (1, 32768), (1, 131_072), (8, 8192), (32, 8192)] {
        let mut rig = Rig::new(cuda, (kv, N_HEADS), (n_seqs, depth, 1))?;
        let parts: Vec<_> = (0..rig.n_seqs).map(|seq| (seq, depth - 1, 1)).collect();
        rig.lay_out(&parts)?;
        let seconds = rig.time(n_seqs)?;
        let bytes = (n_seqs * depth * kv.token_bytes()) as f64 / f64::from(kv.n_layers);
        let name = format!("decode {dtype} d {d} group {group}, {n_seqs} x {depth}");
        report.add(&name, seconds, bytes, 2.0 * f64::from(group) * bytes);
    }
    Ok(())
}

fn prefill(cuda: &Cuda, report: &mut Report, depth: usize, rows: usize) -> Outcome {
    let kv = KvShape {
        n_layers: N_LAYERS,
        n_kv_heads: 8,
        head_dim: 128,
        page_len: 16,
        dtype: KvDtype::F16,
    };
    let mut rig = Rig::new(cuda, (kv, N_HEADS), (1, depth + rows, rows))?;
    rig.lay_out(&[(0, depth, rows)])?;
    let seconds = rig.time(rows)?;
    let keys = rows as f64 * (depth as f64 + rows as f64 / 2.0);
    let bytes = ((depth + rows) * kv.token_bytes()) as f64 / f64::from(kv.n_layers);
    let operations = 4.0 * keys * f64::from(N_HEADS * kv.head_dim);
    report.add(&format!("prefill f16 d 128, {rows} at {depth}"), seconds, bytes, operations);
    Ok(())
}
