//! The one trait that a device implements, and the suite that judges it.
//!
//! The trait names the operations of a decoder-only transformer over a paged KV cache, and no
//! others: it is not a tensor library.
//!
//! Shape legend, used in every comment: `B` sequences, `T` query rows of the whole batch, `H` query
//! heads, `G` key/value heads, `D` head width, `S` tokens per page, `F` feed-forward width, `V`
//! vocabulary.

mod backend;
mod choosing;
pub mod cold;
#[cfg(feature = "conformance")]
pub mod conformance;
mod draw;
mod error;
mod layout;
mod near;
mod page_layout;
pub mod quant;
mod row_code;
mod row_mover;
pub mod topk;
mod weight;
mod working_set;

pub use backend::Backend;
pub use choosing::{Chooser, Choosing, Known};
pub use cold::PageCodec;
pub use draw::{Draw, Moved};
pub use error::DeviceError;
pub use layout::{AttnSpec, BatchLayout, Norm, Pass, PlanShape, RopeSpec, RopeStyle};
pub use near::{Bring, Near, NearCounts, NearHead};
pub use page_layout::{LayoutCodec, PageLayout, narrow, widen};
pub use row_code::RowCode;
pub use row_mover::{RowMove, RowMover};
pub use topk::{
    Ask, Best, Decided, DecidedPlaces, Deciding, Digest, DigestKind, Pick, Rules, ScoreBy,
};
pub use weight::{HostMatrix, WeightType};
pub use working_set::{AGE_MAX, WorkingSet};
