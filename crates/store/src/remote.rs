//! Pages somewhere else, where several engines find them: an object for each page.
//!
//! ```text
//!   save   a record --> a writing thread: put
//!   load   read --> a reading thread: get, check name, tokens and checksum --> poll -> the bytes
//! ```
//!
//! Nobody knows what is there without asking, so pages are asked for that may be there: the first one
//! alone, more as pages come (see [`crate::slow`]). What fails again and again is let in peace for a
//! while. How large the store is, and what goes first, is the store's own affair.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Select, Sender, unbounded};
use nuthatch_types::{Clock, FastSet, PageKey};

use crate::ahead::{Ahead, Found};
use crate::disk::{Asked, Loaded, Miss, PageName};
pub use crate::objects::{ObjectError, Objects, secret};
use crate::page_buf::{Buffers, OwnedName, PageBuf, RecordLayout};

/// Threads that read: requests under way at once. Guessed.
const N_READERS: usize = 8;
/// Threads that write.
const N_WRITERS: usize = 2;
/// Pages known to be there that are remembered: 16 bytes each.
const N_KNOWN_MAX: usize = 1 << 20;
/// Failures in a row before the store is let in peace.
const N_FAILURES: u32 = 3;
/// How long at first; twice as long after each further failure, up to the last.
const PEACE: Duration = Duration::from_secs(1);
const PEACE_MAX: Duration = Duration::from_secs(64);
/// What remains of the weight of what came after each later question; about the last ten count.
const DECAY: f64 = 0.9;
/// Of questions that are not worth their time, one in so many is asked all the same.
const N_UNASKED: u32 = 16;
/// Memory for pages that are fetched before they are asked for.
const AHEAD_BYTES: usize = 256 << 20;
/// The tag of such pages, which no load has.
const AHEAD: u64 = u64::MAX;

/// What the tier did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounters {
    /// Pages written.
    pub pages_saved: u64,
    /// Bytes of their records.
    pub bytes_written: u64,
    /// Pages that could not be written.
    pub saves_failed: u64,
    /// Pages that were not written because too many waited, or because the store had failed.
    pub saves_refused: u64,
    /// Pages read and found to be what they should be.
    pub pages_read: u64,
    /// Bytes of their records.
    pub bytes_read: u64,
    /// Pages that were asked for and are not there.
    pub missed_absent: u64,
    /// Pages that the store did not give.
    pub missed_io: u64,
    /// Pages that were not what they should be.
    pub missed_defect: u64,
}

/// Pages somewhere else. See the module's documentation.
pub struct RemoteTier {
    reads: Option<Sender<Job>>,
    writes: Option<Sender<Job>>,
    done: Receiver<Done>,
    is_ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    clock: Arc<dyn Clock + Send + Sync>,
    free_reads: Buffers,
    free_writes: Buffers,
    ahead: Ahead,
    /// Pages that were fetched ahead and are asked for now.
    ready: VecDeque<Loaded>,
    /// Pages that are there, as far as is known.
    known: FastSet<PageKey>,
    writing: FastSet<PageKey>,
    /// Failures in a row, and until when nothing is asked.
    n_failures: u32,
    peace_until: Duration,
    /// What share of the pages that nobody knew of was there, and how long an answer takes.
    luck: f64,
    answer_nanos: f64,
    n_unasked: u32,
    counters: RemoteCounters,
}

struct Job {
    tag: u64,
    name: OwnedName,
    /// Whether the record is whole, and not the page only.
    is_sealed: bool,
    buf: PageBuf,
}

enum Done {
    Written { key: PageKey, is_ok: bool, buf: PageBuf },
    Read { tag: u64, key: PageKey, result: Result<(), Miss>, nanos: u64, buf: PageBuf },
}

/// What every thread has.
#[derive(Clone)]
struct Worker {
    objects: Arc<dyn Objects>,
    layout: RecordLayout,
    clock: Arc<dyn Clock + Send + Sync>,
    done: Sender<Done>,
    is_ending: Arc<AtomicBool>,
}

