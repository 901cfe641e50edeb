//! What policies did, counted.

use std::ops::AddAssign;

use super::head::Lookup;

/// What one policy did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Heads that were attended by picks, once for each head and step.
    pub heads: u64,
    /// Lookups of heads that do refresh, and how many of them were hits.
    pub live_lookups: u64,
    /// Hits among them.
    pub live_hits: u64,
    /// Lookups of frozen heads.
    pub frozen_lookups: u64,
    /// Hits among them.
    pub frozen_hits: u64,
    /// Lookups of both after which the last selection served once more, while the next one was made.
    pub late: u64,
    /// Selections that were made.
    pub selections: u64,
    /// Rows of those selections.
    pub rows_selected: u64,
    /// Rows that a selection brought to the working set.
    pub rows_moved: u64,
    /// Rows that were attended, sinks and tail included.
    pub rows_attended: u64,
    /// Rows that full attention would have attended.
    pub rows_full: u64,
    /// The share of attention that fell on attended rows, summed over `mass_heads`.
    pub mass: f64,
    /// Heads whose mass was measured.
    pub mass_heads: u64,
    /// The same share times the head's importance, and the sum of importances.
    pub mass_important: f64,
    /// Importances of the heads whose mass was measured.
    pub importance: f64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.heads += other.heads;
        self.live_lookups += other.live_lookups;
        self.live_hits += other.live_hits;
        self.frozen_lookups += other.frozen_lookups;
        self.frozen_hits += other.frozen_hits;
        self.late += other.late;
        self.selections += other.selections;
        self.rows_selected += other.rows_selected;
        self.rows_moved += other.rows_moved;
        self.rows_attended += other.rows_attended;
        self.rows_full += other.rows_full;
        self.mass += other.mass;
        self.mass_heads += other.mass_heads;
        self.mass_important += other.mass_important;
        self.importance += other.importance;
    }
}

impl Counts {
    pub(super) fn count_lookup(&mut self, is_frozen: bool, lookup: Lookup) {
        let (lookups, hits) = if is_frozen {
            (&mut self.frozen_lookups, &mut self.frozen_hits)
        } else {
            (&mut self.live_lookups, &mut self.live_hits)
        };
        *lookups += 1;
        *hits += u64::from(lookup.is_hit());
        self.late += u64::from(lookup.is_late());
    }

    /// Hits among the lookups of live heads; nothing if there were none.
    pub fn live_hit_ratio(&self) -> Option<f64> {
        ratio(self.live_hits, self.live_lookups)
    }

    /// Hits among the lookups of frozen heads; nothing if there were none.
    pub fn frozen_hit_ratio(&self) -> Option<f64> {
        ratio(self.frozen_hits, self.frozen_lookups)
    }

    /// Lookups after which the last selection served once more; nothing if there were none.
    pub fn late_ratio(&self) -> Option<f64> {
        ratio(self.late, self.live_lookups + self.frozen_lookups)
    }

    /// Rows that moved, of those that full attention would have read.
    pub fn moved_share(&self) -> Option<f64> {
        ratio(self.rows_moved, self.rows_full)
    }

    /// Rows that were attended, of those that full attention would have read.
    pub fn attended_share(&self) -> Option<f64> {
        ratio(self.rows_attended, self.rows_full)
    }

    /// The average share of attention that fell on attended rows, where it was measured.
    pub fn mass_recall(&self) -> Option<f64> {
        (self.mass_heads > 0).then(|| self.mass / self.mass_heads as f64)
    }

    /// The same, of which important heads have most: an average over all heads says little about the
    /// few that find something far away.
    pub fn important_mass_recall(&self) -> Option<f64> {
        (self.importance > 0.0).then(|| self.mass_important / self.importance)
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// What all policies did, and what it took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// `[policy]`.
    pub policies: Vec<Counts>,
    /// Time of looking up, scoring and selecting, in nanoseconds; 0 when it was not measured. Of selections
    /// that are made while other threads attend, it is the time of their thread, shared by all threads.
    pub select_nanos: u64,
    /// Time of bringing rows near that attention waited for.
    pub bring_nanos: u64,
}
