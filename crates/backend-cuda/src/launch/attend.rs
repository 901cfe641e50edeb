//! `attend.cu` and `attend_f32.cu`: attention over pages.

use nuthatch_backend::{AttnSpec, DeviceError};
use nuthatch_types::{KvDtype, LayerIdx};

use super::{Address, count, params};
use crate::Cuda;
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};
use crate::kv::{CudaKv, PAGE_LEN, PageShape};
use crate::plan::CudaPlan;

params! {
    /// Mirrors `Task`: the lines (pairs of a token and a query head) of one block, and its chunks.
    Task {
        /// Of the batch.
        first_row: u32,
        first_line: u32,
        n_lines: u32,
        /// Of the sequence's first row.
        position: u32,
        table_row: u32,
        first_chunk: u32,
        end_chunk: u32,
        /// Where the result of a split's first chunk goes.
        partial: u32,
    }
}

params! {
    /// Mirrors `Merge`: the partial results of one row.
    Merge {
        /// Of the batch.
        row: u32,
        partial: u32,
        n_partials: u32,
        padding: u32,
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
        tables: Address,
        head_bytes: u64,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        scale: f32,
        padding: u32,
    }
}

params! {
    /// Mirrors `MergeParams`.
    MergeParams {
        partials: Address,
        sums: Address,
        merges: Address,
        out: Address,
        rounded: Address,
        n_kv_heads: u32,
        group: u32,
    }
}

params! {
    /// Mirrors `AttendF32Params`.
    AttendF32Params {
        qkv: Address,
        layer: Address,
        out: Address,
        rounded: Address,
        positions: Address,
        table_rows: Address,
        tables: Address,
        head_bytes: u64,
        table_len: u32,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        scale: f32,
        padding: u32,
    }
}

/// Keys that one partial softmax covers; `CHUNK` of `attend.cu`.
pub(crate) const CHUNK: usize = 256;
/// Lines of one warp.
pub(crate) const WARP_LINES: usize = 16;
/// Warps of a block; `TEAM` of `attend.cu`.
const WARPS: usize = 4;
/// Lines of a block of `attend_tile`.
pub(crate) const TILE_LINES: usize = WARP_LINES * WARPS;
/// Threads of a block of `merge`.
const MERGE_THREADS: u32 = 128;
/// Keys of one step; `STEP` of `attend.cu`.
const STEP: usize = 32;
/// Chunks of one batch of `merge`; `BATCH` of `attend.cu`.
const BATCH: usize = 32;

/// The kernels for one KV type and head width.
pub(crate) struct AttendKernels {
    pub(crate) rope: Kernel,
    pub(crate) attend: Attend,
}

/// How attention is computed.
pub(crate) enum Attend {
    /// One kernel for everything.
    F32(Kernel),
    /// Tensor cores.
    Mma {
        /// One token, some chunks.
        split: Kernel,
        /// Many lines, all chunks.
        tile: Kernel,
        /// Brings the splits together.
        merge: Kernel,
    },
}

/// How the warps of a block share a task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Team {
    /// Sets of sixteen lines: one for each warp, or one for all.
    line_sets: usize,
    /// Steps in shared memory.
    pub(crate) stages: usize,
    /// Bytes in which the warps give each other scores.
    scores: usize,
}

/// The team of `attend_split`.
pub(crate) const SPLIT: Team = Team { line_sets: 1, stages: 3, scores: 2 * WARPS * 512 };
/// The team of `attend_tile`.
pub(crate) const TILE: Team = Team { line_sets: WARPS, stages: 2, scores: 0 };

impl Team {
    /// Dynamic shared memory of a block: pages, queries, scores, barriers.
    pub(crate) fn shared_bytes(self, page: PageShape) -> usize {
        let parts = if page.dtype == KvDtype::F16 { 2 } else { 3 };
        let queries = page.width() / 16 * parts * 512;
        let pages = self.stages * (STEP / PAGE_LEN) * page.bytes();
        pages + self.line_sets * queries + self.scores + 64
    }
}

/// Dynamic shared memory of a block of `merge`.
pub(crate) fn merge_shared_bytes(page: PageShape) -> usize {
    2 * BATCH * page.width() * 4
}