impl RemoteTier {
    /// Pages as such records in a store.
    pub fn start(
        objects: Arc<dyn Objects>,
        layout: RecordLayout,
        clock: Arc<dyn Clock + Send + Sync>,
    ) -> io::Result<Self> {
        let (reads, read_jobs) = unbounded();
        let (writes, write_jobs) = unbounded();
        let (done, ends) = unbounded();
        let is_ending = Arc::new(AtomicBool::new(false));
        let buffers = || Buffers::new(layout.form.shape, layout.codec.as_deref());
        let mut tier = RemoteTier {
            reads: Some(reads),
            writes: Some(writes),
            done: ends,
            is_ending: Arc::clone(&is_ending),
            threads: Vec::new(),
            clock: Arc::clone(&clock),
            free_reads: buffers(),
            free_writes: buffers(),
            ahead: Ahead::new(Buffers::with_bytes(
                AHEAD_BYTES,
                layout.form.shape,
                layout.codec.as_deref(),
            )),
            ready: VecDeque::new(),
            known: FastSet::default(),
            writing: FastSet::default(),
            n_failures: 0,
            peace_until: Duration::ZERO,
            luck: 0.5,
            answer_nanos: 0.0,
            n_unasked: 0,
            counters: RemoteCounters::default(),
        };
        let worker = Worker { objects, layout, clock, done, is_ending };
        for i in 0..N_READERS + N_WRITERS {
            let worker = worker.clone();
            let (name, jobs): (_, Receiver<Job>) = match i {
                0..N_WRITERS => (format!("nuthatch-put-{i}"), write_jobs.clone()),
                _ => (format!("nuthatch-get-{}", i - N_WRITERS), read_jobs.clone()),
            };
            let body = move || match i {
                0..N_WRITERS => worker.write_all(&jobs),
                _ => worker.read_all(&jobs),
            };
            tier.threads.push(std::thread::Builder::new().name(name).spawn(body)?);
        }
        Ok(tier)
    }

    /// Whether a page was there when it was last asked for or written.
    pub fn is_known(&self, key: PageKey) -> bool {
        self.known.contains(&key)
    }

    /// Whether to ask for pages of which nobody knows whether they are there, if computing them takes
    /// so long.
    pub fn is_worth_asking(&mut self, compute_nanos: f64) -> bool {
        if self.is_in_peace() {
            return false;
        }
        if self.luck * compute_nanos > self.answer_nanos {
            self.n_unasked = 0;
            return true;
        }
        // Luck may have turned.
        self.n_unasked = (self.n_unasked + 1) % N_UNASKED;
        self.n_unasked == 0
    }

    /// Takes in whether pages of which nobody knew were there.
    pub fn note_luck(&mut self, was_there: bool) {
        self.luck = DECAY * self.luck + (1.0 - DECAY) * f64::from(u8::from(was_there));
    }

    /// Whether a page is there, or will be, as far as is known.
    pub fn contains(&self, key: PageKey) -> bool {
        self.known.contains(&key) || self.writing.contains(&key)
    }

    /// A buffer for a page; `None` when too many are on their way or the store has failed.
    pub fn begin_save(&mut self) -> Option<PageBuf> {
        let buf = if self.is_in_peace() { None } else { self.free_writes.take() };
        self.counters.saves_refused += u64::from(buf.is_none());
        buf
    }

    /// Whether to go on with saving: there is a buffer, or saves are refused.
    pub fn may_save(&self) -> bool {
        self.is_in_peace() || !self.free_writes.is_empty()
    }

    /// Saves a page whose bytes are in a buffer of [`RemoteTier::begin_save`].
    pub fn save(&mut self, name: &PageName<'_>, buf: PageBuf) {
        self.write(OwnedName::new(name), false, buf);
    }

