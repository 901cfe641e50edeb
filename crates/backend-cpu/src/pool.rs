//! A few threads that run one loop at a time.
//!
//! A decode step is some hundred loops of ten to fifty microseconds, so waking a thread through the
//! system for each of them would cost as much as the work. Workers spin for a while after a loop
//! and only then sleep. The calling thread takes part in every loop.

#![expect(unsafe_code, reason = "a job borrows the caller's stack for the length of one call")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::mem::{SharedMut, fetch_line};

/// Waiting is done in three stages. A pause takes about 60 ns on recent Intel cores, so this is a
/// few microseconds, the usual gap between two loops of a step.
const SPINS_BEFORE_YIELD: u32 = 100;
/// Then the core is offered to whoever needs it; on an idle machine a yield returns in under a
/// microsecond, so that workers sleep after roughly a hundred microseconds.
const YIELDS_BEFORE_SLEEP: u32 = 200;

type Job = dyn Fn(usize) + Sync;

/// Threads that share the indices of one loop.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a loop: one loop at a time.
    turn: Mutex<()>,
}

struct Shared {
    /// Counts loops; a change tells workers that `job` is new. Written under `turn`.
    epoch: AtomicU32,
    /// The running loop's body. Null-like between loops: read only after a new epoch was seen.
    job: Mutex<Option<JobPtr>>,
    /// Indices that are handed out: in the first part, or in one for each thread.
    parts: Vec<Part>,
    n_parts: AtomicUsize,
    /// Workers that have not finished the running loop.
    busy: AtomicUsize,
    sleepers: Mutex<usize>,
    wake: Condvar,
    panicked: AtomicBool,
    quit: AtomicBool,
}

/// What one thread has: its share of the indices, and what it fetches while it waits. No two share a cache
/// line.
#[derive(Default)]
#[repr(align(128))]
struct Part {
    /// Next index to hand out, and one past the last.
    next: AtomicUsize,
    end: AtomicUsize,
    /// Address and length. A thread that has left a loop may read one of them before and one after it is
    /// written, and then fetches a few wrong bytes; of a start and an end it might be gigabytes.
    ahead: [AtomicUsize; 2],
}

#[derive(Clone, Copy)]
struct JobPtr(*const Job);
// SAFETY: the pointee is `Sync`, and `Pool::run_in_parts` keeps it alive until no worker uses it.
unsafe impl Send for JobPtr {}

