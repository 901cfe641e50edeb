//! `matmul_wide.cu`: products with many rows of activations, on Hopper.

use cudarc::driver::sys;
use nuthatch_backend::{DeviceError, WeightType};

use super::matmul::{MatmulParams, cell_bytes};
use super::{Address, count, params};
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `WideParams`.
    WideParams {
        w: sys::CUtensorMap,
        x: sys::CUtensorMap,
        product: MatmulParams,
    }
}

/// Rows of the weight, and of the activations, of a tile; `WIDE` of `matmul_wide.cu`.
const WIDE: usize = 128;
/// Blocks that share rows of activations; `WIDE_PAIR`.
pub(crate) const PAIR: u32 = 2;
/// Cells that the ring holds.
pub(crate) const STAGES: usize = 6;
/// Eight warps that multiply, and one that brings.
const THREADS: u32 = 288;

/// The architecture that has the instruction, and the type that it takes as it is.
pub(crate) fn is_for(device: &Device, dtype: WeightType) -> bool {
    device.describe().1.0 == 9 && dtype == WeightType::BF16
}

/// Dynamic shared memory of a block.
pub(crate) fn shared_bytes(dtype: WeightType) -> usize {
    STAGES * (WIDE / 16 * cell_bytes(dtype) + WIDE * 128 + 16)
}

/// Tiles of pairs of blocks.
fn n_pairs(product: &MatmulParams) -> u32 {
    product.rows.div_ceil(PAIR * count(WIDE)) * product.n_x.div_ceil(count(WIDE))
}

/// Whether a product has tiles for enough of the device. Measured on one H200: with 32 tiles of its 132
/// the tiles for few rows take two thirds of the time, with 48 as much.
pub(crate) fn fills(device: &Device, product: &MatmulParams) -> bool {
    3 * PAIR * n_pairs(product) >= device.n_multiprocessors()
}

/// Queues a product whose parameters the caller has checked.
pub(crate) fn launch(
    device: &Device,
    kernel: &Kernel,
    product: &MatmulParams,
) -> Result<(), DeviceError> {
    let (w, x) = (tiles_of_w(product, WeightType::BF16), tiles_of_x(product));
    let params = WideParams { w: w.map(device)?, x: x.map(device)?, product: *product };
    let blocks = PAIR * n_pairs(product).min(device.n_multiprocessors() / PAIR);
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the packed part, whole by construction, and of x what the map says; it
    // writes `n_x` rows of out, which the caller has asserted to fit.
    unsafe {
        device.launch(kernel, (blocks, 1), THREADS, &params)
    }
}

/// An array that the copy engine takes tiles from; zeros beyond its end.
struct Tiles<const N: usize> {
    dtype: sys::CUtensorMapDataType,
    address: Address,
    /// The innermost first.
    sizes: [u64; N],
    /// Bytes from one of the second dimension to the next, and so on.
    strides: [u64; N],
    tile: [u32; N],
    swizzle: sys::CUtensorMapSwizzle,
}

/// The packed part, by cells of `WIDE` rows.
fn tiles_of_w(product: &MatmulParams, dtype: WeightType) -> Tiles<3> {
    let (cell, cells) = (cell_bytes(dtype) as u64, u64::from(product.cells));
    let (tiles, eights) = (product.rows.div_ceil(16), cell / 8);
    Tiles {
        dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        address: product.packed,
        sizes: [eights, cells, u64::from(tiles)],
        strides: [cell, cell * cells, 0],
        tile: [eights as u32, 1, count(WIDE / 16)],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    }
}

/// The rows of x, by 64 columns of what one block of a pair brings, swizzled as the instruction reads them.
fn tiles_of_x(product: &MatmulParams) -> Tiles<2> {
    let stride = u64::from(product.x_stride);
    Tiles {
        dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        address: product.x,
        sizes: [stride, u64::from(product.n_x)],
        strides: [2 * stride, 0],
        tile: [64, count(WIDE) / PAIR],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

impl<const N: usize> Tiles<N> {
    fn map(&self, device: &Device) -> Result<sys::CUtensorMap, DeviceError> {
        use sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS;
        use sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN;
        use sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as LINES;
        device.enter()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: all pointers are to live arrays of a number for each dimension, and the map is written
        // only.
        let made = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                self.dtype,
                N as u32,
                self.address as *mut std::ffi::c_void,
                self.sizes.as_ptr(),
                self.strides.as_ptr(),
                self.tile.as_ptr(),
                [1; N].as_ptr(),
                PLAIN,
                self.swizzle,
                LINES,
                ZEROS,
            )
        };
        device.check(made.result())?;
        Ok(map)
    }
}
