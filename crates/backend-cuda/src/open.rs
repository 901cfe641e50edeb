//! Opening a GPU, and measuring on it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use nuthatch_backend::DeviceError;

use crate::Cuda;
use crate::branch::LinkTuning;
use crate::buf::CudaBuf;
use crate::common::Common;
use crate::device::Device;
use crate::error::OpenError;
use crate::kv::{CudaKv, FarPages};
use crate::launch::roof;
use crate::nvrtc::Compiler;
use crate::product::Scratch;
use crate::program::Program;
use crate::timing::KernelTime;

/// How a GPU is used.
#[derive(Clone, Debug, Default)]
pub struct CudaConfig {
    /// Where compiled kernels are kept; nowhere if not given.
    pub cache_dir: Option<PathBuf>,
    /// Whether products and attention take all bits of the activations, at two or three times the
    /// arithmetic; if not, activations are rounded to bf16 before they are multiplied with weights, and
    /// queries to the type of keys and values, as is usual on GPUs.
    pub is_exact: bool,
    /// Steps of 32 keys that decoding brings to the second-level cache ahead of their use; none if 0.
    pub l2_prefetch: u32,
    /// Whether every kernel is queued by itself, and no pass is recorded.
    pub is_eager: bool,
    /// Pages that are far, if they are.
    pub far: Option<FarPages>,
    /// Whether pages lie one after the other, in the order of the tables, behind addresses that are reserved
    /// for every table at its longest; memory is put behind them by [`Cuda::back`]. Attention then needs
    /// no table, and nothing can be shared: to compare with.
    pub kv_virtual: bool,
    /// How rows are brought over the link.
    pub tuning: LinkTuning,
}

impl Cuda {
    /// Opens a device and compiles what every model needs.
    pub fn open(ordinal: usize, config: CudaConfig) -> Result<Self, OpenError> {
        let device = Device::open(ordinal, config.kv_virtual)?;
        let compiler = Compiler::new(device.arch(), config.cache_dir)?;
        let cubin = compiler.cubin(&Program::common())?;
        let common = Common::new(&device, cubin).map_err(|e| OpenError::Driver(e.to_string()))?;
        Ok(Cuda {
            device,
            ordinal,
            compiler,
            common: Arc::new(common),
            weights: Mutex::new(BTreeMap::new()),
            attention: Mutex::new(BTreeMap::new()),
            is_exact: config.is_exact,
            l2_prefetch: config.l2_prefetch,
            is_eager: config.is_eager.into(),
            far: config.far,
            tuning: config.tuning,
            scratch: Mutex::new(Scratch::default()),
        })
    }

    /// Keeps pages far from now on.
    pub fn keep_far(&mut self, far: FarPages) {
        self.far = Some(far);
    }

    /// Whether arenas have addresses first, and memory when it is put behind them.
    pub fn has_virtual_kv(&self) -> bool {
        self.device.has_virtual_kv()
    }

    /// Puts memory behind slots of an arena whose addresses are reserved only, and gives the bytes that
    /// are behind all its slots.
    pub fn back(&self, kv: &CudaKv, slots: Range<u32>) -> Result<usize, DeviceError> {
        kv.back(&self.device, slots)
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.device.memory()
    }

    /// Reads all floats of `source` and does nothing with them: what this takes is the least that
    /// anything takes that has to read as much. `out` may be changed.
    pub fn read_all(&self, source: &CudaBuf, out: &mut CudaBuf) -> Result<(), DeviceError> {
        roof::read_all(&self.device, &self.common.read_all, source, out)
    }

    /// Whether decode passes are recorded and replayed from now on, or queued kernel by kernel.
    pub fn record_passes(&self, is_on: bool) {
        self.is_eager.store(!is_on, Ordering::Relaxed);
    }

    /// From now on every kernel is timed, and queued by itself.
    pub fn begin_timing(&self) {
        self.device.timing.begin();
    }

    /// The kernels since then, in the order in which they ran.
    pub fn end_timing(&self) -> Result<Vec<KernelTime>, DeviceError> {
        self.device.enter()?;
        self.device.check(self.device.timing.end())
    }
}
