//! `swiglu.cu`: the gated activation.

use nuthatch_backend::DeviceError;

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `SwigluParams`.
    SwigluParams {
        gate_up: Address,
        out: Address,
        rounded: Address,
        f: u32,
        rows: u32,
    }
}

const THREADS: usize = 256;

/// `out[t, i] = silu(gate_up[t, i]) * gate_up[t, f + i]`.
pub(crate) fn swiglu(
    device: &Device,
    kernel: &Kernel,
    gate_up: &CudaBuf,
    (f, rows): (usize, usize),
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    assert!(rows * 2 * f <= gate_up.len, "the rows are in gate_up");
    assert!(rows * f <= out.len, "the rows fit out");
    out.set_fresh(rows * f);
    if rows * f == 0 {
        return Ok(());
    }
    let params = SwigluParams {
        gate_up: gate_up.floats.address(),
        out: out.floats.address(),
        rounded: out.rounded.address(),
        f: count(f),
        rows: count(rows),
    };
    let blocks = count((rows * f).div_ceil(THREADS));
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the kernel touches `rows` rows, which were asserted to be there.
    unsafe {
        device.launch(kernel, (blocks, 1), count(THREADS), &params)
    }
}
