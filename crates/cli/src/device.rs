//! The device, chosen once; everything below is generic over it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use nuthatch_backend::{
    Backend as _, DeviceError, NearCounts, PageCodec, RowCode, RowMover, WeightType,
};
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_backend_cuda::{Cuda, CudaConfig, DecidingShape, FarPages, OpenError};
use nuthatch_engine::topk::{NearPlan, Policy, Stats, TopKShape};
use nuthatch_engine::{
    Arrivals, Attachment, CodeBytes, Engine, EngineOptions, Execute, Executor, FarRequest,
    Forecast, ForecastRequest, LoadedModel, NearSizes, Pages, Rates, SharedClock, Sizes,
    TopKOptions, TopKStats,
};
use nuthatch_model::{LoadError, ModelError, ModelFiles, NARROW_LEAST, topk_shape};
use nuthatch_types::{
    ColdKv, HeadSet, HostReads, KvShape, LayerSet, PageImage, SeqId, Slot, StepPlan, StepResult,
};

use crate::args::DeviceArg;
use crate::host;

/// Share of the host's available memory that pages of a GPU may take.
const HOST_SHARE: f64 = 0.85;

/// An engine on whatever device was chosen.
pub(crate) type AnyEngine = Engine<AnyExecutor>;

/// A device that is open.
pub(crate) enum Device {
    /// This machine's processor.
    Cpu(Arc<Cpu>),
    /// A GPU.
    Cuda(Arc<Cuda>),
}

/// How rows come from far pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FarWay {
    /// As what.
    pub(crate) code: Option<RowCode>,
    /// Threads that bring them to a GPU; none if it does.
    pub(crate) n_threads: u32,
}

/// What decides how a device is used.
#[derive(Clone, Debug)]
pub(crate) struct DeviceConfig {
    pub(crate) device: DeviceArg,
    /// Threads of the CPU; 0 means all.
    pub(crate) threads: u32,
    /// Whether a GPU takes all bits of the activations.
    pub(crate) is_exact: bool,
    /// Where compiled kernels are kept.
    pub(crate) kernel_dir: Option<PathBuf>,
    /// Where KV pages lie, if not in memory.
    pub(crate) kv_file: Option<PathBuf>,
    /// Whether the pages of a sequence lie one after the other.
    pub(crate) kv_virtual: bool,
    /// How rows come from far pages.
    pub(crate) far: FarWay,
}

impl Device {
    /// Opens the device that was asked for; `auto` is the first GPU if there is one.
    pub(crate) fn open(config: &DeviceConfig) -> anyhow::Result<Self> {
        let cuda = |ordinal: u32| {
            let (cache_dir, is_exact) = (config.kernel_dir.clone(), config.is_exact);
            let kv_virtual = config.kv_virtual;
            Cuda::open(
                ordinal as usize,
                CudaConfig { cache_dir, is_exact, kv_virtual, ..CudaConfig::default() },
            )
        };
        match config.device {
            DeviceArg::Cpu => Self::cpu(config),
            DeviceArg::Cuda(ordinal) => {
                let cuda =
                    cuda(ordinal).with_context(|| format!("cannot use --device cuda:{ordinal}"))?;
                Ok(Device::Cuda(Arc::new(cuda)))
            }
            DeviceArg::Auto => match cuda(0) {
                Ok(cuda) => Ok(Device::Cuda(Arc::new(cuda))),
                Err(OpenError::NoDriver | OpenError::NoDevice { .. }) => Self::cpu(config),
                Err(error) => {
                    tracing::warn!("the GPU is not used: {error}");
                    Self::cpu(config)
                }
            },
        }
    }

    fn cpu(config: &DeviceConfig) -> anyhow::Result<Self> {
        anyhow::ensure!(
            !config.kv_virtual,
            "--kv-layout virtual needs an NVIDIA GPU, whose driver puts memory behind addresses; the \
             CPU has paged only"
        );
        anyhow::ensure!(
            config.far.n_threads == 0,
            "--kv-transfer threads is for a GPU: on the CPU whoever needs rows brings them"
        );
        let threads = config.threads as usize;
        let mut cpu = Cpu::new(CpuConfig { threads, ..CpuConfig::default() })?;
        if let Some(path) = &config.kv_file {
            cpu = cpu.with_kv_file(path.clone());
        }
        if let Some(code) = config.far.code {
            cpu = cpu.with_far_code(code);
        }
        Ok(Device::Cpu(Arc::new(cpu)))
    }

