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
        /// Where a split's result goes.
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
/// Warps of a block of `attend_tile`.
const TILE_WARPS: usize = 4;
/// Lines of a block of `attend_tile`.
pub(crate) const TILE_LINES: usize = WARP_LINES * TILE_WARPS;
/// Threads of a block of `merge`.
const MERGE_THREADS: u32 = 128;
/// Keys of one step, and steps in shared memory; `STEP` and `STAGES` of `attend.cu`.
const STEP: usize = 64;
const STAGES: usize = 2;

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
        /// One token, one chunk.
        split: Kernel,
        /// Many lines, all chunks.
        tile: Kernel,
        /// Brings the splits together.
        merge: Kernel,
    },
}

/// Dynamic shared memory of a block of some warps.
pub(crate) fn shared_bytes(page: PageShape, warps: usize) -> usize {
    let parts = if page.dtype == KvDtype::F16 { 2 } else { 3 };
    let queries = page.width() / 16 * parts * 512;
    STAGES * (STEP / PAGE_LEN) * page.bytes() + warps * queries
}

/// The same for a block of `attend_tile`.
pub(crate) fn tile_shared_bytes(page: PageShape) -> usize {
    shared_bytes(page, TILE_WARPS)
}

/// `out[t, h] = softmax(scale q[t, h] K) V` for every row of the plan.
pub(crate) fn attend(
    device: &Device,
    plan: &CudaPlan,
    layer: LayerIdx,
    spec: &AttnSpec<'_, Cuda>,
    (qkv, kv): (&CudaBuf, &CudaKv),
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let (d, n_heads) = (kv.page.head_dim as usize, spec.n_heads);
    let n_kv_heads = kv.shape.n_kv_heads;
    let (rows, group) = (plan.n_rows(), n_heads / n_kv_heads);
    assert!(rows * (n_heads + 2 * n_kv_heads) as usize * d <= qkv.len, "the rows are in qkv");
    assert!(rows * n_heads as usize * d <= out.len, "the rows fit out");
    assert!(plan.page == kv.page, "the plan is for this arena");
    assert_eq!(plan.group(), group as usize, "the plan is for these heads");
    out.set_fresh(rows * n_heads as usize * d);
    let scale = spec.scale * std::f32::consts::LOG2_E;
    let window = spec.window.unwrap_or(u32::MAX);
    let (split, tile, merge) = match &plan.kernels.attend {
        Attend::F32(kernel) => {
            let params = AttendF32Params {
                qkv: qkv.floats.address(),
                layer: kv.layer_address(layer.0),
                out: out.floats.address(),
                rounded: out.rounded.address(),
                positions: plan.positions(),
                table_rows: plan.table_rows(),
                tables: plan.tables,
                head_bytes: kv.head_bytes(),
                table_len: plan.table_len,
                n_kv_heads,
                group,
                window,
                scale,
                padding: 0,
            };
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: rows and heads were asserted to be in qkv and out; slots come from the
            // plan's tables, whose entries the executor has checked against the arena.
            return unsafe { device.launch(kernel, (count(rows), n_heads), 32, &params) };
        }
        Attend::Mma { split, tile, merge } => (split, tile, merge),
    };
    let params = |tasks: Address| AttendParams {
        qkv: qkv.floats.address(),
        layer: kv.layer_address(layer.0),
        out: out.floats.address(),
        rounded: out.rounded.address(),
        partials: plan.partials.address(),
        sums: plan.sums.address(),
        tasks,
        tables: plan.tables,
        head_bytes: kv.head_bytes(),
        table_len: plan.table_len,
        n_kv_heads,
        group,
        window,
        scale,
        padding: 0,
    };
    let (splits, n_splits) = plan.splits();
    if n_splits > 0 {
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: tasks are rows of the batch, asserted to be in qkv; partial results have their
        // places in the plan, counted when the tasks were made; slots are as above.
        unsafe {
            device.launch(split, (n_splits, n_kv_heads), 32, &params(splits))?;
        }
    }
    let (tiles, n_tiles) = plan.tiles();
    if n_tiles > 0 {
        let threads = count(32 * TILE_WARPS);
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: tasks are rows of the batch, asserted to be in qkv and out; slots are as above.
        unsafe {
            device.launch(tile, (n_tiles, n_kv_heads), threads, &params(tiles))?;
        }
    }
    let (merges, n_merges) = plan.merges();
    if n_merges > 0 {
        let params = MergeParams {
            partials: plan.partials.address(),
            sums: plan.sums.address(),
            merges,
            out: out.floats.address(),
            rounded: out.rounded.address(),
            n_kv_heads,
            group,
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: merges are rows of the batch, asserted to fit out, and partial results that the
        // splits have written.
        unsafe {
            device.launch(merge, (n_merges, n_heads), MERGE_THREADS, &params)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_of_usual_heads_fits_a_hopper() {
        for (dtype, head_dim) in
            [(KvDtype::F16, 64), (KvDtype::F16, 128), (KvDtype::Bf16, 128), (KvDtype::Bf16, 256)]
        {
            let bytes = tile_shared_bytes(PageShape { dtype, head_dim });
            assert!(bytes <= 227 * 1024, "{dtype} {head_dim}: {bytes}");
        }
    }
}
