//! A model on a device with its KV arena and its tables, all of fixed size.

mod measure;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_attention::topk::{
    Counts, NearNeeds, NearPlan, NearRequest, Policy, Profile, Reuse, Stats, TopK, TopKShape,
    digest_page_bytes, hardest_heads, hardest_layers, prefetchable_heads, working_rows,
};
use nuthatch_backend::{Backend, BatchLayout, DeviceError, Draw, NearCounts, PageCodec, RowMover};
use nuthatch_cache::{Cache, Options};
use nuthatch_model::{
    BatchLimits, LoadError, Model, ModelFiles, NARROW_LEAST, kv_shape, topk_shape,
};
use nuthatch_scheduler::Scheduler;
use nuthatch_store::KvStore;
use nuthatch_types::{ColdKv, HostReads, PageCopy, PageImage, PageShift, Slot, TokenId};

use crate::rope_mark::rope_mark;
use crate::{
    Arrivals, Engine, EngineOptions, Executor, Forward, Pages, SharedClock, Sizes, TopKStats,
};

/// Attention to the tokens that a query needs, instead of to all.
#[derive(Clone, Debug)]
pub struct TopKOptions {
    /// At least one; sequences have the first, unless told otherwise.
    pub policies: Vec<Policy>,
    /// What was measured of the model's heads.
    pub profile: Option<Arc<Profile>>,
    /// A text of the kind that the model reads, to measure what the profile lacks; its beginning is
    /// used.
    pub text: Vec<TokenId>,
    /// What is kept near, if pages are far.
    pub offload: Option<Offload>,
}

impl TopKOptions {
    /// The most rows that the working sets of all heads of a sequence of `n` tokens have together.
    pub fn working_rows(&self, shape: &TopKShape, n: u32) -> u64 {
        let empty = Profile::empty(shape);
        working_rows(shape, &self.policies, self.profile.as_deref().unwrap_or(&empty), n)
    }

    /// Layers, and heads counting those of all layers, those first that should stay on a device where not all can;
    /// rows of so many heads of a layer come in time.
    pub fn hardest(&self, shape: &TopKShape, n_in_time: u32) -> (Vec<u32>, Vec<u32>) {
        let empty = Profile::empty(shape);
        let profile = self.profile.as_deref().unwrap_or(&empty);
        let policies = &self.policies;
        let heads = hardest_heads(shape, policies, profile, n_in_time as usize);
        (hardest_layers(shape, policies, profile), heads)
    }

    /// The same for a device that reads far pages over a link and keeps what it needs near by itself: only
    /// rows that the host decides about, where it caches them by the page, the host has kept.
    #[must_use]
    pub fn on_link(&self) -> Self {
        let is_lru = |policy: &Policy| matches!(policy.reuse, Reuse::PageLru { .. });
        let is_kept = self.policies.iter().any(is_lru);
        let offload = self.offload.filter(|_| is_kept).map(|_| Offload::default());
        TopKOptions { offload, ..self.clone() }
    }

    /// What digests and policies do to pages' bytes, as a number to mix into the key of the cache:
    /// tokens that were decoded by other policies have other keys and values.
    fn salt(&self) -> u128 {
        // FNV-1a of 128 bits, which is the same in every process.
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        for policy in &self.policies {
            for byte in policy.to_string().into_bytes().into_iter().chain([0]) {
                hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
            }
        }
        hash
    }
}

/// Pages are far, and of running sequences only what they attend to is near.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Bytes of rows and digests near, never exceeded; without it, as many as are needed.
    pub budget: Option<u64>,
    /// Whether heads stay near whole as far as the budget allows.
    pub keeps_heads: bool,
}

/// A model on a device with its KV arena and its tables.
pub struct LoadedModel<B: Backend> {
    backend: Arc<B>,
    model: Model<B>,
    store: KvStore<B>,
    tables: B::Tables,
    /// Rows of one step, tables, and tokens of a sequence.
    max_rows: u32,
    max_seqs: u32,
    max_context: u32,
}