    /// The device, for people.
    pub(crate) fn name(&self) -> String {
        match self {
            Device::Cpu(cpu) => cpu.name(),
            Device::Cuda(cuda) => cuda.name(),
        }
    }

    /// Threads that compute; none of this machine's if a GPU does.
    pub(crate) fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.threads(),
            Device::Cuda(_) => 0,
        }
    }

    /// Whether and how well sequences run on pages of the host tier.
    pub(crate) fn host_reads(&self) -> HostReads {
        match self {
            Device::Cpu(cpu) => cpu.host_reads(),
            Device::Cuda(cuda) => cuda.host_reads(),
        }
    }

    /// Bytes that are free, if that is known.
    pub(crate) fn available_memory(&self) -> Result<Option<u64>, DeviceError> {
        match self {
            Device::Cpu(_) => Ok(host::available_memory()),
            Device::Cuda(cuda) => Ok(Some(cuda.memory()?.0 as u64)),
        }
    }

    /// Bytes that the weights take once they are loaded, also those that layers are decided about ahead by.
    pub(crate) fn weight_bytes(
        &self,
        files: &ModelFiles,
        policies: &[Policy],
    ) -> Result<u64, ModelError> {
        let (all, bytes_of): (u64, fn(WeightType, usize, usize) -> usize) = match self {
            Device::Cpu(_) => {
                let bytes_of =
                    |dtype: WeightType, rows, cols| rows * dtype.row_bytes(cols).unwrap_or(0);
                (files.weight_bytes(), bytes_of)
            }
            Device::Cuda(_) => {
                let bytes_of = nuthatch_backend_cuda::weight_bytes;
                (files.weight_bytes_as(bytes_of)?, bytes_of)
            }
        };
        let is_ahead = policies.iter().any(|policy| policy.speculates);
        Ok(all + if is_ahead { files.deciding_bytes_as(NARROW_LEAST, bytes_of)? } else { 0 })
    }

    /// Bytes that it needs to decide about top-k attention by itself, for sequences of `max_context`
    /// tokens; if all pages are far, and rows come in eight bits, with `code`.
    pub(crate) fn deciding_bytes(
        &self,
        files: &ModelFiles,
        topk: &TopKOptions,
        (kv, max_context, n_tables): (KvShape, u32, u32),
        code: Option<RowCode>,
    ) -> u64 {
        match self {
            Device::Cpu(_) => 0,
            Device::Cuda(_) => {
                let (config, shape) = (files.config(), topk_shape(files.config()));
                nuthatch_backend_cuda::deciding_bytes(&DecidingShape {
                    kv,
                    n_layers: config.n_layers,
                    n_heads: config.n_heads,
                    max_context,
                    n_tables,
                    set_rows: topk.working_rows(&shape, max_context),
                    is_soft: topk.policies.iter().any(Policy::is_soft),
                    code,
                })
            }
        }
    }

    /// What it may keep of pages that are far, if it reads them over a link by itself.
    pub(crate) fn far(
        &self,
        topk: Option<&TopKOptions>,
        (kv, way, deciding_saved): (KvShape, &FarWay, u64),
    ) -> Option<FarRequest> {
        let Device::Cuda(_) = self else { return None };
        let topk = topk.filter(|topk| topk.offload.is_some())?;
        let most = |of: fn(&Policy) -> u32| topk.policies.iter().map(of).max().unwrap_or(0);
        let host = host::available_memory().unwrap_or(u64::MAX / 2);
        Some(FarRequest {
            host_usable: (host as f64 * HOST_SHARE) as u64,
            near_budget: topk.offload.and_then(|offload| offload.budget),
            pages_per_seq: nuthatch_backend_cuda::near_pages(
                most(|policy| policy.sinks),
                most(|policy| policy.recent),
            ),
            parts: nuthatch_backend_cuda::most_parts(&kv),
            keeps_layers: topk.offload.is_some_and(|offload| offload.keeps_heads),
            codes: way.code.map_or_else(CodeBytes::default, |_| {
                let heads = u64::from(kv.n_layers) * u64::from(kv.n_kv_heads);
                let (host, device) = nuthatch_backend_cuda::code_bytes(kv.head_dim);
                CodeBytes { host: heads * host, device: heads * device }
            }),
            deciding_saved,
            staged: if way.n_threads > 0 { nuthatch_backend_cuda::STAGED_BYTES } else { 0 },
        })
    }

    /// What a step takes with pages here and with pages on the host, if some may leave a GPU.
    pub(crate) fn forecast(
        &self,
        files: &ModelFiles,
        topk: Option<&TopKOptions>,
        (sizes, kv, digest_page_bytes): (&Sizes, KvShape, u64),
        way: &FarWay,
    ) -> Result<Option<Forecast>, DeviceError> {
        let (Device::Cuda(cuda), Some(topk), Some(_)) = (self, topk, &sizes.near) else {
            return Ok(None);
        };
        let (read, link) = cuda.rates()?;
        let shape = topk_shape(files.config());
        let policy = &topk.policies[0];
        let heads = u64::from(kv.n_layers) * u64::from(kv.n_kv_heads);
        let always = heads * u64::from(policy.sinks + policy.recent);
        Ok(Some(Forecast::new(&ForecastRequest {
            rates: Rates { read: read as f64, link: link as f64 },
            weights: sizes.weights,
            kv,
            n_seqs: sizes.max_seqs,
            context: sizes.max_context,
            seen_rows: topk.working_rows(&shape, sizes.max_context) + always,
            digest_page_bytes,
            row_share: match way.code {
                Some(_) => 1.0 / kv.dtype.bytes() as f64,
                None => 1.0,
            },
            is_ahead: policy.speculates,
        })))
    }

    /// Pages are far, but for those of some layers, and rows in eight bits but for those of some heads: of which most
    /// rows would come, but for so many of each layer as come in time. Nobody else has the device yet.
    pub(crate) fn keep_far(
        &mut self,
        near: &NearSizes,
        (topk, shape, n_in_time): (Option<&TopKOptions>, &TopKShape, u32),
        way: &FarWay,
    ) {
        let hardest = |topk: &TopKOptions| {
            // Rows come in time only if they are known before a layer's turn.
            let is_ahead = topk.policies[0].speculates;
            topk.hardest(shape, if is_ahead { n_in_time } else { 0 })
        };
        let (layers, heads) = topk.map_or_else(Default::default, hardest);
        // Of layers and heads that sets can have.
        let first = |all: Vec<u32>, most, n: u32| {
            all.into_iter().filter(move |&i| i < most).take(n as usize).collect::<Vec<u32>>()
        };
        let layers = first(layers, u128::BITS, near.n_layers);
        let heads = first(heads, HeadSet::MOST, near.n_heads);
        if let Device::Cuda(cuda) = self
            && let Some(cuda) = Arc::get_mut(cuda)
        {
            cuda.keep_far(FarPages {
                n_near: near.n_pages,
                resident: LayerSet::of(&layers).unwrap_or_default(),
                n_threads: way.n_threads,
                code: way.code,
                coded_here: HeadSet::of(heads),
                fails_after: None,
            });
        }
    }

    /// Loads a model and puts an engine around it.
    pub(crate) fn load(
        &self,
        files: &ModelFiles,
        sizes: &Sizes,
        options: &EngineOptions,
        clock: SharedClock,
        topk: Option<&TopKOptions>,
    ) -> Result<AnyEngine, LoadError> {
        match self {
            Device::Cpu(cpu) => {
                let engine =
                    Engine::load_topk(Arc::clone(cpu), files, sizes, options, clock, topk)?;
                Ok(engine.map_executor(|cpu| AnyExecutor::Cpu(Box::new(cpu))))
            }
            Device::Cuda(cuda) => {
                // The device keeps what it needs near by itself.
                let topk = topk.map(TopKOptions::on_link);
                let topk = topk.as_ref();
                let engine =
                    Engine::load_topk(Arc::clone(cuda), files, sizes, options, clock, topk)?;
                Ok(engine.map_executor(|cuda| AnyExecutor::Cuda(Box::new(cuda))))
            }
        }
    }
}

