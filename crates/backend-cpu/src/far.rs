//! Pages in a file: the far memory of contexts that are larger than memory.
//!
//! The file is laid out as the arena is, `[layer][kv head][slot][16 tokens][K|V][D]`, so that
//! neighbouring rows of one head are read at once. It belongs to the user alone and has no name once
//! it is open, so that it goes with the process, however that ends. All of its room is taken at the
//! start: a disk that is full is an error then, and not in the middle of an answer.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nuthatch_backend::DeviceError;

/// A file of a fixed size that threads read and write, each its own parts.
pub(crate) struct PageFile {
    file: File,
    path: PathBuf,
    /// What went wrong first. Threads note it; the operation that they belong to ends with it.
    fault: Mutex<Option<String>>,
    n_read: AtomicU64,
}

impl PageFile {
    /// Makes a file of `bytes`, at `path`, which must not exist, or inside of it if it is a folder.
    pub(crate) fn create(path: &Path, bytes: usize) -> Result<Self, DeviceError> {
        static N_MADE: AtomicU32 = AtomicU32::new(0);
        let path = if path.is_dir() {
            let n = N_MADE.fetch_add(1, Ordering::Relaxed);
            path.join(format!("nuthatch-kv-{}-{n}", std::process::id()))
        } else {
            path.to_owned()
        };
        let fault = |error: io::Error| {
            let path = path.display();
            DeviceError::Fault(format!("cannot keep {bytes} bytes of KV in {path}: {error}"))
        };
        let options =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).clone();
        let file = options.open(&path).map_err(fault)?;
        std::fs::remove_file(&path).map_err(fault)?;
        reserve(&file, bytes).map_err(fault)?;
        Ok(PageFile { file, path, fault: Mutex::new(None), n_read: AtomicU64::new(0) })
    }

    /// Reads bytes from `at` on; zeros, if that fails.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) {
        self.n_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        if let Err(error) = self.file.read_exact_at(out, at as u64) {
            out.fill(0);
            self.note("read", &error);
        }
    }

    /// Bytes that were read so far.
    pub(crate) fn n_read(&self) -> u64 {
        self.n_read.load(Ordering::Relaxed)
    }

    /// Writes bytes from `at` on.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        if let Err(error) = self.file.write_all_at(bytes, at as u64) {
            self.note("write", &error);
        }
    }

    /// What went wrong so far, if anything did.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.as_ref().map_or(Ok(()), |fault| Err(DeviceError::Fault(fault.clone())))
    }

    fn note(&self, what: &str, error: &io::Error) {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.path.display();
        fault.get_or_insert_with(|| format!("cannot {what} KV in {path}: {error}"));
    }
}

/// Takes the file's room on the disk.
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::FileTooLarge, "larger than a file can be"))?;
    if len == 0 {
        return Ok(());
    }
    #[expect(unsafe_code, reason = "the standard library does not reserve room")]
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and numbers are checked by
    // the system.
    let code = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) };
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("nuthatch-far-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_file_has_no_name_and_keeps_what_is_written() {
        let dir = folder("kept");
        for path in [dir.clone(), dir.join("kv")] {
            let file = PageFile::create(&path, 4096).unwrap();
            assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "{}", path.display());
            file.write(100, b"seeds");
            let mut bytes = [1; 6];
            file.read(99, &mut bytes);
            assert_eq!((&bytes, file.n_read()), (b"\0seeds", 6));
            assert!(file.check().is_ok());
            file.read(4090, &mut [0; 10]);
            let error = file.check().unwrap_err().to_string();
            assert!(error.contains("cannot read KV in"), "{error}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_cannot_be_made_is_an_error_with_the_path() {
        let dir = folder("refused");
        let taken = dir.join("taken");
        std::fs::write(&taken, b"somebody's").unwrap();
        for (path, bytes) in [
            (taken.as_path(), 4096),
            (&dir.join("none").join("kv"), 4096),
            // More than any disk has.
            (&dir.join("large"), 1 << 60),
        ] {
            let error = PageFile::create(path, bytes).err().unwrap().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(std::fs::read(&taken).unwrap(), b"somebody's");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
