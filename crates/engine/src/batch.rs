//! A plan laid out in rows, in memory that is reused from step to step.
//!
//! ```text
//!   plan.seqs      [ seq 7: 3 tokens ][ seq 9: 1 ][ seq 4: 2 tokens ]
//!   rows            0    1    2         3           4    5
//!   query_start     0                   3           4                6
//!   output_rows               2         3                5      (those that are sampled)
//! ```

use std::ops::Range;

use nuthatch_backend::BatchLayout;
use nuthatch_types::{SeqStep, TokenId};

/// A batch that is being laid out.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    layout: BatchLayout,
}

impl Batch {
    /// A batch with room for `max_rows` rows of `max_seqs` sequences.
    pub(crate) fn with_capacity(max_rows: usize, max_seqs: usize) -> Self {
        Batch {
            layout: BatchLayout {
                tokens: Vec::with_capacity(max_rows),
                positions: Vec::with_capacity(max_rows),
                query_start: Vec::with_capacity(max_seqs + 1),
                kv_len: Vec::with_capacity(max_seqs),
                table_row: Vec::with_capacity(max_seqs),
                output_rows: Vec::with_capacity(max_seqs),
            },
        }
    }

    /// Empties the batch.
    pub(crate) fn clear(&mut self) {
        self.layout.clear();
        self.layout.query_start.push(0);
    }

    /// Adds one sequence's tokens, whose table is in `table_row`.
    pub(crate) fn push(&mut self, step: SeqStep<'_>, table_row: u32) {
        let layout = &mut self.layout;
        let end = step.start + step.tokens.len() as u32;
        layout.tokens.extend(step.tokens.iter().map(|&TokenId(token)| token));
        layout.positions.extend(step.start + step.shift..end + step.shift);
        let n_rows = layout.tokens.len() as u32;
        layout.query_start.push(n_rows);
        layout.kv_len.push(end);
        layout.table_row.push(table_row);
        if step.sample {
            layout.output_rows.push(n_rows - 1);
        }
    }

    /// Asks for these rows instead of those that are sampled.
    pub(crate) fn set_outputs(&mut self, rows: Range<u32>) {
        self.layout.output_rows.clear();
        self.layout.output_rows.extend(rows);
    }

    /// The rows so far.
    pub(crate) fn layout(&self) -> &BatchLayout {
        &self.layout
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::{SeqId, TableChange};

    use super::*;

    #[test]
    fn rows_follow_the_plan() {
        let table = TableChange::default();
        let step = |start, tokens, sample| SeqStep {
            seq: SeqId(0),
            start,
            shift: 0,
            tokens,
            table,
            sample,
        };
        let tokens = [10, 11, 12, 13, 14, 15].map(TokenId);
        let mut batch = Batch::with_capacity(8, 4);
        for _ in 0..2 {
            batch.clear();
            batch.push(step(4, &tokens[..3], true), 2);
            batch.push(step(90, &tokens[3..4], true), 0);
            // A sequence that has dropped 32 tokens.
            batch.push(SeqStep { shift: 32, ..step(0, &tokens[4..], false) }, 1);
            let expected = BatchLayout {
                tokens: vec![10, 11, 12, 13, 14, 15],
                positions: vec![4, 5, 6, 90, 32, 33],
                query_start: vec![0, 3, 4, 6],
                kv_len: vec![7, 91, 2],
                table_row: vec![2, 0, 1],
                output_rows: vec![2, 3],
            };
            assert_eq!(batch.layout(), &expected);
        }
    }
}
