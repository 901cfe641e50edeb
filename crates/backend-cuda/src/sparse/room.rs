//! Memory that deciding takes. All of it is there from the start, and is counted before anything is
//! allocated: a sequence has the memory of its table's row, a *seat*, for as long as it runs.
//!
//! ```text
//!   each seat    states, labels, queries that choose late, marks of all places, pages of working sets
//!   once         scores and moves of as many rows as are decided about at a time, partial results
//! ```

use nuthatch_backend::{DeviceError, RowCode};
use nuthatch_types::KvShape;

use crate::device::{Device, Memory};
use crate::kv::{PAGE_LEN, PageShape};
use crate::launch::sparse::{HeadState, SparseRow};
use crate::launch::sparse_attend::{MAX_NUMBERS, max_tasks};
use crate::launch::sparse_score::{PIECE, Tally};

use super::decide::WHAT;

/// Of a layer: what counts blocks that have decided.
pub(super) const DONE_BYTES: usize = 4;

/// Bytes of scratch that rows may need together; more of them are decided about in turns. Guessed.
const SCRATCH_BYTES_MAX: usize = 512 << 20;

/// What decides how much memory deciding takes.
#[derive(Clone, Copy, Debug)]
pub struct DecidingShape {
    /// Shape of the model's KV.
    pub kv: KvShape,
    /// Layers of the model, also those without KV of their own.
    pub n_layers: u32,
    /// Query heads of a layer.
    pub n_heads: u32,
    /// Tokens of a sequence.
    pub max_context: u32,
    /// Sequences at one time.
    pub n_tables: u32,
    /// Rows of the working sets of all heads of a sequence together, at most.
    pub set_rows: u64,
    /// Whether selections may be made late.
    pub is_soft: bool,
    /// What all rows come as from the host, if in eight bits.
    pub code: Option<RowCode>,
}

/// Bytes that deciding takes at most; the rules themselves, a few bytes for each head, are not counted.
pub fn deciding_bytes(shape: &DecidingShape) -> u64 {
    let n_all = shape.n_layers as usize * shape.kv.n_kv_heads as usize;
    // Each head's rows begin in a page of their own, and have one more.
    let set_pages = (shape.set_rows as usize).div_ceil(PAGE_LEN) + 2 * n_all;
    let page = PageShape::of_layer(&shape.kv, 0);
    let room = Room::new(&RoomShape {
        page,
        n_all,
        n_kv_heads: shape.kv.n_kv_heads as usize,
        group: (shape.n_heads / shape.kv.n_kv_heads.max(1)) as usize,
        max_context: shape.max_context as usize,
        n_rows: shape.n_tables as usize,
        set_bytes: set_pages * page.set_bytes(shape.code.is_some_and(|code| page.keeps(code))),
        is_soft: shape.is_soft,
    });
    room.bytes(shape.n_tables as usize) as u64
}

/// The same as the arena knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoomShape {
    pub(super) page: PageShape,
    /// Heads of all layers.
    pub(super) n_all: usize,
    pub(super) n_kv_heads: usize,
    pub(super) group: usize,
    pub(super) max_context: usize,
    /// Rows of a batch.
    pub(super) n_rows: usize,
    /// Bytes of the working sets of a sequence.
    pub(super) set_bytes: usize,
    /// Whether selections may be made late.
    pub(super) is_soft: bool,
}

/// Bytes of everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Places that a sequence may have, whole pieces.
    pub(super) stride: usize,
    /// Rows that are decided about at a time.
    pub(super) n_at_once: usize,
    /// Of each seat.
    pub(super) states: usize,
    pub(super) labels: usize,
    pub(super) asked: usize,
    pub(super) marks: usize,
    pub(super) pages: usize,
    /// So many sets of scratch, each of which has these.
    pub(super) n_sets: usize,
    pub(super) raw: usize,
    pub(super) scores: usize,
    pub(super) score_sums: usize,
    pub(super) tallies: usize,
    pub(super) moves: usize,
    /// One of each.
    pub(super) rows: usize,
    pub(super) partials: usize,
    pub(super) sums: usize,
    pub(super) tasks: usize,
    pub(super) done: usize,
}

