//! Which product comes next. A model multiplies by its weights in the same order at every step, so what came
//! next last time is fetched by threads that wait.

use std::ops::Range;

/// Most bytes that a thread fetches of what comes next: what lies between may be attention, and the cache
/// should still have them then.
pub(super) const AHEAD_BYTES: usize = 64 << 10;

/// Of each weight, by its number, the addresses that threads read first of the one that came next.
#[derive(Default)]
pub(crate) struct Order {
    last: Option<usize>,
    next: Vec<Vec<Range<usize>>>,
}

impl Order {
    /// A product by weight `number` begins, of which each thread reads these addresses first. Returns the
    /// same of the next product, or nothing if that is not known yet.
    pub(super) fn begin(
        &mut self,
        number: usize,
        first: impl Iterator<Item = Range<usize>>,
    ) -> &[Range<usize>] {
        if self.next.len() <= number {
            self.next.resize(number + 1, Vec::new());
        }
        if let Some(last) = self.last.replace(number) {
            self.next[last].clear();
            self.next[last].extend(first);
        }
        &self.next[number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_next_comes_next() {
        let mut order = Order::default();
        let mut begin = |number: usize| {
            let next = order.begin(number, std::iter::once(number..number + 64));
            next.first().map(|next| next.start)
        };
        for number in [0, 2, 5, 7] {
            assert_eq!(begin(number), None);
        }
        assert_eq!([begin(2), begin(5), begin(7)], [Some(5), Some(7), Some(2)]);
        // Another order is learned as it is seen.
        assert_eq!([begin(5), begin(2), begin(5)], [Some(7), Some(5), Some(2)]);
    }
}
