//! Slower tiers beside the loop: what is saved when, and what is brought instead of computed.
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
//!
//! What a store somewhere else holds shows only when it is asked. So a load may be a guess: it asks for
//! one page that nobody knows of, for two more for each that comes, and ends at the first that does
//! not.

mod early;
mod loading;
mod stats;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_cache::{Findable, Load, LoadId, Outcome, Salt};
use nuthatch_scheduler::{Scheduler, Source, StoredPages};
use nuthatch_store::disk::{Asked, Loaded, PageName};
use nuthatch_store::slow::SlowTiers;
use nuthatch_types::{PageId, PageKey, TokenId};

use crate::SharedClock;
use crate::executor::Execute;
use crate::moved::{Moved, Wanted};
use crate::pages::WritePage;
pub(crate) use loading::LayerParts;
use loading::{Loading, Parts};
pub use stats::{TierCounters, TierStats};

/// The share of the time of steps that copying pages for saves may have.
const SAVE_SHARE: f64 = 0.02;
/// The least time before a load is given up, whatever computing its pages would take.
const PATIENCE_MIN: Duration = Duration::from_millis(200);
/// The least time before a load or a guess is given up while nobody knows what computing takes, as
/// right after the start, when conversations come back.
const PATIENCE_UNMEASURED: Duration = Duration::from_secs(5);
const GUESS_PATIENCE_UNMEASURED: Duration = Duration::from_secs(1);
/// How long the engine waits at once for a page when there is nothing to compute, before it looks at
/// its commands.
const PAUSE: Duration = Duration::from_millis(2);
/// How long a guess may go without any page: this share of what computing takes, but not less than
/// the time after it.
const GUESS_SHARE: f64 = 0.25;
const GUESS_PATIENCE_MIN: Duration = Duration::from_millis(20);

/// In the order of [`Loading::came`].
const SOURCES: [Source; 2] = [Source::Disk, Source::Remote];

/// Pages that are in slower tiers, on their way there, or on their way back.
#[derive(Debug)]
pub(crate) struct Tier {
    slow: SlowTiers,
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
    /// What stands elsewhere than it stood is used too.
    moved: Option<Moved>,
    /// The parts of pages, if passes can begin while pages come part by part.
    parts: Option<LayerParts>,
}

impl Tier {
    pub(crate) fn new(slow: SlowTiers, page_len: u32, n_pages: u32) -> Self {
        Tier {
            slow,
            page_len,
            unsaved: VecDeque::new(),
            n_unsaved_max: 2 * n_pages as usize,
            loads: BTreeMap::new(),
            n_tags: 0,
            save_nanos: 0.0,
            copy_nanos: 0.0,
            counters: TierCounters::default(),
            moved: None,
            parts: None,
        }
    }

    /// Lets passes begin while pages come part by part.
    pub(crate) fn begin_early(&mut self, parts: LayerParts) {
        self.parts = Some(parts);
    }

    /// Also uses pages whose tokens stand elsewhere than they stood.
    pub(crate) fn reuse(&mut self, mut moved: Moved) {
        self.slow.each_name(|name| moved.add(name));
        self.moved = Some(moved);
    }

