//! `matmul` and `matmul_add`: every weight format, odd shapes, stacks of parts, biases.
//!
//! How far off may a product be? With float weights, by the rounding of an `f32` sum in any order;
//! on a device that says so, with 16-bit ones also by the rounding of activations to bf16, at most
//! 1/256 of each. With quantised weights a device may also round the activations to eight bits in blocks of 32,
//! which is how integer dot products work: each activation then moves by at most half a step,
//! `largest of the block / 254`. The products of these errors with the weights have random signs,
//! so they add up like a random walk, and [`WALK`] deviations are never left by chance.
//!
//! That bound is wide enough to hide a wrong code in a long row. So every product is also taken of
//! activations that eight bits hold exactly (whole numbers, 127 the largest of each block), where
//! nothing but the rounding of the sum is left.

use crate::{Backend, HostMatrix, WeightType};

use super::at_most;
use super::compare::{ROUNDING, TINY, Truth, download, unwritten, upload};
use super::inputs::{Matrix, Random};

/// Deviations of the rounding of activations that a sum may be off by. Each deviation is taken as
/// the largest possible error, not its mean, so chance exceeds this once in `exp(12.5)` sums even
/// if every error were at its limit.
const WALK: f64 = 5.0;
/// Activations that share a scale.
const BLOCK: usize = 32;

/// A weight of one or more parts, with their biases.
pub(super) struct Stack {
    pub(super) parts: Vec<(Matrix, Option<Vec<f32>>)>,
}

impl Stack {
    pub(super) fn single(random: &mut Random, dtype: WeightType, rows: usize, cols: usize) -> Self {
        Stack { parts: vec![(random.matrix(dtype, rows, cols), None)] }
    }

    pub(super) fn cols(&self) -> usize {
        self.parts[0].0.cols
    }

    pub(super) fn rows(&self) -> usize {
        self.parts.iter().map(|(matrix, _)| matrix.rows).sum()
    }

    pub(super) fn load<B: Backend>(&self, b: &B) -> B::Weight {
        let parts: Vec<HostMatrix<'_>> = self
            .parts
            .iter()
            .map(|(matrix, bias)| HostMatrix {
                dtype: matrix.dtype,
                rows: matrix.rows,
                cols: matrix.cols,
                bytes: &matrix.bytes,
                bias: bias.as_deref(),
            })
            .collect();
        b.load(&parts).expect("the device takes weights of every type")
    }

    /// The product with every row of `x`, in `f64`.
    fn truth(&self, x: &[f32], kind: Activations, rounds: bool) -> Truth {
        let n_out = self.rows();
        let rows = x.len() / self.cols();
        let mut truth = Truth { value: vec![0.0; rows * n_out], bound: vec![0.0; rows * n_out] };
        let mut out = 0;
        for (matrix, bias) in &self.parts {
            for i in 0..matrix.rows {
                let row = WeightRow::new(matrix, i, rounds);
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
                for (t, x) in x.chunks_exact(self.cols()).enumerate() {
                    let (value, bound) = row.times(x, kind);
                    truth.value[t * n_out + out] = value + bias;
                    truth.bound[t * n_out + out] = bound + 4.0 * ROUNDING * bias.abs();
                }
                out += 1;
            }
        }
        truth
    }
}

/// Whether a device can hold activations exactly.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activations {
    Any,
    /// Eight bits and a scale of one hold them.
    Whole,
}

/// One row of weights, with what its bound needs of each block.
struct WeightRow {
    is_float: bool,
    /// Whether a device may round activations to bf16 before it multiplies.
    takes_bf16: bool,
    weights: Vec<f64>,
    /// Per block: sum and sum of squares of how much one activation's error can count.
    gain: Vec<(f64, f64)>,
    /// Per block: sum of everything that is multiplied and added, in magnitude.
    mass: Vec<f64>,
}

impl WeightRow {
    fn new(matrix: &Matrix, i: usize, rounds: bool) -> Self {
        let is_float = matrix.dtype.block_len() == 1;
        let takes_bf16 = rounds && matrix.dtype != WeightType::F32;
        let weights: Vec<f64> = matrix.row(i).into_iter().map(f64::from).collect();
        let offsets: Vec<f64> = matrix.offsets(i).into_iter().map(f64::from).collect();
        let blocks = || weights.chunks(BLOCK).zip(offsets.chunks(BLOCK));
        // A device may multiply the offset with the exact activations or with the rounded ones.
        let gain = blocks()
            .map(|(weights, offsets)| {
                weights.iter().zip(offsets).fold((0.0, 0.0), |(sum, squares), (w, offset)| {
                    let gain = w.abs().max((w - offset).abs());
                    (sum + gain, squares + gain * gain)
                })
            })
            .collect();
        let mass = blocks()
            .map(|(weights, offsets)| {
                weights.iter().zip(offsets).map(|(w, offset)| w.abs() + 2.0 * offset.abs()).sum()
            })
            .collect();
        WeightRow { is_float, takes_bf16, weights, gain, mass }
    }

