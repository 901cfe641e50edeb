//! What starting costs: kernels from the disk, and pinned memory of the host.

use std::error::Error;
use std::time::Duration;

use nuthatch_backend::{Backend as _, HostMatrix, PlanShape, RopeSpec, RopeStyle, WeightType};
use nuthatch_backend_cuda::{Cuda, CudaConfig};
use nuthatch_types::{Clock as _, KvDtype, KvShape, KvSlots, SystemClock};

use crate::{Outcome, Report};

/// Slots of 2 MiB each: 16 GiB.
const HOST_SLOTS: u32 = 8192;

const SHAPE: KvShape =
    KvShape { n_layers: 32, n_kv_heads: 8, head_dim: 128, page_len: 16, dtype: KvDtype::F16 };

/// Times a second opening of the device, with every kernel that a model of bf16 weights needs, and
/// an arena with 16 GiB on the host.
pub(crate) fn start(config: &CudaConfig, report: &mut Report) -> Outcome {
    open(config)?;
    let (seconds, cuda) = timed(|| open(config))?;
    report.add("start: the device and its kernels", seconds, 0.0, 0.0);
    let slots = KvSlots { device: 1, host: HOST_SLOTS };
    let (seconds, kv) = timed(|| Ok(cuda.alloc_kv(SHAPE, slots)?))?;
    let bytes = f64::from(HOST_SLOTS) * 16.0 * SHAPE.token_bytes() as f64;
    report.add("start: 16 GiB of pinned host memory", seconds, bytes, 0.0);
    drop(kv);
    Ok(())
}

fn timed<T>(run: impl FnOnce() -> Result<T, Box<dyn Error>>) -> Result<(f64, T), Box<dyn Error>> {
    let clock = SystemClock::start();
    let begin: Duration = clock.now();
    let made = run()?;
    Ok(((clock.now() - begin).as_secs_f64(), made))
}

/// The device with its kernels loaded.
fn open(config: &CudaConfig) -> Result<Cuda, Box<dyn Error>> {
    let cuda = Cuda::open(0, config.clone())?;
    let bytes = [0; 64 * 2];
    cuda.load(&[HostMatrix {
        dtype: WeightType::BF16,
        rows: 1,
        cols: 64,
        bytes: &bytes,
        bias: None,
    }])?;
    let rope =
        RopeSpec { inv_freq: vec![0.01; 64], attention_factor: 1.0, style: RopeStyle::Halves };
    cuda.alloc_plan(&PlanShape {
        max_rows: 1,
        max_seqs: 1,
        max_context: 16,
        n_heads: 32,
        kv: SHAPE,
        rope,
    })?;
    cuda.wait()?;
    Ok(cuda)
}
