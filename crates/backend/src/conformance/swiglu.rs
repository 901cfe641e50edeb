//! `swiglu`: the gated activation between the two products of the feed-forward layer.

use crate::{Backend, HostMatrix, Norm, WeightType};

use super::compare::{ROUNDING, TINY, Truth, download, same_bits, unwritten, upload};
use super::inputs::{Matrix, Random};

fn run<B: Backend>(b: &B, gate_up: &[f32], f: usize) -> Vec<f32> {
    let rows = gate_up.len() / (2 * f);
    let gate_up = upload(b, gate_up);
    let mut out = unwritten(b, rows * f);
    b.swiglu(&gate_up, f, rows, &mut out).expect("swiglu runs");
    download(b, &out, rows * f)
}

/// Gates of ordinary size, some so large that their exponential overflows or vanishes.
fn rows_of(random: &mut Random, rows: usize, f: usize) -> Vec<f32> {
    let mut x = random.values(rows * 2 * f);
    for (i, extreme) in [0.0, -0.0, 88.0, -88.0, 90.0, -104.0, 1e4, -1e4].into_iter().enumerate() {
        if i < f {
            x[i] = extreme;
        }
    }
    x
}

/// `silu(gate) * up` for many widths, against `f64`.
pub fn swiglu_matches<B: Backend>(b: &B) {
    let mut random = Random::new(3);
    for (f, rows) in [(1, 4), (7, 3), (16, 1), (65, 17), (192, 5), (1536, 33)] {
        let x = rows_of(&mut random, rows, f);
        let mut truth = Truth::default();
        for row in x.chunks_exact(2 * f) {
            for (&gate, &up) in row[..f].iter().zip(&row[f..]) {
                let (gate, up) = (f64::from(gate), f64::from(up));
                let value = gate / (1.0 + (-gate).exp()) * up;
                // The exponent is rounded once before the exponential, which makes the relative
                // error grow with it; a few roundings follow.
                let relative = (12.0 + 2.0 * gate.abs().min(104.0)) * ROUNDING;
                truth.push(value, value.abs() * relative + TINY * (1.0 + up.abs()));
            }
        }
        truth.check(&run(b, &x, f), &|| format!("swiglu of {rows} rows of {f}"));
    }
}

fn host_matrix<'a>(matrix: &'a Matrix, bias: Option<&'a [f32]>) -> HostMatrix<'a> {
    let &Matrix { dtype, rows, cols, ref bytes } = matrix;
    HostMatrix { dtype, rows, cols, bytes, bias }
}

/// The product and the activation together have the bits of both, one after the other.
pub fn gated_matmul_agrees<B: Backend>(b: &B) {
    let mut random = Random::new(32);
    for dtype in [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q4_K] {
        for (f, cols) in [(5, 256), (24, 256), (136, 512)] {
            let (gate, up) = (random.matrix(dtype, f, cols), random.matrix(dtype, f, cols));
            let bias = random.values(f);
            let (gate, up) = (host_matrix(&gate, None), host_matrix(&up, Some(&bias)));
            let apart = b.load(&[gate, up]).expect("the device takes the type");
            let together = b.load_gated(gate, up).expect("the device takes the type");
            for rows in [1, 9, 30, 70, 130] {
                let x = upload(b, &random.values(rows * cols));
                let mut gate_up = unwritten(b, rows * 2 * f);
                b.matmul(&apart, &x, rows, &mut gate_up).expect("matmul runs");
                let mut expected = unwritten(b, rows * f);
                b.swiglu(&gate_up, f, rows, &mut expected).expect("swiglu runs");
                let mut out = unwritten(b, rows * f);
                b.gated_matmul(&together, &x, f, rows, &mut gate_up, &mut out).expect("it runs");
                let (expected, out) =
                    (download(b, &expected, rows * f), download(b, &out, rows * f));
                same_bits(&out, &expected, &|| format!("{rows} rows of {f} by {cols}, {dtype}"));
            }
        }
    }
}

/// Products of norms have the bits of both done apart, plain ones and gated ones.
pub fn norm_matmul_agrees<B: Backend>(b: &B) {
    const EPS: f32 = 1e-5;
    let mut random = Random::new(33);
    let types = [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0];
    for (dtype, f, cols) in types.into_iter().flat_map(|dtype| {
        [(5, 96), (24, 576), (8, 4096), (8, 5120), (8, 9216)].map(|(f, cols)| (dtype, f, cols))
    }) {
        let (gate, up) = (random.matrix(dtype, f, cols), random.matrix(dtype, f, cols));
        let bias = random.values(f);
        let (gate, up) = (host_matrix(&gate, Some(&bias)), host_matrix(&up, None));
        let plain = b.load(&[gate, up]).expect("the device takes the type");
        let gated = b.load_gated(gate, up).expect("the device takes the type");
        let weight = upload(b, &random.values(cols));
        for rows in [1, 3] {
            let x = upload(b, &random.values(rows * cols));
            let [mut h, mut other_h] = [(); 2].map(|()| unwritten(b, rows * cols));
            let [mut expected, mut out, mut gate_up] = [(); 3].map(|()| unwritten(b, rows * 2 * f));
            let what = |op: &str| format!("{op} of {rows} rows of {f} by {cols}, {dtype}");
            b.norm(&x, &weight, EPS, rows, &mut h).expect("norm runs");
            b.matmul(&plain, &h, rows, &mut expected).expect("matmul runs");
            let norm = Norm { x: &x, weight: &weight, eps: EPS };
            b.norm_matmul(&norm, &plain, rows, &mut other_h, &mut out).expect("it runs");
            let len = rows * 2 * f;
            same_bits(&download(b, &out, len), &download(b, &expected, len), &|| what("product"));
            b.gated_matmul(&gated, &h, f, rows, &mut gate_up, &mut expected).expect("it runs");
            let scratch = (&mut other_h, &mut gate_up);
            b.norm_gated_matmul(&norm, &gated, f, rows, scratch, &mut out).expect("it runs");
            let len = rows * f;
            same_bits(&download(b, &out, len), &download(b, &expected, len), &|| what("gated"));
        }
    }
}

/// A row's result has the same bits alone and in any batch.
pub fn swiglu_rows_agree<B: Backend>(b: &B) {
    let mut random = Random::new(4);
    for f in [7, 16, 65, 576] {
        let x = rows_of(&mut random, 40, f);
        let together = run(b, &x, f);
        for (start, end) in [(0, 1), (1, 2), (2, 4), (3, 8), (7, 24), (17, 34), (39, 40)] {
            let part = run(b, &x[start * 2 * f..end * 2 * f], f);
            let what = || format!("swiglu of rows {start}..{end} of 40, width {f}");
            same_bits(&part, &together[start * f..end * f], &what);
        }
    }
}
