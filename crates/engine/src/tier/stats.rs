//! What the slower tiers hold and did, as plain numbers.

use nuthatch_store::disk::DiskStats;
use nuthatch_store::remote::RemoteCounters;

/// What was done beside the slower tiers' own work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Loads that were begun.
    pub loads: u64,
    /// Loads that asked for pages of which nobody knew, and found none of them.
    pub guesses_missed: u64,
    /// Loads that took too long and ended with a part of their pages.
    pub loads_late: u64,
    /// Loads whose sequences were computed while they came, layer by layer.
    pub loads_early: u64,
    /// Those of them that did not come, so that the step was undone.
    pub loads_undone: u64,
    /// Pages that were brought to the device.
    pub pages_loaded: u64,
    /// Those of them that were made of rows of others.
    pub pages_moved: u64,
    /// Pages that were gone before they were saved.
    pub saves_missed: u64,
}

/// What the slower tiers hold and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// The files, if there is a disk tier.
    pub disk: Option<DiskStats>,
    /// The store somewhere else, if there is one.
    pub remote: Option<RemoteCounters>,
    /// The moves between them and the device.
    pub counters: TierCounters,
}
