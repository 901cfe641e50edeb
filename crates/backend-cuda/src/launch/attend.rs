//! `attend_split.cu`, `attend_tile.cu`, `attend_wide.cu` and `attend_f32.cu`: attention over pages.

use nuthatch_backend::{AttnSpec, DeviceError, RopeStyle};
use nuthatch_types::{KvDtype, LayerIdx};

use super::{Address, NearPages, count, params};
use crate::Cuda;
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};
use crate::kv::{CudaKv, PAGE_LEN, PageShape};
use crate::plan::CudaPlan;

params! {
    /// Mirrors `Task`: the lines (pairs of a token and a query head) of one block.
    Task {
        /// Of the batch.
        first_row: u32,
        first_line: u32,
        n_lines: u32,
        /// Of the sequence's first row.
        place: u32,
        table_row: u32,
        padding: [u32; 3],
    }
}

params! {
    /// Mirrors `Split`: a row that is alone in its sequence.
    Split {
        /// Of the batch.
        row: u32,
        n_keys: u32,
        table_row: u32,
        /// Where the result of its first chunk goes.
        partial: u32,
    }
}

params! {
    /// Mirrors `Part`: one chunk of a split.
    Part {
        /// Row of the batch, and the chunk from bit 16 on.
        row_chunk: u32,
        n_keys: u32,
        table_row: u32,
        /// Where its result goes.
        partial: u32,
    }
}

params! {
    /// Mirrors `AttendParams`.
    AttendParams {
        qkv: Address,
        layer: Address,
        out: Address,
        rounded: Address,
        partials: Address,
        sums: Address,
        tasks: Address,
        n_tasks: Address,
        tables: Address,
        angles: Address,
        head_bytes: u64,
        near: NearPages,
        q_stride: u32,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        prefetch: u32,
        cuts: Cuts,
        tile_parts: u32,
        is_halves: u32,
        is_contiguous: u32,
        scale: f32,
    }
}

params! {
    /// Mirrors `AttendF32Params`.
    AttendF32Params {
        qkv: Address,
        layer: Address,
        out: Address,
        rounded: Address,
        places: Address,
        table_rows: Address,
        tables: Address,
        head_bytes: u64,
        near: NearPages,
        q_stride: u32,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        scale: f32,
    }
}

/// Keys of a chunk at the beginning of a sequence, further on, and then.
pub(crate) const SMALL_CHUNK: usize = 64;
pub(crate) const MIDDLE_CHUNK: usize = 192;
pub(crate) const LARGE_CHUNK: usize = 512;

params! {
    /// Mirrors `Cuts`: where chunks get longer. Each chunk gives one partial softmax, so bits depend
    /// on them: they are the same for all batches of a model.
    Cuts {
        small_end: u32,
        middle_end: u32,
    }
}

impl Cuts {
    /// Short sequences of models with few KV heads would leave the device empty with longer chunks;
    /// every chunk costs a partial result. Measured on one H200 with `kernels/lab/hopper.py decode`:
    /// `eval/results` has the alternatives.
    pub(crate) fn of(n_kv_heads: u32) -> Self {
        let (small_end, middle_end) = match n_kv_heads {
            0..4 => (8192, 32768),
            4..8 => (2048, 32768),
            _ => (896, 8192),
        };
        Cuts { small_end, middle_end }
    }

    /// Chunks before each end, and of a sequence; as `chunk_of` of `attend.cuh` counts them.
    pub(crate) fn n_chunks(self, n_keys: usize) -> [usize; 3] {
        let small = n_keys.min(self.small_end as usize);
        let middle = n_keys.min(self.middle_end as usize);
        let n_small = small.div_ceil(SMALL_CHUNK);
        let n_middle = n_small + (middle - small).div_ceil(MIDDLE_CHUNK);
        [n_small, n_middle, n_middle + (n_keys - middle).div_ceil(LARGE_CHUNK)]
    }
}

/// Lines of one warp.
const WARP_LINES: usize = 16;
/// Warps of a block of `attend_tile`; `TEAM` there.
const TEAM: usize = 4;
/// Warps of a block of `attend_wide` that compute; `WIDE_TEAM` there.
const WIDE_TEAM: usize = 8;
/// Keys that a stage of `attend_wide` has, and stages of a block; `SPAN` there.
const SPAN: usize = 64;
pub(crate) const WIDE_STAGES: usize = 4;
/// Steps in a block's shared memory of `attend_tile`.
pub(crate) const TILE_STAGES: usize = 2;
/// Keys of one step; `STEP` of `attend.cuh`.
const STEP: usize = 32;