    /// Tokens at a prompt's beginning that are cached or stored, or may be stored, if those are more
    /// than are cached, and pages of them that are not on the disk; 0 if they are not worth loading.
    /// What is stored of them is fetched ahead.
    pub(crate) fn n_stored(
        &mut self,
        scheduler: &Scheduler,
        salt: Salt,
        prompt: &[TokenId],
    ) -> (u32, u32) {
        self.settle();
        let cache = scheduler.cache();
        let n_cached = cache.n_cached(salt, prompt);
        // The last token is always computed.
        let all_keys = cache.keys(salt, &prompt[..prompt.len().saturating_sub(1)]);
        let (cached, keys) = all_keys[1..].split_at(n_cached as usize);
        // Or a conversation would lose its beginning on the disk while it goes on in memory.
        self.slow.touch(cached);
        let n_known = self.slow.n_stored(keys);
        let n_before = n_cached as usize + n_known;
        let wanted = Wanted {
            root: all_keys[0],
            parent: all_keys[n_before],
            tokens: &prompt[..prompt.len().saturating_sub(1)],
            start: n_before * self.page_len as usize,
        };
        let is_on_disk = |key| self.slow.is_on_disk(key);
        let n_moved = self.moved.as_ref().map_or(0, |moved| moved.n_pages(&wanted, is_on_disk));
        let tokens = |n_pages: usize| (n_cached + n_pages as u32) * self.page_len;
        let unknown = tokens(n_known)..tokens(keys.len());
        let is_worth_asking = n_moved == 0
            && !unknown.is_empty()
            && self.slow.is_worth_asking(scheduler.rates().compute(unknown));
        let n_stored = if is_worth_asking { keys.len() } else { n_known + n_moved };
        let is_remote = |key: &&PageKey| self.source(**key) == Source::Remote;
        let n_asked = n_stored - n_moved;
        let n_remote = keys[..n_asked].iter().filter(is_remote).count() as u32;
        let pages = StoredPages { n_disk: n_stored as u32 - n_remote, n_remote };
        if n_stored == 0 || !scheduler.is_worth_loading(n_cached, pages) {
            return (0, 0);
        }
        let name = |(i, &key): (usize, &PageKey)| {
            let (page, page_len) = (n_cached as usize + i, self.page_len as usize);
            let tokens = &prompt[page * page_len..(page + 1) * page_len];
            PageName { key, parent: all_keys[page], tokens }
        };
        let names: Vec<PageName<'_>> = keys[..n_asked].iter().enumerate().map(name).collect();
        self.slow.prefetch(&names, n_known, !scheduler.is_idle());
        ((n_cached + n_stored as u32) * self.page_len, n_remote)
    }

