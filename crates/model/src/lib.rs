//! Models: their files, their weights, and the forward pass.
//!
//! - [`ModelFiles`]: a Hugging Face directory or a GGUF file, checked, memory-mapped
//! - [`ModelConfig`]: what the files say about the model
//! - [`Model`]: the weights on a device, and one step's pass over a batch

mod config;
mod error;
mod files;
mod forward;
mod gguf;
mod names;
mod narrow;
mod probe;
mod random;
mod rope;
mod safetensors;
mod source;
mod weights;

pub use config::*;
pub use error::*;
pub use files::*;
pub use forward::{Arrive, BatchLimits, Model, kv_shape, topk_shape};
pub use gguf::*;
pub use names::*;
pub use narrow::NARROW_LEAST;
pub use probe::Restriction;
pub use rope::*;

/// Tokens of a page.
pub const PAGE_LEN: u32 = 16;

/// A model that could not be brought onto its device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The files are wrong.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] nuthatch_backend::DeviceError),
    /// Near memory cannot be used as was asked.
    #[error(transparent)]
    Near(#[from] nuthatch_attention::topk::NearError),
}
