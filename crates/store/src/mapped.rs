//! A file mapped read-only into memory.
//!
//! Weights are read from here in place, so that loading costs no copy and the system may drop pages
//! that are not in use. It does not parse anything and never writes.

#![expect(unsafe_code, reason = "a mapping is only sound while nobody truncates the file")]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of one file, valid for the life of the value.
///
/// Hazard: the bytes are the file's own. If another process changes the file, its new bytes are
/// seen; if it truncates the file, reading the lost part ends the process with `SIGBUS`. Model files
/// are written once and replaced by renaming, which leaves an existing mapping untouched.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole file.
    ///
    /// An error if it cannot be opened, is not a plain file, or is empty.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file"));
        }
        let len = usize::try_from(metadata.len()).map_err(|_| {
            io::Error::new(io::ErrorKind::FileTooLarge, "larger than memory can map")
        })?;
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is empty"));
        }
        // SAFETY:
        // - the length is that of the plain file just opened, so every mapped byte is backed by it;
        // - the mapping is read-only, and only shared references to it are given out;
        // - nobody may truncate the file meanwhile: the documented hazard of the type, which no
        //   check can rule out.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(&file) }?;
        Ok(MappedFile { map })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_the_bytes_and_refuses_what_cannot_be_mapped() {
        let dir = std::env::temp_dir().join(format!("nuthatch-mapped-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("file");
        std::fs::write(&path, b"seeds").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"seeds");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(MappedFile::open(&path).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(MappedFile::open(&dir).is_err());
        assert_eq!(
            MappedFile::open(&dir.join("none")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
