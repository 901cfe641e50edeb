//! `embed.cu`, and the embedding of `matmul_f32.cu`: rows of a table, decoded.

use nuthatch_backend::DeviceError;

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::Device;
use crate::plan::CudaPlan;
use crate::weight::{CudaWeight, Kernels};

params! {
    /// Mirrors `EmbedParams`.
    EmbedParams {
        packed: Address,
        tokens: Address,
        out: Address,
        d: u32,
        cells: u32,
        last: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `EmbedF32Params`.
    EmbedF32Params {
        table: Address,
        tokens: Address,
        out: Address,
        d: u32,
        last: u32,
    }
}

const THREADS: u32 = 256;

/// `out[t] = table[token[t]]` for each of the plan's tokens.
pub(crate) fn embed(
    device: &Device,
    table: &CudaWeight,
    plan: &CudaPlan,
    out: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let [part] = &table.parts[..] else { panic!("an embedding is one matrix") };
    let d = table.cols;
    assert!(plan.n_rows() * d <= out.len, "the batch's rows fit out");
    plan.check_tokens(table.rows);
    out.set_stale();
    let (grid, last) = ((count(plan.n_rows()), 1), count(table.rows - 1));
    let (tokens, target) = (plan.tokens(), out.floats.address());
    match &part.kernels {
        Kernels::Packed(kernels) => {
            let (packed, cells) = (part.memory.address(), count(d.div_ceil(64)));
            let d = count(d);
            let params = EmbedParams { packed, tokens, out: target, d, cells, last, padding: 0 };
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: no row after the last is read, and the outputs fit, as asserted.
            unsafe {
                device.launch(&kernels.embed, grid, THREADS, &params)
            }
        }
        Kernels::F32(common) => {
            let table = part.memory.address();
            let params = EmbedF32Params { table, tokens, out: target, d: count(d), last };
            #[expect(unsafe_code, reason = "a kernel")]
            // SAFETY: no row after the last is read, and the outputs fit, as asserted.
            unsafe {
                device.launch(&common.embed_f32, grid, THREADS, &params)
            }
        }
    }
}
