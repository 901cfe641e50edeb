//! Pages on a disk: checked, bounded, and safe to be killed at any moment.
//!
//! ```text
//!   save   begin_save -> the page's bytes -> save --> the writing thread: checksum, append
//!   load   read --> a reading thread: read, check name, tokens and checksum --> poll -> the bytes
//! ```
//!
//! A directory holds append-only segment files. A page is found by its name ([`PageKey`]) in an index
//! in memory, which is made anew from the records' headers when the directory is opened; whatever is
//! torn, corrupt, foreign or stale is a miss with a counted reason. There is no order of writes that a
//! crash could break: a record counts if its checks hold. Nothing is synced, so a power failure may
//! cost records, never truth.
//!
//! Code map: [`DiskTier`] belongs to one thread and owns all state; `record` is the form of the files,
//! `segments` which page is where and which segment goes, `recover` how a directory is opened, `io` the
//! threads that read and write, `queue` their transfers by io_uring or one by one, `files` the other
//! operations they use.

mod files;
mod io;
mod queue;
mod record;
mod recover;
mod segments;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Select;
use nuthatch_types::{Clock, FastSet, PageKey};

pub use files::{DiskIo, Files, IoEngine, SegmentFile, SystemFiles};
pub use io::Miss;
pub use queue::{Moved, Queue, SystemFile, Transfer};
pub(crate) use record::{BLOCK, part_check};
pub use record::{Defect, N_PARTS, PageName, PartChecks, RecordShape};
pub use recover::{DiskDir, DiskError};
pub use stats::{DiskCounters, DiskStats};

use files::read_fully;
use io::{Done, Hint, ReadJob, Target, Threads, WriteJob};
use segments::{Segments, Victim};

use crate::page_buf::{Buffers, OwnedName, PageBuf, RecordLayout};

/// After failed writes in a row, up to two to this many saves are refused before the next try.
const BACKOFF_BITS: u32 = 10;
/// Pages that the disk reads side by side, for what one of them costs. Guessed.
const N_SIDE_BY_SIDE: u64 = 2;

/// Pages that the system was asked for, as far as they are remembered.
const N_HINTED_MAX: usize = 1 << 16;

/// Pages on a disk. See the module's documentation.
pub struct DiskTier {
    dir: PathBuf,
    /// Held as long as the directory is in use.
    _lock: std::fs::File,
    segments: Segments,
    threads: Threads,
    io: DiskIo,
    /// Pages that the system was asked to have in its cache, so that they are read from there.
    hinted: FastSet<PageKey>,
    /// Pages that are being written.
    writing: FastSet<PageKey>,
    /// Buffers that are not on their way, for each direction.
    free_writes: Buffers,
    free_reads: Buffers,
    /// The same for parts of pages.
    free_parts: Buffers,
    /// Records that were written and not taken yet, if they are kept for somebody.
    records: Option<VecDeque<(OwnedName, PageBuf)>>,
    /// Writes that failed in a row, and saves that are refused because of that.
    n_failures: u32,
    n_refusals: u64,
    counters: DiskCounters,
}

/// Whether a page will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It is being read: [`DiskTier::poll`] will say what became of it.
    Begun,
    /// Too many are on their way. Ask again later.
    Busy,
    /// It is not stored.
    Missing,
}

/// A page that was read, or was not.
#[derive(Debug)]
pub struct Loaded {
    /// What the caller named it.
    pub tag: u64,
    /// Its bytes, to be given back by [`DiskTier::recycle`].
    pub page: Result<PageBuf, Miss>,
    /// How long it took: its share, where several come side by side.
    pub nanos: u64,
    /// Whether it came from somewhere else than the disk.
    pub is_remote: bool,
}

impl DiskTier {
    /// Opens a directory for records of this form and finds what is stored. Never more than
    /// `bytes_max` bytes of segments are kept.
    pub fn open(
        dir: DiskDir,
        bytes_max: u64,
        layout: &RecordLayout,
        files: Arc<dyn Files>,
        clock: Arc<dyn Clock + Send + Sync>,
    ) -> Result<Self, DiskError> {
        let RecordLayout { form, codec } = layout;
        let shape = form.shape;
        let buffers = || Buffers::new(shape, codec.as_deref());
        let (free_writes, free_reads) = (buffers(), buffers());
        let mut counters = DiskCounters::default();
        let mut io = files.io();
        let takes_direct =
            |path: &Path| files.open(path).is_ok_and(|file| file.system().is_direct());
        io.direct = io.direct && shape.has_blocks() && takes_direct(&dir.path.join("lock"));
        let segments = recover::segments(&dir.path, bytes_max, shape, &*files, &mut counters)?;
        let threads = Threads::start(form, codec.as_ref(), &files, &clock)
            .map_err(|source| DiskError::Io { path: dir.path.clone(), source })?;
        Ok(DiskTier {
            dir: dir.path,
            _lock: dir.lock,
            segments,
            threads,
            io,
            hinted: FastSet::default(),
            writing: FastSet::default(),
            free_writes,
            free_reads,
            free_parts: Buffers::for_parts(shape, codec.as_deref()),
            records: None,
            n_failures: 0,
            n_refusals: 0,
            counters,
        })
    }

