//! Threads of the host that bring rows: the other way over the link, as LiteCache and CLO do it. The
//! device says which rows it wants, threads put them together in pinned memory, and the copy engine
//! brings them.
//!
//! ```text
//!   device   post: addresses, ticket ──────────────────────────────► wait, put rows in their places
//!   host          └──► threads: rows to pinned memory ─► copy engine ─► ticket ──┘
//! ```
//!
//! Everybody polls: the threads a ticket in memory of the host, the device a ticket of its own. A thread
//! takes its share of each order, queues the copy of it, and the last one queues the ticket behind all
//! copies; so a desk has one order at a time.
//!
//! A thread that ends before its time says so at both desks, and a device that has waited for seconds does
//! too. Whoever reads it brings the rows of that step without the threads, and the next step is an error.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::{CudaStream, DriverError, sys};
use nuthatch_backend::DeviceError;

use crate::device::{Device, Memory};
use crate::launch::sparse::{GatherRowsParams, PostParams};
use crate::pinned::PinnedMemory;

const WHAT: &str = "rows on their way";
/// Bytes of an order before its rows; `Order` of `sparse_post.cu`.
const ORDER_HEAD: usize = 64;
/// Where it says that nobody serves the desk.
const IS_CLOSED: usize = 8;
/// Bytes of rows that an order may have; the device brings more than that by itself. Guessed.
const ORDER_BYTES: usize = 32 << 20;
/// Bytes of the device for rows on their way by threads, and as many of the host, where there are
/// addresses and tickets too.
pub const STAGED_BYTES: u64 = 2 * (ORDER_BYTES as u64 + 64);
/// Polls without an order after which a thread sleeps between polls.
const POLLS: u32 = 200_000;
const NAP: Duration = Duration::from_micros(50);

/// Where orders of every other layer go.
struct Desk {
    order: PinnedMemory,
    staged_here: PinnedMemory,
    staged: Memory,
    /// Of what was asked for, and of what has come; then blocks that have posted.
    tickets: Memory,
}

impl Desk {
    fn new(device: &Device, row_bytes: usize) -> Result<Self, DeviceError> {
        let n_rows = ORDER_BYTES / row_bytes;
        let tickets = device.alloc(64, WHAT)?;
        device.clear(&tickets, 0, 64)?;
        Ok(Desk {
            order: PinnedMemory::whole(device, ORDER_HEAD + 8 * n_rows, WHAT)?,
            staged_here: PinnedMemory::whole(device, ORDER_BYTES, WHAT)?,
            staged: device.alloc(ORDER_BYTES, WHAT)?,
            tickets,
        })
    }

    /// The word that says that nobody serves the desk.
    fn is_closed_at(&self) -> u64 {
        self.order.address() + IS_CLOSED as u64
    }

    fn is_closed(&self) -> bool {
        let mut word = [0; 4];
        self.order.read(IS_CLOSED, &mut word);
        word != [0; 4]
    }

    fn close(&self) {
        let word = self.is_closed_at() as *mut u32;
        #[expect(unsafe_code, reason = "memory that the device reads")]
        // SAFETY: a word of the desk's own memory, which everybody only sets.
        unsafe {
            word.write_volatile(1);
        }
    }
}

/// Threads that bring rows, and the desks that they watch.
pub(crate) struct Link {
    desks: Arc<[Desk; 2]>,
    /// Rows that an order may have.
    n_staged: u32,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    /// Starts threads that bring rows of `half_bytes` for keys and values each, from pages whose values are
    /// `half_page` behind their keys, and that lie in `pages`. For tests the last one may fail after some
    /// orders.
    pub(crate) fn start(
        device: &Device,
        (n_threads, fails_after): (u32, Option<u32>),
        (half_bytes, half_page): (usize, usize),
        pages: Range<u64>,
    ) -> Result<Self, DeviceError> {
        let row_bytes = 2 * half_bytes;
        let desks = Arc::new([Desk::new(device, row_bytes)?, Desk::new(device, row_bytes)?]);
        let stream = device.check(device.context().new_stream())?;
        let (is_over, n_ended) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let thread = |share| {
            let worker = Worker {
                desks: Arc::clone(&desks),
                stream: Arc::clone(&stream),
                is_over: Arc::clone(&is_over),
                n_ended: Arc::clone(&n_ended),
                pages: pages.clone(),
                share,
                n_shares: n_threads,
                fails_after: fails_after.filter(|_| share + 1 == n_threads),
                half_bytes,
                half_page,
            };
            let named = std::thread::Builder::new().name(format!("link {share}"));
            named.spawn(move || worker.run())
        };
        let threads = (0..n_threads).map(thread).collect::<Result<Vec<_>, _>>();
        let threads = threads.map_err(|e| DeviceError::Fault(format!("a thread: {e}")))?;
        let n_staged = u32::try_from(ORDER_BYTES / row_bytes).unwrap_or(u32::MAX);
        Ok(Link { desks, n_staged, is_over, threads })
    }

