//! `angles.cu`, once per step, and `rope.cu`: rotating heads and writing them to their pages.

use nuthatch_backend::{AttnSpec, DeviceError, RopeStyle};
use nuthatch_types::LayerIdx;

use super::attend::AttendKernels;
use super::{Address, CodeRows, NearPages, count, params};
use crate::Cuda;
use crate::branch::{Branch, LINK_BLOCKS};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};
use crate::kv::CudaKv;
use crate::plan::CudaPlan;

params! {
    /// Mirrors `AnglesParams`.
    AnglesParams {
        positions: Address,
        inv_freq: Address,
        angles: Address,
        rows: u32,
        half: u32,
        factor: f32,
        padding: u32,
    }
}

params! {
    /// Mirrors `RopeParams`.
    RopeParams {
        qkv: Address,
        layer: Address,
        q_norm: Address,
        k_norm: Address,
        angles: Address,
        places: Address,
        table_rows: Address,
        tables: Address,
        head_bytes: u64,
        near: NearPages,
        codes: CodeRows,
        rows: u32,
        n_heads: u32,
        n_kv_heads: u32,
        table_len: u32,
        half: u32,
        is_halves: u32,
        eps: f32,
        defers: u32,
        only_queries: u32,
        near_heads: u32,
    }
}

params! {
    /// Mirrors `WriteFarParams`.
    WriteFarParams {
        layer: Address,
        places: Address,
        table_rows: Address,
        tables: Address,
        head_bytes: u64,
        near: NearPages,
        codes: CodeRows,
        rows: u32,
        n_kv_heads: u32,
        table_len: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `CodePagesParams`.
    CodePagesParams {
        layer: Address,
        slots: Address,
        head_bytes: u64,
        codes: CodeRows,
    }
}

const ANGLES_THREADS: usize = 128;
const WARPS: usize = 4;
const FAR_THREADS: u32 = 512;

/// Cosines and sines of the plan's positions.
pub(crate) fn angles(device: &Device, kernel: &Kernel, plan: &CudaPlan) -> Result<(), DeviceError> {
    let rope = &plan.shape.rope;
    let n = plan.n_rows() * rope.inv_freq.len();
    if n == 0 {
        return Ok(());
    }
    assert!(n * 8 <= plan.angles.bytes(), "the angles fit the plan");
    let params = AnglesParams {
        positions: plan.positions(),
        inv_freq: plan.inv_freq.address(),
        angles: plan.angles.address(),
        rows: count(plan.n_rows()),
        half: count(rope.inv_freq.len()),
        factor: rope.attention_factor,
        padding: 0,
    };
    let blocks = count(n.div_ceil(ANGLES_THREADS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the plan holds the positions and frequencies, and the angles were asserted to fit.
    unsafe {
        device.launch(kernel, (blocks, 1), count(ANGLES_THREADS), &params)
    }
}

/// Normalises and rotates q and k, and writes k and v to the pages of their sequences; or only
/// normalises and rotates q.
pub(crate) fn rope_append(
    device: &Device,
    plan: &CudaPlan,
    layer: LayerIdx,
    spec: &AttnSpec<'_, Cuda>,
    (qkv, kv): (&mut CudaBuf, &mut CudaKv),
    only_queries: bool,
) -> Result<(), DeviceError> {
    let d = kv.page.head_dim as usize;
    // A layer that owns no keys and values has rows of queries only.
    let n_kv_heads = if spec.owns_kv { kv.shape.n_kv_heads } else { 0 };
    let heads = (spec.n_heads + 2 * n_kv_heads) as usize;
    assert!(plan.n_rows() * heads * d <= qkv.len, "the batch's rows are in qkv");
    assert!(plan.shape.kv == kv.shape, "the plan is for this arena");
    assert!(plan.shape.rope.inv_freq.len() * 2 <= d, "no more is rotated than there is");
    let norms = spec.head_norms;
    assert!(norms.is_none_or(|(q, k)| q.len >= d && k.len >= d), "a weight for each element");
    let (near, near_heads) = kv.written_pages(layer.0);
    // Rows that decode may look at pages themselves, if only some heads have copies.
    let sees_pages =
        kv.near_pages(layer.0).frames == 0 && plan.seqs.iter().any(|seq| seq.n_rows == 1);
    let defers = plan.beside.is_some() && !plan.is_decode() && !only_queries && !sees_pages;
    let params = RopeParams {
        qkv: qkv.floats.address(),
        layer: kv.layer_address(layer.0),
        q_norm: norms.map_or(0, |(q, _)| q.floats.address()),
        k_norm: norms.map_or(0, |(_, k)| k.floats.address()),
        angles: plan.angles.address(),
        places: plan.places(),
        table_rows: plan.table_rows(),
        tables: plan.tables,
        head_bytes: kv.layer_head_bytes(layer.0),
        near,
        codes: kv.codes_of(layer.0),
        rows: count(plan.n_rows()),
        n_heads: spec.n_heads,
        n_kv_heads,
        table_len: plan.table_len,
        half: count(plan.shape.rope.inv_freq.len()),
        is_halves: u32::from(plan.shape.rope.style == RopeStyle::Halves),
        eps: spec.eps,
        defers: defers.into(),
        only_queries: u32::from(only_queries),
        near_heads,
    };
    qkv.set_stale();
    let blocks = count((plan.n_rows() * heads).div_ceil(WARPS));
    let kernels = plan.kernels_of(kv, kv.page_of(layer.0));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: rows and heads were asserted to be in qkv; slots come from the plan's tables, whose
    // entries the executor has checked against the arena.
    unsafe { device.launch(&kernels.rope, (blocks, 1), count(32 * WARPS), &params) }?;
    match &plan.beside {
        Some(branch) if defers && n_kv_heads > 0 && kv.is_far(layer.0) => {
            write_far(device, plan, layer, kv, branch)
        }
        _ => Ok(()),
    }
}

/// Writes the batch's keys and values from copies of pages to the pages, while other things run.
fn write_far(
    device: &Device,
    plan: &CudaPlan,
    layer: LayerIdx,
    kv: &CudaKv,
    branch: &Branch,
) -> Result<(), DeviceError> {
    let (near, n_kv_heads) = kv.written_pages(layer.0);
    let params = WriteFarParams {
        layer: kv.layer_address(layer.0),
        places: plan.places(),
        table_rows: plan.table_rows(),
        tables: plan.tables,
        head_bytes: kv.layer_head_bytes(layer.0),
        near,
        codes: kv.codes_of(layer.0),
        rows: count(plan.n_rows()),
        n_kv_heads,
        table_len: plan.table_len,
        padding: 0,
    };
    let (kernel, stream) = (&plan.kernels_of(kv, kv.page).write_far, branch.fork(device, 0)?);
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: slots come from the plan's tables, whose entries the executor has checked against the
    // arena; frames are those that the arena's own list names.
    unsafe { device.launch_on((stream, false), kernel, ((LINK_BLOCKS, 1), FAR_THREADS), &params) }?;
    branch.end(device, 0)
}

/// Makes the codes of so many pages of so many heads.
pub(crate) fn code_pages(
    device: &Device,
    kernels: &AttendKernels,
    params: &CodePagesParams,
    (n_pages, n_heads): (usize, usize),
) -> Result<(), DeviceError> {
    let grid = (count(n_pages), count(n_heads));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: pages and heads are those of the arena, as the caller has seen to; codes lie as pages do.
    unsafe {
        device.launch(&kernels.code_pages, grid, FAR_THREADS, params)
    }
}
