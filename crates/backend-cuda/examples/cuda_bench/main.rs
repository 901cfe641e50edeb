//! Times the CUDA kernels on the shapes of Llama-3-8B, with bytes and operations per second.
//!
//!     cargo run --release -p nuthatch-backend-cuda --example cuda_bench [FILE.json]
//!
//! With `step` as a further word it also times whole decode steps, which takes 40 GB of the device.
//!
//! Kernels are queued back to back and timed together, so that short ones show what queuing costs.
//! Operands are rotated, so that the second-level cache does not serve them.

#![expect(clippy::print_stdout, reason = "a bench prints")]

mod rig;
mod step;

use std::error::Error;
use std::fmt::Write as _;

use nuthatch_backend::{Backend, HostMatrix, WeightType, quant};
use nuthatch_backend_cuda::{Cuda, CudaConfig};
use nuthatch_types::{Clock, KvDtype, KvShape, SystemClock};

use rig::Rig;

type Outcome = Result<(), Box<dyn Error>>;

const N_HEADS: u32 = 32;
/// Layers that take turns.
const N_LAYERS: u32 = 4;

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
    if std::env::args().nth(2).as_deref() == Some("step") {
        step::steps(&cuda, &mut report)?;
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
