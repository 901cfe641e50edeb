//! A model on a device with its KV arena and its tables, all of fixed size.

use std::fmt;
use std::sync::Arc;

use nuthatch_backend::{Backend, BatchLayout, DeviceError, Draw};
use nuthatch_cache::{Cache, Options};
use nuthatch_model::{BatchLimits, LoadError, Model, ModelFiles, kv_shape};
use nuthatch_scheduler::Scheduler;
use nuthatch_store::KvStore;
use nuthatch_types::{HostReads, PageCopy, PageShift, Slot};

use crate::{Engine, EngineOptions, Executor, Forward, SharedClock, Sizes};

/// A model on a device with its KV arena and its tables.
pub struct LoadedModel<B: Backend> {
    backend: Arc<B>,
    model: Model<B>,
    store: KvStore<B>,
    tables: B::Tables,
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
        Ok(LoadedModel { backend, model, store, tables })
    }

    /// The model, to look at.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }
}

impl<B: Backend> Forward for LoadedModel<B> {
    fn vocab(&self) -> u32 {
        self.model.config().vocab
    }

    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError> {
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
            return Ok(());
        }
        self.backend.read(device_logits, logits)
    }

    fn hidden_len(&self) -> usize {
        self.model.config().hidden as usize
    }

    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        self.backend.read(self.model.hidden(), hidden)
    }

    fn draws(&self) -> bool {
        self.backend.draws()
    }

    fn forward_and_draw(
        &mut self,
        layout: &BatchLayout,
        draws: &[Draw],
        tokens: &mut [Option<u32>],
    ) -> Result<(), DeviceError> {
        let vocab = self.model.config().vocab as usize;
        let logits = self.model.forward(&mut self.store, &self.tables, layout)?;
        self.backend.draw(logits, vocab, draws, tokens)
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
        // The key says what decides a page's bytes; the tokens themselves are compared on a hit.
        let fingerprint = files.fingerprint()?;
        let (key, _) = fingerprint.split_first_chunk().expect("a fingerprint has 32 bytes");
        let cache_options = Options {
            prefix: options.prefix_caching,
            eviction: options.eviction,
            hash_key: u128::from_le_bytes(*key),
            host_reads: match sizes.host_reads {
                HostReads::Never => HostReads::Never,
                HostReads::Near | HostReads::Far => backend.host_reads(),
            },
            ..Options::default()
        };
        let loaded = LoadedModel::load(backend, files, sizes)?;
        let cache =
            Cache::with_options(sizes.cache(), cache_options).expect("the sizes were checked");
        let mut config = sizes.scheduler();
        config.max_waiting = options.max_waiting.unwrap_or(config.max_waiting).max(1);
        let scheduler =
            Scheduler::with_policy(config, cache, options.policy).expect("the sizes were checked");
        let executor =
            Executor::new(loaded, sizes.capacity()).with_clock(SharedClock::clone(&clock));
        Ok(Engine::new(scheduler, executor, clock))
    }
}
