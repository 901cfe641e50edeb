//! Top-k attention: which tokens a query needs, whether the last choice still serves, which rows
//! to bring.
//!
//! ```text
//!   look up ── hit ──────────────────────────────────────────────┐
//!      └── miss ─► score ─► select ─► working set (moved rows)   │
//!                                            └─► attend [ sinks | working set | tail ]
//! ```
//!
//! Code map: [`Policy`] says how all of this is done, and `spec` reads it from text; `reuse` decides
//! whether a selection still serves; the backend's `WorkingSet` which rows stay; `head` is what is remembered of
//! one head of one sequence; `near` and `residency` share near memory, `near_rows` is where rows are
//! in it; `frames` makes what digests project on, and `hash` learns it; [`Profile`] is what was
//! measured of a model's heads, by `calibration`; [`TopK`] runs a layer, and `device` lets a device
//! decide.
//!
//! Every decision is taken from plain values by plain functions, so that a device that decides by
//! itself can be compared step by step.

mod calibration;
mod compact;
mod device;
mod frames;
mod hash;
mod head;
mod near;
mod near_rows;
mod policy;
mod profile;
mod residency;
mod reuse;
mod run;
mod spec;
mod stats;
mod trace;
mod work;

pub use calibration::{Calibration, HeadRows, KeptRows, Witness};
pub use frames::{orthonormal_frame, principal_frame};
pub use hash::{HashTexts, learn, recall};
pub use head::{Head, HeadRule, Lookup};
pub use near::{NearError, NearNeeds, NearPlan, NearRequest};
pub use policy::{
    Aggregate, Budget, Policy, Qsac, Refresh, Retriever, Reuse, Soft, digest_page_bytes,
};
pub use profile::{Profile, ProfileError};
pub use residency::{hardest_heads, hardest_layers, prefetchable_heads};
pub use reuse::{aggregate, soft_threshold, threshold};
pub use run::{TopK, TopKLayer, TopKShape, working_rows};
pub use spec::{AUTO, GRAMMAR, SpecError};
pub use stats::{Counts, Stats};
pub use trace::Decision;
