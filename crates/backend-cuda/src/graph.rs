//! Passes recorded as CUDA graphs: what was queued kernel by kernel is queued again by one call.
//!
//! A pass is recorded the second time that a batch of its shape comes: the first time allocates what
//! products need, and a batch of a shape that never comes again is not worth recording.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::{CudaContext, result, sys};
use nuthatch_backend::{DeviceError, Pass};

use crate::Cuda;
use crate::device::Device;
use crate::kv::CudaKv;
use crate::plan::CudaPlan;

/// Rows of the largest batch that is recorded; queuing kernels one by one costs larger ones little.
/// Guessed.
const MAX_ROWS: usize = 64;

/// Shapes that are remembered; batches whose rows end at different times have many.
const MAX_SHAPES: usize = 128;

/// A run of kernels, queued by one call. The memory that they use must be there when it is.
struct Graph {
    exec: sys::CUgraphExec,
    context: Arc<CudaContext>,
}

#[expect(unsafe_code, reason = "a handle of the driver")]
// SAFETY: the driver's handles belong to no thread, and only one thread at a time has this one.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            #[expect(unsafe_code, reason = "a handle of the driver")]
            // SAFETY: made in `Recordings::end`, and destroyed here only; what is queued goes on.
            let destroyed = unsafe { result::graph::exec_destroy(self.exec) };
            let _ = destroyed;
        }
    }
}

/// What decides which kernels a pass queues, and with which parameters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PassKey {
    pub(crate) n_rows: usize,
    /// Which kernel attends.
    pub(crate) paced: [Option<usize>; 2],
    /// Rules, and how many rows the device decides about by them.
    pub(crate) deciding: Vec<(usize, usize)>,
    /// Whether they are served by the selections that there are.
    pub(crate) is_served: bool,
    /// Whether their sequences are short.
    pub(crate) is_short: bool,
    /// Where the tables are, and how long each is.
    pub(crate) tables: (u64, u32),
    /// Where the arena is, and how many slots it has.
    pub(crate) arena: (u64, u32),
    /// Which scratch of products is in use.
    pub(crate) scratch: u64,
    /// Tokens that it chooses, and where it says how.
    pub(crate) draws: (usize, u64),
}

/// What a pass has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Queue the kernels.
    Queue,
    /// Queue the kernels, which are recorded.
    Record,
    /// Queue the recording.
    Replay,
}

/// The passes of one plan.
#[derive(Default)]
pub(crate) struct Recordings {
    /// Shapes that have come, with their recordings from the second time on.
    known: BTreeMap<PassKey, Option<Graph>>,
    recording: Option<PassKey>,
}

impl Recordings {
    /// Begins a pass; true if it was recorded, and is queued now.
    pub(crate) fn begin(&mut self, device: &Device, key: PassKey) -> Result<bool, DeviceError> {
        // What was recorded with other scratch would write to memory that is somebody else's.
        self.known.retain(|known, _| known.scratch == key.scratch);
        match self.step(&key) {
            Step::Queue => Ok(false),
            Step::Record => {
                self.recording = Some(key);
                let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
                #[expect(unsafe_code, reason = "a call of the C interface")]
                // SAFETY: the stream is live, and nothing else is recorded on it.
                let begun = unsafe { result::stream::begin_capture(device.stream(), mode) };
                device.check(begun)?;
                Ok(false)
            }
            Step::Replay => {
                let graph = self.known.get(&key).and_then(Option::as_ref);
                replay(device, graph.expect("the step was decided by this graph"))?;
                Ok(true)
            }
        }
    }

