//! The engine's side of the disk tier: when it is tended to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::Salt;
use nuthatch_store::disk::{DiskDir, DiskError, DiskTier, Files, RecordShape, SystemFiles};
use nuthatch_types::TokenId;
use xxhash_rust::xxh3::xxh3_128;

use super::Engine;
use crate::SharedClock;
use crate::executor::Execute;
use crate::tier::Tier;

/// Where pages are kept that outlive the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// The directory; it is made if there is none.
    pub dir: PathBuf,
    /// Most bytes of it.
    pub bytes_max: u64,
}

/// How long the end of an engine waits for saves.
const FLUSH: Duration = Duration::from_secs(10);

impl<E: Execute> Engine<E> {
    /// Keeps pages on a disk from now on, and finds what an engine before this one kept there.
    /// Nothing may be cached yet.
    pub fn keep_on_disk(&mut self, options: &DiskOptions) -> Result<(), DiskError> {
        self.keep_on_files(options, Arc::new(SystemFiles))
    }

    /// The same with file operations of the caller's.
    pub fn keep_on_files(
        &mut self,
        options: &DiskOptions,
        files: Arc<dyn Files>,
    ) -> Result<(), DiskError> {
        let image = self.executor.page_image().ok_or(DiskError::NoImages)?;
        let dir = DiskDir::open(&options.dir)?;
        self.scheduler.mix_key(dir.secret());
        let cache = self.scheduler.cache();
        let (page_len, n_pages) = (cache.config().page_len, cache.config().slots().total());
        // The key names the model and its policy, the layout all else that decides a page's bytes.
        let name = format!("{:032x} {page_len} {}", cache.key_mark(), image.layout);
        let namespace = xxh3_128(name.as_bytes());
        let shape = RecordShape { namespace, page_len, page_bytes: image.bytes };
        let clock = SharedClock::clone(&self.clock);
        let disk = DiskTier::open(dir, options.bytes_max, shape, files, clock)?;
        self.scheduler.expect_loads();
        self.tier = Some(Tier::new(disk, page_len, n_pages));
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

    /// Tokens at a prompt's beginning that the disk tier holds.
    pub(super) fn n_stored(&mut self, salt: Salt, prompt: &[TokenId]) -> u32 {
        // Where a page does not stand for all tokens before it, loading is not worth its rules.
        let keeps_all = self.scheduler.config().window.is_none();
        match &mut self.tier {
            Some(tier) if keeps_all => tier.n_stored(&self.scheduler, salt, prompt),
            Some(_) | None => 0,
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
        tier.pause(&mut self.executor, &self.clock)?;
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
