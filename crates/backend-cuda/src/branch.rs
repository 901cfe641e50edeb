//! Streams beside the first: what is queued on them runs meanwhile, also inside a recorded pass.
//!
//! ```text
//!   stream   ──┬── fork ──────────── other work ──────── join ──┬──
//!   branch     └── wait ── what runs meanwhile ── record ───────┘
//! ```
//!
//! There are two, for turns that overlap: one is joined after the next has forked.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{CudaEvent, CudaStream, sys};
use nuthatch_backend::DeviceError;

use crate::device::Device;

/// Blocks that write over the link.
pub(crate) const LINK_BLOCKS: u32 = 8;

/// How rows are brought over the link, and how much of the device choosing late takes. The usual numbers
/// were measured (docs/sparse-speed.md); others are for measuring.
#[derive(Clone, Copy, Debug)]
pub struct LinkTuning {
    /// Threads of a block that brings rows.
    pub threads: u32,
    /// Bytes of a warp's rows that are on their way there.
    pub ring: u32,
    /// Such blocks, beside which something else runs.
    pub blocks: u32,
    /// The same of blocks that have decided,
    pub blocks_decided: u32,
    /// and of rows in eight bits, which have to be expanded, and of which the link carries twice as many.
    pub blocks_expanding: u32,
    /// Of both where nothing does.
    pub blocks_alone: u32,
    /// Blocks that decide about a layer, beside which something else runs, at most.
    pub blocks_deciding: u32,
    /// Blocks that choose for selections that are made late.
    pub late_blocks: u32,
    /// Tokens of sequences that are short, which are decided about one layer after the other.
    pub short: u32,
    /// Whether attention of short sequences asks for pages before the kernel before it has ended: 0 or 1.
    pub early: u32,
}

impl Default for LinkTuning {
    fn default() -> Self {
        LinkTuning {
            threads: 96,
            ring: 7680,
            blocks: 8,
            blocks_decided: 6,
            blocks_expanding: 16,
            blocks_alone: 32,
            blocks_deciding: u32::MAX,
            late_blocks: 64,
            short: 48 * 1024,
            early: 1,
        }
    }
}

/// Streams beside the first, and the events that tie them to it.
pub(crate) struct Branch {
    /// For every other turn.
    streams: [Arc<CudaStream>; 2],
    forked: CudaEvent,
    done: [CudaEvent; 2],
    pub(crate) is_urgent: bool,
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
        Ok(Branch { streams, forked: event()?, done: [event()?, event()?], is_urgent })
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
        self.end_on(device, turn, turn)
    }

    /// The same of a turn that was queued on the branch of another one.
    pub(crate) fn end_on(
        &self,
        device: &Device,
        turn: usize,
        branch: usize,
    ) -> Result<(), DeviceError> {
        record(device, &self.done[turn % 2], &self.streams[branch % 2])
    }

    /// What is queued on the stream from now on begins after the turn's end.
    pub(crate) fn join(&self, device: &Device, turn: usize) -> Result<(), DeviceError> {
        wait(device, device.main_stream(), &self.done[turn % 2])
    }
}

/// Two streams on which selections are made late: one chooses, and the other brings rows meanwhile.
///
/// ```text
///   stream     attend ──┬── other layers ───────────────────────── join ──
///   choosing            └── choose ──┬── wait for the set ── choose the next
///   bringing                         └── bring ──┘────────────────┘
/// ```
pub(crate) struct LateBranch {
    choosing: Arc<CudaStream>,
    bringing: Arc<CudaStream>,
    forked: CudaEvent,
    chosen: CudaEvent,
    /// Of both sets of scratch.
    brought: [CudaEvent; 2],
    /// Turns since the last join.
    n: AtomicUsize,
}

impl LateBranch {
    pub(crate) fn new(device: &Device) -> Result<Self, DeviceError> {
        let context = device.context();
        let flags = Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = || device.check(context.new_event(flags));
        // Few blocks, which would else wait behind the thousands of a product.
        let stream = || device.check(context.new_stream_with_priority(-1));
        let (choosing, bringing, forked, chosen) = (stream()?, stream()?, event()?, event()?);
        let brought = [event()?, event()?];
        Ok(LateBranch { choosing, bringing, forked, chosen, brought, n: AtomicUsize::new(0) })
    }

    /// A turn chooses after all that is queued on the stream, with the scratch of this number.
    pub(crate) fn fork(&self, device: &Device) -> Result<(usize, &CudaStream), DeviceError> {
        let n = self.n.load(Ordering::Relaxed);
        record(device, &self.forked, device.main_stream())?;
        wait(device, &self.choosing, &self.forked)?;
        // Of earlier passes nothing is left, and what is recorded may not wait for what is not.
        if n >= 2 {
            wait(device, &self.choosing, &self.brought[n % 2])?;
        }
        Ok((n % 2, &self.choosing))
    }

    /// It has chosen, and its rows are brought.
    pub(crate) fn pass_on(&self, device: &Device) -> Result<&CudaStream, DeviceError> {
        record(device, &self.chosen, &self.choosing)?;
        wait(device, &self.bringing, &self.chosen)?;
        Ok(&self.bringing)
    }

    /// Its rows are brought.
    pub(crate) fn end(&self, device: &Device) -> Result<(), DeviceError> {
        let n = self.n.fetch_add(1, Ordering::Relaxed);
        record(device, &self.brought[n % 2], &self.bringing)
    }

    /// What is queued on the stream from now on begins after all turns.
    pub(crate) fn join(&self, device: &Device) -> Result<(), DeviceError> {
        match self.n.swap(0, Ordering::Relaxed) {
            0 => Ok(()),
            n => wait(device, device.main_stream(), &self.brought[(n - 1) % 2]),
        }
    }
}

pub(crate) fn record(
    device: &Device,
    event: &CudaEvent,
    stream: &CudaStream,
) -> Result<(), DeviceError> {
    device.enter()?;
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: both handles are live.
    let recorded = unsafe { sys::cuEventRecord(event.cu_event(), stream.cu_stream()) };
    device.check(recorded.result())
}

pub(crate) fn wait(
    device: &Device,
    stream: &CudaStream,
    event: &CudaEvent,
) -> Result<(), DeviceError> {
    device.enter()?;
    #[expect(unsafe_code, reason = "a call of the C interface")]
    // SAFETY: both handles are live.
    let waited = unsafe { sys::cuStreamWaitEvent(stream.cu_stream(), event.cu_event(), 0) };
    device.check(waited.result())
}