    /// Saves a whole record of another tier, unless it is there, and gives a buffer for the one that
    /// held it.
    pub(crate) fn save_record(&mut self, name: OwnedName, record: PageBuf) -> PageBuf {
        if self.contains(name.key) {
            return record;
        }
        match self.begin_save() {
            Some(other) => {
                self.write(name, true, record);
                other
            }
            None => record,
        }
    }

    /// Fetches the pages of a prompt that waits, before they are asked for; the first `n_known` are
    /// there for all that is known.
    pub fn prefetch<'a>(&mut self, names: impl Iterator<Item = PageName<'a>>, n_known: usize) {
        self.ahead.add(names.map(|name| OwnedName::new(&name)).collect(), n_known);
        self.ask_ahead();
    }

    fn ask_ahead(&mut self) {
        if self.is_in_peace() {
            // When it is over, these requests will have been answered.
            return self.ahead.forget();
        }
        let now = self.clock.now();
        while let Some((name, buf)) = self.ahead.next(now) {
            self.send(AHEAD, name, buf);
        }
    }

    /// Asks for a page; `tag` is what it will be called by.
    pub fn read(&mut self, tag: u64, name: &PageName<'_>) -> Asked {
        match self.ahead.find(name.key, tag, || self.free_reads.take()) {
            None => return Asked::Busy,
            Some(Found::Coming) => return Asked::Begun,
            Some(Found::Here(buf, nanos)) => {
                let nanos = nanos / N_READERS as u64;
                self.ready.push_back(Loaded { tag, page: Ok(buf), nanos, is_remote: true });
                return Asked::Begun;
            }
            Some(Found::No) if self.is_in_peace() => return Asked::Missing,
            Some(Found::No) => {}
        }
        let Some(buf) = self.free_reads.take() else { return Asked::Busy };
        self.send(tag, OwnedName::new(name), buf);
        Asked::Begun
    }

    fn send(&self, tag: u64, name: OwnedName, buf: PageBuf) {
        if let Some(reads) = &self.reads {
            // The threads live as long as the sender.
            let _ = reads.send(Job { tag, name, is_sealed: false, buf });
        }
    }

    /// The next page that was read since, if there is one. Takes in what else has ended.
    pub fn poll(&mut self) -> Option<Loaded> {
        if let Some(loaded) = self.ready.pop_front() {
            return Some(loaded);
        }
        while let Ok(done) = self.done.try_recv() {
            if let Some(loaded) = self.take(done) {
                return Some(loaded);
            }
        }
        None
    }

    /// Adds what ends here to what somebody waits for.
    pub(crate) fn await_in<'a>(&'a self, select: &mut Select<'a>) {
        select.recv(&self.done);
    }

    /// Whether [`RemoteTier::poll`] has something without waiting.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Gives a buffer back.
    pub fn recycle(&mut self, buf: PageBuf) {
        self.free_reads.give_back(buf);
    }

    /// Whether something is being written.
    pub fn is_busy(&self) -> bool {
        !self.writing.is_empty()
    }

    /// What the tier did.
    pub fn counters(&self) -> RemoteCounters {
        self.counters
    }

    fn write(&mut self, name: OwnedName, is_sealed: bool, buf: PageBuf) {
        self.writing.insert(name.key);
        if let Some(writes) = &self.writes {
            let _ = writes.send(Job { tag: 0, name, is_sealed, buf });
        }
    }

    fn take(&mut self, done: Done) -> Option<Loaded> {
        match done {
            Done::Written { key, is_ok, buf } => {
                self.writing.remove(&key);
                if is_ok {
                    self.counters.pages_saved += 1;
                    self.counters.bytes_written += buf.bytes.len() as u64;
                    self.know(key);
                } else {
                    self.counters.saves_failed += 1;
                }
                self.count_failure(!is_ok);
                self.free_writes.give_back(buf);
                None
            }
            Done::Read { tag, key, result, nanos, buf } => {
                self.count_failure(result == Err(Miss::Io));
                self.answer_nanos = match self.answer_nanos {
                    0.0 => nanos as f64,
                    before => DECAY * before + (1.0 - DECAY) * nanos as f64,
                };
                match result {
                    Ok(()) => {
                        self.counters.pages_read += 1;
                        self.counters.bytes_read += buf.bytes.len() as u64;
                        self.know(key);
                    }
                    Err(miss) => {
                        self.known.remove(&key);
                        *match miss {
                            Miss::Absent => &mut self.counters.missed_absent,
                            Miss::Io => &mut self.counters.missed_io,
                            Miss::Defect(_) => &mut self.counters.missed_defect,
                        } += 1;
                    }
                }
                let (tag, buf) = match tag {
                    AHEAD => {
                        let how = (result.is_ok(), self.clock.now());
                        let wanted = self.ahead.came(key, (buf, nanos), how);
                        self.ask_ahead();
                        wanted?
                    }
                    tag => (tag, buf),
                };
                let page = match result {
                    Ok(()) => Ok(buf),
                    Err(miss) => {
                        self.recycle(buf);
                        Err(miss)
                    }
                };
                Some(Loaded { tag, page, nanos: nanos / N_READERS as u64, is_remote: true })
            }
        }
    }

    fn know(&mut self, key: PageKey) {
        if self.known.len() >= N_KNOWN_MAX {
            // What is forgotten is asked for again.
            self.known.clear();
        }
        self.known.insert(key);
    }

    fn is_in_peace(&self) -> bool {
        self.clock.now() < self.peace_until
    }

    fn count_failure(&mut self, has_failed: bool) {
        if !has_failed {
            self.n_failures = 0;
            return;
        }
        self.n_failures = (self.n_failures + 1).min(N_FAILURES + 16);
        if let Some(doublings) = self.n_failures.checked_sub(N_FAILURES) {
            let peace = PEACE.saturating_mul(1 << doublings.min(16)).min(PEACE_MAX);
            self.peace_until = self.clock.now() + peace;
        }
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Relaxed);
        (self.reads, self.writes) = (None, None);
        for thread in self.threads.drain(..) {
            // Requests have deadlines. A thread that panicked has nothing more to end.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteTier").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Worker {
    /// The object of a page.
    fn object(&self, key: PageKey) -> String {
        format!("{:032x}/{:032x}", self.layout.form.shape.namespace, key.0)
    }

    fn write_all(&self, jobs: &Receiver<Job>) {
        for Job { name, is_sealed, mut buf, .. } in jobs {
            if self.is_ending.load(Ordering::Relaxed) {
                continue;
            }
            let is_sealed = is_sealed || {
                buf.encode(self.layout.codec.as_deref());
                self.layout.form.seal(&name.borrow(), &mut buf.bytes).is_ok()
            };
            let object = self.object(name.key);
            let is_ok = is_sealed && self.objects.put(&object, &buf.bytes).is_ok();
            // Nobody waits when the tier is being dropped.
            let _ = self.done.send(Done::Written { key: name.key, is_ok, buf });
        }
    }

    fn read_all(&self, jobs: &Receiver<Job>) {
        for Job { tag, name, mut buf, .. } in jobs {
            if self.is_ending.load(Ordering::Relaxed) {
                continue;
            }
            let begin = self.clock.now();
            let result = match self.objects.get(&self.object(name.key), &mut buf.bytes) {
                Ok(n) => {
                    let form = &self.layout.form;
                    form.open(&name.borrow(), &mut buf.bytes[..n]).map_err(Miss::Defect)
                }
                Err(ObjectError::Absent) => Err(Miss::Absent),
                Err(ObjectError::Failed(_)) => Err(Miss::Io),
            };
            if result.is_ok() {
                buf.decode(self.layout.codec.as_deref());
            }
            let nanos = self.clock.now().saturating_sub(begin).as_nanos();
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            let _ = self.done.send(Done::Read { tag, key: name.key, result, nanos, buf });
        }
    }
}
