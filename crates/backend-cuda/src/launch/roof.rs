//! `roof.cu`: reading memory, to know how fast that can be.

use nuthatch_backend::DeviceError;

use super::{Address, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `RoofParams`.
    RoofParams {
        source: Address,
        out: Address,
        n: u64,
    }
}

const THREADS: u32 = 256;
/// Blocks that a multiprocessor holds at once.
const BLOCKS: u32 = 8;

/// Reads all floats of a buffer.
pub(crate) fn read_all(
    device: &Device,
    kernel: &Kernel,
    source: &CudaBuf,
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    assert!(out.len > 0, "a place for the sum");
    let params = RoofParams {
        source: source.floats.address(),
        out: out.floats.address(),
        n: (source.len / 4) as u64,
    };
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel reads whole pieces of sixteen bytes inside the source, and writes to the
    // start of out.
    unsafe {
        device.launch(kernel, (BLOCKS * device.n_multiprocessors(), 1), THREADS, &params)
    }
}
