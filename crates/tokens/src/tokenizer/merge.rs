//! The loop that BPE and SentencePiece share: join the best pair of neighbours until none is left.
//!
//! What makes a pair good (a merge's place in the list, a token's score) is the caller's; here it
//! is a rank, the smaller the better, and of equal ranks the leftmost goes first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No token, or no neighbour.
pub(super) const NONE: u32 = u32::MAX;

/// A run of text that is one token so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// Where the run starts in the text.
    pub(super) start: u32,
    /// Its bytes; 0 once it was joined to its left neighbour.
    pub(super) len: u32,
    /// Its token, or [`NONE`].
    pub(super) id: u32,
    prev: u32,
    next: u32,
}

/// A join that may be done: ordered by rank, then by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Join {
    rank: u32,
    left: u32,
    right: u32,
    /// Bytes of both; if they have changed, the join is stale.
    len: u32,
    id: u32,
}

/// Memory for the loop, kept from word to word.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    joins: BinaryHeap<Reverse<Join>>,
}

impl Merger {
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.joins.clear();
    }

    /// Adds a run to the right. The caller bounds the text, so that places fit 32 bits.
    pub(super) fn push(&mut self, start: usize, len: usize, id: u32) {
        let place = self.symbols.len() as u32;
        if let Some(last) = self.symbols.last_mut() {
            last.next = place;
        }
        let prev = place.wrapping_sub(1);
        self.symbols.push(Symbol { start: start as u32, len: len as u32, id, prev, next: NONE });
    }

    /// Joins pairs, the best first. `pair` gives the rank and the token of two neighbours, if they
    /// may be joined.
    pub(super) fn merge(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for right in 1..self.symbols.len() as u32 {
            self.propose(right - 1, right, &pair);
        }
        while let Some(Reverse(join)) = self.joins.pop() {
            let left = self.symbols[join.left as usize];
            let right = self.symbols[join.right as usize];
            let fresh = left.len > 0 && left.next == join.right && left.len + right.len == join.len;
            if !fresh {
                continue;
            }
            self.symbols[join.right as usize].len = 0;
            let joined = &mut self.symbols[join.left as usize];
            joined.len = join.len;
            joined.id = join.id;
            joined.next = right.next;
            if right.next != NONE {
                self.symbols[right.next as usize].prev = join.left;
            }
            self.propose(left.prev, join.left, &pair);
            self.propose(join.left, right.next, &pair);
        }
    }

    /// The runs that are left, from left to right.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }

    fn propose(
        &mut self,
        left: u32,
        right: u32,
        pair: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>,
    ) {
        if left == NONE || right == NONE {
            return;
        }
        let (l, r) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some((rank, id)) = pair(l, r) {
            let len = l.len + r.len;
            self.joins.push(Reverse(Join { rank, left, right, len, id }));
        }
    }
}
