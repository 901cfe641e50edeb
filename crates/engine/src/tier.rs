//! The disk tier beside the loop: what is saved when, and what is brought instead of computed.
//!
//! ```text
//!   submit   how much of the prompt is stored, and is it worth loading?  -> Hints::n_stored, prefetch
//!   step     pages that were read -> their slots, complete_load | plan, run, commit | begin loads |
//!            pages that became full -> buffers -> saved by a thread
//! ```
//!
//! The engine's thread copies pages between the device and buffers and waits for no file. A load that
//! takes too long ends with what has come, and the rest is computed. Copies for saves have a small
//! share of the time of steps; what is not saved in time is saved when the engine rests.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::{Findable, Load, LoadId, Outcome, Salt};
use nuthatch_scheduler::Scheduler;
use nuthatch_store::disk::{Asked, DiskStats, DiskTier, Loaded, PageName};
use nuthatch_types::{PageId, PageKey, Slot, TokenId};

use crate::SharedClock;
use crate::executor::Execute;

/// The share of the time of steps that copying pages for saves may have.
const SAVE_SHARE: f64 = 0.02;
/// The least time before a load is given up, whatever computing its pages would take.
const PATIENCE_MIN: Duration = Duration::from_millis(200);
/// How long the engine waits at once for a page when there is nothing to compute, before it looks at
/// its commands.
const PAUSE: Duration = Duration::from_millis(2);
/// Pages that the disk reads side by side, for what one of them costs. Guessed.
const N_SIDE_BY_SIDE: u64 = 2;

/// Pages that are on a disk, on their way there, or on their way back.
#[derive(Debug)]
pub(crate) struct Tier {
    disk: DiskTier,
    page_len: u32,
    /// Pages that became findable and may not be saved yet.
    unsaved: VecDeque<PageId>,
    /// Most of them; pages of the cache, so there are hardly ever more.
    n_unsaved_max: usize,
    loads: BTreeMap<LoadId, Loading>,
    n_tags: u64,
    /// Time that copies for saves may take, and what one took last.
    save_nanos: f64,
    copy_nanos: f64,
    counters: TierCounters,
}

/// What the tier did, as far as the disk does not know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Loads that were begun.
    pub loads: u64,
    /// Loads that took too long and ended with a part of their pages.
    pub loads_late: u64,
    /// Pages that were brought to the device.
    pub pages_loaded: u64,
    /// Pages that were gone before they were saved.
    pub saves_missed: u64,
}

/// What the disk tier holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// The files.
    pub disk: DiskStats,
    /// The moves between them and the device.
    pub counters: TierCounters,
}

/// A load on its way.
#[derive(Debug)]
struct Loading {
    slots: Vec<Slot>,
    /// The name of what comes before the first page, and those of the pages.
    keys: Vec<PageKey>,
    /// `[n_pages, page_len]`
    tokens: Vec<TokenId>,
    /// The tag of the first page.
    tag: u64,
    /// Pages that were asked for.
    n_asked: usize,
    /// `[n_pages]` what is known of each.
    has_come: Vec<Option<bool>>,
    /// Time that was spent on its pages.
    nanos: u64,
    begun: Duration,
    deadline: Duration,
}

impl Loading {
    /// The pages from the first on that have come.
    fn n_whole(&self) -> usize {
        self.has_come.iter().take_while(|has_come| **has_come == Some(true)).count()
    }

    /// Whether nothing more will come that is of use.
    fn is_over(&self) -> bool {
        let n_whole = self.n_whole();
        n_whole == self.slots.len() || self.has_come[n_whole] == Some(false)
    }
}

impl Tier {
    pub(crate) fn new(disk: DiskTier, page_len: u32, n_pages: u32) -> Self {
        Tier {
            disk,
            page_len,
            unsaved: VecDeque::new(),
            n_unsaved_max: 2 * n_pages as usize,
            loads: BTreeMap::new(),
            n_tags: 0,
            save_nanos: 0.0,
            copy_nanos: 0.0,
            counters: TierCounters::default(),
        }
    }

    /// Tokens at a prompt's beginning that are cached or stored, if more than are cached are; 0 if
    /// they are not worth loading. What is stored of them is fetched ahead.
    pub(crate) fn n_stored(
        &mut self,
        scheduler: &Scheduler,
        salt: Salt,
        tokens: &[TokenId],
    ) -> u32 {
        self.settle();
        let cache = scheduler.cache();
        let n_cached = cache.n_cached(salt, tokens);
        // The last token is always computed.
        let keys = cache.keys(salt, &tokens[..tokens.len().saturating_sub(1)]);
        let (cached, keys) = keys[1..].split_at(n_cached as usize);
        // Or a conversation would lose its beginning on the disk while it goes on in memory.
        self.disk.touch(cached);
        let n_stored = self.disk.n_stored(keys);
        if n_stored == 0 || !scheduler.is_worth_loading(n_cached, n_stored as u32) {
            return 0;
        }
        self.disk.prefetch(&keys[..n_stored]);
        (n_cached + n_stored as u32) * self.page_len
    }

