//! Which pages have a copy on the device: bookkeeping, without bytes.
//!
//! A copy is only that: what is written goes to the page too. So a frame can be given to another page at
//! any time, and the one that was not wanted for longest is.

/// Slots without a copy; `NOT_NEAR` of `kv.cuh`.
const NOT_NEAR: u32 = u32::MAX;
/// Slots between two that have changed that are sent with them: a copy of a few kilobytes takes no longer
/// than one of four bytes. Guessed.
const GAP: u32 = 1024;

/// A page that is to be copied to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Load {
    pub(super) slot: u32,
    pub(super) frame: u32,
}

/// The pages that a step wants near.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    /// Pages of which the first token is written.
    pub(super) begun: Vec<u32>,
    /// Pages that are read, or written further.
    pub(super) seen: Vec<u32>,
}

/// Frames on the device and the pages whose copies they hold.
#[derive(Debug)]
pub(super) struct Frames {
    /// `[slot]` its frame, as the kernels read it.
    frames: Vec<u32>,
    /// `[frame]` whose copy it holds, and when that was last wanted.
    holds: Vec<(Option<u32>, u64)>,
    /// Those again, in the order in which they were last wanted.
    order: Order,
    now: u64,
    /// Slots whose frame has changed.
    changed: Vec<u32>,
}

impl Wanted {
    /// Pages, of which some may be the same.
    pub(super) fn len(&self) -> usize {
        self.begun.len() + self.seen.len()
    }
}

impl Frames {
    pub(super) fn new(n_slots: u32, n_frames: u32) -> Self {
        Frames {
            frames: vec![NOT_NEAR; n_slots as usize],
            holds: vec![(None, 0); n_frames as usize],
            order: Order::new(n_frames),
            now: 0,
            // The device has not seen any of it.
            changed: (0..n_slots).collect(),
        }
    }

    /// A step begins: gives frames to the pages that it wants, as far as there are any that it does not
    /// want itself, and says what is to be copied to them.
    pub(super) fn begin(&mut self, wanted: &Wanted) -> Vec<Load> {
        self.now += 1;
        for &slot in wanted.begun.iter().chain(&wanted.seen) {
            self.keep(slot);
        }
        for &slot in &wanted.begun {
            self.take(slot);
        }
        let load = |&slot: &u32| self.take(slot).map(|frame| Load { slot, frame });
        wanted.seen.iter().filter_map(load).collect()
    }

    /// The pages that a step begins and that have frames: they are copied where they are not written.
    pub(super) fn begun(&self, wanted: &Wanted) -> Vec<Load> {
        let load = |&slot: &u32| Load { slot, frame: self.frames[slot as usize] };
        wanted.begun.iter().map(load).filter(|load| load.frame != NOT_NEAR).collect()
    }

    /// A page was written, but not its copy.
    pub(super) fn forget(&mut self, slot: u32) {
        // Slots of the host have no copies.
        let Some(&frame) = self.frames.get(slot as usize).filter(|&&frame| frame != NOT_NEAR)
        else {
            return;
        };
        self.set(slot, NOT_NEAR);
        self.holds[frame as usize] = (None, 0);
        self.order.make_first(frame);
    }

    /// What the device has to know: runs of slots that have changed, the first of each and their frames.
    pub(super) fn take_changes(&mut self) -> Vec<(u32, &[u32])> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        let runs = changed.chunk_by(|a, b| b - a <= GAP);
        let frames = |run: &[u32]| {
            let (first, last) = (run[0], run[run.len() - 1]);
            (first, &self.frames[first as usize..=last as usize])
        };
        runs.map(frames).collect()
    }

    /// A page that is near stays so in this step.
    fn keep(&mut self, slot: u32) {
        let frame = self.frames[slot as usize];
        if frame != NOT_NEAR {
            self.holds[frame as usize].1 = self.now;
            self.order.make_last(frame);
        }
    }

    /// Gives a frame to a page that has none.
    fn take(&mut self, slot: u32) -> Option<u32> {
        if self.frames[slot as usize] != NOT_NEAR {
            return None;
        }
        let frame = self.order.first()?;
        let holds = &mut self.holds[frame as usize];
        if holds.0.is_some() && holds.1 == self.now {
            return None;
        }
        let (before, _) = std::mem::replace(holds, (Some(slot), self.now));
        self.order.make_last(frame);
        if let Some(before) = before {
            self.set(before, NOT_NEAR);
        }
        self.set(slot, frame);
        Some(frame)
    }

    fn set(&mut self, slot: u32, frame: u32) {
        self.frames[slot as usize] = frame;
        self.changed.push(slot);
    }
}

/// Frames in an order, as a ring of neighbours: the one behind all of them stands between last and first.
#[derive(Debug)]
struct Order {
    /// Before and behind each.
    neighbours: Vec<(u32, u32)>,
}

impl Order {
    fn new(n: u32) -> Self {
        let neighbours =
            (0..=n).map(|i| (if i == 0 { n } else { i - 1 }, if i == n { 0 } else { i + 1 }));
        Order { neighbours: neighbours.collect() }
    }

    fn end(&self) -> u32 {
        self.neighbours.len() as u32 - 1
    }

    fn first(&self) -> Option<u32> {
        let (_, first) = self.neighbours[self.end() as usize];
        (first != self.end()).then_some(first)
    }

