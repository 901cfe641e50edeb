//! What is slower than the host, as one: a disk, a store somewhere else, or both.
//!
//! ```text
//!   save   a page --> disk, and then its record --> store
//!   load   a page <-- disk if it is there, else <-- store
//! ```

use std::time::Duration;

use crossbeam_channel::Select;
use nuthatch_types::PageKey;

use crate::disk::{Asked, DiskStats, DiskTier, Loaded, PageName, PartChecks, RecordShape};
use crate::page_buf::PageBuf;
use crate::remote::{RemoteCounters, RemoteTier};

/// The tiers that are slower than the host. At least one is there.
#[derive(Debug)]
pub struct SlowTiers {
    disk: Option<DiskTier>,
    remote: Option<RemoteTier>,
}

impl SlowTiers {
    /// Both, or one of them.
    pub fn new(mut disk: Option<DiskTier>, remote: Option<RemoteTier>) -> Self {
        if let Some(disk) = disk.as_mut().filter(|_| remote.is_some()) {
            disk.keep_records();
        }
        SlowTiers { disk, remote }
    }

    /// Whether a page need not be saved.
    pub fn contains(&self, key: PageKey) -> bool {
        match (&self.disk, &self.remote) {
            (Some(disk), _) => disk.contains(key),
            (None, Some(remote)) => remote.contains(key),
            (None, None) => true,
        }
    }

    /// Whether a page is stored for all that is known.
    pub fn is_stored(&self, key: PageKey) -> bool {
        self.is_on_disk(key) || self.remote.as_ref().is_some_and(|remote| remote.is_known(key))
    }

