//! `sparse_attend.cu`: attention to what is picked.

use nuthatch_backend::{DeviceError, RowCode};

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
        row_tasks: u32,
        is_early: u32,
    }
}

/// Pages of a task at least; `SHORT_CHUNK`.
const CHUNK_PAGES: usize = 4;
/// Rows and heads of a batch; `MAX_NUMBERS`.
pub(crate) const MAX_NUMBERS: usize = 1024;
/// Static shared memory of a block: the first task of each head, and how long those of a row are.
const STATIC_BYTES: usize = 4 * (2 * MAX_NUMBERS + 1) + 128;
const MERGE_THREADS: u32 = 512;
/// Shared memory that a block leaves to one of `decide`, which runs beside it if a layer is decided about
/// before its turn.
const LEFT_BYTES: usize = 47 * 1024;
/// Unless fewer warps would have room then: so many keep the memory busy.
const WARPS_LEAST: usize = 4;
/// Pages that are on their way to a warp, or computed by it. More of them leave room for fewer warps.
const STAGES: usize = 2;

/// Most tasks of a head that sees so many places, in up to three runs.
pub(crate) fn max_tasks(n_places: usize) -> usize {
    (n_places.div_ceil(PAGE_LEN) + 3).div_ceil(CHUNK_PAGES)
}

/// Registers of a multiprocessor that a block of `decide_beside` leaves: its 512 threads have 72 each.
const LEFT_REGISTERS: usize = 65_536 - 512 * 72;

/// Most warps that have registers beside a block of `decide_beside`, and those of each of their threads. Sums are
/// what most of them are for.
fn registers(lines: usize, attend: AttendShape) -> (usize, usize) {
    let warps = match lines / 8 * attend.page.width() {
        0..=128 => 8,
        129..=256 => 5,
        _ => 3,
    };
    // Threads are given eight at a time.
    (warps, (LEFT_REGISTERS / (32 * warps) / 8 * 8).min(255))
}

/// A block of `sparse_attend`: warps that each have a ring of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SparseShape {
    lines: usize,
    /// Whether rows of working sets are in eight bits.
    is_kept: bool,
    pub(crate) warps: usize,
}

impl SparseShape {
    /// Those for groups up to eight, and for larger ones, that fit a device's shared memory; and both for rows in
    /// eight bits, if those may stay so.
    pub(crate) fn fitting(attend: AttendShape, shared_bytes_max: usize) -> Vec<Self> {
        let all = [(8, false), (16, false), (8, true), (16, true)].into_iter();
        let able = all.filter(|&(_, is_kept)| !is_kept || attend.page.keeps(RowCode::Fp8));
        let fit = |(lines, is_kept)| {
            let one = SparseShape { lines, is_kept, warps: 1 }.shared_bytes(attend);
            let room = |left| shared_bytes_max.saturating_sub(STATIC_BYTES + left) / one;
            let warps = if room(LEFT_BYTES) < WARPS_LEAST { room(0) } else { room(LEFT_BYTES) };
            let (most, _) = registers(lines, attend);
            SparseShape { lines, is_kept, warps: warps.clamp(1, most) }
        };
        able.map(fit).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match (self.lines, self.is_kept) {
            (8, false) => "sparse_attend_8",
            (_, false) => "sparse_attend_16",
            (8, true) => "sparse_attend_kept_8",
            (_, true) => "sparse_attend_kept_16",
        }
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self, attend: AttendShape) -> String {
        let SparseShape { lines, is_kept, warps } = self;
        let (name, shared) = (self.name(), self.shared_bytes(attend));
        let (sets, (_, registers)) = (lines / 8, registers(lines, attend));
        format!("SPARSE({name}, {sets}, {is_kept}, {STAGES}, {warps}, {shared}, {registers})")
    }

    /// Dynamic shared memory: the ring, queries, masks and barriers of each warp.
    pub(crate) fn shared_bytes(self, attend: AttendShape) -> usize {
        // Of queries, as operands, two bytes for each column and part.
        let queries = self.lines * attend.page.width() * 2 * attend.parts;
        self.warps * (STAGES * attend.page.bytes() + queries + 128)
    }
}

/// How picked rows are attended.
pub(crate) enum SparseAttend {
    F32(Kernel),
    /// As [`SparseShape::fitting`] has them.
    Mma {
        splits: Vec<(SparseShape, Kernel)>,
        merge: Kernel,
    },
}

/// Attends to what the rows' heads see; `is_kept` if their working sets are in eight bits.
pub(crate) fn attend(
    device: &Device,
    (kernels, is_kept): (&SparseAttend, bool),
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
        SparseAttend::Mma { splits, merge } => {
            let lines = if group <= 8 { 8 } else { 16 };
            let is_meant = |split: &&(SparseShape, Kernel)| {
                (split.0.lines, split.0.is_kept) == (lines, is_kept)
            };
            let (shape, kernel) =
                splits.iter().find(is_meant).expect("sets are kept so where that can be read");
            let (grid, threads) = ((device.n_multiprocessors(), 1), count(32 * shape.warps));
            // One for each warp if a single sequence sees many pages: the last of each head is a whole one too.
            let n_warps = device.n_multiprocessors() * count(shape.warps);
            let row_tasks = n_warps.saturating_sub(n_kv_heads).max(1);
            let params = &SparseParams { row_tasks, ..*params };
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

#[cfg(test)]
mod tests {
    use nuthatch_types::KvDtype;

    use super::*;
    use crate::kv::PageShape;

    const HOPPER: usize = 227 * 1024;
    const SMALLEST: usize = 99 * 1024;

    #[test]
    fn warps_have_memory_and_registers_beside_a_block_that_decides() {
        for dtype in [KvDtype::F16, KvDtype::Bf16] {
            for head_dim in [24, 64, 96, 128, 256] {
                for is_exact in [false, true] {
                    let attend = AttendShape::new(PageShape { dtype, head_dim }, is_exact);
                    for shape in SparseShape::fitting(attend, HOPPER) {
                        let shared = STATIC_BYTES + shape.shared_bytes(attend);
                        // Wide heads leave no room.
                        let left = if head_dim > 128 { 0 } else { LEFT_BYTES };
                        assert!(shared + left <= HOPPER, "{shape:?} of {head_dim}, {is_exact}");
                        let (most, registers) = registers(shape.lines, attend);
                        assert!(shape.warps <= most && 32 * most * registers <= LEFT_REGISTERS);
                    }
                    for shape in SparseShape::fitting(attend, SMALLEST) {
                        assert!(STATIC_BYTES + shape.shared_bytes(attend) <= SMALLEST, "{shape:?}");
                    }
                }
            }
        }
        // What most models have.
        let attend = AttendShape::new(PageShape { dtype: KvDtype::Bf16, head_dim: 128 }, false);
        assert_eq!(SparseShape::fitting(attend, HOPPER)[0].warps, 8);
        assert_eq!(registers(8, attend), (8, 112));
    }
}