    /// Where a page would come from.
    fn source(&self, key: PageKey) -> Source {
        if self.slow.is_on_disk(key) { Source::Disk } else { Source::Remote }
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
        let mut write = |slot, start, bytes: &[u8]| executor.write_page(slot, start, bytes);
        while let Some(loaded) = self.slow.poll() {
            self.place(loaded, &mut write, clock)?;
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
        let mut write = |slot, start, bytes: &[u8]| executor.write_page(slot, start, bytes);
        match self.slow.wait(PAUSE) {
            Some(loaded) => self.place(loaded, &mut write, clock),
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
        for (id, loading) in std::mem::take(&mut self.loads) {
            if !loading.is_early {
                scheduler.complete_load(id, Outcome::Ended { n_pages: 0 });
            }
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
            let wanted = found.filter(|found| !self.slow.contains(found.key));
            self.counters.saves_missed += u64::from(found.is_none());
            if let Some(found) = wanted {
                if !has_time || !self.slow.may_save() {
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
        self.slow.is_busy()
    }

    /// Waits a moment for something on its way to the disk.
    pub(crate) fn wait_saves(&mut self) {
        if let Some(loaded) = self.slow.wait(PAUSE) {
            self.slow.recycle(loaded);
        }
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats {
            disk: self.slow.disk_stats(),
            remote: self.slow.remote_counters(),
            counters: self.counters,
        }
    }

    fn save_page<E: Execute>(
        &mut self,
        executor: &mut E,
        found: &Findable<'_>,
    ) -> Result<(), DeviceError> {
        let Some(mut buf) = self.slow.begin_save() else { return Ok(()) };
        executor.read_page(found.slot, buf.page_mut())?;
        let name = PageName { key: found.key, parent: found.parent, tokens: found.tokens };
        if let Some(moved) = &mut self.moved {
            moved.tidy(|key| self.slow.contains(key));
            moved.add(&name);
        }
        self.slow.save(&name, buf);
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
        let rates = scheduler.rates();
        let compute_nanos = rates.compute(load.start..end as u32);
        let (least, guess_least) = match rates.is_measured() {
            true => (PATIENCE_MIN, GUESS_PATIENCE_MIN),
            false => (PATIENCE_UNMEASURED, GUESS_PATIENCE_UNMEASURED),
        };
        let patience = Duration::from_nanos((2.0 * compute_nanos) as u64).max(least);
        let guess_patience = Duration::from_nanos((GUESS_SHARE * compute_nanos) as u64);
        let guess_patience = guess_patience.max(guess_least);
        let n_known = self.slow.n_stored(&keys[1..]);
        let root = scheduler.cache().keys(salt, &[])[0];
        let wanted = Wanted {
            root,
            parent: keys[n_known],
            tokens: &tokens[..end],
            start: start + n_known * page_len as usize,
        };
        let is_on_disk = |key| self.slow.is_on_disk(key);
        let moved = self.moved.as_ref().map(|moved| moved.pages(&wanted, is_on_disk));
        let moved = moved.filter(|moved| moved.n_pages() > 0);
        let first_moved = if moved.is_some() { n_known } else { n_pages };
        let moved = moved.unwrap_or_default();
        let mut has_come = vec![None; n_pages];
        if first_moved + moved.n_pages() < n_pages {
            has_come[first_moved + moved.n_pages()] = Some(false);
        }
        // While others are computed, nobody is in a hurry.
        let is_alone = scheduler.early_tokens(load.id).is_some();
        let is_here = n_known == n_pages && keys[1..].iter().all(|&key| self.slow.is_on_disk(key));
        let comes_in_parts = is_alone && is_here && self.loads.is_empty();
        let parts = self.parts.filter(|_| comes_in_parts).zip(self.slow.parts());
        let parts = parts.map(|(parts, shape)| Parts::new(shape, parts.bytes, n_pages));
        let n_reads = match &parts {
            Some(parts) => parts.shape.n_parts() * n_pages,
            None => first_moved + moved.reads.len(),
        };
        let tag = self.n_tags;
        self.n_tags += n_reads as u64;
        Some(Loading {
            parts,
            is_early: false,
            slots: load.slots.clone(),
            keys,
            tokens: tokens[start..end].to_vec(),
            tag,
            n_asked: 0,
            has_come,
            moved,
            first_moved,
            came: [(0, 0); 2],
            guess: None,
            begun: now,
            deadline: now + patience,
            guess_deadline: now + guess_patience,
        })
    }

    /// Asks for pages of loads, in order, as long as there are buffers.
    fn ask(&mut self) {
        let page_len = self.page_len as usize;
        for loading in self.loads.values_mut() {
            if loading.parts.is_some() {
                early::ask_parts(&mut self.slow, loading, page_len);
                continue;
            }
            while loading.n_asked < loading.n_reads() && !loading.is_over() {
                let i = loading.n_asked;
                if let Some(read) = i.checked_sub(loading.first_moved) {
                    match self.slow.read(loading.tag + i as u64, &loading.moved.reads[read].name())
                    {
                        Asked::Begun => {}
                        Asked::Busy => return,
                        Asked::Missing => loading.lose(read),
                    }
                    loading.n_asked += 1;
                    continue;
                }
                if !loading.may_ask(self.slow.is_stored(loading.keys[i + 1])) {
                    break;
                }
                let tokens = &loading.tokens[i * page_len..(i + 1) * page_len];
                let name = PageName { key: loading.keys[i + 1], parent: loading.keys[i], tokens };
                match self.slow.read(loading.tag + i as u64, &name) {
                    Asked::Begun => {}
                    Asked::Busy => return,
                    Asked::Missing => loading.has_come[i] = Some(false),
                }
                loading.n_asked += 1;
            }
        }
    }

    /// Takes a page that was read to its slot, if somebody still waits for it.
    fn place(
        &mut self,
        loaded: Loaded,
        write: &mut WritePage<'_>,
        clock: &SharedClock,
    ) -> Result<(), DeviceError> {
        let tag = loaded.tag;
        let of_tag = |loading: &&mut Loading| {
            (loading.tag..loading.tag + loading.n_reads() as u64).contains(&tag)
        };
        let begin = clock.now();
        let loading = self.loads.values_mut().find(of_tag);
        if let Some(loading) = loading {
            let i = (tag - loading.tag) as usize;
            let mut n_whole = u32::from(loaded.page.is_ok());
            match (&loaded.page, i.checked_sub(loading.first_moved)) {
                (page, _) if loading.parts.is_some() => {
                    n_whole = u32::from(early::place_part(loading, i, page, write)?);
                }
                (Ok(buf), None) => {
                    write(loading.slots[i], 0, buf.page())?;
                    loading.has_come[i] = Some(true);
                }
                (Err(_), None) => loading.has_come[i] = Some(false),
                (Ok(buf), Some(read)) => {
                    let moved = self.moved.as_ref().expect("it has moved pages");
                    let Loading { moved: pages, slots, has_come, first_moved, .. } = loading;
                    moved.place(pages, read, buf.page(), |page, bytes| {
                        has_come[*first_moved + page] = Some(true);
                        self.counters.pages_moved += 1;
                        write(slots[*first_moved + page], 0, bytes)
                    })?;
                }
                (Err(_), Some(read)) => loading.lose(read),
            }
            let copied = clock.now().saturating_sub(begin).as_nanos() as u64;
            let source = if loaded.is_remote { Source::Remote } else { Source::Disk };
            let (n_pages, nanos) = &mut loading.came[source as usize];
            *n_pages += n_whole;
            *nanos += loaded.nanos + copied;
        }
        self.slow.recycle(loaded);
        Ok(())
    }

    /// Ends loads that have come, that cannot come, for which nobody waits, or that take too long.
    fn end_loads(&mut self, scheduler: &mut Scheduler, now: Duration) {
        let is_over = |(id, loading): (&LoadId, &Loading)| {
            let is_wanted = scheduler.cache().waits_for(*id).is_some();
            (loading.is_over() || loading.is_late(now) || !is_wanted).then_some(*id)
        };
        let over: Vec<LoadId> = self.loads.iter().filter_map(is_over).collect();
        for id in over {
            let Some(loading) = self.loads.remove(&id) else { continue };
            let n_pages = loading.n_whole() as u32;
            self.counters.pages_loaded += u64::from(n_pages);
            if let Some(first) = loading.guess {
                let was_there = loading.has_come[first] == Some(true);
                self.slow.note_luck(was_there);
                self.counters.guesses_missed += u64::from(!was_there);
            }
            if loading.is_late(now) && !loading.is_over() {
                self.counters.loads_late += 1;
                let waited = now.saturating_sub(loading.begun);
                // A guess in vain says nothing of what loading takes.
                let n_waited = if now < loading.deadline { n_pages } else { n_pages.max(1) };
                // What it waits for is what was slow.
                let source = self.source(loading.keys[loading.n_whole() + 1]);
                scheduler.loaded(source, n_waited, waited.as_nanos() as u64);
            } else {
                for (source, (n_pages, nanos)) in SOURCES.into_iter().zip(loading.came) {
                    scheduler.loaded(source, n_pages, nanos);
                }
            }
            scheduler.complete_load(id, Outcome::Ended { n_pages });
        }
    }

    /// Takes in what has ended while no load is on its way. With loads, pages that come are for them.
    fn settle(&mut self) {
        while self.loads.is_empty()
            && let Some(loaded) = self.slow.poll()
        {
            // Nobody waits for it any more.
            self.slow.recycle(loaded);
        }
    }
}
