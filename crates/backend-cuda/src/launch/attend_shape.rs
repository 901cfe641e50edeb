//! How attention is cut: chunks of keys, lines of a block, and the shared memory that takes.

use nuthatch_types::KvDtype;

use super::params;
use crate::kv::{PAGE_LEN, PageShape};

/// Keys of a chunk at the beginning of a sequence, further on, and then at most.
pub(crate) const SMALL_CHUNK: usize = 64;
pub(crate) const MIDDLE_CHUNK: usize = 192;
pub(crate) const LARGE_CHUNK: usize = 512;

params! {
    /// Mirrors `Cuts`: how many chunks there are before they get longer. Each chunk gives one partial
    /// softmax, so bits depend on them: they are the same for all batches of a model.
    Cuts {
        n_small: u32,
        n_middle: u32,
        /// Keys of a chunk after those, and how many of them there are before the longest.
        large: u32,
        n_large: u32,
    }
}

impl Cuts {
    /// Short sequences of models with few KV heads would leave the device empty with longer chunks;
    /// every chunk costs a partial result. Measured on one H200 with `kernels/lab/hopper.py decode`:
    /// `eval/results` has the alternatives.
    pub(crate) fn of(n_kv_heads: u32) -> Self {
        let (n_small, n_middle, large, n_large) = match n_kv_heads {
            0..4 => (128, 128, LARGE_CHUNK as u32, 0),
            // Up to 32K all warps have one of them, and with 128K one of the longest.
            4..8 => (32, 32, 384, 64),
            _ => (14, 38, LARGE_CHUNK as u32, 0),
        };
        Cuts { n_small, n_middle, large, n_large }
    }

    /// Keys before chunks get longer.
    fn ends(self) -> [usize; 3] {
        let small_end = self.n_small as usize * SMALL_CHUNK;
        let middle_end = small_end + self.n_middle as usize * MIDDLE_CHUNK;
        [small_end, middle_end, middle_end + (self.n_large * self.large) as usize]
    }

    /// Chunks before each end, and of a sequence; as `chunk_of` of `attend.cuh` counts them.
    pub(crate) fn n_chunks(self, n_keys: usize) -> [usize; 4] {
        let [small, middle, large] = self.ends().map(|end| n_keys.min(end));
        let n_small = small.div_ceil(SMALL_CHUNK);
        let n_middle = n_small + (middle - small).div_ceil(MIDDLE_CHUNK);
        let n_large = n_middle + (large - middle).div_ceil(self.large as usize);
        [n_small, n_middle, n_large, n_large + (n_keys - large).div_ceil(LARGE_CHUNK)]
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

    /// Whether a warp of eight lines has its queries in registers; `OWNS_QUERIES` of `attend_split.cu`.
    fn owns_queries(self) -> bool {
        self.parts == 1 && self.page.width() <= 128 && !self.page.dtype.is_coded()
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

/// Tasks that a warp of splits knows; `QUEUE` of `attend_feed.cuh`.
const QUEUE_BYTES: usize = 8 * 32;

/// A block of `attend_split`: warps that each have a ring of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitShape {
    /// Lines of a warp: eight or sixteen.
    pub(crate) lines: usize,
    pub(crate) warps: usize,
    pub(crate) stages: usize,
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
            let mut shapes = all.map(|(warps, stages)| SplitShape { lines, warps, stages });
            let fits = |shape: &Self| shape.shared_bytes(attend) <= shared_bytes_max;
            shapes.find(fits).unwrap_or(SplitShape { lines, warps: 1, stages: 2 })
        })
    }

    /// The kernel's name.
    pub(crate) fn name(self) -> &'static str {
        if self.lines == 8 { "attend_split_8" } else { "attend_split_16" }
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self, attend: AttendShape) -> String {
        let SplitShape { lines, warps, stages } = self;
        let (name, shared) = (self.name(), self.shared_bytes(attend));
        format!("SPLIT({name}, {}, {warps}, {stages}, {shared})", lines / 8)
    }

    /// Dynamic shared memory of a block: keys or values of pages, queries that are not in registers,
    /// tasks and barriers of each warp.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        let ring = self.stages * attend.step_bytes() / 2;
        let queries = match self.lines == 8 && attend.owns_queries() {
            true => 0,
            false => attend.query_bytes(self.lines),
        };
        self.warps * (ring + queries + QUEUE_BYTES + 64)
    }
}

/// A block of `attend_paced`, which is for more tasks, on devices that have copies of whole runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacedShape {
    pub(crate) name: &'static str,
    pub(crate) warps: usize,
    stages: usize,
}

impl PacedShape {
    /// From that for few tasks, which have longer rings, to that for many.
    pub(crate) const ALL: [Self; 3] = [
        PacedShape { name: "attend_paced_4", warps: 4, stages: 6 },
        PacedShape { name: "attend_paced_6", warps: 6, stages: 4 },
        PacedShape { name: "attend_paced_8", warps: 8, stages: 3 },
    ];

