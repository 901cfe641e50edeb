//! How attention is cut: chunks of keys, lines of a block, and the shared memory that takes.

use nuthatch_types::KvDtype;

use super::params;
use crate::kv::{PAGE_LEN, PageShape};

/// Keys of a chunk at the beginning of a sequence, further on, and then at most.
pub(crate) const SMALL_CHUNK: usize = 64;
pub(crate) const MIDDLE_CHUNK: usize = 192;
pub(crate) const LARGE_CHUNK: usize = 512;

params! {
    /// Mirrors `Cuts`: where chunks get longer. Each chunk gives one partial softmax, so bits depend
    /// on them: they are the same for all batches of a model.
    Cuts {
        small_end: u32,
        middle_end: u32,
        /// Keys of a chunk from there on.
        large: u32,
    }
}

impl Cuts {
    /// Short sequences of models with few KV heads would leave the device empty with longer chunks;
    /// every chunk costs a partial result. Measured on one H200 with `kernels/lab/hopper.py decode`:
    /// `eval/results` has the alternatives.
    pub(crate) fn of(n_kv_heads: u32) -> Self {
        let (small_end, middle_end, large) = match n_kv_heads {
            0..4 => (8192, 32768, LARGE_CHUNK),
            4..8 => (2048, 8192, 384),
            _ => (896, 8192, LARGE_CHUNK),
        };
        Cuts { small_end, middle_end, large: large as u32 }
    }

    /// Chunks before each end, and of a sequence; as `chunk_of` of `attend.cuh` counts them.
    pub(crate) fn n_chunks(self, n_keys: usize) -> [usize; 3] {
        let small = n_keys.min(self.small_end as usize);
        let middle = n_keys.min(self.middle_end as usize);
        let n_small = small.div_ceil(SMALL_CHUNK);
        let n_middle = n_small + (middle - small).div_ceil(MIDDLE_CHUNK);
        [n_small, n_middle, n_middle + (n_keys - middle).div_ceil(self.large as usize)]
    }
}

/// Lines of one warp.
pub(super) const WARP_LINES: usize = 16;
/// Warps of a block of `attend_tile`; `TEAM` there.
pub(super) const TEAM: usize = 4;
/// Warps of a block of `attend_wide` that compute; `WIDE_TEAM` there.
const WIDE_TEAM: usize = 8;
/// Keys that a stage of `attend_wide` has, and stages of a block; `SPAN` there.
const SPAN: usize = 64;
pub(crate) const WIDE_STAGES: usize = 4;
/// Steps in a block's shared memory of `attend_tile`.
pub(crate) const TILE_STAGES: usize = 2;
/// Keys of one step; `STEP` of `attend.cuh`.
const STEP: usize = 32;

/// How a block takes many lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    pub(crate) name: &'static str,
    /// Lines of a block.
    pub(crate) lines: usize,
    pub(super) threads: usize,
    pub(crate) shared_bytes: usize,
}

/// What decides the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttendShape {
    pub(crate) page: PageShape,
    /// Floats of the pages' type that stand for an element of a query, and for a weight of a value;
    /// `PARTS` of `attend.cuh`.
    pub(crate) parts: usize,
    /// Whether a token's key is one run of its page; `ROWS` of `kv.cuh`.
    pub(crate) by_rows: bool,
}

impl AttendShape {
    /// Rounded to the pages' type, or with all bits if `is_exact`.
    pub(crate) fn new(page: PageShape, is_exact: bool) -> Self {
        let parts = match page.dtype {
            // Not taken apart, but there for their kernel's name.
            KvDtype::F32 => 1,
            _ if !is_exact => 1,
            KvDtype::F16 => 2,
            KvDtype::Bf16 | KvDtype::Int8(_) | KvDtype::Fp8(_) => 3,
        };
        AttendShape { page, parts, by_rows: false }
    }

    /// Bytes of the pages of one step.
    pub(crate) fn step_bytes(self) -> usize {
        STEP / PAGE_LEN * self.page.bytes()
    }

    /// Bytes of the queries of a warp of eight or sixteen lines; `Q_BYTES` of `attend.cuh`.
    pub(crate) fn query_bytes(self, lines: usize) -> usize {
        let sets = if lines == 8 { self.parts.div_ceil(2) } else { self.parts };
        self.page.width() / 16 * sets * 512
    }

    /// Dynamic shared memory of a block of `attend_tile`: pages, queries, barriers.
    pub(crate) fn tile_shared_bytes(self) -> usize {
        TILE_STAGES * self.step_bytes() + TEAM * self.query_bytes(WARP_LINES) + 64
    }

    /// The same of `attend_wide`.
    pub(crate) fn wide_shared_bytes(self) -> usize {
        let span = SPAN / PAGE_LEN * self.page.bytes();
        WIDE_STAGES * (span + 16) + WIDE_TEAM * self.query_bytes(WARP_LINES)
    }

