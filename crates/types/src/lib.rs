//! The vocabulary every other crate speaks: ids, shapes, the step plan, sampling, limits, time.
//!
//! Nothing here allocates on a device, does I/O, or depends on another crate of this workspace.

mod beam;
mod clock;
mod fast_map;
mod id;
mod kept;
mod plan;
mod sampling;
mod seq_steps;
mod shape;

pub use beam::{BeamParams, EarlyStopping};
pub use clock::{Clock, ManualClock, SystemClock};
pub use fast_map::{FastMap, FastSet};
pub use id::{LayerIdx, PageId, PageKey, SeqId, Slot, TokenId};
pub use kept::{Streaming, Window};
pub use plan::{PageCopy, PageShift, Sampled, SeqStart, StepPlan, StepResult};
pub use sampling::{FinishReason, Limits, Sampling, SamplingError};
pub use seq_steps::{SeqStep, SeqSteps, TableChange};
pub use shape::{
    ColdDtype, ColdKv, HeadSet, HostReads, KvDtype, KvShape, KvSlots, LayerSet, PageImage,
};