impl<B: Backend> LoadedModel<B> {
    /// Loads the weights and allocates everything that a step needs.
    pub fn load(backend: Arc<B>, files: &ModelFiles, sizes: &Sizes) -> Result<Self, LoadError> {
        let shape = kv_shape(files.config(), sizes.kv_dtype);
        assert_eq!(shape.page_len, sizes.page_len, "the sizes were computed for this model");
        let limits = BatchLimits {
            max_rows: sizes.max_rows as usize,
            max_seqs: sizes.max_seqs as usize,
            max_context: sizes.max_context as usize,
            max_outputs: sizes.max_seqs as usize,
            kv_dtype: sizes.kv_dtype,
        };
        let model = Model::load(Arc::clone(&backend), files, &limits)?;
        let store = KvStore::new(&*backend, shape, sizes.cache().slots())?;
        let tables = backend.alloc_tables(sizes.max_seqs, sizes.capacity().table_len())?;
        let Sizes { max_rows, max_seqs, max_context, .. } = *sizes;
        Ok(LoadedModel { backend, model, store, tables, max_rows, max_seqs, max_context })
    }

    /// The model, to look at.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// Attends to what queries need from now on; the arena is empty. An error if the profile is of
    /// another shape, or if the device cannot.
    pub fn set_topk(
        &mut self,
        files: &ModelFiles,
        options: &TopKOptions,
        clock: &SharedClock,
    ) -> Result<(), LoadError> {
        if options.policies.iter().any(|policy| policy.speculates) {
            self.model.narrow_deciding(files, NARROW_LEAST)?;
        }
        let shape = topk_shape(self.model.config());
        let mut profile = match &options.profile {
            Some(profile) => Profile::clone(profile),
            None => Profile::empty(&shape),
        };
        let fault = |error: nuthatch_attention::topk::ProfileError| {
            DeviceError::Fault(format!("this model's top-k attention: {error}"))
        };
        profile.check_shape(&shape).map_err(fault)?;
        if !options.policies.iter().all(|policy| profile.serves(policy)) {
            let importance = std::mem::take(&mut profile.importance);
            self.calibrate(&options.text)?.finish(&mut profile);
            profile.importance = importance;
        }
        let mut topk = TopK::new(shape, &options.policies, &profile, self.max_seqs as usize);
        if let Some(offload) = &options.offload {
            self.keep_near(&mut topk, offload, clock)?;
        }
        topk.set_clock(SharedClock::clone(clock));
        Ok(self.model.set_topk(topk, &mut self.store)?)
    }

    /// Shares near memory, and has the device keep it.
    fn keep_near(
        &mut self,
        topk: &mut TopK,
        offload: &Offload,
        clock: &SharedClock,
    ) -> Result<(), LoadError> {
        let shape = self.store.shape();
        let policies: Vec<Policy> = topk.policies().copied().collect();
        let digest_bytes = digest_page_bytes(&policies, &shape) as u64;
        let needs = NearNeeds {
            n_tables: self.max_seqs,
            max_context: self.max_context,
            row_bytes: shape.row_bytes(0),
            digest_bytes: digest_bytes * u64::from(self.store.slots().total()),
        };
        let Offload { budget, keeps_heads } = *offload;
        let mut n_prefetchable = 0;
        if topk.speculates() && keeps_heads {
            let request = NearRequest { budget, keeps_heads: false, n_prefetchable };
            let near = topk.keep_near(&needs, &request)?;
            self.backend.keep_near(self.store.device_mut(), near)?;
            if near.heads.first().is_some_and(|head| head.n_chosen > 0) {
                n_prefetchable = self.prefetchable(topk, clock)?;
            }
        }
        let request = NearRequest { budget, keeps_heads, n_prefetchable };
        let near = topk.keep_near(&needs, &request)?;
        Ok(self.backend.keep_near(self.store.device_mut(), near)?)
    }

