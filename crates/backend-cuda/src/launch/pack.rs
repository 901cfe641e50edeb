//! `pack.cu`: a matrix from the order of its file to the order of the products.

use nuthatch_backend::DeviceError;

use super::{Address, count, params};
use crate::device::{Device, Kernel, Memory};

params! {
    /// Mirrors `PackParams`.
    PackParams {
        file: Address,
        packed: Address,
        row_bytes: u64,
        rows: u32,
        cols: u32,
        cells: u32,
        tiles: u32,
        half: u32,
        padding: u32,
    }
}

const THREADS: usize = 256;

/// A matrix as its file has it, on the device.
pub(crate) struct FileMatrix<'a> {
    pub(crate) bytes: &'a Memory,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_bytes: usize,
    /// Whether the two halves of the rows are interleaved, eight by eight.
    pub(crate) is_gated: bool,
}

/// Packs a matrix into cells of `cell_bytes`.
pub(crate) fn pack(
    device: &Device,
    kernel: &Kernel,
    matrix: &FileMatrix<'_>,
    cell_bytes: usize,
    packed: &Memory,
) -> Result<(), DeviceError> {
    let (cells, tiles) = (matrix.cols.div_ceil(64), matrix.rows.div_ceil(16));
    assert!(matrix.rows * matrix.row_bytes <= matrix.bytes.bytes(), "the rows are there");
    assert!(!matrix.is_gated || matrix.rows.is_multiple_of(16), "halves of whole eights");
    assert!(tiles * cells * cell_bytes <= packed.bytes(), "the cells fit");
    let params = PackParams {
        file: matrix.bytes.address(),
        packed: packed.address(),
        row_bytes: matrix.row_bytes as u64,
        rows: count(matrix.rows),
        cols: count(matrix.cols),
        cells: count(cells),
        tiles: count(tiles),
        half: if matrix.is_gated { count(matrix.rows / 2) } else { 0 },
        padding: 0,
    };
    let blocks = count((tiles * cells * 32).div_ceil(THREADS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the matrix and writes its cells, both asserted to be there.
    unsafe {
        device.launch(kernel, (blocks, 1), count(THREADS), &params)
    }
}
