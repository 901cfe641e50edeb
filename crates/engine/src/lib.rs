//! The loop, the executor and sampling: from submitted tokens to streamed tokens.
//!
//! ```text
//!   EngineHandle --commands--> engine thread: scheduler.plan -> executor.run -> scheduler.commit
//!        ^                                                                          |
//!        +------------------ Ticket <-- one channel per request --------------------+
//! ```
//!
//! Code map: [`Engine`] is the loop; [`Executor`] carries out a plan on anything that can
//! [`Forward`], such as a
//! [`LoadedModel`]; `batch` lays a plan out in rows; [`sample`] chooses
//! tokens; `attachment` is how answers keep a form; `requests` knows who waits for which sequence, and `beam` which answers a search follows;
//! [`EngineHandle`] and [`Ticket`] are what callers hold; [`Sizes`] says how large everything is,
//! [`EngineOptions`] how it behaves, once, at the start.
//!
//! One thread owns all mutable state, so there is no lock. The crate speaks tokens: it has never
//! seen a string of text, and it reads neither the environment nor the time, except through a
//! [`Clock`](nuthatch_types::Clock) that it is given.

mod attachment;
mod batch;
mod beam;
mod engine;
mod error;
mod executor;
mod handle;
mod loaded;
mod memory;
mod moved;
mod options;
mod output;
mod pages;
mod requests;
mod rope_mark;
pub mod sample;
mod tier;

pub use attachment::{Attachment, Constraint, ConstraintError, Form, HiddenSink, Pooling};
pub use engine::{
    CacheListener, CachePicture, DiskOptions, Engine, EngineStats, SharedClock, SlowOptions,
    TopKStats,
};
pub use error::{EngineError, SubmitError};
pub use executor::{Execute, Executor, Forward, PromptReader, PromptScores, ScoredToken};
pub use handle::{Ended, EngineHandle, Ticket};
pub use loaded::{LoadedModel, Offload, TopKOptions};
pub use memory::{
    Budget, Capacity, CodeBytes, FarRequest, Forecast, ForecastRequest, MemoryError, NearSizes,
    Rates, SizeRequest, Sizes,
};
pub use nuthatch_attention::topk;
pub use nuthatch_cache::{
    Branch, CachedPage, ContentId, Event as CacheEvent, Eviction, Retention, SlotUse,
    Stats as CacheStats, Tier,
};
pub use nuthatch_scheduler::{
    Policy, Stats as SchedulerStats, SubmitError as Refusal, Tenant, Usage,
};
pub use nuthatch_store::disk::{DiskCounters, DiskError, DiskIo, DiskStats, IoEngine};
pub use nuthatch_store::remote::{ObjectError, Objects, RemoteCounters};
pub use nuthatch_store::{KeyError, StoreKey};
pub use options::EngineOptions;
pub use output::{Hints, Output, Sink, Submission, Timings, best_of};
pub use pages::{Arrivals, Pages, WritePage};
pub use tier::{TierCounters, TierStats};
