//! `gather_rows`: the rows that logits are wanted for.

use crate::{Backend, BatchLayout};

use super::compare::{download, same_bits, unwritten, upload};
use super::inputs::Random;
use super::rig::small_plan;

/// Rows at the start, at the end, in between, all and none.
pub fn gather_rows_matches<B: Backend>(b: &B) {
    let mut random = Random::new(10);
    let wanted: [(u32, &[u32]); 6] = [
        (1, &[0]),
        (5, &[4]),
        (5, &[0, 2, 3]),
        (4, &[0, 1, 2, 3]),
        (64, &[0, 1, 17, 31, 32, 63]),
        (8, &[]),
    ];
    for (rows, output_rows) in wanted {
        for d in [1, 7, 64, 576] {
            let layout = BatchLayout {
                tokens: vec![0; rows as usize],
                positions: (0..rows).collect(),
                query_start: vec![0, rows],
                kv_len: vec![rows],
                table_row: vec![0],
                output_rows: output_rows.to_vec(),
            };
            let plan = small_plan(b, &layout);
            let x = random.values(rows as usize * d);
            let x_buf = upload(b, &x);
            let mut out = unwritten(b, output_rows.len() * d);
            b.gather_rows(&plan, &x_buf, d, &mut out).expect("gather_rows runs");
            let expected: Vec<f32> = output_rows
                .iter()
                .flat_map(|&row| x[row as usize * d..(row as usize + 1) * d].iter().copied())
                .collect();
            let what = || format!("gather of {output_rows:?} of {rows} rows of {d}");
            same_bits(&download(b, &out, expected.len()), &expected, &what);
        }
    }
}
