//! The file operations of the disk tier: few, so that one layer of faults can stand in for them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};

/// Where segments are.
pub trait Files: Send + Sync {
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
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

impl Files for SystemFiles {
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
        Ok(Arc::new(open(path, OpenOptions::new().read(true).write(true))?))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        Ok(Arc::new(open(path, OpenOptions::new().read(true).write(true).create_new(true))?))
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
impl SegmentFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn read_at(&self, target: &mut [u8], start: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, target, start)
    }

    fn write_at(&self, source: &[u8], start: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(self, source, start)
    }

    #[cfg(target_os = "linux")]
    #[expect(unsafe_code, reason = "a call to the system without a safe wrapper")]
    fn will_need(&self, start: u64, len: u64) {
        use std::os::fd::AsRawFd as _;
        let (Ok(start), Ok(len)) = (start.try_into(), len.try_into()) else { return };
        // SAFETY: the descriptor is open, because the file is borrowed; the call takes numbers only.
        // It is advice: a refusal costs time and nothing else.
        unsafe { libc::posix_fadvise(self.as_raw_fd(), start, len, libc::POSIX_FADV_WILLNEED) };
    }

    #[cfg(not(target_os = "linux"))]
    fn will_need(&self, _start: u64, _len: u64) {}
}
