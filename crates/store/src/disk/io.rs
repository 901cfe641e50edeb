//! The threads that read and write: one writes and removes, a few read, each with a queue of transfers.
//!
//! Jobs and their ends are plain values, and buffers travel with them.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nuthatch_backend::PageCodec;
use nuthatch_types::{Clock, PageKey};

use super::files::{IoEngine, write_fully};
use super::queue::{Moved, Queue, Transfer};
use super::record::{BLOCK, Defect, PartChecks};
use super::segments::Place;
use super::{Files, SegmentFile};
use crate::cipher::RecordForm;
use crate::page_buf::{Blocks, OwnedName, PageBuf};

/// Threads that read. Where each reads one page at a time, more overlap more requests to the disk;
/// checksums need little. Guessed.
const N_READERS: usize = 3;
const N_RING_READERS: usize = 2;
/// Hints that wait; more are dropped.
const N_HINTS: usize = 64;

/// Why a page that should be there does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// It is not there.
    Absent,
    /// The system could not read it.
    Io,
    /// The record is not what it should be.
    Defect(Defect),
}

/// Where a segment is, or will be.
pub(super) enum Target {
    Open(Arc<dyn SegmentFile>),
    /// It may have been made by an earlier job.
    New(PathBuf),
}

pub(super) enum WriteJob {
    Write { place: Place, name: OwnedName, target: Target, buf: PageBuf, is_direct: bool },
    Remove { number: u64, path: PathBuf },
}

pub(super) struct ReadJob {
    pub(super) tag: u64,
    pub(super) place: Place,
    pub(super) file: Arc<dyn SegmentFile>,
    pub(super) name: OwnedName,
    pub(super) buf: PageBuf,
    pub(super) is_direct: bool,
    /// One part only, and the checks; the first comes with the header, which has them.
    pub(super) part: Option<(usize, PartChecks)>,
}

/// Bytes that will be wanted soon.
pub(super) struct Hint {
    pub(super) file: Arc<dyn SegmentFile>,
    pub(super) start: u64,
    pub(super) len: u64,
}

/// What has ended.
pub(super) enum Done {
    Written {
        place: Place,
        name: OwnedName,
        result: io::Result<Arc<dyn SegmentFile>>,
        /// False if it is still as it came.
        is_sealed: bool,
        buf: PageBuf,
    },
    Removed {
        number: u64,
        result: io::Result<()>,
    },
    Read {
        tag: u64,
        part: Option<usize>,
        place: Place,
        key: PageKey,
        result: Result<(), Miss>,
        nanos: u64,
        buf: PageBuf,
    },
}

/// The threads. Dropping it lets jobs that have not begun fall, and waits for the others.
pub(super) struct Threads {
    writes: Option<Sender<WriteJob>>,
    reads: Option<Sender<ReadJob>>,
    hints: Option<Sender<Hint>>,
    pub(super) done: Receiver<Done>,
    is_ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What every thread has.
struct Worker {
    form: Arc<RecordForm>,
    codec: Option<Arc<dyn PageCodec>>,
    files: Arc<dyn Files>,
    clock: Arc<dyn Clock + Send + Sync>,
    done: Sender<Done>,
    is_ending: Arc<AtomicBool>,
}

impl Threads {
    pub(super) fn start(
        form: &Arc<RecordForm>,
        codec: Option<&Arc<dyn PageCodec>>,
        files: &Arc<dyn Files>,
        clock: &Arc<dyn Clock + Send + Sync>,
    ) -> io::Result<Self> {
        let (writes, write_jobs) = unbounded();
        let (reads, read_jobs) = unbounded();
        let (hints, hint_jobs) = bounded(N_HINTS);
        let (done, ends) = unbounded();
        let is_ending = Arc::new(AtomicBool::new(false));
        let mut all = Threads {
            writes: Some(writes),
            reads: Some(reads),
            hints: Some(hints),
            done: ends,
            is_ending: Arc::clone(&is_ending),
            threads: Vec::new(),
        };
        let worker = || Worker {
            form: Arc::clone(form),
            codec: codec.cloned(),
            files: Arc::clone(files),
            clock: Arc::clone(clock),
            done: done.clone(),
            is_ending: Arc::clone(&is_ending),
        };
        let mut spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            all.threads.push(std::thread::Builder::new().name(name).spawn(body)?);
            io::Result::Ok(())
        };
        let writer = worker();
        spawn("nuthatch-save".to_owned(), Box::new(move || writer.write_all(&write_jobs)))?;
        let n_readers = match files.io().engine {
            IoEngine::Uring => N_RING_READERS,
            IoEngine::Auto | IoEngine::Threads => N_READERS,
        };
        for i in 0..n_readers {
            let (reader, jobs) = (worker(), read_jobs.clone());
            spawn(format!("nuthatch-load-{i}"), Box::new(move || reader.read_all(&jobs)))?;
        }
        // A hint may wait for the disk, so it is not for those who read.
        let hint_all = move || {
            for Hint { file, start, len } in hint_jobs {
                file.will_need(start, len);
            }
        };
        spawn("nuthatch-hint".to_owned(), Box::new(hint_all))?;
        Ok(all)
    }

