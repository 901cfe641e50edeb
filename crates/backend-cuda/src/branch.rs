//! Streams beside the first: what is queued on them runs meanwhile, also inside a recorded pass.
//!
//! ```text
//!   stream   ──┬── fork ──────────── other work ──────── join ──┬──
//!   branch     └── wait ── what runs meanwhile ── record ───────┘
//! ```
//!
//! There are two, for turns that overlap: one is joined after the next has forked.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};
use nuthatch_backend::DeviceError;

use crate::device::Device;

/// Blocks that bring rows over the link: 0.86 of the copy engine's rate for 4 MiB, 0.92 for 16 and 0.97 for
/// 64, and more blocks bring hardly more (`cuda_bench bring host`, one H200).
pub(crate) const LINK_BLOCKS: u32 = 8;
/// The same where nothing else runs meanwhile: with 32 of them a step of 128K tokens took 10.1 ms instead of
/// 10.7 (`cuda_bench topk 131072 host`).
pub(crate) const LINK_BLOCKS_ALONE: u32 = 32;

/// Streams beside the first, and the events that tie them to it.
pub(crate) struct Branch {
    /// For every other turn.
    streams: [Arc<CudaStream>; 2],
    forked: CudaEvent,
    done: [CudaEvent; 2],
}

impl Branch {
    /// Blocks of an urgent branch come before those of the stream that wait for a place.
    pub(crate) fn new(device: &Device, is_urgent: bool) -> Result<Self, DeviceError> {
        let context = device.context();
        let event = || {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            device.check(context.new_event(Some(flags)))
        };
        let stream = || match is_urgent {
            true => device.check(context.new_stream_with_priority(-1)),
            false => device.check(context.new_stream()),
        };
        let streams = [stream()?, stream()?];
        Ok(Branch { streams, forked: event()?, done: [event()?, event()?] })
    }

    /// What is queued on the turn's branch from now on begins after all that is queued on the stream.
    pub(crate) fn fork(&self, device: &Device, turn: usize) -> Result<&CudaStream, DeviceError> {
        let stream = &self.streams[turn % 2];
        record(device, &self.forked, device.main_stream())?;
        wait(device, stream, &self.forked)?;
        Ok(stream)
    }

    /// The turn's branch, as it is.
    pub(crate) fn stream(&self, turn: usize) -> &CudaStream {
        &self.streams[turn % 2]
    }

    /// Marks the end of a turn on the branch.
    pub(crate) fn end(&self, device: &Device, turn: usize) -> Result<(), DeviceError> {
        record(device, &self.done[turn % 2], &self.streams[turn % 2])
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