/// The kernels for one KV type and head width.
pub(crate) struct AttendKernels {
    pub(crate) rope: Kernel,
    pub(crate) write_far: Kernel,
    pub(crate) shift: Kernel,
    pub(crate) attend: Attend,
}

/// How attention is computed.
#[expect(clippy::large_enum_variant, reason = "there is one for each kind of pages")]
pub(crate) enum Attend {
    /// One kernel for everything.
    F32(Kernel),
    /// Tensor cores.
    Mma {
        /// Rows alone in their sequences, chunk by chunk; for groups that one of them takes.
        splits: [(SplitShape, Kernel); 2],
        /// Many lines, all chunks.
        tile: Tile,
        /// Bring splits together, in the order of [`MergeShape::ALL`](super::merge::MergeShape::ALL).
        merges: [Kernel; 4],
    },
}

/// A kernel that takes many lines of one sequence.
pub(crate) struct Tile {
    pub(crate) kernel: Kernel,
    pub(crate) shape: TileShape,
}

/// How a block takes many lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    pub(crate) name: &'static str,
    /// Lines of a block.
    pub(crate) lines: usize,
    threads: usize,
    pub(crate) shared_bytes: usize,
}

impl AttendKernels {
    /// Lines that are one task of many.
    pub(crate) fn tile_lines(&self) -> usize {
        match &self.attend {
            // Its tasks are not looked at.
            Attend::F32(_) => WARP_LINES * TEAM,
            Attend::Mma { tile, .. } => tile.shape.lines,
        }
    }
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
}

impl SplitShape {
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

    /// Dynamic shared memory of a block: keys or values of pages, queries, tasks and barriers of each
    /// warp.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        let ring = self.stages * attend.step_bytes() / 2;
        self.warps * (ring + attend.query_bytes(self.lines) + 4 * 32 + 64)
    }
}

/// One layer's attention.
pub(crate) struct Attention<'a> {
    pub(crate) device: &'a Device,
    pub(crate) plan: &'a CudaPlan,
    pub(crate) layer: LayerIdx,
    pub(crate) spec: &'a AttnSpec<'a, Cuda>,
    pub(crate) qkv: &'a CudaBuf,
    pub(crate) kv: &'a CudaKv,
    /// Steps that splits bring to the second-level cache ahead of their use, or 0.
    pub(crate) prefetch: u32,
}

impl Cuda {
    pub(crate) fn attention<'a>(
        &'a self,
        plan: &'a CudaPlan,
        layer: LayerIdx,
        spec: &'a AttnSpec<'a, Cuda>,
        (qkv, kv): (&'a CudaBuf, &'a CudaKv),
    ) -> Attention<'a> {
        let (device, prefetch) = (&self.device, self.l2_prefetch);
        Attention { device, plan, layer, spec, qkv, kv, prefetch }
    }
}

/// Whether attention can also rotate queries and keys, and append keys and values.
pub(crate) fn can_append(plan: &CudaPlan, spec: &AttnSpec<'_, Cuda>, kv: &CudaKv) -> bool {
    let (d, rotated) = (kv.page.head_dim as usize, 2 * plan.shape.rope.inv_freq.len());
    let is_split = plan.n_rows() > 0 && plan.splits().1 as usize == plan.n_rows();
    let has_lanes = d.is_multiple_of(64) && rotated == d && kv.page.dtype != KvDtype::F32;
    is_split && has_lanes && spec.owns_kv && spec.head_norms.is_none() && kv.sparse.is_none()
}

