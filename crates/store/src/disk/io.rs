//! The threads that read and write: one writes and removes, in order; a few read.
//!
//! Jobs and their ends are plain values, and buffers travel with them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nuthatch_backend::PageCodec;
use nuthatch_types::{Clock, PageKey};

use super::files::{read_fully, write_fully};
use super::record::Defect;
use super::segments::Place;
use super::{Files, SegmentFile};
use crate::cipher::Form;
use crate::page_buf::{OwnedName, PageBuf};

/// Threads that read. More overlap more requests to the disk; checksums need little. Guessed.
const N_READERS: usize = 3;
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
    Write { place: Place, name: OwnedName, target: Target, buf: PageBuf },
    Remove { number: u64, path: PathBuf },
}

pub(super) struct ReadJob {
    pub(super) tag: u64,
    pub(super) place: Place,
    pub(super) file: Arc<dyn SegmentFile>,
    pub(super) name: OwnedName,
    pub(super) buf: PageBuf,
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
        buf: PageBuf,
    },
    Removed {
        number: u64,
        result: io::Result<()>,
    },
    Read {
        tag: u64,
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
    form: Arc<Form>,
    codec: Option<Arc<dyn PageCodec>>,
    files: Arc<dyn Files>,
    clock: Arc<dyn Clock + Send + Sync>,
    done: Sender<Done>,
    is_ending: Arc<AtomicBool>,
}

impl Threads {
    pub(super) fn start(
        form: &Arc<Form>,
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
        for i in 0..N_READERS {
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

impl Worker {
    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    fn write_all(&self, jobs: &Receiver<WriteJob>) {
        // The segment that was made last.
        let mut newest: Option<(u64, Arc<dyn SegmentFile>)> = None;
        for job in jobs {
            if self.is_ending() {
                continue;
            }
            let done = match job {
                WriteJob::Write { place, name, target, mut buf } => {
                    buf.encode(self.codec.as_deref());
                    let sealed = self.form.seal(&name.borrow(), &mut buf.bytes);
                    let file = sealed.and_then(|()| self.file(place.segment, target, &mut newest));
                    let result = file.and_then(|file| {
                        let start = self.form.shape.record_start(place.record);
                        write_fully(&*file, &buf.bytes, start).map(|()| file)
                    });
                    Done::Written { place, name, result, buf }
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
        for ReadJob { tag, place, file, name, mut buf } in jobs {
            if self.is_ending() {
                continue;
            }
            let begin = self.clock.now();
            let start = self.form.shape.record_start(place.record);
            let result = match read_fully(&*file, &mut buf.bytes, start) {
                Ok(n) => self.form.open(&name.borrow(), &mut buf.bytes[..n]).map_err(Miss::Defect),
                Err(_) => Err(Miss::Io),
            };
            if result.is_ok() {
                buf.decode(self.codec.as_deref());
            }
            let nanos = self.clock.now().saturating_sub(begin).as_nanos();
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            let _ = self.done.send(Done::Read { tag, place, key: name.key, result, nanos, buf });
        }
    }
}