    /// Takes the loads that the scheduler decided.
    pub(crate) fn begin_loads(&mut self, scheduler: &mut Scheduler, now: Duration) {
        for load in scheduler.take_loads() {
            self.counters.loads += 1;
            match self.loading(&load, scheduler, now) {
                Some(loading) => {
                    self.loads.insert(load.id, loading);
                }
                None => scheduler.complete_load(load.id, Outcome::Ended { n_pages: 0 }),
            }
        }
        self.ask();
    }

    /// Whether something is on its way to the device.
    pub(crate) fn is_loading(&self) -> bool {
        !self.loads.is_empty()
    }

    /// Brings what was read to the device, and ends the loads that are over.
    pub(crate) fn take_loaded<E: Execute>(
        &mut self,
        executor: &mut E,
        scheduler: &mut Scheduler,
        clock: &SharedClock,
    ) -> Result<(), DeviceError> {
        while let Some(loaded) = self.disk.poll() {
            self.place(loaded, executor, clock)?;
        }
        self.ask();
        self.end_loads(scheduler, clock.now());
        Ok(())
    }

    /// Waits a moment for something that was asked for: there is nothing to compute.
    pub(crate) fn pause<E: Execute>(
        &mut self,
        executor: &mut E,
        clock: &SharedClock,
    ) -> Result<(), DeviceError> {
        match self.disk.wait(PAUSE) {
            Some(loaded) => self.place(loaded, executor, clock),
            None => Ok(()),
        }
    }

    /// Ends every load with nothing, and saves nothing more of what is now cached: the bytes on the
    /// device are lost.
    pub(crate) fn abandon(&mut self, scheduler: &mut Scheduler) {
        self.unsaved.clear();
        scheduler.take_published();
        for load in scheduler.take_loads() {
            scheduler.complete_load(load.id, Outcome::Ended { n_pages: 0 });
        }
        for id in std::mem::take(&mut self.loads).into_keys() {
            scheduler.complete_load(id, Outcome::Ended { n_pages: 0 });
        }
    }

    /// Saves pages that became full, as many as a step of this length has time for, or as many as
    /// there are buffers for if there is all the time. Says whether something is left to save.
    pub(crate) fn save<E: Execute>(
        &mut self,
        executor: &mut E,
        scheduler: &mut Scheduler,
        clock: &SharedClock,
        step_time: Option<Duration>,
    ) -> Result<bool, DeviceError> {
        self.unsaved.extend(scheduler.take_published());
        let n_over = self.unsaved.len().saturating_sub(self.n_unsaved_max);
        self.unsaved.drain(..n_over);
        self.counters.saves_missed += n_over as u64;
        if let Some(step_time) = step_time {
            let share = SAVE_SHARE * step_time.as_nanos() as f64;
            // What was not used before is lost, but for one page.
            self.save_nanos = (self.save_nanos + share).min(share.max(self.copy_nanos));
        }
        self.settle();
        // A page that moves has its new slot before its bytes are there.
        if scheduler.cache().n_copies() > 0 {
            return Ok(!self.unsaved.is_empty());
        }
        while let Some(&page) = self.unsaved.front() {
            let has_time = step_time.is_none() || self.save_nanos >= self.copy_nanos;
            let found = scheduler.cache().findable(page);
            let wanted = found.filter(|found| !self.disk.contains(found.key));
            self.counters.saves_missed += u64::from(found.is_none());
            if let Some(found) = wanted {
                if !has_time || !self.disk.may_save() {
                    break;
                }
                let begin = clock.now();
                self.save_page(executor, &found)?;
                self.copy_nanos = clock.now().saturating_sub(begin).as_nanos() as f64;
                self.save_nanos -= self.copy_nanos;
            }
            self.unsaved.pop_front();
        }
        Ok(!self.unsaved.is_empty())
    }

    /// Whether pages are on their way to the disk.
    pub(crate) fn is_saving(&self) -> bool {
        self.disk.is_busy()
    }

    /// Waits a moment for something on its way to the disk.
    pub(crate) fn wait_saves(&mut self) {
        if let Some(Loaded { page: Ok(buf), .. }) = self.disk.wait(PAUSE) {
            self.disk.recycle(buf);
        }
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats { disk: self.disk.stats(), counters: self.counters }
    }

