//! NVIDIA GPUs as a device: CUDA loaded at run time, kernels compiled by NVRTC at first use.
//!
//! - `backend`: the operations of the trait, handed on; `open`: how a GPU is used
//! - `device`, `pinned`, `host_memory`, `virtual_memory`: the driver, one stream, memory, the host's
//!   too, and the fault that ends it
//! - `nvrtc`, `program`, `compile`: compiling kernels, keeping them on disk, what is compiled
//!   together, and compiling all of it to see that it can be
//! - `common`: the kernels that every model needs
//! - `buf`, `weight`, `kv`, `plan`: what lies on the device
//! - `launch`: one file per operation, beside one `.cu` file each; `product` chooses among those of
//!   products
//! - `near`: pages that are far, and their copies on the device; `link`: threads that bring their rows;
//!   `door`: pages that come from the host
//! - `kernels`: kernels that are loaded when they are first needed; `sparse`: top-k attention
//! - `graph`: passes that are queued again by one call; `branch`: what runs beside them; `timing`: what
//!   each kernel takes
//!
//! Nothing at build time needs CUDA, and a machine without a driver gets an error, not a crash.

mod backend;
mod branch;
mod buf;
mod common;
mod compile;
mod device;
mod door;
mod error;
mod graph;
mod host_memory;
mod kernels;
mod kv;
mod launch;
mod link;
mod near;
mod nvrtc;
mod open;
mod pinned;
mod plan;
mod product;
mod program;
mod sparse;
mod timing;
mod virtual_memory;
mod weight;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use nuthatch_backend::WeightType;

pub use branch::LinkTuning;
pub use buf::CudaBuf;
use common::Common;
pub use compile::{Extent, compile_all};
use device::Device;
pub use error::{CompileError, OpenError};
use kv::PageShape;
pub use kv::{CudaKv, FarPages};
use launch::attend::AttendKernels;
pub use link::STAGED_BYTES;
pub use near::{code_bytes, most_parts, near_pages};
use nvrtc::Compiler;
pub use open::CudaConfig;
pub use plan::{CudaPlan, CudaTables};
use product::Scratch;
pub use sparse::{Beside, DecidingShape, ListedRows, Threads, deciding_bytes};
pub use timing::KernelTime;
use weight::WeightKernels;
pub use weight::{CudaWeight, weight_bytes};

/// A GPU as a device.
pub struct Cuda {
    device: Device,
    ordinal: usize,
    compiler: Compiler,
    common: Arc<Common>,
    weights: Mutex<BTreeMap<WeightType, Arc<WeightKernels>>>,
    /// By the page's shape, and whether it is of rows.
    attention: Mutex<BTreeMap<(PageShape, bool), Arc<AttendKernels>>>,
    is_exact: bool,
    l2_prefetch: u32,
    is_eager: AtomicBool,
    far: Option<FarPages>,
    tuning: LinkTuning,
    scratch: Mutex<Scratch>,
}