/// One layer's attention.
pub(crate) struct Attention<'a> {
    pub(crate) device: &'a Device,
    pub(crate) plan: &'a CudaPlan,
    pub(crate) layer: LayerIdx,
    pub(crate) spec: &'a AttnSpec<'a, Cuda>,
    pub(crate) qkv: &'a CudaBuf,
    pub(crate) kv: &'a CudaKv,
}

impl Attention<'_> {
    /// `out[t, h] = softmax(scale q[t, h] K) V` for every row of the plan.
    pub(crate) fn run(&self, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let (plan, kv) = (self.plan, self.kv);
        let (d, n_heads) = (kv.page.head_dim as usize, self.spec.n_heads);
        let all_heads = (n_heads + 2 * kv.shape.n_kv_heads) as usize;
        assert!(plan.n_rows() * all_heads * d <= self.qkv.len, "the rows are in qkv");
        assert!(plan.n_rows() * n_heads as usize * d <= out.len, "the rows fit out");
        assert!(plan.page == kv.page, "the plan is for this arena");
        assert_eq!(plan.group(), self.group() as usize, "the plan is for these heads");
        out.set_fresh(plan.n_rows() * n_heads as usize * d);
        match &plan.kernels.attend {
            Attend::F32(kernel) => self.attend_f32(kernel, out),
            Attend::Mma { split, tile, merge } => {
                self.attend(split, plan.splits(), out)?;
                self.attend(tile, plan.tiles(), out)?;
                self.merge(merge, out)
            }
        }
    }

    fn group(&self) -> u32 {
        self.spec.n_heads / self.kv.shape.n_kv_heads
    }

    /// What scores are multiplied with: exponents are of two.
    fn scale(&self) -> f32 {
        self.spec.scale * std::f32::consts::LOG2_E
    }

    fn window(&self) -> u32 {
        self.spec.window.unwrap_or(u32::MAX)
    }

    /// Tasks of one kind.
    fn attend(
        &self,
        kernel: &Kernel,
        (tasks, n_tasks): (Address, u32),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        if n_tasks == 0 {
            return Ok(());
        }
        let params = AttendParams {
            qkv: self.qkv.floats.address(),
            layer: self.kv.layer_address(self.layer.0),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            tasks,
            tables: self.plan.tables,
            head_bytes: self.kv.head_bytes(),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            scale: self.scale(),
            padding: 0,
        };
        let (grid, threads) = ((n_tasks, params.n_kv_heads), count(32 * WARPS));
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: tasks are rows of the batch, asserted to be in qkv and out; partial results have
        // their places in the plan, counted when the tasks were made; slots come from the plan's
        // tables, whose entries the executor has checked against the arena.
        unsafe {
            self.device.launch(kernel, grid, threads, &params)
        }
    }

    /// Brings the splits of each row together.
    fn merge(&self, kernel: &Kernel, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let (merges, n_merges) = self.plan.merges();
        if n_merges == 0 {
            return Ok(());
        }
        let params = MergeParams {
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            merges,
            out: out.floats.address(),
            rounded: out.rounded.address(),
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: merges are rows of the batch, asserted to fit out, and partial results that the
        // splits have written.
        unsafe {
            self.device.launch(kernel, (n_merges, self.spec.n_heads), MERGE_THREADS, &params)
        }
    }

    fn attend_f32(&self, kernel: &Kernel, out: &mut CudaBuf) -> Result<(), DeviceError> {
        let params = AttendF32Params {
            qkv: self.qkv.floats.address(),
            layer: self.kv.layer_address(self.layer.0),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            positions: self.plan.positions(),
            table_rows: self.plan.table_rows(),
            tables: self.plan.tables,
            head_bytes: self.kv.head_bytes(),
            table_len: self.plan.table_len,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            scale: self.scale(),
            padding: 0,
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
    use super::*;

    #[test]
    fn shared_memory_of_usual_heads_fits_a_hopper() {
        for (dtype, head_dim) in
            [(KvDtype::F16, 64), (KvDtype::F16, 128), (KvDtype::Bf16, 128), (KvDtype::Bf16, 256)]
        {
            let bytes = TILE.shared_bytes(PageShape { dtype, head_dim });
            assert!(bytes <= 227 * 1024, "{dtype} {head_dim}: {bytes}");
        }
    }
}
