//! `norm`: root mean square over a row.

use crate::Backend;

use super::compare::{ROUNDING, TINY, Truth, download, same_bits, unwritten, upload};
use super::inputs::Random;

const EPS: f32 = 1e-5;

fn run<B: Backend>(b: &B, x: &[f32], weight: &[f32]) -> Vec<f32> {
    let rows = x.len() / weight.len();
    let x_buf = upload(b, x);
    let weight_buf = upload(b, weight);
    let mut out = unwritten(b, x.len());
    b.norm(&x_buf, &weight_buf, EPS, rows, &mut out).expect("norm runs");
    download(b, &out, x.len())
}

/// Rows of which one is so small that `EPS` rules, and one is zero.
fn rows_of(random: &mut Random, rows: usize, d: usize) -> Vec<f32> {
    let mut x = random.values(rows * d);
    if rows > 2 {
        x[d..2 * d].iter_mut().for_each(|v| *v *= 1e-3);
        x[2 * d..3 * d].fill(0.0);
    }
    x
}

/// The norm of rows of many widths, against `f64`.
pub fn norm_matches<B: Backend>(b: &B) {
    let mut random = Random::new(1);
    for (d, rows) in [(1, 3), (7, 5), (16, 1), (64, 17), (65, 4), (576, 33), (4096, 3)] {
        let x = rows_of(&mut random, rows, d);
        let weight = random.values(d);
        // The sum of squares may be off by its rounding; the root halves that.
        let relative = (8.0 + (d as f64).sqrt()) * ROUNDING;
        let mut truth = Truth::default();
        for row in x.chunks_exact(d) {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / d as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (&v, &w) in row.iter().zip(&weight) {
                let value = f64::from(v) * scale * f64::from(w);
                truth.push(value, value.abs() * relative + TINY);
            }
        }
        truth.check(&run(b, &x, &weight), &|| format!("norm of {rows} rows of {d}"));
    }
}

/// A row's norm has the same bits alone and in any batch.
pub fn norm_rows_agree<B: Backend>(b: &B) {
    let mut random = Random::new(2);
    for d in [7, 64, 65, 576] {
        let x = rows_of(&mut random, 40, d);
        let weight = random.values(d);
        let together = run(b, &x, &weight);
        for (start, end) in [(0, 1), (1, 2), (2, 4), (3, 8), (7, 24), (17, 34), (39, 40)] {
            let part = run(b, &x[start * d..end * d], &weight);
            let what = || format!("norm of rows {start}..{end} of 40, width {d}");
            same_bits(&part, &together[start * d..end * d], &what);
        }
    }
}
