//! The hashes of pages given up last, so that the reason of a miss is known.

use std::collections::VecDeque;

use nuthatch_types::{FastMap, PageKey};

/// The hashes of pages given up last; a fixed number of them.
#[derive(Debug)]
pub(crate) struct Ghosts {
    capacity: usize,
    order: VecDeque<PageKey>,
    /// How often each hash is in `order`.
    counts: FastMap<PageKey, u32>,
}

impl Ghosts {
    pub(crate) fn new(capacity: u32) -> Self {
        let capacity = capacity as usize;
        Ghosts { capacity, order: VecDeque::new(), counts: FastMap::default() }
    }

    pub(crate) fn contains(&self, hash: PageKey) -> bool {
        self.counts.contains_key(&hash)
    }

    pub(crate) fn push(&mut self, hash: PageKey) {
        self.order.push_back(hash);
        *self.counts.entry(hash).or_default() += 1;
        while self.order.len() > self.capacity {
            let Some(oldest) = self.order.pop_front() else { return };
            let count = self.counts.get_mut(&oldest).expect("counted when it was pushed");
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        self.order.clear();
        self.counts.clear();
    }
}
