//! `norm.cu`: root mean square over rows.

use nuthatch_backend::DeviceError;

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};

params! {
    /// Mirrors `NormParams`.
    NormParams {
        x: Address,
        weight: Address,
        out: Address,
        rounded: Address,
        d: u32,
        eps: f32,
    }
}

/// Threads of a block: enough for four elements each, in whole warps.
pub(crate) fn threads(d: usize) -> u32 {
    count(d.div_ceil(4).next_multiple_of(32)).min(1024)
}

/// `out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight` for `rows` rows.
pub(crate) fn norm(
    device: &Device,
    kernel: &Kernel,
    (x, weight): (&CudaBuf, &CudaBuf),
    (eps, rows): (f32, usize),
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let d = weight.len;
    assert!(rows * d <= x.len, "the rows are in x");
    assert!(rows * d <= out.len, "the rows fit out");
    out.set_fresh(rows * d);
    if rows == 0 {
        return Ok(());
    }
    let params = NormParams {
        x: x.floats.address(),
        weight: weight.floats.address(),
        out: out.floats.address(),
        rounded: out.rounded.address(),
        d: count(d),
        eps,
    };
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: block `t` touches row `t` of x and out, which were asserted to be there.
    unsafe {
        device.launch(kernel, (count(rows), 1), threads(d), &params)
    }
}
