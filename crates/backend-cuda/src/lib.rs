//! NVIDIA GPUs as a device: CUDA loaded at run time, kernels compiled by NVRTC at first use.
//!
//! - `device`, `pinned`: the driver, one stream, memory, the host's too, and the fault that ends it
//! - `nvrtc`, `program`, `compile`: compiling kernels, keeping them on disk, what is compiled
//!   together, and compiling all of it to see that it can be
//! - `common`: the kernels that every model needs
//! - `buf`, `weight`, `kv`, `plan`: what lies on the device
//! - `launch`: one file per operation, beside one `.cu` file each; `product` chooses among those of
//!   products
//! - `graph`: passes that are queued again by one call; `timing`: what each kernel takes
//!
//! Nothing at build time needs CUDA, and a machine without a driver gets an error, not a crash.

mod buf;
mod common;
mod compile;
mod device;
mod error;
mod graph;
mod kv;
mod launch;
mod nvrtc;
mod pinned;
mod plan;
mod product;
mod program;
mod timing;
mod weight;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, DeviceError, Draw, HostMatrix, Norm, Pass, PlanShape,
    WeightType,
};
use nuthatch_types::{KvShape, KvSlots, LayerIdx, PageCopy, PageShift, Slot};

pub use buf::CudaBuf;
use common::Common;
pub use compile::{Extent, compile_all};
use device::Device;
pub use error::{CompileError, OpenError};
use graph::PassKey;
pub use kv::CudaKv;
use kv::PageShape;
use launch::attend::{Attend, AttendKernels, AttendShape, Attention, SplitShape, Tile};
use launch::draw::Draws;
use launch::matmul::Target;
use launch::merge::MergeShape;
use launch::{copy, embed, gather, norm, roof, rope, shift, swiglu};
use nvrtc::Compiler;
pub use plan::{CudaPlan, CudaTables};
use product::Scratch;
use program::Program;
pub use timing::KernelTime;
pub use weight::{CudaWeight, weight_bytes};
use weight::{Kernels, Part, WeightKernels, check_size};

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
}

/// A GPU as a device.
pub struct Cuda {
    device: Device,
    ordinal: usize,
    compiler: Compiler,
    common: Arc<Common>,
    weights: Mutex<BTreeMap<WeightType, Arc<WeightKernels>>>,
    attention: Mutex<BTreeMap<PageShape, Arc<AttendKernels>>>,
    is_exact: bool,
    l2_prefetch: u32,
    is_eager: bool,
    scratch: Mutex<Scratch>,
}

impl Cuda {
    /// Opens a device and compiles what every model needs.
    pub fn open(ordinal: usize, config: CudaConfig) -> Result<Self, OpenError> {
        let device = Device::open(ordinal)?;
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
            is_eager: config.is_eager,
            scratch: Mutex::new(Scratch::default()),
        })
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

    /// From now on every kernel is timed, and queued by itself.
    pub fn begin_timing(&self) {
        self.device.timing.begin();
    }

    /// The kernels since then, in the order in which they ran.
    pub fn end_timing(&self) -> Result<Vec<KernelTime>, DeviceError> {
        self.device.enter()?;
        self.device.check(self.device.timing.end())
    }

    fn weight_kernels(&self, dtype: WeightType) -> Result<Kernels, DeviceError> {
        if dtype == WeightType::F32 {
            return Ok(Kernels::F32(Arc::clone(&self.common)));
        }
        let mut known = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&dtype) {
            return Ok(Kernels::Packed(Arc::clone(kernels)));
        }
        let cubin = self.cubin(&Program::weights(dtype))?;
        let kernels = Arc::new(WeightKernels::new(&self.device, cubin, dtype)?);
        known.insert(dtype, Arc::clone(&kernels));
        Ok(Kernels::Packed(kernels))
    }

    fn attend_kernels(&self, page: PageShape) -> Result<Arc<AttendKernels>, DeviceError> {
        let mut known = self.attention.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&page) {
            return Ok(Arc::clone(kernels));
        }
        let attend = AttendShape::new(page, self.is_exact);
        let splits = SplitShape::fitting(attend, self.device.shared_bytes_max());
        let cubin = self.cubin(&Program::attention(attend, splits))?;
        let kernels = Arc::new(AttendKernels::new(&self.device, cubin, (attend, splits))?);
        known.insert(page, Arc::clone(&kernels));
        Ok(kernels)
    }

    fn cubin(&self, program: &Program) -> Result<Vec<u8>, DeviceError> {
        self.compiler.cubin(program).map_err(|e| DeviceError::Fault(e.to_string()))
    }
}

