//! What the kernels of top-k attention share, and those that take digests and bring rows:
//! `sparse.cuh`, `sparse_digest.cu`, `sparse_gather.cu`.

use cudarc::driver::CudaStream;
use nuthatch_backend::topk::N_FOLLOWERS;
use nuthatch_backend::{DeviceError, DigestKind};
use nuthatch_types::KvDtype;

use super::sparse_attend::{SparseParams, SparseShape};
use super::sparse_score::{AskedParams, DecideParams, Question, ScoreParams, Tally};
use super::{Address, CodeRows, NearPages, count, params};
use crate::branch::LinkTuning;
use crate::device::{Device, Kernel};
use crate::kv::{PAGE_LEN, PageShape};
use crate::launch::attend_shape::AttendShape;

/// Bytes that working sets are counted by: their pages are whole ones.
const SET_UNIT: usize = 64;

params! {
    /// Mirrors `SparseRow`: a row of the batch that sees what is picked for its heads.
    SparseRow {
        row: u32,
        kv_len: u32,
        table_row: u32,
        state_row: u32,
        marks: Address,
        pages: Address,
    }
}

params! {
    /// Mirrors `HeadState`: what is remembered of one head of one sequence, and what was last decided
    /// about it.
    HeadState {
        has_label: u32,
        cut: u32,
        made_at: u32,
        now: u32,
        n_members: u32,
        n_first: u32,
        first: u32,
        n_pages: u32,
        lookup: u32,
        similarity: f32,
        n_chosen: u32,
        n_moved: u32,
        n_moves: u32,
        n_gone: u32,
        seen_members: u32,
        seen_cut: u32,
    }
}

impl HeadState {
    /// Nothing is remembered; the working set has its place, so many bytes behind the row's pages.
    pub(crate) fn empty(first_byte: usize, n_pages: usize) -> Self {
        HeadState {
            has_label: 0,
            cut: 0,
            made_at: 0,
            now: 0,
            n_members: 0,
            n_first: 0,
            first: count(first_byte / SET_UNIT),
            n_pages: count(n_pages),
            lookup: 0,
            similarity: 0.0,
            n_chosen: 0,
            n_moved: 0,
            n_moves: 0,
            n_gone: 0,
            seen_members: 0,
            seen_cut: 0,
        }
    }
}

params! {
    /// Mirrors `SparseHeads`: rows and states of one layer.
    SparseHeads {
        rows: Address,
        states: Address,
        state_stride: u32,
        n_rows: u32,
        n_kv_heads: u32,
        group: u32,
    }
}