    /// The dot product and its bound.
    fn times(&self, x: &[f32], kind: Activations) -> (f64, f64) {
        let mut value = 0.0;
        let mut magnitude = 0.0;
        let mut squares: f64 = 0.0;
        for (w, &x) in self.weights.iter().zip(x) {
            let product = w * f64::from(x);
            value += product;
            magnitude += product.abs();
            squares += product * product;
        }
        let sum_rounding = (4.0 + 2.0 * (x.len() as f64).sqrt()) * ROUNDING;
        if self.is_float {
            let activations = match kind {
                Activations::Any if self.takes_bf16 => magnitude.min(WALK * squares.sqrt()) / 256.0,
                Activations::Any | Activations::Whole => 0.0,
            };
            return (value, activations + sum_rounding * magnitude + TINY);
        }
        let (mut certain, mut walk, mut mass) = (0.0, 0.0, 0.0);
        for (i, x) in x.chunks(BLOCK).enumerate() {
            let largest = x.iter().fold(0.0, |largest: f64, &x| largest.max(f64::from(x).abs()));
            let error = largest / 254.0;
            certain += error * self.gain[i].0;
            walk += error * error * self.gain[i].1;
            mass += largest * self.mass[i];
        }
        let activations = match kind {
            Activations::Any => certain.min(WALK * walk.sqrt()) * 1.001,
            Activations::Whole => 0.0,
        };
        (value, activations + sum_rounding * mass + TINY)
    }
}

/// Rows of activations of which some are special: zeros, and numbers near the end of `f32`.
pub(super) fn activations(random: &mut Random, rows: usize, cols: usize) -> Vec<f32> {
    let mut x = random.values(rows * cols);
    for (row, x) in x.chunks_exact_mut(cols).enumerate() {
        match row % 9 {
            4 => x.fill(0.0),
            6 => x.iter_mut().for_each(|x| *x *= 1e-20),
            7 => x.iter_mut().for_each(|x| *x *= 1e20),
            _ => {}
        }
    }
    x
}

/// Whole numbers of which 127 is the largest in each block.
fn whole_activations(random: &mut Random, rows: usize, cols: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * cols).map(|_| random.below(255) as f32 - 127.0).collect();
    for row in x.chunks_exact_mut(cols) {
        for block in row.chunks_mut(BLOCK) {
            let at = random.below(block.len());
            block[at] = if random.below(2) == 0 { 127.0 } else { -127.0 };
        }
    }
    x
}

pub(super) fn product<B: Backend>(
    b: &B,
    w: &B::Weight,
    x: &[f32],
    shape: (usize, usize),
) -> Vec<f32> {
    let (rows, n_out) = shape;
    let x = upload(b, x);
    let mut out = unwritten(b, rows * n_out);
    b.matmul(w, &x, rows, &mut out).expect("matmul runs");
    download(b, &out, rows * n_out)
}

/// `before + W x`, where `before` is as long as the result.
pub(super) fn added_product<B: Backend>(
    b: &B,
    w: &B::Weight,
    x: &[f32],
    rows: usize,
    before: &[f32],
) -> Vec<f32> {
    let x = upload(b, x);
    let mut out = upload(b, before);
    b.matmul_add(w, &x, rows, &mut out).expect("matmul_add runs");
    download(b, &out, before.len())
}

/// Checks both products of one stack and one batch.
fn check<B: Backend>(b: &B, random: &mut Random, stack: &Stack, rows: usize) {
    let (cols, n_out) = (stack.cols(), stack.rows());
    let what = |op: &str| {
        let parts: Vec<String> =
            stack.parts.iter().map(|(m, _)| format!("{} {}", m.rows, m.dtype)).collect();
        format!("{op} of {rows} rows of {cols} with [{}]", parts.join(", "))
    };
    let weight = stack.load(b);
    let x = activations(random, rows, cols);
    let whole = whole_activations(random, rows, cols);
    let rounds = b.rounds_activations();
    stack
        .truth(&whole, Activations::Whole, rounds)
        .check(&product(b, &weight, &whole, (rows, n_out)), &|| what("matmul of whole numbers"));
    let mut truth = stack.truth(&x, Activations::Any, rounds);
    truth.check(&product(b, &weight, &x, (rows, n_out)), &|| what("matmul"));

    let before = random.values(rows * n_out);
    for ((value, bound), &before) in truth.value.iter_mut().zip(&mut truth.bound).zip(&before) {
        *value += f64::from(before);
        // The sum so far may be rounded once more, and so may the result.
        *bound += 4.0 * ROUNDING * (f64::from(before).abs() + value.abs());
    }
    truth.check(&added_product(b, &weight, &x, rows, &before), &|| what("matmul_add"));
}

