//! `round.cu`: activations to bf16 for products, in one part or in three whose sum they are.

use nuthatch_backend::DeviceError;

use super::matmul::Target;
use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel, Memory};
use crate::weight::Part;

params! {
    /// Mirrors `RoundParams`.
    RoundParams {
        x: Address,
        out: Address,
        rows: u32,
        cols: u32,
        stride: u32,
        parts: u32,
    }
}

params! {
    /// Mirrors `SumParams`.
    SumParams {
        products: Address,
        bias: Address,
        out: Address,
        rows: u32,
        n: u32,
        parts: u32,
        out_stride: u32,
        out_first: u32,
        is_added: u32,
    }
}

const THREADS: usize = 256;

/// Parts of an activation that hold all its bits.
pub(crate) const EXACT_PARTS: usize = 3;

/// How rows are rounded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounding {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Elements from one row, or part of a row, to the next.
    pub(crate) stride: usize,
    pub(crate) parts: usize,
}

/// Rounds rows of activations.
pub(crate) fn round(
    device: &Device,
    kernel: &Kernel,
    x: &CudaBuf,
    rounding: Rounding,
    out: &Memory,
) -> Result<(), DeviceError> {
    let Rounding { rows, cols, stride, parts } = rounding;
    assert!(rows * cols <= x.len, "the rows are in x");
    assert!(rows * parts * stride * 2 <= out.bytes(), "the rows fit out");
    let params = RoundParams {
        x: x.floats.address(),
        out: out.address(),
        rows: count(rows),
        cols: count(cols),
        stride: count(stride),
        parts: count(parts),
    };
    let blocks = count((rows * stride).div_ceil(THREADS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel touches `rows` rows, which were asserted to be there.
    unsafe {
        device.launch(kernel, (blocks, 1), count(THREADS), &params)
    }
}

/// Brings the products of a part of a weight with each part of the activations together.
pub(crate) fn sum(
    device: &Device,
    kernel: &Kernel,
    (products, part): (&Memory, &Part),
    rows: usize,
    target: &mut Target<'_>,
) -> Result<(), DeviceError> {
    assert!(rows * EXACT_PARTS * part.rows * 4 <= products.bytes(), "the products are there");
    assert!(part.first + part.rows <= target.stride, "the part's outputs are in a row");
    assert!(rows * target.stride <= target.out.len, "the rows fit out");
    let params = SumParams {
        products: products.address(),
        bias: part.bias.as_ref().map_or(0, Memory::address),
        out: target.out.floats.address(),
        rows: count(rows),
        n: count(part.rows),
        parts: count(EXACT_PARTS),
        out_stride: count(target.stride),
        out_first: count(part.first),
        is_added: u32::from(target.is_added),
    };
    let blocks = count((rows * part.rows).div_ceil(THREADS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel touches `rows` rows, which were asserted to be there.
    unsafe {
        device.launch(kernel, (blocks, 1), count(THREADS), &params)
    }
}