/// An executor on whatever device was chosen.
#[derive(Debug)]
pub(crate) enum AnyExecutor {
    Cpu(Box<Executor<LoadedModel<Cpu>>>),
    Cuda(Box<Executor<LoadedModel<Cuda>>>),
}

impl AnyExecutor {
    /// The GPU, if it is one.
    pub(crate) fn cuda(&self) -> Option<&Cuda> {
        match self {
            AnyExecutor::Cpu(_) => None,
            AnyExecutor::Cuda(executor) => Some(executor.forward().backend()),
        }
    }

    /// What top-k attention did so far, if there is such.
    pub(crate) fn topk_stats(&self) -> Option<&Stats> {
        match self {
            AnyExecutor::Cpu(executor) => executor.forward().topk_stats(),
            AnyExecutor::Cuda(executor) => executor.forward().topk_stats(),
        }
    }

    /// What is kept near and what came there, if pages are far.
    pub(crate) fn near(&self) -> Option<(&NearPlan, NearCounts)> {
        match self {
            AnyExecutor::Cpu(executor) => executor.forward().near_with_counts(),
            AnyExecutor::Cuda(executor) => executor.forward().near_with_counts(),
        }
    }
}

impl Execute for AnyExecutor {
    fn vocab(&self) -> u32 {
        match self {
            AnyExecutor::Cpu(executor) => executor.vocab(),
            AnyExecutor::Cuda(executor) => executor.vocab(),
        }
    }