    /// Heads of a layer whose selections come near while another layer computes, as measured.
    fn prefetchable(&mut self, topk: &TopK, clock: &SharedClock) -> Result<u32, DeviceError> {
        /// Rows of one try.
        const N_ROWS: usize = 64;
        self.write_table(0, 0, &[Slot(0)])?;
        let layout = BatchLayout {
            tokens: vec![0],
            positions: vec![0],
            query_start: vec![0, 1],
            kv_len: vec![1],
            table_row: vec![0],
            output_rows: Vec::new(),
        };
        let seconds = |begin: Duration| clock.now().saturating_sub(begin).as_secs_f64();
        let (mut pass, mut rows) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..4 {
            let begin = clock.now();
            self.forward(&layout, &mut [])?;
            pass = pass.min(seconds(begin));
            let begin = clock.now();
            self.model.try_bring(&self.store, N_ROWS)?;
            rows = rows.min(seconds(begin));
        }
        let row_bytes = self.store.shape().row_bytes(0);
        let link = (N_ROWS * row_bytes) as f64 / rows.max(f64::MIN_POSITIVE);
        let layer = pass / f64::from(self.model.config().n_layers.max(1));
        let selection = topk.selection_bytes(self.max_context, row_bytes);
        Ok(prefetchable_heads(layer, link, selection as f64))
    }

    /// A sequence takes a table, and attends by one of the policies after its prompt.
    pub fn begin_with(&mut self, row: u32, n_prompt: u32, policy: usize) {
        if let Some(topk) = self.model.topk_mut() {
            topk.begin(row, n_prompt, policy);
            self.backend.forget_near(self.store.device_mut(), row);
        }
    }

    /// What is kept near, if pages are far, and the rows that came there so far.
    pub fn near_with_counts(&self) -> Option<(&NearPlan, NearCounts)> {
        let near = self.model.topk()?.near()?;
        Some((near, self.backend.near_counts(self.store.device())))
    }

    /// Top-k attention, if there is such, to measure it.
    pub fn topk_mut(&mut self) -> Option<&mut TopK> {
        self.model.topk_mut()
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// What top-k attention did so far.
    pub fn topk_stats(&self) -> Option<&Stats> {
        self.model.topk().map(TopK::stats)
    }
}

impl<B: Backend> Pages for LoadedModel<B> {
    fn page_image(&self) -> Option<PageImage> {
        self.store.page_image(&self.backend)
    }

    fn page_codec(&self, cold: &ColdKv) -> Option<Arc<dyn PageCodec>> {
        self.store.page_codec(&self.backend, cold)
    }

    fn row_mover(&self) -> Option<RowMover> {
        self.store.row_mover(&self.backend, self.model.rope())
    }

    fn read_page(&mut self, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        self.store.read_page(&self.backend, slot, target)
    }

    fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) -> Result<(), DeviceError> {
        self.store.write_page(&self.backend, slot, start, source)
    }
}

impl<B: Backend> Forward for LoadedModel<B> {
    fn vocab(&self) -> u32 {
        self.model.config().vocab
    }

    fn begin(&mut self, row: u32, n_prompt: u32) {
        self.begin_with(row, n_prompt, 0);
    }

    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError> {
        let topk = self.model.topk_mut();
        if topk.is_some_and(|topk| topk.table_written(row, start, slots.len() as u32)) {
            self.backend.forget_near(self.store.device_mut(), row);
        }
        self.backend.write_table(&mut self.tables, row, start, slots)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError> {
        self.store.copy(&self.backend, copies)?;
        // Whoever measures what copies take must not measure how fast they are queued.
        self.backend.wait()
    }

    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError> {
        self.model.shift_pages(&mut self.store, shifts)
    }

    fn forward(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        let device_logits = self.model.forward(&mut self.store, &self.tables, layout)?;
        if logits.is_empty() {
            // A step takes as long as its computation, whether anybody asks for its result or not.
            self.backend.wait()?;
        } else {
            self.backend.read(device_logits, logits)?;
        }
        self.model.count_decisions(&self.store)
    }

    fn forward_awaiting(
        &mut self,
        layout: &BatchLayout,
        logits: &mut [f32],
        arrivals: &mut dyn Arrivals,
    ) -> Result<bool, DeviceError> {
        let LoadedModel { backend, model, store, tables, .. } = self;
        let mut arrive = |store: &mut KvStore<B>, layer| {
            let has_come = arrivals.await_layer(layer, &mut |slot, start, bytes| {
                store.write_page(backend, slot, start, bytes)
            })?;
            store.land_pages(backend, true)?;
            Ok(has_come)
        };
        store.land_pages(backend, true)?;
        let done = model.forward_awaiting(store, tables, layout, &mut arrive);
        store.land_pages(backend, false)?;
        let Some(device_logits) = done? else { return Ok(false) };
        match logits.is_empty() {
            true => backend.wait()?,
            false => backend.read(device_logits, logits)?,
        }
        Ok(true)
    }

    fn topk(&self) -> Option<TopKStats> {
        let mut counts = Counts::default();
        self.topk_stats()?.policies.iter().for_each(|&policy| counts += policy);
        let near = self.backend.near_counts(self.store.device());
        Some(TopKStats { counts, near, row_bytes: self.store.shape().row_bytes(0) as u64 })
    }

    fn hidden_len(&self) -> usize {
        self.model.config().hidden as usize
    }

    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        self.backend.read(self.model.hidden(), hidden)
    }

