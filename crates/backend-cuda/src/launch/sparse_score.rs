//! `sparse_score.cu` and `sparse_decide.cu`: how well places fit, and what is decided from that.

use cudarc::driver::CudaStream;
use nuthatch_backend::DeviceError;
use nuthatch_backend::topk::N_FOLLOWERS;

use super::sparse::{MAX_GROUP, SparseHeads, SparsePages};
use super::{Address, CodeRows, count, params};
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `ScoreParams`.
    ScoreParams {
        qkv: Address,
        digests: Address,
        frame: Address,
        weights: Address,
        raw: Address,
        scores: Address,
        sums: Address,
        digest_head_bytes: u64,
        frame_stride: u64,
        pages: SparsePages,
        stride: u32,
        q_stride: u32,
        group: u32,
        kind: u32,
        width: u32,
        page_bytes: u32,
        scale: f32,
        padding: u32,
    }
}

params! {
    /// Mirrors `Question`.
    Question {
        number: u32,
        row: u32,
        table_row: u32,
        head: u32,
        n: u32,
    }
}

params! {
    /// Mirrors `AskedParams`.
    AskedParams {
        score: ScoreParams,
        asks: Address,
    }
}

params! {
    /// Mirrors `Tally`: what the blocks of a head tell each other; the first three are zero between decisions.
    Tally {
        arrived: [u32; 32],
        digits: [[u32; BINS]; 4],
        ages: [u32; BINS],
        own_digits: [[u32; BINS]; MAX_BLOCKS],
        own_ages: [[u32; BINS]; MAX_BLOCKS],
        n_new: [u32; MAX_BLOCKS],
        edges: [[f32; MAX_GROUP * N_FOLLOWERS]; MAX_BLOCKS],
    }
}

params! {
    /// Mirrors `HeadRule`.
    HeadRule {
        threshold: f32,
        weight: f32,
        soft: f32,
        padding: u32,
    }
}

params! {
    /// Mirrors `DecideParams`.
    DecideParams {
        score: ScoreParams,
        heads: SparseHeads,
        labels: Address,
        rules: Address,
        importances: Address,
        tallies: Address,
        moves: Address,
        codes: CodeRows,
        done: Address,
        percent: f64,
        mark_stride: u64,
        first_head: u32,
        k_min: u32,
        k_max: u32,
        sinks: u32,
        recent: u32,
        working_set: f32,
        max_age: u32,
        aggregate: u32,
        flags: u32,
        fade: u32,
        n_bringing: u32,
        padding: u32,
    }
}

/// Numbers that scores are sorted into; `BINS` of `sparse_decide.cu`.
const BINS: usize = 2048;
/// Blocks that share a head.
const MAX_BLOCKS: usize = 64;
/// `FLAG_REUSES`, `FLAG_WHOLE`, `FLAG_NOTHING`, `FLAG_TOGETHER`, `FLAG_LATE` and
/// `FLAG_LOOKS`.
pub(crate) const REUSES: u32 = 1;
pub(crate) const WHOLE: u32 = 2;
pub(crate) const NOTHING: u32 = 4;
const TOGETHER: u32 = 8;
pub(crate) const LATE: u32 = 16;
pub(crate) const LOOKS: u32 = 32;
/// Heads that every block looks at; `LOOK_MAX`.
const LOOK_MAX: usize = 16;
/// Places of a piece; `PIECE` of `sparse_score.cuh`.
pub(crate) const PIECE: usize = 2048;
/// How keys themselves are called among the kinds of digests.
pub(crate) const SCORE_KEYS: u32 = 3;
/// How bits are called.
pub(crate) const SCORE_SIGNS: u32 = 0;
const SCORE_CHANNELS: u32 = 1;
const SCORE_NIBBLES: u32 = 4;
const THREADS: u32 = 512;
/// Warps of a block of `decide`, each of which may bring rows; `SCORE_WARPS`.
pub(crate) const DECIDE_WARPS: usize = THREADS as usize / 32;
/// Tokens of a page.
const PAGE_LEN: usize = crate::kv::PAGE_LEN;

/// Dynamic shared memory of a block that scores: raw scores of a piece, queries as they meet the digest,
/// slots; `query_words` counts the same.
pub(crate) fn shared_bytes(kind: u32, width: usize, group: usize, head_dim: usize) -> usize {
    let queries = match kind {
        SCORE_SIGNS => group * width / 32,
        SCORE_CHANNELS => group.div_ceil(8) * (width.div_ceil(16) * 128 + 8),
        SCORE_NIBBLES => group.div_ceil(8) * (width.div_ceil(32) * 64 + 16),
        _ => group * head_dim,
    };
    4 * (group * PIECE + queries + PIECE / PAGE_LEN)
}

/// The kernels that answer questions.
pub(crate) struct ScoreKernels {
    pub(crate) pieces: Kernel,
    pub(crate) finish: Kernel,
}

/// Answers `n_asks` questions about up to `n` places each.
pub(crate) fn answer(
    device: &Device,
    kernels: &ScoreKernels,
    params: &AskedParams,
    (n_asks, n): (usize, usize),
) -> Result<(), DeviceError> {
    let grid = (count(n.div_ceil(PIECE)), count(n_asks));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: questions are about rows of the batch and places of their tables, and the scratch has
    // room for `stride` places of each (the caller's duty).
    unsafe {
        device.launch(&kernels.pieces, grid, THREADS, params)?;
    }
    if params.score.kind == SCORE_SIGNS {
        return Ok(());
    }
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: as above.
    unsafe {
        device.launch(&kernels.finish, grid, THREADS, params)
    }
}

/// Blocks of `decide` that can be on the device at once.
pub(crate) fn most_blocks(device: &Device, kernel: &Kernel) -> Result<usize, DeviceError> {
    Ok((device.blocks_at_once(kernel, THREADS)? * device.n_multiprocessors()) as usize)
}

/// Decides about all heads of the rows, with no more blocks than `n_blocks` where they wait for each
/// other, and on a branch if there is one.
pub(crate) fn decide(
    device: &Device,
    kernel: &Kernel,
    params: &DecideParams,
    (n_blocks, branch): (usize, Option<&CudaStream>),
) -> Result<(), DeviceError> {
    let on = branch.map_or((device.main_stream(), true), |branch| (branch, false));
    let n = (params.heads.n_rows * params.heads.n_kv_heads) as usize;
    let n_pieces = params.score.stride as usize / PIECE;
    let mut params = *params;
    let grid = if n <= LOOK_MAX.min(n_blocks) {
        params.flags |= TOGETHER;
        (count(n_blocks.min(n * n_pieces)), 1)
    } else {
        // Blocks count themselves where they know how many there are.
        params.done = 0;
        (count((n_blocks / n).clamp(1, MAX_BLOCKS).min(n_pieces)), count(n))
    };
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: states, labels, marks and scratch have room for these rows and heads and for `stride`
    // places of each, and working sets for all rows that the rules allow (the caller's duty).
    unsafe {
        device.launch_on(on, kernel, (grid, THREADS), &params)
    }
}
