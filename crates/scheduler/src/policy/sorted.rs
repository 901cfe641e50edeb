//! Those who wait, sorted by rank.

use std::collections::BTreeMap;

use nuthatch_types::SeqId;

use super::{Rank, Waiter};

/// Those who wait, sorted by rank; those whom the executor knows apart.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    fresh: BTreeMap<Rank, SeqId>,
    started: BTreeMap<Rank, SeqId>,
}

impl Sorted {
    pub(super) fn push(&mut self, waiter: Waiter) {
        let before = self.map(&waiter).insert(waiter.rank, waiter.seq);
        assert_eq!(before, None, "no two ranks are equal");
    }

    pub(super) fn remove(&mut self, waiter: &Waiter) {
        let removed = self.map(waiter).remove(&waiter.rank);
        assert_eq!(removed, Some(waiter.seq), "it waits with this rank");
    }

    /// The first by rank, of all or only of those whom the executor knows.
    pub(super) fn first(&self, may_start: bool) -> Option<SeqId> {
        let fresh = self.fresh.first_key_value().filter(|_| may_start);
        let started = self.started.first_key_value();
        fresh.into_iter().chain(started).min().map(|(_, &seq)| seq)
    }

    /// The first by rank of those whom the executor knows.
    pub(super) fn first_started(&self) -> Option<SeqId> {
        self.started.first_key_value().map(|(_, &seq)| seq)
    }

    /// Those whom the executor does not know, by rank.
    pub(super) fn fresh(&self) -> impl Iterator<Item = (Rank, SeqId)> + '_ {
        self.fresh.iter().map(|(&rank, &seq)| (rank, seq))
    }

    pub(super) fn len(&self) -> usize {
        self.fresh.len() + self.started.len()
    }

    fn map(&mut self, waiter: &Waiter) -> &mut BTreeMap<Rank, SeqId> {
        if waiter.is_started { &mut self.started } else { &mut self.fresh }
    }
}