    pub(super) fn write(&self, job: WriteJob) {
        if let Some(writes) = &self.writes {
            // The thread lives as long as the sender.
            let _ = writes.send(job);
        }
    }

    pub(super) fn read(&self, job: ReadJob) {
        if let Some(reads) = &self.reads {
            let _ = reads.send(job);
        }
    }

    pub(super) fn hint(&self, hint: Hint) {
        if let Some(hints) = &self.hints {
            // With many hints before it, it would come too late.
            let _ = hints.try_send(hint);
        }
    }

    /// Waits for something to end, but not longer than this.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Done> {
        self.done.recv_timeout(timeout).ok()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Relaxed);
        (self.writes, self.reads, self.hints) = (None, None, None);
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to end.
            let _ = thread.join();
        }
    }
}

/// Jobs whose transfers are on their way, by tags.
struct Flying<J> {
    queue: Box<dyn Queue>,
    jobs: Vec<Option<Flight<J>>>,
    free: Vec<usize>,
}

struct Flight<J> {
    job: J,
    /// Where its bytes begin in memory.
    first: usize,
}

/// What a job moves.
struct Span {
    start: u64,
    range: Range<usize>,
    is_write: bool,
    is_direct: bool,
}

impl<J> Flying<J> {
    fn new(queue: Box<dyn Queue>) -> Self {
        let depth = queue.depth();
        Flying { queue, jobs: (0..depth).map(|_| None).collect(), free: (0..depth).collect() }
    }

    /// A job that can begin now. Waits for one if nothing else is to be done.
    fn next<T>(&self, jobs: &Receiver<T>) -> Option<T> {
        match self.free.len() {
            0 => None,
            n if n == self.jobs.len() => jobs.recv().ok(),
            _ => jobs.try_recv().ok(),
        }
    }

    fn begin(&mut self, job: J, bytes: Blocks, file: &Arc<dyn SegmentFile>, span: Span) {
        let tag = self.free.pop().expect("there is room for a job");
        let Span { start, range, is_write, is_direct } = span;
        self.jobs[tag] = Some(Flight { job, first: range.start });
        let file = Arc::clone(file);
        self.queue.push(Transfer { tag, file, start, bytes, range, is_write, is_direct });
    }

    /// Waits for a job to end, and says how many bytes it moved; `None` if nothing is on its way.
    fn end(&mut self) -> Option<(J, Blocks, io::Result<usize>)> {
        loop {
            let (mut transfer, moved): Moved = self.queue.pop()?;
            let end = match moved {
                Ok(0) if transfer.is_write => Some(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => {
                    transfer.range.start += n;
                    transfer.start += n as u64;
                    // The end of the file, or all of it.
                    (n == 0 || transfer.range.is_empty()).then_some(Ok(transfer.range.start))
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
                // Not every file can be read and written so.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput && transfer.is_direct => {
                    None
                }
                Err(error) => Some(Err(error)),
            };
            let Some(end) = end else {
                // The rest may begin anywhere.
                transfer.is_direct = false;
                self.queue.push(transfer);
                continue;
            };
            self.free.push(transfer.tag);
            let flight = self.jobs[transfer.tag].take().expect("it was begun");
            return Some((flight.job, transfer.bytes, end.map(|end| end - flight.first)));
        }
    }
}

impl Worker {
    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    fn write_all(&self, jobs: &Receiver<WriteJob>) {
        // The segment that was made last.
        let mut newest: Option<(u64, Arc<dyn SegmentFile>)> = None;
        let mut flying = Flying::new(self.files.queue());
        loop {
            while let Some(job) = flying.next(jobs) {
                if !self.is_ending() {
                    self.begin_write(job, &mut newest, &mut flying);
                }
            }
            let Some(((place, name, file, mut buf), bytes, result)) = flying.end() else { return };
            buf.bytes = bytes;
            let _ = self.done.send(Done::Written {
                place,
                name,
                result: result.map(|_| file),
                is_sealed: true,
                buf,
            });
        }
    }

