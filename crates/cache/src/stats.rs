//! What the cache holds and did, as plain numbers.

use crate::{Miss, MissReason};

/// What the cache holds at one moment, and what it did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens of one page.
    pub page_len: u32,
    /// All pages of the device: free, used and idle ones.
    pub pages_total: u32,
    /// Pages that hold nothing.
    pub pages_free: u32,
    /// Pages that a sequence or a pin holds, shared ones counted once.
    pub pages_used: u32,
    /// Pages that nobody holds and that can be found by their tokens. They are given up on demand.
    pub pages_idle: u32,
    /// All pages of the host: free, used and idle ones.
    pub host_total: u32,
    /// Pages of the host that hold nothing.
    pub host_free: u32,
    /// Pages of the host that a swapped or spilled sequence or a pin holds, shared ones counted once.
    pub host_used: u32,
    /// Pages of the host that nobody holds and that can be found by their tokens.
    pub host_idle: u32,
    /// Pages of the host on which sequences run, counted once for each of them.
    pub spilled: u32,
    /// Sequences with a table.
    pub seqs: u32,
    /// Tokens that have a place in used pages of both tiers, shared ones counted once.
    pub tokens_stored: u32,
    /// Places for tokens in used pages that hold none: the room of each sequence's last page.
    pub tokens_wasted: u32,
    /// What was done since the cache was made.
    pub counters: Counters,
}

impl Stats {
    /// The share of the used pages' places that hold no token, from 0 to 1.
    pub fn waste_fraction(&self) -> f64 {
        let places = f64::from(self.pages_used) * f64::from(self.page_len);
        if places == 0.0 { 0.0 } else { f64::from(self.tokens_wasted) / places }
    }
}

/// What the cache did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens that admitted sequences came with.
    pub tokens_asked: u64,
    /// Tokens of those that were found in full pages and shared.
    pub tokens_shared: u64,
    /// Tokens of those that were found and copied.
    pub tokens_copied: u64,
    /// Admissions that found all they could.
    pub found_complete: u64,
    /// Admissions that found no more because nothing was ever stored that goes on like this.
    pub missed_never_seen: u64,
    /// Admissions that found no more because the next page was given up.
    pub missed_evicted: u64,
    /// Admissions that found nothing because it is cached under another salt.
    pub missed_salt: u64,
    /// Admissions that found no more because what is cached goes on differently.
    pub missed_diverged: u64,
    /// Pages that became findable.
    pub pages_published: u64,
    /// Pages that were freed because another held the same tokens.
    pub pages_merged: u64,
    /// Idle pages that were given up.
    pub pages_evicted: u64,
    /// Pages that left the window of a sequence.
    pub pages_out: u64,
    /// Pages that were dropped from the middle of a sequence.
    pub pages_dropped: u64,
    /// Idle pages that were taken from the device to the host.
    pub pages_demoted: u64,
    /// Pages that were brought back from the host because a request found them.
    pub pages_promoted: u64,
    /// Pages that were taken to the host with the sequence that holds them.
    pub pages_swapped_out: u64,
    /// Pages that were brought back with the sequence that holds them.
    pub pages_swapped_in: u64,
    /// Pages that sequences began to run on although they are on the host.
    pub pages_spilled: u64,
    /// Pages that were brought to the device while sequences ran on them.
    pub pages_unspilled: u64,
    /// Pages that were loaded from something slower than the host.
    pub pages_loaded: u64,
    /// Pages that should have been loaded and did not come, or for which nobody waited.
    pub pages_not_loaded: u64,
}

impl Counters {
    /// The share of the tokens asked for that were found, from 0 to 1.
    pub fn hit_fraction(&self) -> f64 {
        let found = (self.tokens_shared + self.tokens_copied) as f64;
        if self.tokens_asked == 0 { 0.0 } else { found / self.tokens_asked as f64 }
    }

    pub(crate) fn count(&mut self, miss: Miss) {
        let counter = match miss.reason {
            MissReason::Complete => &mut self.found_complete,
            MissReason::NeverSeen => &mut self.missed_never_seen,
            MissReason::Evicted => &mut self.missed_evicted,
            MissReason::Salt => &mut self.missed_salt,
            MissReason::Diverged => &mut self.missed_diverged,
        };
        *counter += 1;
    }
}
