//! Loads whose sequences are computed while they come (CachedAttention's overlap).
//!
//! ```text
//!   disk     parts 0 of all pages | parts 1 ...      | parts 2 ...      | ...
//!   device                        | layers of part 0 | layers of part 1 | ...
//! ```
//!
//! A pass waits before each layer until all pages have it. It begins when what is left should take no
//! longer than the pass itself, so that nobody who comes meanwhile waits for a disk, and only where
//! nobody else could be computed. What does not come undoes the pass: nothing that it wrote is read
//! before it is written again, and its pages cannot be found.

use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::LoadId;
use nuthatch_scheduler::{Scheduler, Source};
use nuthatch_store::PageBuf;
use nuthatch_store::disk::{Asked, Miss, PageName, PartChecks};
use nuthatch_store::slow::SlowTiers;
use nuthatch_types::LayerIdx;

use super::loading::Loading;
use super::{PAUSE, Tier};
use crate::SharedClock;
use crate::pages::{Arrivals, WritePage};

impl Tier {
    /// The load whose sequence should go on now, before it has ended, if there is one.
    pub(crate) fn early(&self, scheduler: &Scheduler, now: Duration) -> Option<LoadId> {
        let (&id, loading) = self.loads.first_key_value()?;
        let parts = loading.parts.as_ref()?;
        if self.loads.len() > 1 || loading.has_failed() || !parts.has_come(0) {
            return None;
        }
        let tokens = scheduler.early_tokens(id)?;
        let elapsed = now.saturating_sub(loading.begun).as_nanos() as f64;
        let left = elapsed * (1.0 - parts.share()) / parts.share();
        (left <= scheduler.rates().compute(tokens)).then_some(id)
    }

    /// What comes of a load while a pass runs.
    pub(crate) fn coming<'a>(&'a mut self, id: LoadId, clock: &'a SharedClock) -> Coming<'a> {
        self.counters.loads_early += 1;
        if let Some(loading) = self.loads.get_mut(&id) {
            loading.is_early = true;
        }
        Coming { tier: self, id, clock }
    }

    /// Ends such a load, and says how many of its pages did not come.
    pub(crate) fn end_early(&mut self, id: LoadId, scheduler: &mut Scheduler) -> u32 {
        let Some(loading) = self.loads.remove(&id) else { return 0 };
        let n_lost = (loading.slots.len() - loading.n_whole()) as u32;
        let (n_pages, nanos) = loading.came[Source::Disk as usize];
        self.counters.loads_undone += u64::from(n_lost > 0);
        self.counters.pages_loaded += loading.n_whole() as u64;
        scheduler.loaded(Source::Disk, n_pages, nanos);
        n_lost
    }
}

/// What comes of a load while a pass runs.
pub(crate) struct Coming<'a> {
    tier: &'a mut Tier,
    id: LoadId,
    clock: &'a SharedClock,
}

impl Arrivals for Coming<'_> {
    fn await_layer(
        &mut self,
        layer: LayerIdx,
        write: &mut WritePage<'_>,
    ) -> Result<bool, DeviceError> {
        let Coming { tier, id, clock } = self;
        let part_layers = tier.parts.map_or(1, |parts| parts.n_layers);
        while let Some(loaded) = tier.slow.poll() {
            tier.place(loaded, write, clock)?;
        }
        loop {
            tier.ask();
            let Some(loading) = tier.loads.get(id) else { return Ok(false) };
            let Some(parts) = &loading.parts else { return Ok(false) };
            // Layers that share another's keys and values have none of their own.
            let part = ((layer.0 / part_layers) as usize).min(parts.shape.n_parts() - 1);
            if parts.has_come(part) {
                return Ok(true);
            }
            if loading.has_failed() || loading.is_late(clock.now()) {
                return Ok(false);
            }
            if let Some(loaded) = tier.slow.wait(PAUSE) {
                tier.place(loaded, write, clock)?;
            }
        }
    }
}

/// Asks for the parts of a load's pages, those of the first layers first, as long as there are buffers.
pub(super) fn ask_parts(slow: &mut SlowTiers, loading: &mut Loading, page_len: usize) {
    let n_pages = loading.slots.len();
    while loading.n_asked < loading.n_reads() && !loading.is_over() {
        let Some(parts) = &loading.parts else { return };
        let (part, page) = (loading.n_asked / n_pages, loading.n_asked % n_pages);
        // What comes after a page that is lost is of no use.
        if loading.has_come[..=page].contains(&Some(false)) {
            loading.n_asked += 1;
            continue;
        }
        let checks = match (part, parts.checks[page]) {
            (0, _) => PartChecks::default(),
            (_, Some(checks)) => checks,
            // Its first part is on its way.
            (_, None) => return,
        };
        let tokens = &loading.tokens[page * page_len..(page + 1) * page_len];
        let name = PageName { key: loading.keys[page + 1], parent: loading.keys[page], tokens };
        match slow.read_part(loading.tag + loading.n_asked as u64, &name, (part, checks)) {
            Asked::Begun => {}
            Asked::Busy => return,
            Asked::Missing => loading.has_come[page] = Some(false),
        }
        loading.n_asked += 1;
    }
}

/// Takes the `i`-th part that was asked for to its slot, and says whether its page is whole now.
pub(super) fn place_part(
    loading: &mut Loading,
    i: usize,
    came: &Result<PageBuf, Miss>,
    write: &mut WritePage<'_>,
) -> Result<bool, DeviceError> {
    let (part, page) = (i / loading.slots.len(), i % loading.slots.len());
    let (Ok(buf), Some(parts)) = (came, &mut loading.parts) else {
        loading.has_come[page] = Some(false);
        return Ok(false);
    };
    write(loading.slots[page], part * parts.bytes, buf.page())?;
    let is_whole = parts.take(part, page, buf.checks());
    if is_whole {
        loading.has_come[page] = Some(true);
    }
    Ok(is_whole)
}
