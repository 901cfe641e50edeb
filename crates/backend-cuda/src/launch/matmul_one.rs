//! `matmul_one.cu`: products with a single row of activations, which may be normalised on the way.

use nuthatch_backend::{DeviceError, WeightType};

use super::matmul::{MatmulParams, SEGMENTS, cell_bytes};
use super::{Address, count, norm};
use crate::device::{Device, Kernel};
use crate::weight::Part;

/// Room for a row that is made: rows of so many bytes, and shorter ones.
pub(crate) const ROW_BYTES: usize = 32 * 1024;
/// Bytes of the row that belong to a cell.
const CELL_ROW_BYTES: usize = 128;
/// Room for those of a row that is there: of as many cells as are on their way.
pub(crate) const CELLS_BYTES: usize = SEGMENTS * STAGES_MAX * CELL_ROW_BYTES;
const STAGES_MAX: usize = 8;
/// Of rows of so many bytes, and longer ones, there is room for what is needed only.
const LONG_ROW_BYTES: usize = 4 * 1024;
/// Pieces of four elements of a row that a thread normalises at most.
pub(crate) const PIECES: usize = 8;

const THREADS: usize = 32 * SEGMENTS;

/// What the row is the norm of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normed {
    pub(crate) x: Address,
    pub(crate) weight: Address,
    pub(crate) eps: f32,
}

/// Cells that a warp's ring holds; small ones need more on their way.
fn stages(dtype: WeightType) -> usize {
    if dtype.block_len() == 1 { 5 } else { STAGES_MAX }
}

/// Dynamic shared memory of a block.
pub(crate) fn shared_bytes(dtype: WeightType) -> usize {
    SEGMENTS * stages(dtype) * cell_bytes(dtype) + ROW_BYTES
}

/// The kernel, for the compiler.
pub(crate) fn entry(dtype: WeightType) -> String {
    format!("ONE(matmul_one, {}, {})", stages(dtype), shared_bytes(dtype))
}

/// Whether there is room for a row of a product.
pub(crate) fn takes(product: &MatmulParams) -> bool {
    product.n_x == 1 && product.cells as usize * CELL_ROW_BYTES <= ROW_BYTES
}

/// Whether rows of a part can be normalised on the way.
pub(crate) fn normalises(part: &Part) -> bool {
    part.cols.is_multiple_of(64) && part.cols <= PIECES * THREADS * 4
}

/// Queues a product of a row whose parameters the caller has checked.
pub(crate) fn launch(
    device: &Device,
    kernel: &Kernel,
    product: &MatmulParams,
) -> Result<(), DeviceError> {
    let row_bytes = product.cells as usize * CELL_ROW_BYTES;
    let needed = if product.norm_x == 0 { CELLS_BYTES } else { row_bytes };
    // What a long row does not need is room for somebody who decides and brings rows beside two blocks of this. Of
    // small models more blocks would come at once, and steps take longer.
    let unused = if row_bytes < LONG_ROW_BYTES { 0 } else { ROW_BYTES - needed };
    let kernel = kernel.with_shared_bytes(kernel.shared_bytes() - unused);
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the packed part, whole by construction, and one row, which the caller has
    // asserted to be there; it writes one row of out, asserted to fit.
    unsafe {
        device.launch(&kernel, (product.rows.div_ceil(16), 1), count(THREADS), product)
    }
}

/// The same with the norm of a row.
pub(crate) fn normed(product: &MatmulParams, of: Normed) -> MatmulParams {
    MatmulParams {
        norm_x: of.x,
        norm_weight: of.weight,
        norm_eps: of.eps,
        norm_threads: norm::threads(product.cells as usize * 64),
        ..*product
    }
}