impl Room {
    pub(super) fn new(shape: &RoomShape) -> Self {
        let &RoomShape { page, n_all, n_kv_heads, group, max_context, n_rows, set_bytes, is_soft } =
            shape;
        let stride = max_context.next_multiple_of(PIECE);
        let one = n_kv_heads * stride * 4 * (group + 3) + n_kv_heads * size_of::<Tally>();
        let n_at_once = (SCRATCH_BYTES_MAX / one.max(1)).min(MAX_NUMBERS / n_kv_heads.max(1));
        let n_at_once = n_at_once.min(n_rows).max(1);
        let n = n_at_once * n_kv_heads;
        // A head may see everything, in three runs that begin and end within pages.
        let n_tasks = n * max_tasks(max_context + 2 * PAGE_LEN);
        Room {
            stride,
            n_at_once,
            states: n_all * size_of::<HeadState>(),
            labels: n_all * group * page.head_dim as usize * 4,
            asked: if is_soft { n_all * group * page.head_dim as usize * 4 } else { 0 },
            marks: n_all * stride * 8,
            pages: set_bytes,
            // Two for what is decided before or after its turn, which overlaps; one more for the turn.
            n_sets: if is_soft { 3 } else { 2 },
            raw: n * group * stride * 4,
            scores: n * stride * 4,
            score_sums: n * stride / PIECE * group * 8,
            tallies: n * size_of::<Tally>(),
            moves: n * stride * 8,
            rows: n_rows * size_of::<SparseRow>(),
            partials: n_tasks * group * page.width() * 4,
            sums: n_tasks * group * 8,
            tasks: (n + 1) * 4,
            done: n_all / n_kv_heads.max(1) * DONE_BYTES,
        }
    }

    /// Everything together, for so many seats.
    fn bytes(&self, n_seats: usize) -> usize {
        let seat = self.states + self.labels + self.asked + self.marks + self.pages;
        let set = self.raw + self.scores + self.score_sums + self.tallies + self.moves;
        n_seats.saturating_mul(seat)
            + self.n_sets * set
            + self.rows
            + self.partials
            + self.sums
            + self.tasks
            + self.done
    }
}

/// Scratch of one decision.
pub(super) struct Set {
    pub(super) raw: Memory,
    pub(super) scores: Memory,
    pub(super) score_sums: Memory,
    pub(super) tallies: Memory,
    pub(super) moves: Memory,
}

impl Set {
    pub(super) fn new(device: &Device, room: &Room) -> Result<Self, DeviceError> {
        let alloc = |bytes| device.alloc(bytes, WHAT);
        Ok(Set {
            raw: alloc(room.raw)?,
            scores: alloc(room.scores)?,
            score_sums: alloc(room.score_sums)?,
            tallies: alloc(room.tallies)?,
            moves: alloc(room.moves)?,
        })
    }
}

/// Whose memory each seat is: which rules its sequence is decided about by, and whether its heads have a
/// selection.
#[derive(Debug)]
pub(super) struct Seats(Vec<(Option<usize>, bool)>);

impl Seats {
    pub(super) fn new(n: usize) -> Self {
        Seats(vec![(None, false); n])
    }

    /// The heads of this seat are decided about, and choose if there `is_choice`; says whether they have chosen
    /// before, and still have to choose from.
    pub(super) fn choose(&mut self, seat: usize, is_choice: bool) -> bool {
        let has_chosen = &mut self.0[seat].1;
        std::mem::replace(has_chosen, *has_chosen || is_choice) && is_choice
    }

    /// The rules that a seat was last taken by.
    pub(super) fn rules(&self, seat: usize) -> Option<usize> {
        self.0[seat].0
    }