    fn make_first(&mut self, frame: u32) {
        self.take_out(frame);
        self.put_between(self.end(), frame, self.neighbours[self.end() as usize].1);
    }

    fn make_last(&mut self, frame: u32) {
        self.take_out(frame);
        self.put_between(self.neighbours[self.end() as usize].0, frame, self.end());
    }

    fn take_out(&mut self, frame: u32) {
        let (before, behind) = self.neighbours[frame as usize];
        self.neighbours[before as usize].1 = behind;
        self.neighbours[behind as usize].0 = before;
    }

    fn put_between(&mut self, before: u32, frame: u32, behind: u32) {
        self.neighbours[frame as usize] = (before, behind);
        self.neighbours[before as usize].1 = frame;
        self.neighbours[behind as usize].0 = frame;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn wanted(begun: &[u32], seen: &[u32]) -> Wanted {
        Wanted { begun: begun.to_vec(), seen: seen.to_vec() }
    }

    /// Pages that are near, in order.
    fn near(frames: &Frames) -> Vec<u32> {
        let slots = (0..).zip(&frames.frames);
        slots.filter(|(_, frame)| **frame != NOT_NEAR).map(|(slot, _)| slot).collect()
    }

    #[test]
    fn what_was_not_wanted_for_longest_goes() {
        let mut frames = Frames::new(10, 3);
        assert_eq!(frames.take_changes(), [(0, &[NOT_NEAR; 10][..])]);
        // What is begun is written anyway; what is seen has to come.
        assert_eq!(frames.begin(&wanted(&[4], &[2])), [Load { slot: 2, frame: 1 }]);
        assert_eq!(frames.take_changes(), [(2, &[1, NOT_NEAR, 0][..])]);
        assert_eq!(frames.begin(&wanted(&[], &[4])), []);
        assert_eq!(frames.take_changes(), []);
        assert_eq!(frames.begin(&wanted(&[5, 6], &[])), []);
        assert_eq!(near(&frames), [4, 5, 6]);
        assert_eq!(frames.begin(&wanted(&[7], &[5])), []);
        assert_eq!(near(&frames), [5, 6, 7]);
    }

    #[test]
    fn only_what_has_changed_is_told() {
        let mut frames = Frames::new(5000, 3);
        frames.take_changes();
        frames.begin(&wanted(&[4900, 7, 9], &[]));
        assert_eq!(frames.take_changes(), [(7, &[1, NOT_NEAR, 2][..]), (4900, &[0][..])]);
    }

    #[test]
    fn a_step_does_not_take_from_itself() {
        let mut frames = Frames::new(10, 3);
        // Too many: the first have frames, in particular those that are begun.
        let loads = frames.begin(&wanted(&[9], &[0, 1, 2, 3]));
        assert_eq!(loads.iter().map(|load| load.slot).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(near(&frames), [0, 1, 9]);
        // Those that are there stay, though others are wanted too.
        assert_eq!(frames.begin(&wanted(&[], &[3, 2, 1, 0])).len(), 1);
        assert_eq!(near(&frames), [0, 1, 3]);
        // A page that is wanted twice comes once.
        assert_eq!(frames.begin(&wanted(&[], &[8, 8])).len(), 1);
    }

    #[test]
    fn what_was_written_elsewhere_is_forgotten() {
        let mut frames = Frames::new(10, 2);
        frames.begin(&wanted(&[1, 2], &[]));
        frames.forget(2);
        frames.forget(3);
        frames.forget(4711);
        assert_eq!(near(&frames), [1]);
        // Its frame is the first to go.
        assert_eq!(frames.begin(&wanted(&[], &[5])).len(), 1);
        assert_eq!(near(&frames), [1, 5]);
        assert_eq!(frames.begin(&wanted(&[], &[2])).len(), 1);
        assert_eq!(near(&frames), [2, 5]);
    }

    #[test]
    fn frames_and_slots_agree() {
        let mut frames = Frames::new(64, 12);
        let mut state = 1u32;
        let mut next = |n: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % n
        };
        let mut on_device = vec![0; 64];
        for _ in 0..2000 {
            let pages =
                |n: u32, next: &mut dyn FnMut(u32) -> u32| (0..n).map(|_| next(64)).collect();
            let begun = pages(next(3), &mut next);
            let step = Wanted { begun, seen: pages(next(9), &mut next) };
            frames.begin(&step);
            assert!(step.begun.iter().all(|&slot| near(&frames).contains(&slot)));
            if next(4) == 0 {
                frames.forget(next(70));
            }
            for (first, part) in frames.take_changes() {
                on_device[first as usize..][..part.len()].copy_from_slice(part);
            }
            assert_eq!(on_device, frames.frames);
            let mut order = vec![frames.order.first().unwrap()];
            while let &(_, next) = &frames.order.neighbours[*order.last().unwrap() as usize]
                && next != frames.order.end()
            {
                order.push(next);
            }
            assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 12);
            assert!(order.is_sorted_by_key(|&frame| frames.holds[frame as usize].1));
            for (frame, &(slot, _)) in (0..).zip(&frames.holds) {
                assert!(slot.is_none_or(|slot| frames.frames[slot as usize] == frame));
            }
            let held: BTreeSet<_> = frames.holds.iter().filter_map(|(slot, _)| *slot).collect();
            assert_eq!(held.into_iter().collect::<Vec<_>>(), near(&frames));
        }
    }
}
