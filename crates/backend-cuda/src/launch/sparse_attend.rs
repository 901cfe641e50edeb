//! `sparse_attend.cu`: attention to what is picked.

use nuthatch_backend::DeviceError;

use super::sparse::{SparseHeads, SparsePages};
use super::{Address, count, params};
use crate::device::{Device, Kernel};
use crate::kv::PAGE_LEN;
use crate::launch::attend_shape::AttendShape;

params! {
    /// Mirrors `SparseParams`.
    SparseParams {
        heads: SparseHeads,
        pages: SparsePages,
        qkv: Address,
        out: Address,
        rounded: Address,
        partials: Address,
        sums: Address,
        tasks: Address,
        done: Address,
        asked: Address,
        q_stride: u32,
        scale: f32,
        head_tasks: u32,
        is_early: u32,
    }
}

/// Pages of a task at least; `SHORT_CHUNK`.
const CHUNK_PAGES: usize = 4;
/// Rows and heads of a batch; `MAX_NUMBERS`.
pub(crate) const MAX_NUMBERS: usize = 1024;
/// Static shared memory of a block: the tasks.
const STATIC_BYTES: usize = 4 * (MAX_NUMBERS + 1) + 128;
const MERGE_THREADS: u32 = 512;
/// Shared memory that a block leaves to one of `decide`, which runs beside it if a layer is decided about
/// before its turn.
const LEFT_BYTES: usize = 47 * 1024;
/// Unless fewer warps would have room then: so many keep the memory busy.
const WARPS_LEAST: usize = 4;

/// Most tasks of a head that sees so many places, in up to three runs.
pub(crate) fn max_tasks(n_places: usize) -> usize {
    (n_places.div_ceil(PAGE_LEN) + 3).div_ceil(CHUNK_PAGES)
}

/// A block of `sparse_attend`: warps that each have a ring of two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SparseShape {
    lines: usize,
    pub(crate) warps: usize,
}

impl SparseShape {
    /// Those for groups up to eight, and for larger ones, that fit a device's shared memory.
    pub(crate) fn fitting(attend: AttendShape, shared_bytes_max: usize) -> [Self; 2] {
        [8, 16].map(|lines| {
            let one = SparseShape { lines, warps: 1 }.shared_bytes(attend);
            let room = |left| shared_bytes_max.saturating_sub(STATIC_BYTES + left) / one;
            let warps = if room(LEFT_BYTES) < WARPS_LEAST { room(0) } else { room(LEFT_BYTES) };
            SparseShape { lines, warps: warps.clamp(1, 8) }
        })
    }

    pub(crate) fn name(self) -> &'static str {
        if self.lines == 8 { "sparse_attend_8" } else { "sparse_attend_16" }
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self, attend: AttendShape) -> String {
        let SparseShape { lines, warps } = self;
        let (name, shared) = (self.name(), self.shared_bytes(attend));
        format!("SPARSE({name}, {}, {warps}, {shared})", lines / 8)
    }

    /// Dynamic shared memory: the ring, queries, masks and barriers of each warp.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        self.warps * (2 * attend.step_bytes() + attend.query_bytes(self.lines) + 128)
    }
}

/// How picked rows are attended.
pub(crate) enum SparseAttend {
    F32(Kernel),
    Mma { splits: [(SparseShape, Kernel); 2], merge: Kernel },
}

/// Attends to what the rows' heads see.
pub(crate) fn attend(
    device: &Device,
    kernels: &SparseAttend,
    params: &SparseParams,
) -> Result<(), DeviceError> {
    let SparseHeads { n_rows, n_kv_heads, group, .. } = params.heads;
    assert!((n_rows * n_kv_heads) as usize <= MAX_NUMBERS, "no more than a block counts");
    let heads = (n_rows, n_kv_heads * group);
    match kernels {
        SparseAttend::F32(kernel) => {
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: rows are those of the batch, and what they see is in their tables and working
            // sets (the caller's duty).
            unsafe {
                device.launch(kernel, heads, 32, params)
            }
        }
        SparseAttend::Mma { splits: [small, large], merge } => {
            let (shape, kernel) = if group <= 8 { small } else { large };
            let (grid, threads) = ((device.n_multiprocessors(), 1), count(32 * shape.warps));
            // One for each warp if a single sequence sees many pages.
            let n_warps = device.n_multiprocessors() * count(shape.warps);
            let head_tasks = (n_warps / n_kv_heads).max(1);
            let params = &SparseParams { head_tasks, ..*params };
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: as above; there is room for the partial results of all tasks.
            unsafe {
                device.launch(kernel, grid, threads, params)?;
            }
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: the partial results are those of the kernel before.
            unsafe {
                device.launch(merge, heads, MERGE_THREADS, params)
            }
        }
    }
}
