//! Times the CPU kernels on the shapes of a small model, with bytes and operations per second.
//!
//! ```text
//! cargo run --release -p nuthatch-backend-cpu --example kernel_bench [threads] [Q4_1|...|attend]
//! ```

#![expect(clippy::print_stdout, reason = "a bench prints")]

use std::time::Duration;

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, HostMatrix, PlanShape, RopeSpec, RopeStyle, WeightType, quant,
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
    if !wanted("attend") {
        return Ok(());
    }
    let (int8, fp8) = (KvDtype::Int8(LayerSet::NONE), KvDtype::Fp8(LayerSet::NONE));
    for (depth, rows) in [(128, 1), (2048, 1), (8000, 1), (512, 512), (2048, 512), (8192, 512)] {
        for dtype in [KvDtype::F16, KvDtype::Bf16, int8, fp8] {
            attend(&cpu, dtype, depth, rows)?;
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

fn attend(
    cpu: &Cpu,
    dtype: KvDtype,
    depth: usize,
    rows: usize,
) -> Result<(), nuthatch_backend::DeviceError> {
    let (n_heads, n_layers) = (9, 30);
    let kv = KvShape { n_layers, n_kv_heads: 3, head_dim: 64, page_len: 16, dtype };
    let n_pages = depth.div_ceil(16);
    let mut store = cpu.alloc_kv(kv, KvSlots::on_device(n_pages as u32))?;
    let mut tables = cpu.alloc_tables(1, n_pages as u32)?;
    let slots: Vec<Slot> = (0..n_pages as u32).map(Slot).collect();
    cpu.write_table(&mut tables, 0, 0, &slots)?;
    let rope =
        RopeSpec { inv_freq: vec![0.01; 32], attention_factor: 1.0, style: RopeStyle::Pairs };
    let shape = PlanShape { max_rows: depth, max_seqs: 1, max_context: depth, n_heads, kv, rope };
    let mut plan = cpu.alloc_plan(&shape)?;
    let mut qkv = cpu.alloc(depth * 15 * 64)?;
    cpu.write(&mut qkv, &random(depth * 15 * 64))?;
    let (scale, eps) = (0.125, 1e-5);
    let spec = AttnSpec { n_heads: 9, scale, window: None, owns_kv: true, head_norms: None, eps };
    let layout = |first: usize, n: usize| BatchLayout {
        tokens: vec![0; n],
        positions: (first as u32..(first + n) as u32).collect(),
        query_start: vec![0, n as u32],
        kv_len: vec![(first + n) as u32],
        table_row: vec![0],
        output_rows: vec![],
    };
    cpu.plan(&mut plan, &tables, &layout(0, depth))?;
    for layer in 0..n_layers {
        cpu.rope_append(&plan, LayerIdx(layer), &spec, &mut qkv, &mut store)?;
    }
    cpu.plan(&mut plan, &tables, &layout(depth - rows, rows))?;
    let mut out = cpu.alloc(rows * 9 * 64)?;
    let time = best(|| {
        for layer in 0..n_layers {
            cpu.attend(&plan, LayerIdx(layer), &spec, &qkv, &store, &mut out).expect("runs");
        }
    });
    let s = time.as_secs_f64();
    let keys: usize = (depth - rows..depth).map(|p| p + 1).sum();
    println!(
        "attend {dtype:4} depth {depth:5} rows {rows:3}, 30 layers: {:9.1} us {:6.1} GB/s {:8.1} \
         GFMA/s",
        s * 1e6,
        (kv.token_bytes() * depth) as f64 / s / 1e9,
        (keys * 9 * 64 * 2 * 30) as f64 / s / 1e9
    );
    Ok(())
}