impl AttendKernels {
    fn new(
        device: &Device,
        cubin: Vec<u8>,
        (attend, [small, large]): (AttendShape, [SplitShape; 2]),
    ) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        let kernel = |name, shared| device.kernel(&module, name, shared);
        let split = |shape: SplitShape| {
            Ok::<_, DeviceError>((shape, kernel(shape.name(), shape.shared_bytes(attend))?))
        };
        let [few, many] = MergeShape::ALL;
        let merge = |shape: MergeShape| {
            Ok::<_, DeviceError>((shape, kernel(shape.name, shape.shared_bytes())?))
        };
        let shape = attend.tile(device.describe().1.0);
        let attend = match attend.page.dtype {
            nuthatch_types::KvDtype::F32 => Attend::F32(kernel("attend_f32", 0)?),
            nuthatch_types::KvDtype::F16 | nuthatch_types::KvDtype::Bf16 => Attend::Mma {
                splits: [split(small)?, split(large)?],
                tile: Tile { kernel: kernel(shape.name, shape.shared_bytes)?, shape },
                merges: [merge(few)?, merge(many)?],
            },
        };
        Ok(AttendKernels {
            rope: kernel("rope_append", 0)?,
            shift: kernel("shift_pages", 0)?,
            attend,
        })
    }
}

impl Backend for Cuda {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type Kv = CudaKv;
    type Tables = CudaTables;
    type Plan = CudaPlan;

    fn name(&self) -> String {
        let (name, (major, minor)) = self.device.describe();
        format!("cuda:{} ({name}, {major}.{minor})", self.ordinal)
    }

    fn rounds_activations(&self) -> bool {
        !self.is_exact
    }

    fn begin_stage(&self, stage: &'static str, layer: Option<LayerIdx>) {
        self.device.timing.begin_stage(stage, layer);
    }

    fn alloc(&self, len: usize) -> Result<CudaBuf, DeviceError> {
        const WHAT: &str = "activations";
        let floats = self.device.alloc(len * 4, WHAT)?;
        Ok(CudaBuf::new(len, floats, self.device.alloc(len * 2, WHAT)?))
    }

    fn write(&self, target: &mut CudaBuf, source: &[f32]) -> Result<(), DeviceError> {
        assert!(source.len() <= target.len, "the values fit the buffer");
        target.set_stale();
        self.device.upload(&target.floats, 0, source)
    }

    fn read(&self, source: &CudaBuf, target: &mut [f32]) -> Result<(), DeviceError> {
        assert!(target.len() <= source.len, "the values are in the buffer");
        self.device.download_from(&source.floats, 0, target)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.device.wait()
    }