    /// A row of this seat is decided about by these rules; says whether the seat has to be cleared, because
    /// another sequence had it, or other rules.
    pub(super) fn take(&mut self, seat: usize, rules: usize, is_new: bool) -> bool {
        let is_other = self.0[seat].0 != Some(rules) || is_new;
        if is_other {
            self.0[seat] = (Some(rules), false);
        }
        is_other
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::KvDtype;

    use super::*;

    const LLAMA3_8B: KvShape =
        KvShape { n_layers: 32, n_kv_heads: 8, head_dim: 128, page_len: 16, dtype: KvDtype::F16 };

    fn shape(n_tables: u32) -> DecidingShape {
        let set_rows = 256 * 9 * 131_072 / 100;
        DecidingShape {
            kv: LLAMA3_8B,
            n_layers: 32,
            n_heads: 32,
            max_context: 131_072,
            n_tables,
            set_rows,
            is_soft: false,
            code: None,
        }
    }

    #[test]
    fn the_sum_has_all_parts() {
        let seat = deciding_bytes(&shape(2)) - deciding_bytes(&shape(1));
        let states = 256 * 64;
        let (labels, marks) = (256 * 4 * 128 * 4, 256 * 131_072 * 8);
        let pages = (256u64 * 9 * 131_072 / 100).div_ceil(16) + 2 * 256;
        // Two rows instead of one are decided about at a time as well.
        let raw_scores_moves = 8 * 131_072 * (4 * 4 + 4 + 8);
        let sums = 8 * 131_072 / PIECE as u64 * 4 * 8;
        let tallies = 8 * size_of::<Tally>() as u64;
        let tasks = 8 * max_tasks(131_072 + 32) as u64;
        let partials = tasks * 4 * (128 * 4 + 8) + 8 * 4;
        let expected = states
            + labels
            + marks
            + pages * 8192
            + partials
            + size_of::<SparseRow>() as u64
            + 2 * (raw_scores_moves + sums + tallies);
        assert_eq!(seat, expected);
        // Rows in eight bits are half as large, but for two factors each.
        let coded = |n| deciding_bytes(&DecidingShape { code: Some(RowCode::Fp8), ..shape(n) });
        assert_eq!(seat - (coded(2) - coded(1)), pages * (8192 - 4160));
        let int8 = deciding_bytes(&DecidingShape { code: Some(RowCode::Int8), ..shape(2) });
        assert_eq!(int8, deciding_bytes(&shape(2)), "these are expanded");
        // More rows than fit the scratch take turns, so that from then on only seats are added.
        let many = deciding_bytes(&shape(200)) - deciding_bytes(&shape(199));
        assert_eq!(many, states + labels + marks + pages * 8192 + size_of::<SparseRow>() as u64);
    }

    #[test]
    fn choosing_late_has_queries_and_scratch_of_its_own() {
        let soft = |n| DecidingShape { is_soft: true, ..shape(n) };
        let more = |n| deciding_bytes(&soft(n)) - deciding_bytes(&shape(n));
        let raw_scores_moves = 8 * 131_072 * (4 * 4 + 4 + 8);
        let set = raw_scores_moves + 2048 * 8 + 8 * size_of::<Tally>() as u64;
        assert_eq!(more(1), 256 * 4 * 128 * 4 + set);
        assert_eq!(more(2), 2 * more(1));
    }

    #[test]
    fn a_seat_is_cleared_for_others_only() {
        let mut seats = Seats::new(2);
        assert!(seats.take(1, 0, false), "nobody was there");
        assert!(!seats.take(1, 0, false));
        assert!(seats.take(1, 0, true), "another sequence");
        assert!(seats.take(1, 3, false), "other rules");
        assert!(!seats.take(1, 3, false));
        assert!(seats.take(0, 3, false), "nobody was there either");
        assert!(!seats.choose(0, false), "nothing to choose from");
        assert!(!seats.choose(0, true), "for the first time");
        assert!(seats.choose(0, true));
        assert!(!seats.choose(0, false) && seats.choose(0, true));
        assert!(seats.take(0, 3, true) && !seats.choose(0, true), "another sequence");
    }
}
