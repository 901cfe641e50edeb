//! The engine's side of the tiers that are slower than the host: when they are tended to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::{LoadId, Salt};
use nuthatch_store::disk::{
    DiskDir, DiskError, DiskIo, DiskTier, Files, IoEngine, RecordShape, SystemFiles,
};
use nuthatch_store::remote::{self, Objects, RemoteTier};
use nuthatch_store::slow::SlowTiers;
use nuthatch_store::{RecordLayout, StoreKey};
use nuthatch_types::{ColdKv, TokenId};
use xxhash_rust::xxh3::xxh3_128;

use super::Engine;
use crate::SharedClock;
use crate::executor::Execute;
use crate::moved::Moved;
use crate::tier::{LayerParts, Tier};

/// Where pages are kept that outlive the engine.
#[derive(Clone, Default)]
pub struct SlowOptions {
    /// A directory.
    pub disk: Option<DiskOptions>,
    /// A store somewhere else.
    pub remote: Option<Arc<dyn Objects>>,
    /// Keeps pages in fewer bits: an approximation. `None` keeps them as they are.
    pub cold: Option<ColdKv>,
    /// Also uses stored pages whose tokens stand elsewhere in a prompt, so many in a row at least: an
    /// approximation.
    pub reuse: Option<u32>,
    /// Encrypts them.
    pub key: Option<StoreKey>,
    /// Whether the first layers are computed while the others come. `None` does so where it was
    /// measured to help: with direct I/O by io_uring, which needs no core of its own.
    pub by_layers: Option<bool>,
}

/// A directory for pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// The directory; it is made if there is none.
    pub dir: PathBuf,
    /// Most bytes of it.
    pub bytes_max: u64,
    /// How its files are read and written.
    pub io: DiskIo,
}

/// How long the end of an engine waits for saves.
const FLUSH: Duration = Duration::from_secs(10);

impl<E: Execute> Engine<E> {
    /// Keeps pages from now on, and finds what an engine before this one kept. Nothing may be cached
    /// yet.
    pub fn keep_pages(&mut self, options: &SlowOptions) -> Result<(), DiskError> {
        let io = options.disk.as_ref().map_or(DiskIo::default(), |disk| disk.io);
        let files = SystemFiles::new(io).map_err(DiskError::NoRing)?;
        self.keep_pages_in(options, Arc::new(files))
    }

    /// The same with file operations of the caller's.
    pub fn keep_pages_in(
        &mut self,
        options: &SlowOptions,
        files: Arc<dyn Files>,
    ) -> Result<(), DiskError> {
        if options.reuse.is_some() && options.disk.is_none() {
            return Err(DiskError::NoRows);
        }
        let image = self.executor.page_image().ok_or(DiskError::NoImages)?;
        let codec = match &options.cold {
            Some(cold) => {
                let codec = self.executor.page_codec(cold);
                Some(codec.ok_or_else(|| DiskError::NoCodec(cold.clone()))?)
            }
            None => None,
        };
        let disk = options.disk.as_ref();
        let dir = disk.map(|disk| DiskDir::open(&disk.dir)).transpose()?;
        // Those who share a store share its secret, or they would not find each other's pages.
        let secret = match (&options.key, &options.remote, &dir) {
            (Some(key), ..) => key.name_secret(),
            (None, Some(objects), _) => remote::secret(&**objects)?,
            (None, None, Some(dir)) => dir.secret(),
            (None, None, None) => return Ok(()),
        };
        self.scheduler.mix_key(secret);
        let cache = self.scheduler.cache();
        let (page_len, n_pages) = (cache.config().page_len, cache.config().slots().total());
        // The key names the model and its policy, the layout all else that decides a page's bytes.
        let mut name = format!("3 {:032x} {page_len} {}", cache.key_mark(), image.layout);
        if let Some(cold) = &options.cold {
            name += &format!(", {cold}, 1");
        }
        if options.reuse.is_some() {
            name += ", moved 1";
        }
        let namespace = xxh3_128(name.as_bytes());
        let page_bytes = codec.as_ref().map_or(image.bytes, |codec| codec.coded_bytes());
        let is_encrypted = options.key.is_some();
        // What top-k attention learned in a pass cannot be undone.
        let comes_early = self.executor.topk().is_none();
        let parts = if comes_early { LayerParts::of(&image, codec.as_deref()) } else { None };
        let part_bytes = parts.map_or(page_bytes, |parts| parts.stored_bytes);
        let shape = RecordShape { namespace, page_len, page_bytes, part_bytes, is_encrypted };
        let layout = RecordLayout::new(shape, codec, options.key.as_ref());
        let clock = || SharedClock::clone(&self.clock);
        let disk = match (disk, dir) {
            (Some(disk), Some(dir)) => {
                let tier = DiskTier::open(dir, disk.bytes_max, &layout, files, clock())?;
                tracing::info!(io = %tier.stats().io, "the disk tier is open");
                Some(tier)
            }
            _ => None,
        };
        let remote = match &options.remote {
            Some(objects) => {
                let started = RemoteTier::start(Arc::clone(objects), layout, clock());
                Some(started.map_err(|error| DiskError::Remote(error.to_string()))?)
            }
            None => None,
        };
        let is_apart = disk.as_ref().is_some_and(|disk| {
            let io = disk.stats().io;
            io.direct && io.engine == IoEngine::Uring
        });
        let seed = cache.key_mark() as u64;
        let mut tier = Tier::new(SlowTiers::new(disk, remote), page_len, n_pages);
        if let Some(parts) = parts.filter(|_| options.by_layers.unwrap_or(is_apart)) {
            tier.begin_early(parts);
        }
        if let Some(least) = options.reuse {
            let mover = self.executor.row_mover().ok_or(DiskError::NoRows)?;
            tier.reuse(Moved::new(page_len, least, mover, seed));
        }
        self.scheduler.expect_loads();
        self.tier = Some(tier);
        Ok(())
    }

