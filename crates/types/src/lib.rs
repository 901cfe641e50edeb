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
mod shape;
mod step_tokens;

pub use beam::{BeamParams, EarlyStopping};
pub use clock::{Clock, ManualClock, SystemClock};
pub use fast_map::{FastMap, FastSet};
pub use id::{LayerIdx, PageId, SeqId, Slot, TokenId};
pub use kept::{Streaming, Window};
pub use plan::{
    PageCopy, PageShift, Sampled, SeqStart, SeqStep, StepPlan, StepResult, TableChange,
};
pub use sampling::{FinishReason, Limits, Sampling, SamplingError};
pub use shape::{HostReads, KvDtype, KvShape, KvSlots};
pub use step_tokens::StepTokens;
