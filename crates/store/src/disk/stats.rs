//! What the disk tier holds and did, as plain numbers.

use super::{Defect, DiskIo, Miss};

/// What the disk tier holds, and what it did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Bytes of all segments.
    pub bytes: u64,
    /// Bytes that they may have.
    pub bytes_max: u64,
    /// Pages that can be found.
    pub pages: u64,
    /// Segments, with those of others.
    pub segments: u64,
    /// How they are read and written.
    pub io: DiskIo,
    /// What was done.
    pub counters: DiskCounters,
}

/// What the disk tier did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Pages that were found when the directory was opened.
    pub pages_recovered: u64,
    /// Segments that ended in the middle of a record then, and were cut off.
    pub segments_torn: u64,
    /// Segments of another model, layout or version then.
    pub segments_foreign: u64,
    /// Segments that could not be read then, or had no sound header; they were removed.
    pub segments_corrupt: u64,
    /// Records without a sound header then.
    pub records_corrupt: u64,
    /// Pages written.
    pub pages_saved: u64,
    /// Bytes of their records.
    pub bytes_written: u64,
    /// Pages that were not written, because there was no room, or they were there already.
    pub saves_refused: u64,
    /// Pages that could not be written.
    pub saves_failed: u64,
    /// Pages read and found to be what they should be.
    pub pages_read: u64,
    /// Bytes of their records.
    pub bytes_read: u64,
    /// Pages that the system could not read.
    pub missed_io: u64,
    /// Pages whose record ended too early.
    pub missed_torn: u64,
    /// Pages whose record was not as it was written.
    pub missed_corrupt: u64,
    /// Pages whose record held other tokens.
    pub missed_stale: u64,
    /// Segments that went to make room.
    pub segments_evicted: u64,
    /// Pages that were lost with them.
    pub pages_evicted: u64,
    /// Segments that could not be removed; it is tried again.
    pub removals_failed: u64,
}

impl DiskCounters {
    pub(super) fn count_miss(&mut self, miss: Miss) {
        let counter = match miss {
            Miss::Absent | Miss::Io => &mut self.missed_io,
            Miss::Defect(Defect::Torn) => &mut self.missed_torn,
            Miss::Defect(Defect::Corrupt | Defect::Foreign) => &mut self.missed_corrupt,
            Miss::Defect(Defect::Stale) => &mut self.missed_stale,
        };
        *counter += 1;
    }
}