    /// Whether a page is stored, or will be.
    pub fn contains(&self, key: PageKey) -> bool {
        self.segments.contains(key) || self.writing.contains(&key)
    }

    /// How many of these pages are stored, up to the first that is not.
    pub fn n_stored(&self, keys: &[PageKey]) -> usize {
        keys.iter().take_while(|&&key| self.segments.contains(key)).count()
    }

    /// Tells all pages that are stored; none if they are encrypted.
    pub fn each_name(&self, mut tell: impl FnMut(&PageName<'_>)) {
        let shape = self.segments.shape;
        if shape.is_encrypted {
            return;
        }
        let mut header = vec![0; shape.header_bytes()];
        for (place, file) in self.segments.places() {
            let n = read_fully(&**file, &mut header, shape.record_start(place.record)).unwrap_or(0);
            if let Some(name) = shape.read_name(&header[..n]) {
                tell(&name.borrow());
            }
        }
    }

    /// Says that these pages are in use, wherever they were found: what is stored of them stays
    /// longer.
    pub fn touch(&mut self, keys: &[PageKey]) {
        for &key in keys {
            if let Some((place, _)) = self.segments.find(key) {
                self.segments.hit(place);
            }
        }
    }

    /// Says that these pages will be read, at once or after something for which they wait, so that the
    /// system fetches them.
    pub fn prefetch(&mut self, keys: &[PageKey], waits: bool) {
        let shape = self.segments.shape;
        if self.io.direct {
            // What is read at once needs no page cache.
            if !waits {
                return;
            }
            if self.hinted.len() > N_HINTED_MAX {
                self.hinted.clear();
            }
            self.hinted.extend(keys);
        }
        let mut hints: Vec<(u64, Hint)> = Vec::new();
        for &key in keys {
            let Some((place, file)) = self.segments.find(key) else { continue };
            let (start, len) = (shape.record_start(place.record), shape.record_bytes() as u64);
            match hints.last_mut() {
                // Pages of one prompt mostly follow each other.
                Some((segment, hint))
                    if *segment == place.segment && hint.start + hint.len == start =>
                {
                    hint.len += len;
                }
                _ => hints.push((place.segment, Hint { file: Arc::clone(file), start, len })),
            }
        }
        hints.into_iter().for_each(|(_, hint)| self.threads.hint(hint));
    }

    /// A buffer for a page that is not stored; `None` when it is not to be saved, because writes have
    /// failed or because too many are on their way: see [`DiskTier::may_save`].
    pub fn begin_save(&mut self) -> Option<PageBuf> {
        if self.n_refusals > 0 {
            self.n_refusals -= 1;
            self.counters.saves_refused += 1;
            return None;
        }
        self.free_writes.take()
    }

    /// Saves a page whose bytes are in the buffer. It can be found when it is written.
    pub fn save(&mut self, name: &PageName<'_>, buf: PageBuf) {
        let is_new = !self.contains(name.key);
        let Some(place) = is_new.then(|| self.segments.reserve()).flatten() else {
            self.counters.saves_refused += 1;
            return self.free_writes.give_back(buf);
        };
        self.writing.insert(name.key);
        let target = match self.segments.file(place.segment) {
            Some(file) => Target::Open(Arc::clone(file)),
            None => Target::New(segment_path(&self.dir, place.segment)),
        };
        let (name, is_direct) = (OwnedName::new(name), self.io.direct);
        self.threads.write(WriteJob::Write { place, name, target, buf, is_direct });
    }

    /// Whether to go on with saving: there is room, and a buffer, or the disk has failed so that saves
    /// are refused. If not, there will be room later.
    pub fn may_save(&mut self) -> bool {
        if self.n_refusals > 0 {
            return true;
        }
        self.make_room();
        self.segments.has_room() && !self.free_writes.is_empty()
    }

    /// Asks for a page; `tag` is what it will be called by.
    pub fn read(&mut self, tag: u64, name: &PageName<'_>) -> Asked {
        self.read_some(tag, name, None)
    }

    /// The form of records.
    pub fn shape(&self) -> RecordShape {
        self.segments.shape
    }

    /// Asks for a part of a page. The checks came with its first part, which needs none.
    pub fn read_part(&mut self, tag: u64, name: &PageName<'_>, part: (usize, PartChecks)) -> Asked {
        self.read_some(tag, name, Some(part))
    }

    fn read_some(
        &mut self,
        tag: u64,
        name: &PageName<'_>,
        part: Option<(usize, PartChecks)>,
    ) -> Asked {
        let Some((place, file)) = self.segments.find(name.key) else { return Asked::Missing };
        let file = Arc::clone(file);
        let buffers = if part.is_some() { &mut self.free_parts } else { &mut self.free_reads };
        let Some(buf) = buffers.take() else { return Asked::Busy };
        let is_direct = self.io.direct && !self.hinted.contains(&name.key);
        let n_parts = self.segments.shape.n_parts();
        if part.is_none_or(|(part, _)| part + 1 == n_parts) {
            self.hinted.remove(&name.key);
        }
        let name = OwnedName::new(name);
        self.threads.read(ReadJob { tag, place, file, name, buf, is_direct, part });
        Asked::Begun
    }

    /// The next page that was read since, if there is one. Takes in what else has ended.
    pub fn poll(&mut self) -> Option<Loaded> {
        while let Ok(done) = self.threads.done.try_recv() {
            if let Some(loaded) = self.take(done) {
                return Some(loaded);
            }
        }
        None
    }

    /// Takes in one thing that has ended, and waits for it if nothing has, at most so long.
    pub fn wait(&mut self, timeout: Duration) -> Option<Loaded> {
        let done = self.threads.done.try_recv().ok().or_else(|| self.threads.wait(timeout))?;
        self.take(done)
    }

    /// Gives a buffer back.
    pub fn recycle(&mut self, buf: PageBuf) {
        match buf.is_part {
            true => self.free_parts.give_back(buf),
            false => self.free_reads.give_back(buf),
        }
    }

    /// Keeps records that were written for [`DiskTier::take_record`].
    pub(crate) fn keep_records(&mut self) {
        self.records = Some(VecDeque::new());
    }

    /// The next record that was written, or could not be.
    pub(crate) fn take_record(&mut self) -> Option<(OwnedName, PageBuf)> {
        self.records.as_mut()?.pop_front()
    }

    /// Gives a buffer back for one that was taken with its record.
    pub(crate) fn give_back(&mut self, buf: PageBuf) {
        self.free_writes.give_back(buf);
    }

    /// Adds what ends here to what somebody waits for.
    pub(crate) fn await_in<'a>(&'a self, select: &mut Select<'a>) {
        select.recv(&self.threads.done);
    }

