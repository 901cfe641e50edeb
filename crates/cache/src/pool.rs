//! The slots of one tier: a fixed number, opened and freed in constant time.
//!
//! The free list is a stack, so that the slot freed last, whose bytes are most likely still in a
//! processor's cache, is the next to be used, and so that the same operations give the same slots.

use std::ops::Range;

use nuthatch_types::Slot;

/// The slots of one tier.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Free slots; the next one to be opened is last.
    free: Vec<Slot>,
    /// `[n_slots]` whether a slot is in use.
    used: Vec<bool>,
    /// The number of the first slot.
    first: u32,
}

impl Pool {
    /// A pool of free slots with these numbers. A fresh pool opens them in ascending order.
    pub(crate) fn new(slots: Range<u32>) -> Self {
        let (first, used) = (slots.start, vec![false; slots.len()]);
        Pool { free: slots.rev().map(Slot).collect(), used, first }
    }

    /// Takes a free slot, or `None` when all are in use.
    pub(crate) fn open(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        *self.used_mut(slot) = true;
        Some(slot)
    }

    /// Gives a slot back. Giving a free slot back is a programmer's error.
    pub(crate) fn free(&mut self, slot: Slot) {
        let used = self.used_mut(slot);
        assert!(*used, "{slot:?} was freed twice");
        *used = false;
        self.free.push(slot);
    }

    /// All slots, free or not.
    pub(crate) fn n_slots(&self) -> u32 {
        self.used.len() as u32
    }

    /// Slots that can be opened.
    pub(crate) fn n_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Whether a slot is in use.
    pub(crate) fn is_used(&self, slot: Slot) -> bool {
        self.used[(slot.0 - self.first) as usize]
    }

    /// Whether the free list holds exactly the unused slots, each once.
    pub(crate) fn is_sound(&self) -> bool {
        let mut seen = self.used.clone();
        let mut is_new =
            |slot: &Slot| !std::mem::replace(&mut seen[(slot.0 - self.first) as usize], true);
        let distinct = self.free.iter().all(&mut is_new);
        distinct && seen.into_iter().all(|slot_seen| slot_seen)
    }

    fn used_mut(&mut self, slot: Slot) -> &mut bool {
        &mut self.used[(slot.0 - self.first) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_in_order_and_the_last_freed_comes_first() {
        let mut pool = Pool::new(5..8);
        assert_eq!([pool.open(), pool.open(), pool.open()], [5, 6, 7].map(|i| Some(Slot(i))));
        assert_eq!(pool.open(), None);
        pool.free(Slot(5));
        pool.free(Slot(7));
        assert_eq!(pool.n_free(), 2);
        assert!(pool.is_sound() && pool.is_used(Slot(6)));
        assert_eq!(pool.open(), Some(Slot(7)));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_slot_is_freed_once() {
        let mut pool = Pool::new(0..1);
        let slot = pool.open().unwrap();
        pool.free(slot);
        pool.free(slot);
    }
}