    /// Whether the disk has a page, so that it comes from there.
    pub fn is_on_disk(&self, key: PageKey) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.n_stored(&[key]) > 0)
    }

    /// How many of these pages are stored for all that is known, up to the first that is not.
    pub fn n_stored(&self, keys: &[PageKey]) -> usize {
        keys.iter().take_while(|&&key| self.is_stored(key)).count()
    }

    /// Tells all pages of the disk.
    pub fn each_name(&self, tell: impl FnMut(&PageName<'_>)) {
        if let Some(disk) = &self.disk {
            disk.each_name(tell);
        }
    }

    /// Whether to ask for pages of which nobody knows whether they are stored, if computing them takes
    /// so long.
    pub fn is_worth_asking(&mut self, compute_nanos: f64) -> bool {
        self.remote.as_mut().is_some_and(|remote| remote.is_worth_asking(compute_nanos))
    }

    /// Takes in whether pages of which nobody knew were there.
    pub fn note_luck(&mut self, was_there: bool) {
        if let Some(remote) = &mut self.remote {
            remote.note_luck(was_there);
        }
    }

    /// Says that these pages are in use, wherever they were found: what is stored of them stays
    /// longer.
    pub fn touch(&mut self, keys: &[PageKey]) {
        if let Some(disk) = &mut self.disk {
            disk.touch(keys);
        }
    }

    /// Says that these pages will be read soon, so that they are fetched: from the disk by the
    /// system, and from the store what comes after the pages that the disk has. The first `n_known`
    /// are stored for all that is known; `waits` says whether something else comes before them.
    pub fn prefetch(&mut self, names: &[PageName<'_>], n_known: usize, waits: bool) {
        let keys: Vec<PageKey> = names[..n_known].iter().map(|name| name.key).collect();
        if let Some(disk) = &mut self.disk {
            disk.prefetch(&keys, waits);
        }
        let n_disk = keys.iter().take_while(|&&key| self.is_on_disk(key)).count();
        if let Some(remote) = &mut self.remote {
            remote.prefetch(names[n_disk..].iter().copied(), n_known - n_disk);
        }
    }

    /// A buffer for a page that is not stored; `None` when it is not to be saved.
    pub fn begin_save(&mut self) -> Option<PageBuf> {
        match (&mut self.disk, &mut self.remote) {
            (Some(disk), _) => disk.begin_save(),
            (None, Some(remote)) => remote.begin_save(),
            (None, None) => None,
        }
    }

    /// Saves a page whose bytes are in the buffer.
    pub fn save(&mut self, name: &PageName<'_>, buf: PageBuf) {
        match (&mut self.disk, &mut self.remote) {
            (Some(disk), _) => disk.save(name, buf),
            (None, Some(remote)) => remote.save(name, buf),
            (None, None) => {}
        }
    }

    /// Whether to go on with saving. If not, there will be room later.
    pub fn may_save(&mut self) -> bool {
        match (&mut self.disk, &self.remote) {
            (Some(disk), _) => disk.may_save(),
            (None, Some(remote)) => remote.may_save(),
            (None, None) => true,
        }
    }

    /// Asks for a page; `tag` is what it will be called by.
    pub fn read(&mut self, tag: u64, name: &PageName<'_>) -> Asked {
        let from_disk = self.disk.as_mut().map_or(Asked::Missing, |disk| disk.read(tag, name));
        match (&mut self.remote, from_disk) {
            (Some(remote), Asked::Missing) => remote.read(tag, name),
            _ => from_disk,
        }
    }

    /// The form of the disk's records, if their parts can be read alone.
    pub fn parts(&self) -> Option<RecordShape> {
        let shape = self.disk.as_ref()?.shape();
        (shape.n_parts() > 1).then_some(shape)
    }

    /// Asks for a part of a page of the disk: see [`DiskTier::read_part`].
    pub fn read_part(&mut self, tag: u64, name: &PageName<'_>, part: (usize, PartChecks)) -> Asked {
        self.disk.as_mut().map_or(Asked::Missing, |disk| disk.read_part(tag, name, part))
    }

    /// The next page that was read since, if there is one. Takes in what else has ended.
    pub fn poll(&mut self) -> Option<Loaded> {
        let loaded = self.disk.as_mut().and_then(DiskTier::poll);
        self.hand_on();
        loaded.or_else(|| self.remote.as_mut().and_then(RemoteTier::poll))
    }

    /// The same, and waits for it if nothing has ended, at most so long.
    pub fn wait(&mut self, timeout: Duration) -> Option<Loaded> {
        if self.remote.as_ref().is_some_and(RemoteTier::is_ready) {
            return self.poll();
        }
        let mut select = Select::new();
        if let Some(disk) = &self.disk {
            disk.await_in(&mut select);
        }
        if let Some(remote) = &self.remote {
            remote.await_in(&mut select);
        }
        // Whether it was in vain shows when it is asked.
        let _ = select.ready_timeout(timeout);
        self.poll()
    }

    /// Gives the buffer of a page back.
    pub fn recycle(&mut self, loaded: Loaded) {
        let Loaded { page: Ok(buf), is_remote, .. } = loaded else { return };
        match (&mut self.disk, &mut self.remote) {
            (_, Some(remote)) if is_remote => remote.recycle(buf),
            (Some(disk), _) => disk.recycle(buf),
            _ => {}
        }
    }

    /// Whether something is being written or removed.
    pub fn is_busy(&self) -> bool {
        self.disk.as_ref().is_some_and(DiskTier::is_busy)
            || self.remote.as_ref().is_some_and(RemoteTier::is_busy)
    }

    /// What the disk holds and did.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        self.disk.as_ref().map(DiskTier::stats)
    }

    /// What the store somewhere else did.
    pub fn remote_counters(&self) -> Option<RemoteCounters> {
        self.remote.as_ref().map(RemoteTier::counters)
    }

    /// Gives records that the disk is done with to the store.
    fn hand_on(&mut self) {
        if let (Some(disk), Some(remote)) = (&mut self.disk, &mut self.remote) {
            while let Some((name, record)) = disk.take_record() {
                disk.give_back(remote.save_record(name, record));
            }
        }
    }
}