    /// Whether something is being written or removed.
    pub fn is_busy(&self) -> bool {
        !self.writing.is_empty() || self.segments.is_removing()
    }

    /// What the tier holds and what it did.
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            bytes: self.segments.bytes(),
            bytes_max: self.segments.bytes_max,
            pages: self.segments.n_pages(),
            segments: self.segments.n_segments(),
            io: self.io,
            counters: self.counters,
        }
    }

    /// Begins to remove a segment if it is time for that.
    fn make_room(&mut self) {
        if let Some(Victim { number, n_pages }) = self.segments.next_victim() {
            self.counters.segments_evicted += 1;
            self.counters.pages_evicted += n_pages;
            let path = segment_path(&self.dir, number);
            self.threads.write(WriteJob::Remove { number, path });
        }
    }

    /// Takes in what has ended, and gives what was read.
    fn take(&mut self, done: Done) -> Option<Loaded> {
        match done {
            Done::Written { place, name, result, is_sealed, buf } => {
                self.writing.remove(&name.key);
                self.count_write(&result);
                self.segments.written(place, name.key, result.ok());
                match &mut self.records {
                    // What could not be sealed is not handed on: the next tier takes it as it is.
                    Some(records) if is_sealed => records.push_back((name, buf)),
                    Some(_) | None => self.free_writes.give_back(buf),
                }
                None
            }
            Done::Removed { number, result } => {
                if result.is_err() {
                    self.counters.removals_failed += 1;
                    self.back_off();
                }
                self.segments.removed(number, result.is_ok());
                None
            }
            Done::Read { tag, part, place, key, result, nanos, buf } => {
                let page = match result {
                    Ok(()) => {
                        if part.is_none_or(|part| part == 0) {
                            self.counters.pages_read += 1;
                            self.segments.hit(place);
                        }
                        let bytes = part.map_or(buf.bytes.len(), |_| buf.page().len());
                        self.counters.bytes_read += bytes as u64;
                        Ok(buf)
                    }
                    Err(miss) => {
                        self.recycle(buf);
                        self.counters.count_miss(miss);
                        // What the system could not read now it may read later.
                        if miss != Miss::Io {
                            self.segments.forget(key, place);
                        }
                        Err(miss)
                    }
                };
                Some(Loaded { tag, page, nanos: nanos / N_SIDE_BY_SIDE, is_remote: false })
            }
        }
    }

    fn count_write(&mut self, result: &std::io::Result<Arc<dyn SegmentFile>>) {
        match result {
            Ok(_) => {
                self.n_failures = 0;
                self.counters.pages_saved += 1;
                self.counters.bytes_written += self.segments.shape.record_bytes() as u64;
            }
            Err(_) => {
                self.counters.saves_failed += 1;
                self.back_off();
            }
        }
    }

    /// Lets a disk that fails in peace for a while.
    fn back_off(&mut self) {
        self.n_failures = (self.n_failures + 1).min(BACKOFF_BITS);
        self.n_refusals = (1 << self.n_failures) - 1;
    }
}

impl std::fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskTier").field("dir", &self.dir).field("stats", &self.stats()).finish()
    }
}

/// The file of the segment with this number.
fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:016x}.kvseg"))
}

/// The number of a segment's file.
fn segment_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".kvseg").filter(|digits| digits.len() == 16)?;
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    digits.chars().all(is_digit).then(|| u64::from_str_radix(digits, 16).ok())?
}
