//! Each order against a list that is searched from end to end.

use std::cmp::Reverse;

use proptest::prelude::*;

use super::*;

/// The pages offered, in the order in which they were, and the naive rules.
#[derive(Debug, Default)]
struct Naive {
    pages: Vec<(PageId, Facts, u64)>,
    age: u64,
}

impl Naive {
    fn pop(&mut self, eviction: Eviction, now: Duration) -> Option<PageId> {
        let rank = |&(_, facts, age): &(PageId, Facts, u64)| {
            let retention = facts.retention;
            let priority = if retention.is_over(now) { 0 } else { retention.priority };
            let first = match eviction {
                Eviction::Lru => 0,
                Eviction::Lfu => age + u64::from(facts.n_hits),
                Eviction::Priority => u64::from(priority),
                Eviction::Lineage => u64::from(Reverse(facts.depth).0 ^ u32::MAX),
            };
            (first, facts.last_use)
        };
        let (i, _) = self.pages.iter().enumerate().min_by_key(|(_, page)| rank(page))?;
        self.age = rank(&self.pages[i]).0;
        Some(self.pages.remove(i).0)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert { n_hits: u32, depth: u32, priority: u8, until: Option<u64> },
    Remove(prop::sample::Index),
    Pop,
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..5_u32, 0..4_u32, 0..3_u8, prop::option::of(0..40_u64))
            .prop_map(|(n_hits, depth, priority, until)| {
                Op::Insert { n_hits, depth, priority, until }
            }),
        1 => any::<prop::sample::Index>().prop_map(Op::Remove),
        2 => Just(Op::Pop),
        1 => (1..10_u64).prop_map(Op::Wait),
    ]
}

proptest! {
    #[test]
    fn orders_agree_with_the_naive_list(
        kind in 0..4_usize,
        ops in prop::collection::vec(op(), 1..80),
    ) {
        use Eviction::{Lfu, Lineage, Lru, Priority};
        let eviction = [Lru, Lfu, Priority, Lineage][kind];
        let mut order = eviction.order();
        let mut naive = Naive::default();
        let mut now = Duration::ZERO;
        for (i, op) in ops.into_iter().enumerate() {
            match op {
                Op::Insert { n_hits, depth, priority, until } => {
                    let until = until.map(Duration::from_secs);
                    let retention = Retention { priority, until };
                    let facts = Facts { last_use: i as u64, n_hits, depth, retention };
                    order.insert(PageId(i as u32), &facts);
                    naive.pages.push((PageId(i as u32), facts, naive.age));
                }
                Op::Remove(index) if !naive.pages.is_empty() => {
                    let (page, facts, _) = naive.pages.remove(index.index(naive.pages.len()));
                    order.remove(page, &facts);
                }
                Op::Remove(_) => {}
                Op::Pop => prop_assert_eq!(order.pop(now), naive.pop(eviction, now)),
                Op::Wait(seconds) => now += Duration::from_secs(seconds),
            }
            prop_assert_eq!(order.len(), naive.pages.len());
        }
    }
}

#[test]
fn retentions_join_to_the_stronger_one() {
    let of = |priority, until: Option<u64>| Retention {
        priority,
        until: until.map(Duration::from_secs),
    };
    let now = Duration::from_secs(10);
    let check = |a, b, joined| assert_eq!(Retention::join(a, b, now), joined);
    check(of(1, Some(20)), of(2, Some(15)), of(2, Some(15)));
    check(of(2, Some(5)), of(1, Some(15)), of(1, Some(15)));
    check(of(1, Some(20)), of(1, Some(30)), of(1, Some(30)));
    check(of(1, None), of(1, Some(30)), of(1, None));
    check(of(3, None), of(1, Some(5)), of(3, None));
}