    /// Saves what there was no time for while there was work; false when there is nothing more to
    /// save. For an engine that rests.
    pub fn rest(&mut self) -> Result<bool, DeviceError> {
        let Some(tier) = &mut self.tier else { return Ok(false) };
        tier.take_loaded(&mut self.executor, &mut self.scheduler, &self.clock)?;
        let is_left = tier.save(&mut self.executor, &mut self.scheduler, &self.clock, None)?;
        if is_left || tier.is_saving() {
            tier.wait_saves();
            return Ok(true);
        }
        Ok(false)
    }

    /// Saves everything that can be saved, and waits for it, but not for ever.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        let deadline = self.clock.now() + FLUSH;
        while self.rest()? && self.clock.now() < deadline {}
        Ok(())
    }

    /// Tokens at a prompt's beginning that a slower tier holds, or may hold, and pages of them that
    /// are farther than the disk.
    pub(super) fn n_stored(&mut self, salt: Salt, prompt: &[TokenId]) -> (u32, u32) {
        match &mut self.tier {
            Some(tier) => tier.n_stored(&self.scheduler, salt, prompt),
            None => (0, 0),
        }
    }

    /// Brings what was read to the device.
    pub(super) fn take_loaded(&mut self) -> Result<(), DeviceError> {
        match &mut self.tier {
            Some(tier) => tier.take_loaded(&mut self.executor, &mut self.scheduler, &self.clock),
            None => Ok(()),
        }
    }

    /// Waits a moment for a load, if there is one.
    pub(super) fn await_loads(&mut self) -> Result<bool, DeviceError> {
        let Some(tier) = &mut self.tier else { return Ok(false) };
        tier.begin_loads(&mut self.scheduler, self.clock.now());
        if !tier.is_loading() {
            return Ok(false);
        }
        if let Some(id) = tier.early(&self.scheduler, self.clock.now()) {
            return self.step_early(id);
        }
        tier.pause(&mut self.executor, &self.clock)?;
        Ok(true)
    }

    /// Computes a step while the pages of its only sequence come.
    fn step_early(&mut self, id: LoadId) -> Result<bool, DeviceError> {
        let begin = self.clock.now();
        let plan = self.scheduler.plan_early(id).expect("one sequence alone has room");
        let Some(tier) = &mut self.tier else { return Ok(false) };
        for start in &plan.started {
            self.requests.start(start.seq, begin);
        }
        let result = self.executor.run_awaiting(&plan, &mut tier.coming(id, &self.clock))?;
        self.execute_time += self.clock.now().saturating_sub(begin);
        let n_lost = tier.end_early(id, &mut self.scheduler);
        match result {
            Some(result) => {
                assert_eq!(n_lost, 0, "a pass has waited for all layers");
                self.finish_step(result, begin)?;
            }
            None => self.scheduler.undo(n_lost),
        }
        Ok(true)
    }

    /// Begins the loads that were decided, and saves what there is time for.
    pub(super) fn tend_tier(&mut self, step_time: Duration) -> Result<(), DeviceError> {
        let Some(tier) = &mut self.tier else { return Ok(()) };
        tier.begin_loads(&mut self.scheduler, self.clock.now());
        let step_time = Some(step_time);
        tier.save(&mut self.executor, &mut self.scheduler, &self.clock, step_time)?;
        Ok(())
    }
}