    /// Ends a pass that was queued kernel by kernel. If it was recorded, nothing has run yet.
    pub(crate) fn end(&mut self, device: &Device) -> Result<(), DeviceError> {
        let Some(key) = self.recording.take() else { return Ok(()) };
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the stream is live.
        let captured = unsafe { result::stream::end_capture(device.stream()) };
        let recorded = device.check(captured)?;
        let mut exec = std::ptr::null_mut();
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the recording is live, and the pointer is to a live handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, recorded, 0) };
        device.check(made.result())?;
        let graph = Graph { exec, context: device.context() };
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: nobody has the recording after this; what was made of it stands alone.
        let destroyed = unsafe { result::graph::destroy(recorded) };
        device.check(destroyed)?;
        replay(device, &graph)?;
        self.known.insert(key, Some(graph));
        Ok(())
    }

    fn step(&mut self, key: &PassKey) -> Step {
        if key.n_rows > MAX_ROWS {
            return Step::Queue;
        }
        match self.known.get(key) {
            None => {
                if self.known.len() >= MAX_SHAPES {
                    self.known.clear();
                }
                self.known.insert(key.clone(), None);
                Step::Queue
            }
            Some(None) => Step::Record,
            Some(Some(_)) => Step::Replay,
        }
    }
}

impl Cuda {
    /// Queues the pass if it was recorded, and else begins to record it if it is to be.
    pub(crate) fn begin_recording(
        &self,
        plan: &mut CudaPlan,
        kv: &CudaKv,
    ) -> Result<Pass, DeviceError> {
        let is_beside = match &kv.sparse {
            Some(sparse) if plan.is_decode() => sparse.digests_may_wait(),
            Some(_) => kv.near.is_some(),
            None => false,
        };
        if is_beside {
            plan.begin_beside(&self.device)?;
        }
        self.prepare_near(plan, kv)?;
        if self.is_eager.load(Ordering::Relaxed) || self.device.timing.is_on() || !plan.is_decode()
        {
            return Ok(Pass::Needed);
        }
        let key = PassKey {
            n_rows: plan.n_rows(),
            paced: [plan.all().paced, plan.rest().paced],
            deciding: plan.deciding.clone(),
            is_served: plan.is_served,
            is_short: plan.is_short,
            tables: (plan.tables, plan.table_len),
            arena: (kv.head_address(0), kv.slots.device),
            scratch: self.scratch_generation(),
            draws: plan.draws.key(),
        };
        plan.check_tokens_again();
        if !plan.recordings.begin(&self.device, key)? {
            return Ok(Pass::Needed);
        }
        plan.leave_beside();
        plan.tell(&self.device)?;
        Ok(Pass::Queued)
    }
}

fn replay(device: &Device, graph: &Graph) -> Result<(), DeviceError> {
    device.enter()?;
    #[expect(unsafe_code, reason = "kernels use raw device memory")]
    // SAFETY: the key says that arena, tables and scratch are those of the recording; the buffers
    // and weights are the model's, which the contract of `begin_pass` makes the same.
    let launched = unsafe { sys::cuGraphLaunch(graph.exec, device.stream()) };
    device.check(launched.result())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_recorded_when_it_comes_again() {
        let (tables, arena, draws) = ((1, 2), (3, 4), (0, 5));
        let (n_rows, deciding, is_served, is_short, scratch) = (3, Vec::new(), false, false, 0);
        let key = PassKey {
            n_rows,
            paced: [Some(1), None],
            deciding,
            is_served,
            is_short,
            tables,
            arena,
            scratch,
            draws,
        };
        let mut recordings = Recordings::default();
        assert_eq!(recordings.step(&key), Step::Queue);
        assert_eq!(recordings.step(&PassKey { n_rows: 4, ..key.clone() }), Step::Queue);
        assert_eq!(recordings.step(&PassKey { paced: [None; 2], ..key.clone() }), Step::Queue);
        assert_eq!(recordings.step(&PassKey { is_short: true, ..key.clone() }), Step::Queue);
        assert_eq!(
            recordings.step(&PassKey { deciding: vec![(0, 1)], ..key.clone() }),
            Step::Queue
        );
        assert_eq!(recordings.step(&key), Step::Record);
        let large = PassKey { n_rows: MAX_ROWS + 1, ..key };
        assert_eq!([recordings.step(&large), recordings.step(&large)], [Step::Queue; 2]);
    }
}