    fn save_page<E: Execute>(
        &mut self,
        executor: &mut E,
        found: &Findable<'_>,
    ) -> Result<(), DeviceError> {
        let Some(mut buf) = self.disk.begin_save() else { return Ok(()) };
        executor.read_page(found.slot, buf.page_mut())?;
        let name = PageName { key: found.key, parent: found.parent, tokens: found.tokens };
        self.disk.save(&name, buf);
        Ok(())
    }

    /// What a load needs to be carried out; `None` when nobody waits for it.
    fn loading(&mut self, load: &Load, scheduler: &Scheduler, now: Duration) -> Option<Loading> {
        let (salt, tokens) = scheduler.load_tokens(load.id)?;
        let (page_len, n_pages) = (self.page_len, load.slots.len());
        let (start, first) = (load.start as usize, (load.start / page_len) as usize);
        let end = start + n_pages * page_len as usize;
        let mut keys = scheduler.cache().keys(salt, &tokens[..end]);
        keys.drain(..first);
        let compute_nanos = scheduler.rates().compute(load.start..end as u32);
        let patience = Duration::from_nanos((2.0 * compute_nanos) as u64).max(PATIENCE_MIN);
        let tag = self.n_tags;
        self.n_tags += n_pages as u64;
        Some(Loading {
            slots: load.slots.clone(),
            keys,
            tokens: tokens[start..end].to_vec(),
            tag,
            n_asked: 0,
            has_come: vec![None; n_pages],
            nanos: 0,
            begun: now,
            deadline: now + patience,
        })
    }

    /// Asks for pages of loads, in order, as long as there are buffers.
    fn ask(&mut self) {
        let page_len = self.page_len as usize;
        for loading in self.loads.values_mut() {
            while loading.n_asked < loading.slots.len() && !loading.is_over() {
                let i = loading.n_asked;
                let tokens = &loading.tokens[i * page_len..(i + 1) * page_len];
                let name = PageName { key: loading.keys[i + 1], parent: loading.keys[i], tokens };
                match self.disk.read(loading.tag + i as u64, &name) {
                    Asked::Begun => {}
                    Asked::Busy => return,
                    Asked::Missing => loading.has_come[i] = Some(false),
                }
                loading.n_asked += 1;
            }
        }
    }

    /// Takes a page that was read to its slot, if somebody still waits for it.
    fn place<E: Execute>(
        &mut self,
        loaded: Loaded,
        executor: &mut E,
        clock: &SharedClock,
    ) -> Result<(), DeviceError> {
        let Loaded { tag, page, nanos } = loaded;
        let of_tag = |loading: &&mut Loading| {
            (loading.tag..loading.tag + loading.slots.len() as u64).contains(&tag)
        };
        let begin = clock.now();
        let loading = self.loads.values_mut().find(of_tag);
        if let Some(loading) = loading {
            let i = (tag - loading.tag) as usize;
            if let Ok(buf) = &page {
                executor.write_page(loading.slots[i], buf.page())?;
            }
            loading.has_come[i] = Some(page.is_ok());
            let copied = clock.now().saturating_sub(begin).as_nanos() as u64;
            // Pages are read side by side, and copied one after the other.
            loading.nanos += nanos / N_SIDE_BY_SIDE + copied;
        }
        if let Ok(buf) = page {
            self.disk.recycle(buf);
        }
        Ok(())
    }

    /// Ends loads that have come, that cannot come, for which nobody waits, or that take too long.
    fn end_loads(&mut self, scheduler: &mut Scheduler, now: Duration) {
        let is_over = |(id, loading): (&LoadId, &Loading)| {
            let is_late = now >= loading.deadline;
            let is_wanted = scheduler.cache().waits_for(*id).is_some();
            (loading.is_over() || is_late || !is_wanted).then_some(*id)
        };
        let over: Vec<LoadId> = self.loads.iter().filter_map(is_over).collect();
        for id in over {
            let Some(loading) = self.loads.remove(&id) else { continue };
            let n_pages = loading.n_whole() as u32;
            self.counters.pages_loaded += u64::from(n_pages);
            if now >= loading.deadline && !loading.is_over() {
                self.counters.loads_late += 1;
                let waited = now.saturating_sub(loading.begun);
                scheduler.loaded(n_pages.max(1), waited.as_nanos() as u64);
            } else {
                scheduler.loaded(n_pages, loading.nanos);
            }
            scheduler.complete_load(id, Outcome::Ended { n_pages });
        }
    }

    /// Takes in what has ended while no load is on its way. With loads, pages that come are for them.
    fn settle(&mut self) {
        while self.loads.is_empty()
            && let Some(Loaded { page, .. }) = self.disk.poll()
        {
            // Nobody waits for it any more.
            if let Ok(buf) = page {
                self.disk.recycle(buf);
            }
        }
    }
}