/// Every weight type with outputs, columns and batches of many sizes, against `f64`.
pub fn matmul_matches<B: Backend>(b: &B) {
    const OUTPUTS: [usize; 8] = [1, 3, 15, 16, 17, 33, 64, 515];
    const COLS: [usize; 9] = [7, 32, 64, 65, 256, 288, 576, 1536, 2304];
    const ROWS: [usize; 9] = [1, 2, 3, 5, 16, 17, 33, 64, 130];
    /// Larger matrices cost more time than they find.
    const LARGEST: usize = 300_000;
    let mut random = Random::new(5);
    for (n, dtype) in WeightType::ALL.into_iter().enumerate() {
        let cols: Vec<usize> =
            COLS.into_iter().filter(|&cols| dtype.row_bytes(cols).is_some()).collect();
        // Each number of outputs meets each number of columns in a decode step...
        for (i, &n_out) in OUTPUTS.iter().enumerate().take(at_most(1, OUTPUTS.len())) {
            for (j, &cols) in cols.iter().enumerate().step_by(at_most(3, 1)) {
                if n_out * cols > LARGEST {
                    continue;
                }
                let stack = Stack::single(&mut random, dtype, n_out, cols);
                check(b, &mut random, &stack, ROWS[(i + j) % 2]);
            }
        }
        // ... and each number of rows meets some of both.
        for (i, &rows) in ROWS.iter().enumerate().step_by(at_most(2, 1)) {
            let n_out = OUTPUTS[(i + n) % 7];
            let stack = Stack::single(&mut random, dtype, n_out, cols[(i * 2 + n) % cols.len()]);
            check(b, &mut random, &stack, rows);
        }
        // Long rows in a large batch, where a kernel takes columns in pieces.
        let longest = cols[cols.len() - 1];
        let stack = Stack::single(&mut random, dtype, 40, longest);
        check(b, &mut random, &stack, at_most(9, 33));
    }
}

/// Parts of different types and sizes, with and without biases, multiplied as one.
pub fn matmul_stacks_match<B: Backend>(b: &B) {
    use WeightType::{BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    /// Type, rows, and whether there is a bias.
    type Parts = &'static [(WeightType, usize, bool)];
    let stacks: [(usize, Parts); 7] = [
        (65, &[(F32, 17, true), (F16, 3, false), (BF16, 16, true)]),
        (96, &[(Q4_0, 15, true), (Q4_0, 16, true), (Q4_0, 1, true)]),
        (576, &[(Q4_1, 576, false), (Q4_1, 192, false), (Q8_0, 192, false)]),
        (288, &[(Q5_0, 33, true), (F32, 1, true), (Q5_1, 7, false), (Q8_0, 20, true)]),
        (256, &[(Q2_K, 17, false), (Q3_K, 31, true), (Q4_K, 16, false)]),
        (512, &[(Q5_K, 3, true), (Q6_K, 40, true), (F16, 5, true), (Q4_1, 1, false)]),
        (1536, &[(Q4_K, 64, false), (Q6_K, 64, false)]),
    ];
    let mut random = Random::new(6);
    for (cols, parts) in stacks {
        let parts = parts
            .iter()
            .map(|&(dtype, rows, has_bias)| {
                let matrix = random.matrix(dtype, rows, cols);
                (matrix, has_bias.then(|| random.values(rows)))
            })
            .collect();
        let stack = Stack { parts };
        for rows in [1, 5, 33].into_iter().take(at_most(2, 3)) {
            check(b, &mut random, &stack, rows);
        }
    }
}

/// Bytes that do not fit the shape are an error, not a panic: they come from files.
pub fn load_refuses_wrong_sizes<B: Backend>(b: &B) {
    let mut random = Random::new(7);
    for dtype in WeightType::ALL {
        let matrix = random.matrix(dtype, 3, 256);
        let host = HostMatrix { dtype, rows: 3, cols: 256, bytes: &matrix.bytes, bias: None };
        assert!(b.load(&[host]).is_ok(), "{dtype}");
        let short = HostMatrix { bytes: &matrix.bytes[1..], ..host };
        assert!(b.load(&[short]).is_err(), "{dtype}: one byte is missing");
        let long = HostMatrix { rows: 2, ..host };
        assert!(b.load(&[long]).is_err(), "{dtype}: one row is too much");
        if dtype.block_len() > 1 {
            let uneven = HostMatrix { cols: 255, ..host };
            assert!(b.load(&[uneven]).is_err(), "{dtype}: half a block");
        }
    }
}
