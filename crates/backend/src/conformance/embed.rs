//! `embed`: rows of a table, decoded.

use crate::{Backend, BatchLayout, WeightType};

use super::compare::{ROUNDING, Truth, download, unwritten};
use super::inputs::Random;
use super::matmul::Stack;
use super::rig::small_plan;

/// Tokens of the table.
const VOCABULARY: usize = 40;

/// Tables of every type, tokens in any order and repeated, against the format's definition.
///
/// Floats and formats without offsets are one exact product away from their bytes; where an offset
/// is added, the device may round the product first or not.
pub fn embed_matches<B: Backend>(b: &B) {
    let mut random = Random::new(9);
    for dtype in WeightType::ALL {
        for cols in [256, 65, 768] {
            if dtype.row_bytes(cols).is_none() {
                continue;
            }
            let stack = Stack::single(&mut random, dtype, VOCABULARY, cols);
            let matrix = &stack.parts[0].0;
            let table = stack.load(b);
            for rows in [1, 3, 17, 64] {
                let tokens: Vec<u32> = (0..rows).map(|_| random.below(VOCABULARY) as u32).collect();
                let layout = BatchLayout {
                    positions: (0..rows as u32).collect(),
                    query_start: vec![0, rows as u32],
                    kv_len: vec![rows as u32],
                    table_row: vec![0],
                    output_rows: vec![rows as u32 - 1],
                    tokens: tokens.clone(),
                };
                let plan = small_plan(b, &layout);
                let mut out = unwritten(b, rows * cols);
                b.embed(&table, &plan, &mut out).expect("embed runs");

                let mut truth = Truth::default();
                for token in tokens {
                    let offsets = matrix.offsets(token as usize);
                    for (w, offset) in matrix.row(token as usize).into_iter().zip(offsets) {
                        let added = f64::from(w.abs()) + 2.0 * f64::from(offset.abs());
                        let bound = if offset == 0.0 { 0.0 } else { 4.0 * ROUNDING * added };
                        truth.push(f64::from(w), bound);
                    }
                }
                let what = || format!("embed of {rows} tokens, width {cols}, {dtype}");
                truth.check(&download(b, &out, rows * cols), &what);
            }
        }
    }
}
