//! `gather.cu`: the rows that logits are wanted for.

use nuthatch_backend::DeviceError;

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel};
use crate::plan::CudaPlan;

params! {
    /// Mirrors `GatherParams`.
    GatherParams {
        x: Address,
        output_rows: Address,
        out: Address,
        d: u32,
        padding: u32,
    }
}

const THREADS: u32 = 256;

/// `out[i] = x[plan.output_rows[i]]`, rows of width `d`.
pub(crate) fn gather_rows(
    device: &Device,
    kernel: &Kernel,
    plan: &CudaPlan,
    (x, d): (&CudaBuf, usize),
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    assert!(plan.n_rows() * d <= x.len, "the batch's rows are in x");
    assert!(plan.n_outputs() * d <= out.len, "the outputs fit out");
    out.set_stale();
    if plan.n_outputs() * d == 0 {
        return Ok(());
    }
    let params = GatherParams {
        x: x.floats.address(),
        output_rows: plan.output_rows(),
        out: out.floats.address(),
        d: count(d),
        padding: 0,
    };
    #[expect(unsafe_code, reason = "a kernel")]
    // SAFETY: the plan's output rows are rows of the batch, checked when it was made.
    unsafe {
        device.launch(kernel, (count(plan.n_outputs()), 1), THREADS, &params)
    }
}
