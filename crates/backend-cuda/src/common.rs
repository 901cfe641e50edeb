//! The kernels that every model needs.

use nuthatch_backend::DeviceError;

use crate::device::{Device, Kernel};

/// The kernels that every model needs.
pub(crate) struct Common {
    pub(crate) norm: Kernel,
    pub(crate) swiglu: Kernel,
    pub(crate) round: Kernel,
    pub(crate) sum: Kernel,
    pub(crate) gather: Kernel,
    pub(crate) copy: Kernel,
    pub(crate) land: Kernel,
    pub(crate) fill: Kernel,
    pub(crate) angles: Kernel,
    pub(crate) draw: Kernel,
    pub(crate) read_all: Kernel,
    pub(crate) matmul_f32: Kernel,
    pub(crate) embed_f32: Kernel,
}

impl Common {
    pub(crate) fn new(device: &Device, cubin: Vec<u8>) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        let kernel = |name| device.kernel(&module, name, 0);
        Ok(Common {
            norm: kernel("norm_rows")?,
            swiglu: kernel("swiglu")?,
            round: kernel("round_rows")?,
            sum: kernel("sum_rows")?,
            gather: kernel("gather_rows")?,
            copy: kernel("copy_pages")?,
            land: kernel("land_pages")?,
            fill: kernel("fill_frames")?,
            angles: kernel("rope_angles")?,
            draw: kernel("draw_tokens")?,
            read_all: kernel("read_all")?,
            matmul_f32: kernel("matmul_f32")?,
            embed_f32: kernel("embed_f32")?,
        })
    }
}