    fn load(&self, parts: &[HostMatrix<'_>]) -> Result<CudaWeight, DeviceError> {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols == parts[0].cols));
        for part in parts {
            check_size(part)?;
        }
        let (cols, is_gated) = (parts[0].cols, false);
        let mut weight = CudaWeight { rows: 0, cols, parts: Vec::new(), is_gated };
        for same in parts.chunk_by(|a, b| a.dtype == b.dtype) {
            let kernels = self.weight_kernels(same[0].dtype)?;
            let part = Part::load(&self.device, kernels, same, (weight.rows, false))?;
            weight.rows += part.rows;
            weight.parts.push(part);
        }
        Ok(weight)
    }

    fn load_gated(
        &self,
        gate: HostMatrix<'_>,
        up: HostMatrix<'_>,
    ) -> Result<CudaWeight, DeviceError> {
        let is_packed = gate.dtype == up.dtype && gate.dtype != WeightType::F32 && !self.is_exact;
        if !is_packed || gate.rows != up.rows || !gate.rows.is_multiple_of(8) {
            return self.load(&[gate, up]);
        }
        assert_eq!(gate.cols, up.cols, "both have the same columns");
        check_size(&gate)?;
        check_size(&up)?;
        let (rows, cols) = (2 * gate.rows, gate.cols);
        let kernels = self.weight_kernels(gate.dtype)?;
        let part = Part::load(&self.device, kernels, &[gate, up], (0, true))?;
        Ok(CudaWeight { rows, cols, parts: vec![part], is_gated: true })
    }

    fn alloc_kv(&self, shape: KvShape, slots: KvSlots) -> Result<CudaKv, DeviceError> {
        CudaKv::new(&self.device, shape, slots)
    }

    fn alloc_tables(&self, n_rows: u32, n_pages: u32) -> Result<CudaTables, DeviceError> {
        CudaTables::new(&self.device, n_rows, n_pages)
    }

    fn write_table(
        &self,
        tables: &mut CudaTables,
        row: u32,
        start: u32,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        tables.write(&self.device, row, start, slots)
    }

    fn shift_pages(
        &self,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        shifts: &[PageShift],
    ) -> Result<(), DeviceError> {
        shift::shift_pages(&self.device, plan, kv, shifts)
    }

    fn copy_pages(&self, kv: &mut CudaKv, copies: &[PageCopy]) -> Result<(), DeviceError> {
        copy::copy_pages(&self.device, &self.common.copy, kv, copies)
    }

    fn alloc_plan(&self, shape: &PlanShape) -> Result<CudaPlan, DeviceError> {
        let kernels = self.attend_kernels(PageShape::of(&shape.kv))?;
        CudaPlan::new(&self.device, shape, kernels)
    }

    fn plan(
        &self,
        plan: &mut CudaPlan,
        tables: &CudaTables,
        layout: &BatchLayout,
    ) -> Result<(), DeviceError> {
        self.begin_stage("plan", None);
        plan.prepare(&self.device, tables, layout)?;
        rope::angles(&self.device, &self.common.angles, plan)
    }

    fn begin_pass(&self, plan: &mut CudaPlan, kv: &CudaKv) -> Result<Pass, DeviceError> {
        if self.is_eager || self.device.timing.is_on() || !plan.is_decode() {
            return Ok(Pass::Needed);
        }
        let key = PassKey {
            n_rows: plan.n_rows(),
            tables: (plan.tables, plan.table_len),
            arena: (kv.arena.address(), kv.slots.device),
            scratch: self.scratch_generation(),
        };
        plan.check_tokens_again();
        let is_queued = plan.recordings.begin(&self.device, key)?;
        Ok(if is_queued { Pass::Queued } else { Pass::Needed })
    }

    fn end_pass(&self, plan: &mut CudaPlan) -> Result<(), DeviceError> {
        plan.recordings.end(&self.device)
    }

    fn embed(
        &self,
        table: &CudaWeight,
        plan: &CudaPlan,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.begin_stage("embed", None);
        embed::embed(&self.device, table, plan, out)
    }

    fn gather_rows(
        &self,
        plan: &CudaPlan,
        x: &CudaBuf,
        d: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        gather::gather_rows(&self.device, &self.common.gather, plan, (x, d), out)
    }

    fn norm(
        &self,
        x: &CudaBuf,
        weight: &CudaBuf,
        eps: f32,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        norm::norm(&self.device, &self.common.norm, (x, weight), (eps, rows), out)
    }

    fn matmul(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: false })
    }

    fn matmul_add(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.product(w, x, rows, &mut Target { out, stride: w.rows, is_added: true })
    }

    fn gated_matmul(
        &self,
        w: &CudaWeight,
        x: &CudaBuf,
        f: usize,
        rows: usize,
        gate_up: &mut CudaBuf,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        if w.is_gated {
            assert_eq!(w.rows, 2 * f, "two matrices of this width");
            return self.gated_product(w, x, rows, out);
        }
        self.matmul(w, x, rows, gate_up)?;
        self.swiglu(gate_up, f, rows, out)
    }

    fn norm_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &CudaWeight,
        rows: usize,
        h: &mut CudaBuf,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let Some(row) = self.normed_row(w, norm, rows) else {
            self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
            return self.matmul(w, h, rows, out);
        };
        self.normed_product(w, row, &mut Target { out, stride: w.rows, is_added: false })
    }

    fn norm_gated_matmul(
        &self,
        norm: &Norm<'_, Self>,
        w: &CudaWeight,
        f: usize,
        rows: usize,
        (h, gate_up): (&mut CudaBuf, &mut CudaBuf),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        match self.normed_row(w, norm, rows).filter(|_| w.is_gated) {
            Some(row) => self.gated_rows(w, row, out),
            None => {
                self.norm(norm.x, norm.weight, norm.eps, rows, h)?;
                self.gated_matmul(w, h, f, rows, gate_up, out)
            }
        }
    }

    fn rope_append(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &mut CudaBuf,
        kv: &mut CudaKv,
    ) -> Result<(), DeviceError> {
        rope::rope_append(&self.device, plan, layer, spec, qkv, kv)
    }

    fn attend(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &CudaBuf,
        kv: &CudaKv,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (device, prefetch) = (&self.device, self.l2_prefetch);
        Attention { device, plan, layer, spec, qkv, kv, prefetch }.run(out)
    }

    fn draws(&self) -> bool {
        true
    }

    fn draw(
        &self,
        logits: &mut CudaBuf,
        vocab: usize,
        draws: &[Draw],
        tokens: &mut [Option<u32>],
    ) -> Result<(), DeviceError> {
        if draws.is_empty() {
            return Ok(());
        }
        self.begin_stage("draw", None);
        let draws = Draws::new(draws);
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let room = scratch.draws(&self.device, draws.bytes())?;
        draws.run(&self.device, &self.common.draw, (logits, vocab), room, tokens)
    }

    fn swiglu(
        &self,
        gate_up: &CudaBuf,
        f: usize,
        rows: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        swiglu::swiglu(&self.device, &self.common.swiglu, gate_up, (f, rows), out)
    }
}