    /// Whether heads are as those that it was measured with.
    pub(crate) fn is_for(attend: AttendShape) -> bool {
        attend.owns_queries() && attend.page.width() > 96 && !attend.by_rows
    }

    /// Which of them is for so many tasks, if any. With few, whole steps of models are slower, because the
    /// products before it are disturbed: measured on one H200 (`docs/decode-attention.md`).
    pub(crate) fn choose(n_tasks: usize, n_multiprocessors: u32) -> Option<usize> {
        match 10 * n_tasks / n_multiprocessors as usize {
            0..35 => None,
            35..45 => Some(0),
            45..62 => Some(1),
            _ => Some(2),
        }
    }

    /// The kernels, for the compiler.
    pub(crate) fn entries(attend: AttendShape) -> String {
        let entry = |of: Self| {
            format!("PACED({}, {}, {}, {})", of.name, of.warps, of.stages, of.shared_bytes(attend))
        };
        if Self::is_for(attend) { Self::ALL.map(entry).join(" ") } else { String::new() }
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        self.warps * (self.stages * attend.step_bytes() / 2 + QUEUE_BYTES + 64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::merge::MergeShape;
    use super::*;

    const HOPPER: usize = 227 * 1024;
    const SMALLEST: usize = 99 * 1024;

    #[test]
    fn a_merge_finds_room_beside_splits() {
        // Of a multiprocessor, less what every block takes by itself, and the merge's fixed array.
        const ROOM: usize = 228 * 1024 - 2 * 1024 - 128;
        for head_dim in [64, 128] {
            let attend = AttendShape::new(PageShape { dtype: KvDtype::F16, head_dim }, false);
            let split = SplitShape::fitting(attend, HOPPER)[0].shared_bytes(attend);
            for merge in MergeShape::ALL {
                assert!(split + merge.shared_bytes() <= ROOM, "{merge:?}, heads of {head_dim}");
            }
        }
    }

    #[test]
    fn two_merges_find_room_beside_paced_splits() {
        // Less what every block takes by itself, and what the compiler says of `attend_turns.cu`.
        const ROOM: usize = 228 * 1024 - 3 * 1024 - 2 * 2176;
        let attend =
            |head_dim| AttendShape::new(PageShape { dtype: KvDtype::F16, head_dim }, false);
        assert!(PacedShape::is_for(attend(128)) && !PacedShape::is_for(attend(64)));
        for shape in PacedShape::ALL {
            assert!(shape.shared_bytes(attend(128)) <= ROOM, "{shape:?}");
        }
    }

    #[test]
    fn long_sequences_and_many_are_paced() {
        let chosen = |n_kv_heads: u32, n_seqs: usize, n_keys: usize| {
            let [.., n_chunks] = Cuts::of(n_kv_heads).n_chunks(n_keys);
            PacedShape::choose(n_seqs * n_chunks * n_kv_heads as usize, 132)
        };
        assert_eq!([chosen(8, 1, 8192), chosen(4, 1, 8192), chosen(8, 2, 2048)], [None; 3]);
        assert_eq!([chosen(4, 1, 32768), chosen(8, 1, 16384), chosen(8, 3, 2048)], [Some(0); 3]);
        assert_eq!([chosen(8, 1, 32768), chosen(4, 1, 65536), chosen(8, 4, 2048)], [Some(1); 3]);
        assert_eq!([chosen(8, 8, 8192), chosen(4, 1, 131_072), chosen(32, 1, 8192)], [Some(2); 3]);
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
        let ends = [[896, 8192, 8192], [2048, 8192, 32768], [8192, 32768, 32768]];
        assert_eq!([8, 4, 3].map(|n| Cuts::of(n).ends()), ends);
        for cuts in [
            Cuts::of(8),
            Cuts::of(4),
            Cuts::of(3),
            Cuts { n_small: 4, n_middle: 0, large: 320, n_large: 7 },
        ] {
            let [small, middle, large] = cuts.ends();
            let mut starts: Vec<usize> = (0..small).step_by(SMALL_CHUNK).collect();
            starts.extend((small..middle).step_by(MIDDLE_CHUNK));
            starts.extend((middle..large).step_by(cuts.large as usize));
            starts.extend((large..40_000).step_by(LARGE_CHUNK));
            for n_keys in (0..40_000).step_by(7) {
                let before =
                    |end: usize| starts.iter().filter(|&&start| start < n_keys.min(end)).count();
                let expected = [before(small), before(middle), before(large), before(usize::MAX)];
                assert_eq!(cuts.n_chunks(n_keys), expected, "{n_keys} keys");
            }
        }
    }
}
