//! `matmul_wide.cu`: products with many rows of activations, on Hopper.

use cudarc::driver::sys;
use nuthatch_backend::{DeviceError, WeightType};

use super::matmul::{MatmulParams, cell_bytes};
use super::{count, params};
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `WideParams`.
    WideParams {
        x: sys::CUtensorMap,
        product: MatmulParams,
    }
}

/// Rows of the weight, and of the activations, of a tile; `WIDE` of `matmul_wide.cu`.
const WIDE: usize = 128;
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

fn n_tiles(product: &MatmulParams) -> u32 {
    product.rows.div_ceil(count(WIDE)) * product.n_x.div_ceil(count(WIDE))
}

/// Whether a product has tiles for enough of the device. Measured on one H200: with 32 tiles of its 132
/// the tiles for few rows take two thirds of the time, with 48 as much.
pub(crate) fn fills(device: &Device, product: &MatmulParams) -> bool {
    3 * n_tiles(product) >= device.n_multiprocessors()
}

/// Queues a product whose parameters the caller has checked.
pub(crate) fn launch(
    device: &Device,
    kernel: &Kernel,
    product: &MatmulParams,
) -> Result<(), DeviceError> {
    let params = WideParams { x: map_of(device, product)?, product: *product };
    let blocks = n_tiles(product).min(device.n_multiprocessors());
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads the packed part, whole by construction, and of x what the map says; it
    // writes `n_x` rows of out, which the caller has asserted to fit.
    unsafe {
        device.launch(kernel, (blocks, 1), THREADS, &params)
    }
}

/// The rows of x in tiles of 64 columns, swizzled as the instruction reads them; zeros beyond the end.
fn map_of(device: &Device, product: &MatmulParams) -> Result<sys::CUtensorMap, DeviceError> {
    use sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as BF16;
    use sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS;
    use sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN;
    use sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as LINES;
    use sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as SWIZZLE;
    device.enter()?;
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let sizes = [u64::from(product.x_stride), u64::from(product.n_x)];
    let (strides, tile, every) = ([sizes[0] * 2], [64, count(WIDE)], [1, 1]);
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: all pointers are to live arrays of two dimensions' worth, and the map is written only.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            BF16,
            2,
            product.x as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            every.as_ptr(),
            PLAIN,
            SWIZZLE,
            LINES,
            ZEROS,
        )
    };
    device.check(made.result())?;
    Ok(map)
}