    fn run(&mut self, plan: &StepPlan) -> Result<StepResult, DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => executor.run(plan),
            AnyExecutor::Cuda(executor) => executor.run(plan),
        }
    }

    fn run_awaiting(
        &mut self,
        plan: &StepPlan,
        arrivals: &mut dyn Arrivals,
    ) -> Result<Option<StepResult>, DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => executor.run_awaiting(plan, arrivals),
            AnyExecutor::Cuda(executor) => executor.run_awaiting(plan, arrivals),
        }
    }

    fn attach(&mut self, seq: SeqId, attachment: Attachment) {
        match self {
            AnyExecutor::Cpu(executor) => executor.attach(seq, attachment),
            AnyExecutor::Cuda(executor) => executor.attach(seq, attachment),
        }
    }

    fn topk(&self) -> Option<TopKStats> {
        match self {
            AnyExecutor::Cpu(executor) => executor.topk(),
            AnyExecutor::Cuda(executor) => executor.topk(),
        }
    }

    fn detach(&mut self, seq: SeqId) {
        match self {
            AnyExecutor::Cpu(executor) => executor.detach(seq),
            AnyExecutor::Cuda(executor) => executor.detach(seq),
        }
    }
}

impl Pages for AnyExecutor {
    fn page_image(&self) -> Option<PageImage> {
        match self {
            AnyExecutor::Cpu(executor) => executor.page_image(),
            AnyExecutor::Cuda(executor) => executor.page_image(),
        }
    }

    fn page_codec(&self, cold: &ColdKv) -> Option<Arc<dyn PageCodec>> {
        match self {
            AnyExecutor::Cpu(executor) => executor.page_codec(cold),
            AnyExecutor::Cuda(executor) => executor.page_codec(cold),
        }
    }

    fn row_mover(&self) -> Option<RowMover> {
        match self {
            AnyExecutor::Cpu(executor) => executor.row_mover(),
            AnyExecutor::Cuda(executor) => executor.row_mover(),
        }
    }

    fn read_page(&mut self, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => executor.read_page(slot, target),
            AnyExecutor::Cuda(executor) => executor.read_page(slot, target),
        }
    }

    fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) -> Result<(), DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => executor.write_page(slot, start, source),
            AnyExecutor::Cuda(executor) => executor.write_page(slot, start, source),
        }
    }
}