    fn look_back(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError> {
        let device_logits = self.model.look_back(&self.tables, layout, !logits.is_empty())?;
        if logits.is_empty() {
            return Ok(());
        }
        self.backend.read(device_logits, logits)
    }

    fn draws(&self) -> bool {
        self.backend.draws()
    }

    fn runs_ahead(&self) -> bool {
        self.backend.draws()
            && self.backend.queues_behind(self.store.device())
            && self.model.topk().is_none_or(TopK::may_be_queued)
    }

    fn queue(
        &mut self,
        layout: &BatchLayout,
        draws: &[Draw],
        follows: bool,
    ) -> Result<(), DeviceError> {
        self.model.queue(&mut self.store, &self.tables, layout, (draws, follows))
    }

    fn drawn(&mut self, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        self.model.drawn(tokens)?;
        self.model.count_decisions(&self.store)
    }
}

impl<B: Backend> fmt::Debug for LoadedModel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedModel")
            .field("device", &self.backend.name())
            .field("config", self.model.config())
            .field("kv_bytes", &self.store.bytes())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Engine<Executor<LoadedModel<B>>> {
    /// Loads a model and puts an engine around it, of the given sizes.
    pub fn load(
        backend: Arc<B>,
        files: &ModelFiles,
        sizes: &Sizes,
        options: &EngineOptions,
        clock: SharedClock,
    ) -> Result<Self, LoadError> {
        Self::load_topk(backend, files, sizes, options, clock, None)
    }

    /// The same with attention to what queries need.
    pub fn load_topk(
        backend: Arc<B>,
        files: &ModelFiles,
        sizes: &Sizes,
        options: &EngineOptions,
        clock: SharedClock,
        topk: Option<&TopKOptions>,
    ) -> Result<Self, LoadError> {
        // The key says what decides a page's bytes; the tokens themselves are compared on a hit.
        let fingerprint = files.fingerprint()?;
        let (key, _) = fingerprint.split_first_chunk().expect("a fingerprint has 32 bytes");
        let rope = rope_mark(&files.config().rope_spec(sizes.max_context as usize));
        let cache_options = Options {
            prefix: options.prefix_caching,
            eviction: options.eviction,
            hash_key: u128::from_le_bytes(*key) ^ rope ^ topk.map_or(0, TopKOptions::salt),
            host_reads: match sizes.host_reads {
                HostReads::Never => HostReads::Never,
                HostReads::Near | HostReads::Far => backend.host_reads(),
            },
            ..Options::default()
        };
        let mut loaded = LoadedModel::load(backend, files, sizes)?;
        if let Some(topk) = topk {
            loaded.set_topk(files, topk, &clock)?;
        }
        let cache =
            Cache::with_options(sizes.cache(), cache_options).expect("the sizes were checked");
        let mut config = sizes.scheduler();
        config.max_waiting = options.max_waiting.unwrap_or(config.max_waiting).max(1);
        let mut scheduler =
            Scheduler::with_policy(config, cache, options.policy).expect("the sizes were checked");
        if loaded.runs_ahead() {
            scheduler.look_ahead();
        }
        let executor =
            Executor::new(loaded, sizes.capacity()).with_clock(SharedClock::clone(&clock));
        let mut engine = Engine::new(scheduler, executor, clock);
        engine.shares_pages = options.shares_pages;
        Ok(engine)
    }
}
