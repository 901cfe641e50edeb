//! `swiglu`: the gated activation between the two products of the feed-forward layer.

use crate::Backend;

use super::compare::{ROUNDING, TINY, Truth, download, same_bits, unwritten, upload};
use super::inputs::Random;

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