    /// How many lines are taken at a time on a device of this generation.
    pub(crate) fn tile(self, capability: i32) -> TileShape {
        let is_plain = !self.by_rows && !self.page.dtype.is_coded();
        let is_wide = self.parts == 1 && matches!(self.page.width(), 64 | 128) && is_plain;
        if capability == 9 && is_wide {
            let (lines, threads) = (WARP_LINES * WIDE_TEAM, 32 * WIDE_TEAM + 128);
            let (name, shared_bytes) = ("attend_wide", self.wide_shared_bytes());
            return TileShape { name, lines, threads, shared_bytes };
        }
        let (lines, threads) = (WARP_LINES * TEAM, 32 * TEAM);
        TileShape { name: "attend_tile", lines, threads, shared_bytes: self.tile_shared_bytes() }
    }
}

/// A block of `attend_split`: warps that each have a ring of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitShape {
    /// Lines of a warp: eight or sixteen.
    pub(crate) lines: usize,
    pub(crate) warps: usize,
    pub(crate) stages: usize,
    /// Blocks of `merge` for which there is room beside one.
    pub(crate) merges: u32,
}

impl SplitShape {
    /// Most of all of them.
    pub(crate) const MAX_WARPS: usize = 12;

    /// Warps and stages, fast ones first: warps hide each other's latencies, stages that of memory.
    const ALL: [(usize, usize); 10] =
        [(12, 3), (8, 4), (7, 3), (6, 3), (4, 4), (4, 3), (3, 3), (2, 3), (2, 2), (1, 2)];

    /// Those for groups up to eight, and for larger ones, that fit a device's shared memory; the
    /// smallest if none does.
    pub(crate) fn fitting(attend: AttendShape, shared_bytes_max: usize) -> [Self; 2] {
        [8, 16].map(|lines| {
            // Codes need registers while they become floats.
            let is_wide = attend.page.dtype.is_coded() && attend.page.width() > 64;
            let all = is_wide.then_some((8, 5)).into_iter().chain(Self::ALL);
            let has_room = lines == 8 && !attend.page.dtype.is_coded() && !attend.by_rows;
            let of = |(warps, stages)| {
                let merges = if has_room && warps <= 8 { 2 } else { 1 };
                SplitShape { lines, warps, stages, merges }
            };
            let fits = |shape: &Self| shape.shared_bytes(attend) <= shared_bytes_max;
            all.map(of).find(fits).unwrap_or(of((1, 2)))
        })
    }

    /// The kernel's name.
    pub(crate) fn name(self) -> &'static str {
        if self.lines == 8 { "attend_split_8" } else { "attend_split_16" }
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self, attend: AttendShape) -> String {
        let SplitShape { lines, warps, stages, merges } = self;
        let (name, shared) = (self.name(), self.shared_bytes(attend));
        format!("SPLIT({name}, {}, {warps}, {stages}, {merges}, {shared})", lines / 8)
    }

    /// Dynamic shared memory of a block: keys or values of pages, queries that are not in registers,
    /// tasks and barriers of each warp.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        let ring = self.stages * attend.step_bytes() / 2;
        let owns_queries = self.lines == 8 && attend.parts == 1 && attend.page.width() <= 128;
        let queries = match owns_queries && !attend.page.dtype.is_coded() {
            true => 0,
            false => attend.query_bytes(self.lines),
        };
        self.warps * (ring + queries + 4 * 32 + 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: usize = 227 * 1024;
    const SMALLEST: usize = 99 * 1024;

    #[test]
    fn a_merge_finds_room_beside_splits() {
        // Of a multiprocessor, less what every block takes by itself, and what the compiler says of `merge`.
        const ROOM: usize = 228 * 1024 - 3 * 1024 - 2 * 2176;
        for head_dim in [64, 128] {
            let attend = AttendShape::new(PageShape { dtype: KvDtype::F16, head_dim }, false);
            for split in SplitShape::fitting(attend, HOPPER) {
                assert!(split.shared_bytes(attend) <= ROOM, "{split:?}, heads of {head_dim}");
            }
        }
    }

    #[test]
    fn shared_memory_of_usual_heads_fits() {
        for (dtype, head_dim) in
            [(KvDtype::F16, 64), (KvDtype::F16, 128), (KvDtype::Bf16, 128), (KvDtype::Bf16, 256)]
        {
            for is_exact in [false, true] {
                let attend = AttendShape::new(PageShape { dtype, head_dim }, is_exact);
                assert!(attend.tile_shared_bytes() <= HOPPER, "{attend:?}");
                for limit in [HOPPER, SMALLEST] {
                    for shape in SplitShape::fitting(attend, limit) {
                        assert!(shape.shared_bytes(attend) <= limit, "{attend:?}: {shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn chunks_are_counted_as_they_are_cut() {
        for cuts in [
            Cuts::of(8),
            Cuts::of(4),
            Cuts::of(3),
            Cuts { small_end: 256, middle_end: 256, large: 512 },
        ] {
            let (small, middle) = (cuts.small_end as usize, cuts.middle_end as usize);
            let mut starts: Vec<usize> = (0..small).step_by(SMALL_CHUNK).collect();
            starts.extend((small..middle).step_by(MIDDLE_CHUNK));
            starts.extend((middle..40_000).step_by(cuts.large as usize));
            for n_keys in (0..40_000).step_by(7) {
                let before =
                    |end: usize| starts.iter().filter(|&&start| start < n_keys.min(end)).count();
                let expected = [before(small), before(middle), before(usize::MAX)];
                assert_eq!(cuts.n_chunks(n_keys), expected, "{n_keys} keys");
            }
        }
    }
}
