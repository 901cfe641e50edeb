//! What each kernel takes, measured by events around it while somebody asks.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use nuthatch_types::LayerIdx;

/// One kernel that ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// What it was for.
    pub stage: &'static str,
    /// In which layer, if in one.
    pub layer: Option<LayerIdx>,
    /// The kernel's name.
    pub name: &'static str,
    /// From its beginning to its end, alone on the device.
    pub seconds: f64,
}

/// The kernels since timing began, if it did.
#[derive(Default)]
pub(crate) struct Timing {
    spans: Mutex<Option<Vec<Span>>>,
    stage: Mutex<(&'static str, Option<LayerIdx>)>,
}

struct Span {
    stage: &'static str,
    layer: Option<LayerIdx>,
    name: &'static str,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Timing {
    /// From now on kernels are timed; none of them begins before the one before it has ended.
    pub(crate) fn begin(&self) {
        *self.spans.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Kernels from now on are for this.
    pub(crate) fn begin_stage(&self, stage: &'static str, layer: Option<LayerIdx>) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = (stage, layer);
    }

    /// Whether kernels are timed.
    pub(crate) fn is_on(&self) -> bool {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The moment that the stream has come to, if kernels are timed.
    pub(crate) fn mark(&self, stream: &CudaStream) -> Result<Option<CudaEvent>, DriverError> {
        if !self.is_on() {
            return Ok(None);
        }
        stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map(Some)
    }

    /// Remembers a kernel that was queued between two marks.
    pub(crate) fn push(&self, name: &'static str, begin: CudaEvent, end: CudaEvent) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spans) = &mut *spans {
            let (stage, layer) = *self.stage.lock().unwrap_or_else(PoisonError::into_inner);
            spans.push(Span { stage, layer, name, begin, end });
        }
    }

    /// The kernels in the order in which they were queued; waits for the last.
    pub(crate) fn end(&self) -> Result<Vec<KernelTime>, DriverError> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner).take();
        let time = |Span { stage, layer, name, begin, end }: Span| {
            let seconds = f64::from(begin.elapsed_ms(&end)?) / 1e3;
            Ok(KernelTime { stage, layer, name, seconds })
        };
        spans.unwrap_or_default().into_iter().map(time).collect()
    }
}
