//! `matmul`: a row's product has the same bits whatever other rows are in the batch.

use crate::{Backend, WeightType};

use super::at_most;
use super::compare::same_bits;
use super::inputs::Random;
use super::matmul::{Stack, activations, added_product, product};

/// Rows of the whole batch.
const ALL: usize = 130;

/// Batches that the whole one is cut into: around every size at which a kernel may change its way.
const CUTS: [(usize, usize); 19] = [
    (0, 1),
    (129, 130),
    (77, 78),
    (0, 2),
    (3, 6),
    (1, 5),
    (10, 15),
    (9, 15),
    (20, 27),
    (21, 29),
    (2, 11),
    (40, 55),
    (1, 17),
    (33, 50),
    (60, 91),
    (64, 97),
    (5, 69),
    (0, 100),
    (1, 130),
];

/// Every weight type: single rows and batches against the batch of all.
pub fn matmul_rows_agree<B: Backend>(b: &B) {
    let mut random = Random::new(8);
    for dtype in WeightType::ALL.into_iter().step_by(at_most(3, 1)) {
        for (n_out, cols) in [(37, 256), (16, 512)].into_iter().take(at_most(1, 2)) {
            let stack = Stack::single(&mut random, dtype, n_out, cols);
            check(b, &mut random, &stack);
        }
    }
    for cols in [7, 65, 100] {
        check(b, &mut random, &Stack::single_f16(cols));
    }
    let mixed = [WeightType::Q4_1, WeightType::F32, WeightType::Q8_0];
    let parts = mixed.map(|dtype| (random.matrix(dtype, 19, 96), Some(random.values(19))));
    check(b, &mut random, &Stack { parts: parts.into() });
}

impl Stack {
    /// A float matrix whose columns no vector divides.
    fn single_f16(cols: usize) -> Self {
        Stack::single(&mut Random::new(cols as u64), WeightType::F16, 21, cols)
    }
}

fn check<B: Backend>(b: &B, random: &mut Random, stack: &Stack) {
    let (cols, n_out) = (stack.cols(), stack.rows());
    let dtype = stack.parts[0].0.dtype;
    let weight = stack.load(b);
    let mut x = activations(random, ALL, cols);
    let before = random.values(ALL * n_out);
    let together = product(b, &weight, &x, (ALL, n_out));
    let added = added_product(b, &weight, &x, ALL, &before);
    for (start, end) in CUTS.into_iter().step_by(at_most(4, 1)) {
        let what =
            |op: &str| format!("{op} of rows {start}..{end} of {ALL}, {n_out} x {cols} {dtype}");
        let shape = (end - start, n_out);
        let part = product(b, &weight, &x[start * cols..end * cols], shape);
        same_bits(&part, &together[start * n_out..end * n_out], &|| what("matmul"));
        let before = &before[start * n_out..end * n_out];
        let part = added_product(b, &weight, &x[start * cols..end * cols], end - start, before);
        same_bits(&part, &added[start * n_out..end * n_out], &|| what("matmul_add"));
    }

    // A row gone wrong spoils itself only.
    let spoiled = 50;
    x[spoiled * cols..(spoiled + 1) * cols].fill(f32::NAN);
    x[spoiled * cols] = f32::INFINITY;
    let beside = product(b, &weight, &x, (ALL, n_out));
    for row in (0..ALL).filter(|&row| row != spoiled) {
        let range = row * n_out..(row + 1) * n_out;
        let what = || format!("matmul of row {row} beside a row of NaN, {n_out} x {cols} {dtype}");
        same_bits(&beside[range.clone()], &together[range], &what);
    }
}
