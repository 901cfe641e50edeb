//! Reads and writes on their way: by io_uring where the system has it, else one at a time.
//!
//! A thread that moves bytes has a queue of its own. It pushes transfers, whose buffers belong to the
//! queue meanwhile, and takes them back as they end, in any order. One layer of faults stands in for
//! both kinds (`crate::fault`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::SegmentFile;
use crate::page_buf::Blocks;

/// Bytes between a file and memory.
pub struct Transfer {
    /// What the caller named it; less than the queue's depth.
    pub tag: usize,
    /// The file.
    pub file: Arc<dyn SegmentFile>,
    /// Where in the file.
    pub start: u64,
    /// The memory.
    pub bytes: Blocks,
    /// Which bytes of it.
    pub range: Range<usize>,
    /// Whether memory goes to the file.
    pub is_write: bool,
    /// Whether to go around the system's page cache, if the file can. Places and lengths are whole
    /// blocks then.
    pub is_direct: bool,
}

/// A transfer that has ended, and how many bytes it moved.
pub type Moved = (Transfer, io::Result<usize>);

/// Transfers of one thread.
pub trait Queue: Send {
    /// The most transfers on their way.
    fn depth(&self) -> usize;
    /// Begins a transfer; fewer than [`Queue::depth`] are on their way.
    fn push(&mut self, transfer: Transfer);
    /// Waits for a transfer to end; `None` if none is on its way.
    fn pop(&mut self) -> Option<Moved>;
}

/// A system's file: through its page cache, and around it where that can be.
#[derive(Debug)]
pub struct SystemFile {
    pub(super) cached: File,
    pub(super) direct: Option<File>,
}

impl SystemFile {
    /// Whether the page cache can be gone around.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The file that a transfer is about.
    fn of(transfer: &Transfer) -> &File {
        let SystemFile { cached, direct } = transfer.file.system();
        direct.as_ref().filter(|_| transfer.is_direct).unwrap_or(cached)
    }
}

/// One transfer at a time, by the thread itself.
#[derive(Default)]
pub(super) struct Blocking(Option<Moved>);

impl Queue for Blocking {
    fn depth(&self) -> usize {
        1
    }

    #[cfg(unix)]
    fn push(&mut self, mut transfer: Transfer) {
        use std::os::unix::fs::FileExt as _;
        let mut bytes = std::mem::take(&mut transfer.bytes);
        let (file, range) = (SystemFile::of(&transfer), transfer.range.clone());
        let moved = match transfer.is_write {
            true => file.write_at(&bytes[range], transfer.start),
            false => file.read_at(&mut bytes[range], transfer.start),
        };
        transfer.bytes = bytes;
        self.0 = Some((transfer, moved));
    }

    fn pop(&mut self) -> Option<Moved> {
        self.0.take()
    }
}

#[cfg(target_os = "linux")]
pub(super) use ring::Ring;

#[cfg(target_os = "linux")]
mod ring {
    use std::os::fd::AsRawFd as _;

    use io_uring::{IoUring, opcode, types::Fd};

    use super::*;

    /// Transfers on their way at once. A disk is busy with fewer; it costs nothing.
    const DEPTH: usize = 32;

    /// The system's ring, and what is on its way there.
    pub(in super::super) struct Ring {
        ring: IoUring,
        /// `[DEPTH]` by their tags.
        transfers: Vec<Option<Transfer>>,
        n_transfers: usize,
    }

    impl Ring {
        /// An error where the system has no such thing, or does not let us have it.
        pub(in super::super) fn new() -> io::Result<Self> {
            let ring = IoUring::new(DEPTH as u32)?;
            let mut probe = io_uring::Probe::new();
            ring.submitter().register_probe(&mut probe)?;
            if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
                return Err(io::ErrorKind::Unsupported.into());
            }
            Ok(Ring { ring, transfers: (0..DEPTH).map(|_| None).collect(), n_transfers: 0 })
        }

        /// Takes in an end if there is one.
        fn take(&mut self) -> Option<Moved> {
            let end = self.ring.completion().next()?;
            let transfer = usize::try_from(end.user_data()).ok();
            let transfer = transfer.and_then(|tag| self.transfers.get_mut(tag)?.take())?;
            self.n_transfers -= 1;
            let moved = match end.result() {
                n if n < 0 => Err(io::Error::from_raw_os_error(-n)),
                n => Ok(n as usize),
            };
            Some((transfer, moved))
        }
    }

    impl Queue for Ring {
        fn depth(&self) -> usize {
            DEPTH
        }

        #[expect(unsafe_code, reason = "the system writes to memory while nobody looks")]
        fn push(&mut self, mut transfer: Transfer) {
            let fd = Fd(SystemFile::of(&transfer).as_raw_fd());
            let len = u32::try_from(transfer.range.len()).unwrap_or(u32::MAX);
            let bytes = &mut transfer.bytes[transfer.range.clone()];
            let entry = match transfer.is_write {
                true => opcode::Write::new(fd, bytes.as_ptr(), len).offset(transfer.start).build(),
                false => {
                    opcode::Read::new(fd, bytes.as_mut_ptr(), len).offset(transfer.start).build()
                }
            };
            let tag = transfer.tag;
            assert!(self.transfers[tag].is_none(), "a tag is one transfer's");
            self.transfers[tag] = Some(transfer);
            self.n_transfers += 1;
            // SAFETY: memory and file belong to the transfer, which stays in `transfers` until its end
            // has come, and nobody looks at it there; `Blocks` do not move when the transfer does.
            let pushed = unsafe { self.ring.submission().push(&entry.user_data(tag as u64)) };
            pushed.expect("there is room for every tag");
        }

        fn pop(&mut self) -> Option<Moved> {
            while self.n_transfers > 0 {
                if let Some(moved) = self.take() {
                    // What was pushed meanwhile begins before this one is looked at.
                    let _ = self.ring.submit();
                    return Some(moved);
                }
                // Interrupted, or without resources for a moment: tried again.
                if self.ring.submit_and_wait(1).is_err() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
            None
        }
    }

    impl Drop for Ring {
        fn drop(&mut self) {
            // The system may write to memory until then.
            while self.pop().is_some() {}
        }
    }
}