impl Attention<'_> {
    /// `out[t, h] = softmax(scale q[t, h] K) V` for every row of the plan.
    pub(crate) fn run(&self, out: &mut CudaBuf) -> Result<(), DeviceError> {
        self.run_as(false, out)
    }

    /// The same; if it `appends`, queries and keys are not rotated, and keys and values not in their
    /// pages yet, which [`can_append`] has said to be possible.
    pub(crate) fn run_as(&self, appends: bool, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let angles = if appends { self.plan.angles.address() } else { 0 };
        let (plan, kv) = (self.plan, self.kv);
        let (d, n_heads) = (kv.page.head_dim as usize, self.spec.n_heads);
        assert!(plan.n_rows() * self.q_stride() <= self.qkv.len, "the rows are in qkv");
        assert!(plan.n_rows() * n_heads as usize * d <= out.len, "the rows fit out");
        assert!(plan.shape.kv == kv.shape, "the plan is for this arena");
        assert_eq!(plan.group(), self.group() as usize, "the plan is for these heads");
        out.set_fresh(plan.n_rows() * n_heads as usize * d);
        match &plan.kernels_of(kv, kv.page_of(self.layer.0)).attend {
            Attend::F32(kernel) => self.attend_f32(kernel, out),
            Attend::Mma { splits: [small, large], tile, merges } => {
                let (splits, n_splits) = plan.splits();
                if n_splits > 0 {
                    let (shape, kernel) = if self.group() <= 8 { small } else { large };
                    let grid = (self.device.n_multiprocessors(), 1);
                    let threads = count(32 * shape.warps);
                    self.attend(kernel, (plan.split_parts(), 1, angles), (grid, threads), out)?;
                    self.merge(merges, (splits, n_splits), out)?;
                }
                let (tiles, n_tiles) = plan.tiles();
                if n_tiles > 0 {
                    // The plan is made before it is known how pages lie, and so which kernel it is for.
                    let parts = count(plan.tile_lines().div_ceil(tile.shape.lines));
                    let grid = (n_tiles * parts, kv.shape.n_kv_heads);
                    let threads = count(tile.shape.threads);
                    self.attend(&tile.kernel, (tiles, parts, 0), (grid, threads), out)?;
                }
                Ok(())
            }
        }
    }

    /// Floats of a row of q, and of k and v if the layer owns them.
    fn q_stride(&self) -> usize {
        let n_kv_heads = if self.spec.owns_kv { self.kv.shape.n_kv_heads } else { 0 };
        (self.spec.n_heads + 2 * n_kv_heads) as usize * self.kv.page.head_dim as usize
    }

    pub(super) fn group(&self) -> u32 {
        self.spec.n_heads / self.kv.shape.n_kv_heads
    }

    /// What scores are multiplied with: exponents are of two.
    fn scale(&self) -> f32 {
        self.spec.scale * std::f32::consts::LOG2_E
    }

    pub(super) fn window(&self) -> u32 {
        self.spec.window.unwrap_or(u32::MAX)
    }

    /// Tasks of one kind.
    fn attend(
        &self,
        kernel: &Kernel,
        (tasks, tile_parts, angles): (Address, u32, Address),
        (grid, threads): ((u32, u32), u32),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let params = AttendParams {
            qkv: self.qkv.floats.address(),
            layer: self.kv.layer_address(self.layer.0),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            tasks,
            n_tasks: self.plan.n_split_parts(),
            tables: self.plan.tables,
            angles,
            head_bytes: self.kv.layer_head_bytes(self.layer.0),
            near: self.kv.near_pages(self.layer.0),
            q_stride: count(self.q_stride()),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            prefetch: self.prefetch,
            cuts: self.plan.cuts(),
            tile_parts,
            is_halves: u32::from(self.plan.shape.rope.style == RopeStyle::Halves),
            is_contiguous: u32::from(self.device.has_virtual_kv()),
            scale: self.scale(),
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: tasks are rows of the batch, asserted to be in qkv and out; partial results have
        // their places in the plan, counted when the tasks were made; slots come from the plan's
        // tables, whose entries the executor has checked against the arena. What is appended goes to the
        // pages of the rows, which nobody else reads meanwhile.
        unsafe {
            self.device.launch(kernel, grid, threads, &params)
        }
    }

    fn attend_f32(&self, kernel: &Kernel, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let params = AttendF32Params {
            qkv: self.qkv.floats.address(),
            layer: self.kv.layer_address(self.layer.0),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            places: self.plan.places(),
            table_rows: self.plan.table_rows(),
            tables: self.plan.tables,
            head_bytes: self.kv.layer_head_bytes(self.layer.0),
            near: self.kv.near_pages(self.layer.0),
            q_stride: count(self.q_stride()),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            scale: self.scale(),
        };
        let grid = (count(self.plan.n_rows()), self.spec.n_heads);
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: rows and heads were asserted to be in qkv and out; slots are as above.
        unsafe {
            self.device.launch(kernel, grid, 32, &params)
        }
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
        for cuts in
            [Cuts::of(8), Cuts::of(4), Cuts::of(3), Cuts { small_end: 256, middle_end: 256 }]
        {
            let (small, middle) = (cuts.small_end as usize, cuts.middle_end as usize);
            let mut starts: Vec<usize> = (0..small).step_by(SMALL_CHUNK).collect();
            starts.extend((small..middle).step_by(MIDDLE_CHUNK));
            starts.extend((middle..40_000).step_by(LARGE_CHUNK));
            for n_keys in (0..40_000).step_by(7) {
                let before =
                    |end: usize| starts.iter().filter(|&&start| start < n_keys.min(end)).count();
                let expected = [before(small), before(middle), before(usize::MAX)];
                assert_eq!(cuts.n_chunks(n_keys), expected, "{n_keys} keys");
            }
        }
    }
}