impl Pool {
    /// A pool of `n_threads` threads, the caller's included.
    pub(crate) fn new(n_threads: usize) -> Self {
        assert!(n_threads >= 1);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: Mutex::new(None),
            parts: (0..n_threads).map(|_| Part::default()).collect(),
            n_parts: AtomicUsize::new(1),
            busy: AtomicUsize::new(0),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
            panicked: AtomicBool::new(false),
            quit: AtomicBool::new(false),
        });
        let workers = (1..n_threads)
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("cpu-{i}"))
                    .spawn(move || shared.work(i))
                    .expect("the system starts a thread")
            })
            .collect();
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads that take part in a loop.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(i)` for each `i` in `0..n`, on all threads, and returns when all are done.
    ///
    /// Indices are handed out one by one, so uneven pieces balance themselves.
    pub(crate) fn run(&self, n: usize, body: &(dyn Fn(usize) + Sync)) {
        self.run_in_parts(1, n, body);
    }

    /// As [`Pool::run`], but each thread has its share of indices, and helps the others when it is done: if
    /// indices follow memory, each reads memory in order. While threads wait, also after later loops, each
    /// fetches what lies `ahead` of it, the addresses that it will read next.
    pub(crate) fn run_apart(
        &self,
        n: usize,
        ahead: &[Range<usize>],
        body: &(dyn Fn(usize) + Sync),
    ) {
        for (i, part) in self.shared.parts.iter().enumerate() {
            let ahead = ahead.get(i).cloned().unwrap_or_default();
            part.ahead[0].store(ahead.start, Ordering::Relaxed);
            part.ahead[1].store(ahead.len(), Ordering::Relaxed);
        }
        self.run_in_parts(self.n_threads(), n, body);
    }

    /// The shares of [`Pool::run_apart`].
    pub(crate) fn shares(&self, n: usize) -> impl Iterator<Item = Range<usize>> {
        shares(self.n_threads(), n)
    }

    fn run_in_parts(&self, n_parts: usize, n: usize, body: &(dyn Fn(usize) + Sync)) {
        if n <= 1 || self.workers.is_empty() {
            (0..n).for_each(body);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased. `finish` below does not return, nor unwind, before
        // every worker has left the body, so the pointer is never used after `body` ends.
        let erased =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(body) };
        *lock(&shared.job) = Some(JobPtr(erased));
        for (part, share) in shared.parts.iter().zip(shares(n_parts, n)) {
            part.next.store(share.start, Ordering::Relaxed);
            part.end.store(share.end, Ordering::Relaxed);
        }
        shared.n_parts.store(n_parts, Ordering::Relaxed);
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::Release);
        if *lock(&shared.sleepers) > 0 {
            shared.wake.notify_all();
        }
        let finish = Finish(shared);
        shared.drain(0, body);
        drop(finish);
        assert!(!shared.panicked.load(Ordering::Relaxed), "a worker panicked");
    }

    /// Calls `body` for each item, on all threads.
    pub(crate) fn each<T: Send>(&self, items: &mut [T], body: impl Fn(&mut T) + Sync) {
        let n = items.len();
        let items = SharedMut::new(items);
        self.run(n, &|i| {
            // SAFETY: each index is handled once.
            let item = unsafe { items.part(i, 1) };
            body(&mut item[0]);
        });
    }
}

/// Cuts `0..n` into parts.
fn shares(n_parts: usize, n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_parts).map(move |i| i * n / n_parts..(i + 1) * n / n_parts)
}

/// Waits for the workers when dropped, also when the caller's own share panicked.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let (mut spins, mut ahead) = (0, self.0.ahead(0));
        while self.0.busy.load(Ordering::Acquire) > 0 {
            if !fetch_next(&mut ahead) {
                pause(&mut spins);
            }
        }
    }
}

/// Lets the second-level cache fetch the first line of a range of addresses, and leaves the others; false if
/// there is none.
fn fetch_next(ahead: &mut Range<usize>) -> bool {
    const LINE_BYTES: usize = 64;
    if ahead.start >= ahead.end || !cfg!(target_arch = "x86_64") {
        return false;
    }
    fetch_line::<false>(std::ptr::without_provenance(ahead.start));
    ahead.start = ahead.start.saturating_add(LINE_BYTES);
    true
}

/// Spins at first, then yields. Counts how often it was called.
pub(crate) fn pause(spins: &mut u32) {
    *spins += 1;
    if *spins < SPINS_BEFORE_YIELD {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

impl Shared {
    fn drain(&self, thread: usize, body: &(dyn Fn(usize) + Sync)) {
        let n_parts = self.n_parts.load(Ordering::Relaxed);
        for offset in 0..n_parts {
            let Part { next, end, .. } = &self.parts[(thread + offset) % n_parts];
            let end = end.load(Ordering::Relaxed);
            // Many threads may look at the same part in the end, and reading alone disturbs nobody.
            while next.load(Ordering::Relaxed) < end {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index < end {
                    body(index);
                }
            }
        }
    }

    /// What a thread fetches while it waits: after each loop again, because attention may have pushed it out
    /// of the cache.
    fn ahead(&self, thread: usize) -> Range<usize> {
        let [start, len] = self.parts[thread].ahead.each_ref().map(|x| x.load(Ordering::Relaxed));
        start..start.saturating_add(len)
    }

    fn work(&self, thread: usize) {
        let mut seen = 0;
        while let Some(epoch) = self.await_epoch(thread, seen) {
            seen = epoch;
            let job = *lock(&self.job);
            let Some(JobPtr(job)) = job else { continue };
            // SAFETY: `run_in_parts` set the pointer before this epoch and waits for `busy` to reach zero
            // before the pointee ends.
            let body = unsafe { &*job };
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.drain(thread, body)));
            if outcome.is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an epoch other than `seen`; `None` when the pool ends.
    fn await_epoch(&self, thread: usize, seen: u32) -> Option<u32> {
        let (mut spins, mut ahead) = (0, self.ahead(thread));
        loop {
            if self.quit.load(Ordering::Relaxed) {
                return None;
            }
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return Some(epoch);
            }
            if fetch_next(&mut ahead) {
                continue;
            }
            if spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP {
                pause(&mut spins);
                continue;
            }
            let mut sleepers = lock(&self.sleepers);
            *sleepers += 1;
            while self.epoch.load(Ordering::Acquire) == seen && !self.quit.load(Ordering::Relaxed) {
                sleepers =
                    self.wake.wait(sleepers).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            *sleepers -= 1;
            spins = 0;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.sleepers));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panic was already reported by `run`.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once() {
        for n_threads in 1..5 {
            let pool = Pool::new(n_threads);
            for n in [0, 1, 2, 3, 100, 1000] {
                let counts: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
                pool.run(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn threads_that_begin_apart_share_all_indices() {
        for n_threads in 1..5 {
            let pool = Pool::new(n_threads);
            for n in [0, 1, 2, 3, 100, 1000] {
                let counts: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
                // Addresses are fetched whatever they are.
                pool.run_apart(n, &[0..64, 4096..8192], &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                pool.run(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn who_is_done_helps_the_others() {
        let (pool, n_done) = (Pool::new(2), AtomicUsize::new(0));
        pool.run_apart(100, &[], &|i| {
            // The first does not end before all others have run, those of its own share too.
            while i == 0 && n_done.load(Ordering::Acquire) < 99 {
                std::thread::yield_now();
            }
            n_done.fetch_add(1, Ordering::Release);
        });
        assert_eq!(n_done.into_inner(), 100);
    }

    #[test]
    fn loops_after_sleep_still_run() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        for _ in 0..5 {
            // Long enough for the workers to fall asleep; correctness does not depend on it.
            for _ in 0..4 * (SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP) {
                std::thread::yield_now();
            }
            pool.run(10, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 5 * 45);
    }

    #[test]
    fn a_panic_in_a_loop_reaches_the_caller() {
        let pool = Pool::new(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(100, &|i| assert!(i != 57));
        }));
        assert!(outcome.is_err());
    }
}