params! {
    /// Mirrors `SparsePages`: where keys and values of one layer are.
    SparsePages {
        layer: Address,
        tables: Address,
        head_bytes: u64,
        near: NearPages,
        table_len: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `DigestParams`.
    DigestParams {
        arena: Address,
        digests: Address,
        frame: Address,
        mean: Address,
        places: Address,
        table_rows: Address,
        tables: Address,
        slots: Address,
        head_bytes: u64,
        near: NearPages,
        digest_head_bytes: u64,
        frame_stride: u64,
        rows: u32,
        table_len: u32,
        kind: u32,
        width: u32,
        page_bytes: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `ReadKeysParams`.
    ReadKeysParams {
        pages: SparsePages,
        out: Address,
        table_row: u32,
        head: u32,
        n: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `GatherRowsParams`.
    GatherRowsParams {
        heads: SparseHeads,
        pages: SparsePages,
        moves: Address,
        mark_stride: u64,
        staged: Address,
        tickets: Address,
        is_closed: Address,
        n_staged: u32,
        first_head: u32,
        stride: u32,
        padding: u32,
        codes: CodeRows,
    }
}

impl GatherRowsParams {
    /// Rows that the device brings by itself, by moves that the host made: `[head][stride]` each.
    pub(crate) fn of_moves(
        (heads, pages): (SparseHeads, SparsePages),
        (moves, stride): (Address, usize),
        codes: CodeRows,
    ) -> Self {
        GatherRowsParams {
            heads,
            pages,
            moves,
            mark_stride: 0,
            staged: 0,
            tickets: 0,
            is_closed: 0,
            n_staged: 0,
            first_head: 0,
            stride: count(stride),
            padding: 0,
            codes,
        }
    }
}

params! {
    /// Mirrors `PostParams`.
    PostParams {
        gather: GatherRowsParams,
        order: Address,
        n_ended: Address,
    }
}

/// Query heads that one key/value head may have.
pub(crate) const MAX_GROUP: usize = 16;
/// Widest frame; `MAX_WIDTH` of `sparse_score.cuh`.
pub(crate) const MAX_WIDTH: usize = 1024;
/// Rows of a block of `digest_keys`; `DIGEST_TOKENS`.
const DIGEST_TOKENS: usize = 8;
const DIGEST_THREADS: u32 = 128;
const READ_THREADS: u32 = 128;
/// Blocks that write addresses of rows; few, because they wait for nothing.
const POST_BLOCKS: u32 = 8;

/// How a kind of digest is called in kernels.
pub(crate) fn kind_number(kind: DigestKind) -> u32 {
    match kind {
        DigestKind::Signs => 0,
        DigestKind::Channels => 1,
        DigestKind::Bounds => 2,
        // 3 are keys themselves.
        DigestKind::Nibbles => 4,
    }
}

/// What the program is told beside the page's shape.
pub(crate) fn constants(
    attend: AttendShape,
    shared_bytes_max: usize,
    tuning: LinkTuning,
) -> Vec<(&'static str, String)> {
    let mut constants = vec![
        ("GATHER_THREADS", tuning.threads.to_string()),
        ("GATHER_RING_BYTES", gather_ring_bytes(attend.page, tuning).to_string()),
        ("RING_BYTES", ring_bytes(attend.page).to_string()),
        ("MAX_GROUP", MAX_GROUP.to_string()),
        ("N_FOLLOWERS", N_FOLLOWERS.to_string()),
        ("MAX_WIDTH", MAX_WIDTH.to_string()),
        ("SPARSE_ROW_SIZE", size_of::<SparseRow>().to_string()),
        ("HEAD_STATE_SIZE", size_of::<HeadState>().to_string()),
        ("DIGEST_PARAMS_SIZE", size_of::<DigestParams>().to_string()),
        ("SET_UNIT", SET_UNIT.to_string()),
        ("READ_KEYS_PARAMS_SIZE", size_of::<ReadKeysParams>().to_string()),
        ("SCORE_PARAMS_SIZE", size_of::<ScoreParams>().to_string()),
        ("QUESTION_SIZE", size_of::<Question>().to_string()),
        ("ASKED_PARAMS_SIZE", size_of::<AskedParams>().to_string()),
        ("TALLY_SIZE", size_of::<Tally>().to_string()),
        ("DECIDE_PARAMS_SIZE", size_of::<DecideParams>().to_string()),
        ("GATHER_ROWS_PARAMS_SIZE", size_of::<GatherRowsParams>().to_string()),
        ("POST_PARAMS_SIZE", size_of::<PostParams>().to_string()),
        ("SPARSE_PARAMS_SIZE", size_of::<SparseParams>().to_string()),
    ];
    if attend.page.dtype != KvDtype::F32 {
        let shapes = SparseShape::fitting(attend, shared_bytes_max).into_iter();
        let entries: Vec<String> = shapes.map(|shape| shape.entry(attend)).collect();
        constants.push(("SPARSE_ENTRIES", entries.join(" ")));
    }
    constants
}

/// Takes the digests of rows, of `n_heads` heads, on a branch if there is one.
pub(crate) fn digest_keys(
    device: &Device,
    kernel: &Kernel,
    params: &DigestParams,
    (n_heads, branch): (u32, Option<&CudaStream>),
) -> Result<(), DeviceError> {
    if params.rows == 0 || n_heads == 0 {
        return Ok(());
    }
    let on = branch.map_or((device.main_stream(), true), |branch| (branch, false));
    let grid = (count((params.rows as usize).div_ceil(DIGEST_TOKENS)), n_heads);
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: rows and heads are those of the arena, and slots come from the plan's tables or were
    // asserted to be in the arena; digests lie as the pages do.
    unsafe {
        device.launch_on(on, kernel, (grid, DIGEST_THREADS), params)
    }
}

/// Reads the keys of the first places of one head as floats.
pub(crate) fn read_keys(
    device: &Device,
    kernel: &Kernel,
    params: &ReadKeysParams,
) -> Result<(), DeviceError> {
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the caller has room for the keys, and the places are in the sequence's table.
    unsafe {
        device.launch(kernel, (params.n, 1), READ_THREADS, params)
    }
}

/// Bytes of a warp's rows on their way; at least one row.
pub(crate) fn ring_bytes(page: PageShape) -> usize {
    (page.bytes() / PAGE_LEN).max(2048)
}

/// The same of kernels that only bring rows: two blocks find room beside two of a product.
pub(crate) fn gather_ring_bytes(page: PageShape, tuning: LinkTuning) -> usize {
    (page.bytes() / PAGE_LEN).max(tuning.ring as usize)
}

/// A kernel that brings rows, or asks for them, threads of its blocks, and bytes of their rings.
pub(crate) struct Gather {
    pub(crate) kernel: Kernel,
    pub(crate) threads: u32,
    pub(crate) rings: usize,
}

impl Gather {
    /// Shared memory for so many rows and heads: the rings, and the first row of each of them.
    pub(crate) fn shared_bytes(rings: usize, n: usize) -> usize {
        rings + 4 * (n + 1)
    }

    /// The kernel, with as much of it as these heads need.
    fn with_room(&self, heads: &SparseHeads) -> Kernel {
        let n = (heads.n_rows * heads.n_kv_heads) as usize;
        self.kernel.with_shared_bytes(Gather::shared_bytes(self.rings, n))
    }
}

/// Asks threads of the host for the rows of all moves, which [`gather_rows`] then waits for.
pub(crate) fn post_rows(
    device: &Device,
    post: &Gather,
    params: &PostParams,
    branch: Option<&CudaStream>,
) -> Result<(), DeviceError> {
    let kernel = post.with_room(&params.gather.heads);
    let on = branch.map_or((device.main_stream(), true), |branch| (branch, false));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: as below; the order has room for as many rows as the parameters say.
    unsafe {
        device.launch_on(on, &kernel, ((POST_BLOCKS, 1), post.threads), params)
    }
}

/// Brings the rows of all moves to their working sets, on so many blocks, and on a branch if there is
/// one.
pub(crate) fn gather_rows(
    device: &Device,
    [plain, codes]: &[Gather; 2],
    params: &GatherRowsParams,
    (n_blocks, branch): (u32, Option<&CudaStream>),
) -> Result<(), DeviceError> {
    let gather = if params.codes.rows == 0 { plain } else { codes };
    let kernel = gather.with_room(&params.heads);
    let on = branch.map_or((device.main_stream(), true), |branch| (branch, false));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: moves name places of the sequences' tables and rows of working sets that have room for
    // them; whoever made them has seen to that.
    unsafe {
        device.launch_on(on, &kernel, ((n_blocks, 1), gather.threads), params)
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::WeightType;

    use super::super::matmul_one;
    use super::*;

    #[test]
    fn two_blocks_that_bring_rows_find_room_beside_two_of_a_product() {
        // Of a multiprocessor, less what every block takes by itself, and fixed arrays: sums of products, and
        // 32 barriers of each warp.
        let tuning = LinkTuning::default();
        let warps = tuning.threads as usize / 32;
        let room = 228 * 1024 - 4 * 1024 - 2 * 128 - 2 * warps * 32 * 8;
        let product = matmul_one::shared_bytes(WeightType::BF16) - matmul_one::ROW_BYTES + 4096 * 2;
        let page = PageShape { dtype: KvDtype::F16, head_dim: 128 };
        let rings = warps * gather_ring_bytes(page, tuning);
        assert!(2 * product + 2 * Gather::shared_bytes(rings, 8) <= room);
    }
}
