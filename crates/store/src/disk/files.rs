//! The file operations of the disk tier: few, so that one layer of faults can stand in for them.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};

use super::queue::{Blocking, Queue, SystemFile};

/// How files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskIo {
    /// By what.
    pub engine: IoEngine,
    /// Around the system's page cache, where the file system can.
    pub direct: bool,
}

/// What reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring where the system has it and lets us have it, else threads.
    #[default]
    Auto,
    /// io_uring.
    Uring,
    /// A few threads.
    Threads,
}

impl FromStr for DiskIo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (engine, cache) = text.split_once(',').unwrap_or((text, "buffered"));
        let engine = match engine {
            "auto" => IoEngine::Auto,
            "uring" => IoEngine::Uring,
            "threads" => IoEngine::Threads,
            _ => return Err(format!("{engine:?} is not auto, uring or threads")),
        };
        match cache {
            "buffered" => Ok(DiskIo { engine, direct: false }),
            "direct" => Ok(DiskIo { engine, direct: true }),
            _ => Err(format!("{cache:?} is not direct or buffered")),
        }
    }
}

impl fmt::Display for DiskIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let engine = match self.engine {
            IoEngine::Auto => "auto",
            IoEngine::Uring => "uring",
            IoEngine::Threads => "threads",
        };
        write!(f, "{engine},{}", if self.direct { "direct" } else { "buffered" })
    }
}

/// Where segments are.
pub trait Files: Send + Sync {
    /// By what files are read and written; not [`IoEngine::Auto`].
    fn io(&self) -> DiskIo;
    /// A queue for a thread that moves bytes.
    fn queue(&self) -> Box<dyn Queue>;
    /// Names and lengths of the plain files of a directory.
    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>>;
    /// Opens a file to read and write it. Links are not followed.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>>;
    /// Makes a new file that nobody but its owner may read. An error if there is one.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>>;
    /// Removes a file. Who has it open may still read it.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// An open segment.
pub trait SegmentFile: Send + Sync {
    /// The system's file, for queues.
    fn system(&self) -> &SystemFile;
    /// Bytes of the file.
    fn len(&self) -> io::Result<u64>;
    /// Whether the file is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Cuts the file off, or makes it longer by zeros.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reads up to `target.len()` bytes; 0 at the end of the file.
    fn read_at(&self, target: &mut [u8], start: u64) -> io::Result<usize>;
    /// Writes up to `source.len()` bytes.
    fn write_at(&self, source: &[u8], start: u64) -> io::Result<usize>;
    /// Tells the system that these bytes will be read soon.
    fn will_need(&self, start: u64, len: u64);
}

/// Reads as many bytes as there are, up to `target.len()`.
pub(crate) fn read_fully(
    file: &dyn SegmentFile,
    target: &mut [u8],
    start: u64,
) -> io::Result<usize> {
    let mut n_read = 0;
    while n_read < target.len() {
        match file.read_at(&mut target[n_read..], start + n_read as u64) {
            Ok(0) => break,
            Ok(n) => n_read += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(n_read)
}

/// Writes all bytes.
pub(crate) fn write_fully(file: &dyn SegmentFile, source: &[u8], start: u64) -> io::Result<()> {
    let mut n_written = 0;
    while n_written < source.len() {
        match file.write_at(&source[n_written..], start + n_written as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => n_written += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The system's files.
#[derive(Clone, Copy, Debug)]
pub struct SystemFiles(DiskIo);

impl SystemFiles {
    /// Looks what the system has. An error if it does not have what is asked for; with
    /// [`IoEngine::Auto`] it has something.
    pub fn new(io: DiskIo) -> io::Result<Self> {
        let engine = match (io.engine, ring()) {
            (IoEngine::Threads, _) | (IoEngine::Auto, Err(_)) => IoEngine::Threads,
            (IoEngine::Uring | IoEngine::Auto, Ok(_)) => IoEngine::Uring,
            (IoEngine::Uring, Err(error)) => return Err(error),
        };
        Ok(SystemFiles(DiskIo { engine, ..io }))
    }

    fn open_with(&self, path: &Path, options: &mut OpenOptions) -> io::Result<SystemFile> {
        let cached = open(path, options)?;
        let direct = if self.0.direct { open_direct(path).ok() } else { None };
        Ok(SystemFile { cached, direct })
    }
}

#[cfg(target_os = "linux")]
fn ring() -> io::Result<Box<dyn Queue>> {
    Ok(Box::new(super::queue::Ring::new()?))
}

#[cfg(not(target_os = "linux"))]
fn ring() -> io::Result<Box<dyn Queue>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Opens a file that is there so that the system's page cache has no part in it.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_DIRECT;
    options.read(true).write(true).custom_flags(flags).open(path)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Files for SystemFiles {
    fn io(&self) -> DiskIo {
        self.0
    }

    fn queue(&self) -> Box<dyn Queue> {
        // A ring more may be one too many for the system.
        let queue = (self.0.engine == IoEngine::Uring).then(|| ring().ok()).flatten();
        queue.unwrap_or_else(|| Box::new(Blocking::default()))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            // Not followed, so a link is no plain file.
            let metadata = match entry.metadata() {
                // It has gone meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata?,
            };
            if let Ok(name) = entry.file_name().into_string()
                && metadata.is_file()
            {
                files.push((name, metadata.len()));
            }
        }
        Ok(files)
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        Ok(Arc::new(self.open_with(path, OpenOptions::new().read(true).write(true))?))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        let mut options = OpenOptions::new();
        Ok(Arc::new(self.open_with(path, options.read(true).write(true).create_new(true))?))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }
}

/// Opens a plain file that only its owner may read, and follows no link.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file"));
    }
    Ok(file)
}

/// Makes a directory that only its owner may enter, unless there is one.
pub(crate) fn create_dir(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    builder.mode(0o700);
    builder.create(path)
}

#[cfg(unix)]
impl SegmentFile for SystemFile {
    fn system(&self) -> &SystemFile {
        self
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.cached.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.cached.set_len(len)
    }

    fn read_at(&self, target: &mut [u8], start: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.cached, target, start)
    }

    fn write_at(&self, source: &[u8], start: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(&self.cached, source, start)
    }

    #[cfg(target_os = "linux")]
    #[expect(unsafe_code, reason = "a call to the system without a safe wrapper")]
    fn will_need(&self, start: u64, len: u64) {
        use std::os::fd::AsRawFd as _;
        let (Ok(start), Ok(len)) = (start.try_into(), len.try_into()) else { return };
        let fd = self.cached.as_raw_fd();
        // SAFETY: the descriptor is open, because the file is borrowed; the call takes numbers only.
        // It is advice: a refusal costs time and nothing else.
        unsafe { libc::posix_fadvise(fd, start, len, libc::POSIX_FADV_WILLNEED) };
    }

    #[cfg(not(target_os = "linux"))]
    fn will_need(&self, _start: u64, _len: u64) {}
}