    fn begin_write(
        &self,
        job: WriteJob,
        newest: &mut Option<(u64, Arc<dyn SegmentFile>)>,
        flying: &mut Flying<(Place, OwnedName, Arc<dyn SegmentFile>, PageBuf)>,
    ) {
        let done = match job {
            WriteJob::Write { place, name, target, mut buf, is_direct } => {
                buf.encode(self.codec.as_deref());
                let sealed = self.form.seal(&name.borrow(), &mut buf.bytes);
                let is_sealed = sealed.is_ok();
                match sealed.and_then(|()| self.file(place.segment, target, newest)) {
                    Ok(file) => {
                        let bytes = std::mem::take(&mut buf.bytes);
                        let start = self.form.shape.record_start(place.record);
                        let span = Span { start, range: 0..bytes.len(), is_write: true, is_direct };
                        let job = (place, name, Arc::clone(&file), buf);
                        return flying.begin(job, bytes, &file, span);
                    }
                    Err(error) => Done::Written { place, name, result: Err(error), is_sealed, buf },
                }
            }
            WriteJob::Remove { number, path } => {
                let result = match self.files.remove(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    result => result,
                };
                Done::Removed { number, result }
            }
        };
        // Nobody waits when the tier is being dropped.
        let _ = self.done.send(done);
    }

    /// The file of a segment, which is made if this is its first record.
    fn file(
        &self,
        number: u64,
        target: Target,
        newest: &mut Option<(u64, Arc<dyn SegmentFile>)>,
    ) -> io::Result<Arc<dyn SegmentFile>> {
        let path = match (target, &newest) {
            (Target::Open(file), _) => return Ok(file),
            (Target::New(_), Some((made, file))) if *made == number => return Ok(Arc::clone(file)),
            (Target::New(path), _) => path,
        };
        let file = match self.files.create(&path) {
            // Numbers are used once: what is there was begun for this segment and is not whole.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let file = self.files.open(&path)?;
                file.set_len(0)?;
                file
            }
            made => made?,
        };
        if let Err(error) = write_fully(&*file, &self.form.shape.segment_header(number), 0) {
            // Without a header it would be nobody's.
            let _ = self.files.remove(&path);
            return Err(error);
        }
        *newest = Some((number, Arc::clone(&file)));
        Ok(file)
    }

    fn read_all(&self, jobs: &Receiver<ReadJob>) {
        let mut flying = Flying::new(self.files.queue());
        let mut last_end = Duration::ZERO;
        loop {
            while let Some(job) = flying.next(jobs) {
                if !self.is_ending() {
                    self.begin_read(job, &mut flying);
                }
            }
            let Some(((mut job, begin, start), bytes, read)) = flying.end() else { return };
            job.buf.bytes = bytes;
            let result = match read {
                Ok(n) => self.check(&mut job, start..n).map_err(Miss::Defect),
                Err(_) => Err(Miss::Io),
            };
            if result.is_ok() {
                job.buf.decode(self.codec.as_deref());
            }
            let now = self.clock.now();
            // Those that are on their way together share the time.
            let nanos = now.saturating_sub(begin.max(last_end)).as_nanos();
            last_end = now;
            let ReadJob { tag, place, name, buf, .. } = job;
            let (part, key) = (job.part.map(|(part, _)| part), name.key);
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            let _ = self.done.send(Done::Read { tag, part, place, key, result, nanos, buf });
        }
    }

    fn begin_read(&self, mut job: ReadJob, flying: &mut Flying<(ReadJob, Duration, usize)>) {
        let shape = &self.form.shape;
        let bytes = match job.part {
            None => 0..shape.record_bytes(),
            Some((0, _)) => 0..shape.body().start + shape.part(0).end,
            Some((part, _)) => {
                let part = shape.part(part);
                shape.body().start + part.start..shape.body().start + part.end
            }
        };
        let start = shape.record_start(job.place.record) + bytes.start as u64;
        // Direct reads are of whole blocks.
        let before = if shape.has_blocks() { start as usize % BLOCK } else { 0 };
        let mut len = before + bytes.len();
        if shape.has_blocks() {
            len = len.next_multiple_of(BLOCK);
        }
        let (memory, file) = (std::mem::take(&mut job.buf.bytes), Arc::clone(&job.file));
        let (start, is_direct) = (start - before as u64, job.is_direct);
        let span = Span { start, range: 0..len, is_write: false, is_direct };
        flying.begin((job, self.clock.now(), before), memory, &file, span);
    }

    /// Checks what was read, which is so much of the buffer.
    fn check(&self, job: &mut ReadJob, read: Range<usize>) -> Result<(), Defect> {
        let (form, name) = (&self.form, job.name.borrow());
        let bytes = job.buf.bytes.get_mut(read.clone()).ok_or(Defect::Torn)?;
        let Some((part, mut checks)) = job.part else { return form.open(&name, bytes) };
        let mut start = 0;
        if part == 0 {
            checks = form.open_header(&name, bytes)?;
            start = form.shape.body().start;
        }
        let end = start + form.shape.part(part).len();
        let bytes = bytes.get_mut(start..end).ok_or(Defect::Torn)?;
        form.open_part(name.key, part, bytes, &checks)?;
        *job.buf.checks = checks;
        job.buf.body = read.start + start..read.start + end;
        Ok(())
    }
}
