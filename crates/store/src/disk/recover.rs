//! Opening a directory: who may use it, its secret, and what its segments hold.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nuthatch_types::{ColdKv, PageKey};

use super::files::{create_dir, open, read_fully};
use super::record::{Defect, RecordShape, SEGMENT_HEADER_BYTES};
use super::segments::{N_SEGMENTS_MIN, Segments};
use super::{DiskCounters, Files, SegmentFile, segment_number, segment_path};

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process uses it.
    #[error("{} is in use by another engine", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// Too few bytes for anything.
    #[error(
        "{bytes_max} bytes for the disk tier are too few: with records of {record_bytes} bytes it \
         needs at least {needed}"
    )]
    TooSmall {
        /// Bytes that were given.
        bytes_max: u64,
        /// Bytes of one record.
        record_bytes: u64,
        /// The least.
        needed: u64,
    },
    /// The system has no io_uring, or does not let us have it.
    #[error("io_uring, for which --kv-disk-io asks, cannot be used here: {0}")]
    NoRing(io::Error),
    /// The device's pages cannot leave it.
    #[error("KV pages cannot leave this device, so there can be no disk tier")]
    NoImages,
    /// The device's pages cannot be coded in so few bits, or have no such layers.
    #[error("KV pages cannot be kept as {0} here: only floats can, of layers that there are")]
    NoCodec(ColdKv),
    /// The device's pages cannot be made of rows of others.
    #[error(
        "--cache-reuse needs --kv-disk, keys and values as f16, bf16 or f32, and attention to all of \
         them"
    )]
    NoRows,
    /// The store somewhere else does not answer, or says no.
    #[error("cannot use the remote tier: {0}")]
    Remote(String),
    /// The system refused something.
    #[error("cannot use {} for the disk tier: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// A directory that nobody else uses, and its secret.
#[derive(Debug)]
pub struct DiskDir {
    pub(super) path: PathBuf,
    pub(super) lock: File,
    secret: u128,
}

impl DiskDir {
    /// Makes the directory if there is none, and takes it for this process.
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| DiskError::Io { path, source }
        };
        create_dir(path).map_err(fail(path))?;
        let lock_path = path.join("lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = open(&lock_path, &mut options).map_err(fail(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DiskError::InUse { path: path.to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(fail(&lock_path)(source)),
        }
        let secret_path = path.join("secret");
        let secret = secret(&secret_path).map_err(fail(&secret_path))?;
        Ok(DiskDir { path: path.to_owned(), lock, secret })
    }

    /// Something that only those know who may read the directory, the same each time. Names of pages
    /// are made with it, so that nobody can search for two prompts with one name.
    pub fn secret(&self) -> u128 {
        self.secret
    }
}

/// The secret in a file, or a new one if it has none.
fn secret(path: &Path) -> io::Result<u128> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = open(path, &mut options)?;
    let mut bytes = Vec::new();
    (&file).take(17).read_to_end(&mut bytes)?;
    if let Ok(bytes) = <[u8; 16]>::try_from(&bytes[..]) {
        return Ok(u128::from_le_bytes(bytes));
    }
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    file.set_len(0)?;
    io::Seek::rewind(&mut file)?;
    file.write_all(&bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

/// Finds what the segments of a directory hold, and makes room if it is too much.
pub(super) fn segments(
    dir: &Path,
    bytes_max: u64,
    shape: RecordShape,
    files: &dyn Files,
    counters: &mut DiskCounters,
) -> Result<Segments, DiskError> {
    let needed = N_SEGMENTS_MIN * shape.record_start(1);
    if bytes_max < needed {
        let record_bytes = shape.record_bytes() as u64;
        return Err(DiskError::TooSmall { bytes_max, record_bytes, needed });
    }
    let list = files.list(dir);
    let list = list.map_err(|source| DiskError::Io { path: dir.to_owned(), source })?;
    let number = |(name, len): (String, u64)| Some((segment_number(&name)?, len));
    let mut found: Vec<(u64, u64)> = list.into_iter().filter_map(number).collect();
    found.sort_unstable();
    let mut segments = Segments::new(shape, bytes_max);
    for (number, len) in found {
        match read_segment(&segment_path(dir, number), number, shape, files, counters) {
            Ok((file, keys)) => {
                counters.pages_recovered += keys.iter().flatten().count() as u64;
                segments.add_own(number, file, keys);
            }
            Err(Unread::Foreign) => {
                counters.segments_foreign += 1;
                segments.add_foreign(number, len);
            }
            Err(Unread::Corrupt) => {
                counters.segments_corrupt += 1;
                if files.remove(&segment_path(dir, number)).is_err() {
                    segments.add_foreign(number, len);
                }
            }
        }
    }
    // Each is tried once: what cannot be removed now is tried again later, and nothing is saved
    // before there is room.
    for _ in 0..segments.n_segments() {
        let Some(victim) = segments.next_victim() else { break };
        counters.segments_evicted += 1;
        counters.pages_evicted += victim.n_pages;
        let is_gone = files.remove(&segment_path(dir, victim.number)).is_ok();
        segments.removed(victim.number, is_gone);
    }
    Ok(segments)
}

/// Why a segment is none of ours.
enum Unread {
    /// It belongs to others, or cannot be used now: it stays until room is short.
    Foreign,
    /// It is nobody's.
    Corrupt,
}

/// An open segment, and the pages of its records.
type ReadSegment = (Arc<dyn SegmentFile>, Vec<Option<PageKey>>);

/// Reads the headers of a segment's records, and cuts off a record that was not written to its end.
fn read_segment(
    path: &Path,
    number: u64,
    shape: RecordShape,
    files: &dyn Files,
    counters: &mut DiskCounters,
) -> Result<ReadSegment, Unread> {
    let file = files.open(path).map_err(|_| Unread::Foreign)?;
    let mut header = [0; SEGMENT_HEADER_BYTES];
    let n = read_fully(&*file, &mut header, 0).map_err(|_| Unread::Foreign)?;
    shape.check_segment(&header[..n], number).map_err(|defect| match defect {
        Defect::Foreign => Unread::Foreign,
        Defect::Torn | Defect::Corrupt | Defect::Stale => Unread::Corrupt,
    })?;
    let len = file.len().map_err(|_| Unread::Foreign)?;
    let body = len.saturating_sub(shape.record_start(0));
    let n_records = body / shape.record_bytes() as u64;
    let n_records = u32::try_from(n_records).map_err(|_| Unread::Corrupt)?;
    let end = shape.record_start(n_records);
    if len != end {
        // A header that is not filled up was written to its end all the same.
        counters.segments_torn += u64::from(len > end);
        file.set_len(end).map_err(|_| Unread::Foreign)?;
    }
    let mut keys = Vec::new();
    let mut header = vec![0; shape.head_bytes()];
    for record in 0..n_records {
        let n = read_fully(&*file, &mut header, shape.record_start(record)).unwrap_or(0);
        let key = shape.read_key(&header[..n]).ok();
        counters.records_corrupt += u64::from(key.is_none());
        keys.push(key);
    }
    Ok((file, keys))
}