    /// An error if the threads do not serve the desks any more.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        if self.desks.iter().any(Desk::is_closed) {
            let why = "a thread that brings KV rows from the host has failed, or took seconds";
            return Err(DeviceError::Fault(why.to_owned()));
        }
        Ok(())
    }

    /// Has the rows of a layer come by the threads: what asks for them, and in `gather` what waits for them.
    pub(crate) fn ask(&self, idx: usize, gather: &mut GatherRowsParams) -> PostParams {
        let desk = &self.desks[idx % 2];
        gather.staged = desk.staged.address();
        gather.tickets = desk.tickets.address();
        gather.is_closed = desk.is_closed_at();
        gather.n_staged = self.n_staged;
        let n_ended = desk.tickets.address() + 8;
        PostParams { gather: *gather, order: desk.order.address(), n_ended }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// One thread.
struct Worker {
    desks: Arc<[Desk; 2]>,
    /// What copies are queued on.
    stream: Arc<CudaStream>,
    is_over: Arc<AtomicBool>,
    /// Threads that have ended with the order of each desk.
    n_ended: Arc<[AtomicU32; 2]>,
    pages: Range<u64>,
    share: u32,
    n_shares: u32,
    fails_after: Option<u32>,
    half_bytes: usize,
    half_page: usize,
}

/// Closes the desks when its thread ends before its time, by an error or a panic.
struct Alarm<'a>(&'a Worker);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if !self.0.is_over.load(Ordering::Relaxed) {
            self.0.desks.iter().for_each(Desk::close);
        }
    }
}

impl Worker {
    fn run(self) {
        let _alarm = Alarm(&self);
        if self.stream.context().bind_to_thread().is_err() {
            return;
        }
        let (mut tickets, mut n_idle, mut n_orders) = ([0; 2], 0, 0);
        let mut addresses = Vec::with_capacity(8 * (ORDER_BYTES / (2 * self.half_bytes)));
        while !self.is_over.load(Ordering::Relaxed) {
            let mut is_idle = true;
            for (i, last) in tickets.iter_mut().enumerate() {
                let ticket = self.ticket(i);
                if ticket == *last {
                    continue;
                }
                (*last, is_idle) = (ticket, false);
                let fails = self.fails_after == Some(n_orders);
                n_orders += 1;
                if fails || self.serve(i, ticket, &mut addresses).is_err() {
                    return;
                }
            }
            n_idle = if is_idle { n_idle + 1 } else { 0 };
            if n_idle > POLLS {
                n_idle = POLLS;
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// The ticket of the last order of a desk.
    fn ticket(&self, desk: usize) -> u32 {
        let order = self.desks[desk].order.address() as *const u32;
        #[expect(unsafe_code, reason = "memory that the device writes")]
        // SAFETY: the first word of the desk's own memory, which the device writes at any time.
        let ticket = unsafe { order.read_volatile() };
        // What was written before the ticket is there.
        fence(Ordering::Acquire);
        ticket
    }

    /// Takes this thread's share of an order.
    fn serve(&self, desk: usize, ticket: u32, addresses: &mut Vec<u8>) -> Result<(), DriverError> {
        let at = &self.desks[desk];
        let row_bytes = 2 * self.half_bytes;
        let mut n = [0; 4];
        at.order.read(4, &mut n);
        let n = (u32::from_ne_bytes(n) as usize).min(ORDER_BYTES / row_bytes);
        let part = |i: u32| n * i as usize / self.n_shares as usize;
        let (first, end) = (part(self.share), part(self.share + 1));
        addresses.resize(8 * (end - first), 0);
        at.order.read(ORDER_HEAD + 8 * first, addresses);
        let (addresses, _) = addresses.as_chunks::<8>();
        for (row, &address) in (first..end).zip(addresses) {
            let key = u64::from_ne_bytes(address);
            let is_inside = key >= self.pages.start
                && key.saturating_add((self.half_page + self.half_bytes) as u64) <= self.pages.end;
            assert!(is_inside, "a row of the pages");
            let target = at.staged_here.address() as usize + row * row_bytes;
            #[expect(unsafe_code, reason = "rows of pages that the device writes")]
            // SAFETY: key and value are inside the pages, as asserted, and were written before they were
            // asked for; the target is this thread's share of the desk's own memory.
            unsafe {
                let (key, target) = (key as *const u8, target as *mut u8);
                target.copy_from_nonoverlapping(key, self.half_bytes);
                let (value, target) = (key.add(self.half_page), target.add(self.half_bytes));
                target.copy_from_nonoverlapping(value, self.half_bytes);
            }
        }
        let offset = (first * row_bytes) as u64;
        let (target, source) = (at.staged.address() + offset, at.staged_here.address() + offset);
        let bytes = (end - first) * row_bytes;
        if bytes > 0 {
            #[expect(unsafe_code, reason = "raw device memory")]
            // SAFETY: both ranges are inside the desk's memory.
            unsafe {
                let source = source as *const std::ffi::c_void;
                sys::cuMemcpyHtoDAsync_v2(target, source, bytes, self.stream.cu_stream())
            }
            .result()?;
        }
        if self.n_ended[desk].fetch_add(1, Ordering::AcqRel) + 1 < self.n_shares {
            return Ok(());
        }
        // The last one: all copies are queued.
        self.n_ended[desk].store(0, Ordering::Release);
        #[expect(unsafe_code, reason = "raw device memory")]
        // SAFETY: the second ticket, in live memory; the value is written after all copies.
        unsafe {
            sys::cuStreamWriteValue32_v2(
                self.stream.cu_stream(),
                at.tickets.address() + 4,
                ticket,
                0,
            )
        }
        .result()
    }
}
