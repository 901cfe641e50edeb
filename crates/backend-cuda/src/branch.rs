//! A second stream beside the first: what is queued on it runs meanwhile, also inside a recorded pass.
//!
//! ```text
//!   stream   ──┬── fork ──────────── other work ──────── join ──┬──
//!   branch     └── wait ── what runs meanwhile ── record ───────┘
//! ```

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};
use nuthatch_backend::DeviceError;

use crate::device::Device;

/// Blocks that bring rows over the link: 0.89 to 0.98 of the copy engine's rate from 4 MiB on, where
/// eight reach 0.75 to 0.88, and more no more (`kernels/lab/sparse`, one H200).
pub(crate) const LINK_BLOCKS: u32 = 16;

/// A second stream and the events that tie it to the first.
pub(crate) struct Branch {
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    /// For turns that overlap.
    done: [CudaEvent; 2],
}

impl Branch {
    pub(crate) fn new(device: &Device) -> Result<Self, DeviceError> {
        let context = device.context();
        let event = || {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            device.check(context.new_event(Some(flags)))
        };
        let stream = device.check(context.new_stream())?;
        Ok(Branch { stream, forked: event()?, done: [event()?, event()?] })
    }

    /// What is queued on the branch from now on begins after all that is queued on the stream.
    pub(crate) fn fork(&self, device: &Device) -> Result<&CudaStream, DeviceError> {
        record(device, &self.forked, device.main_stream())?;
        wait(device, &self.stream, &self.forked)?;
        Ok(&self.stream)
    }

    /// Marks the end of a turn on the branch.
    pub(crate) fn end(&self, device: &Device, turn: usize) -> Result<(), DeviceError> {
        record(device, &self.done[turn % 2], &self.stream)
    }

    /// What is queued on the stream from now on begins after the turn's end.
    pub(crate) fn join(&self, device: &Device, turn: usize) -> Result<(), DeviceError> {
        wait(device, device.main_stream(), &self.done[turn % 2])
    }
}

fn record(device: &Device, event: &CudaEvent, stream: &CudaStream) -> Result<(), DeviceError> {
    device.enter()?;
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: both handles are live.
    let recorded = unsafe { sys::cuEventRecord(event.cu_event(), stream.cu_stream()) };
    device.check(recorded.result())
}

fn wait(device: &Device, stream: &CudaStream, event: &CudaEvent) -> Result<(), DeviceError> {
    device.enter()?;
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: both handles are live.
    let waited = unsafe { sys::cuStreamWaitEvent(stream.cu_stream(), event.cu_event(), 0) };
    device.check(waited.result())
}
