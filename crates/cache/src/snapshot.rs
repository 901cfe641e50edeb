//! The cache as a picture, for people who watch it: which slots hold what, and which beginnings were
//! found most often. Linear in pages, so it is made on demand and never in a step.

use nuthatch_types::{PageId, TokenId};

use crate::pages::{Pages, State, Tier};
use crate::prefix::{Parent, Tree};
use crate::{Cache, Salt};

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlotUse {
    /// Nothing.
    Free,
    /// A page that nobody holds and that can be found by its tokens.
    Idle,
    /// A page that its owner still writes.
    Open,
    /// A full page that one sequence or pin holds.
    Held,
    /// A full page that several hold.
    Shared,
}

/// A beginning that later requests found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Its tokens from the first on, at most as many as were asked for; none if it is cached under
    /// a salt, because only those who know the salt may know what is under it.
    pub tokens: Vec<TokenId>,
    /// Tokens that it has.
    pub n_tokens: u32,
    /// How often a later request found all of it.
    pub n_hits: u32,
    /// Sequences and pins that hold its last page now.
    pub n_holders: u32,
    /// Whether its last page is on the host.
    pub is_on_host: bool,
}

impl Cache {
    /// What each slot holds, the device's first and then the host's.
    pub fn slot_uses(&self) -> Vec<SlotUse> {
        let slots = self.config.slots();
        let mut uses = vec![SlotUse::Free; slots.total() as usize];
        for (_, record) in self.pages.living() {
            uses[record.slot.0 as usize] = match (record.state, record.n_refs) {
                (State::Open, _) => SlotUse::Open,
                (_, 0) => SlotUse::Idle,
                (_, 1) => SlotUse::Held,
                (_, 2..) => SlotUse::Shared,
            };
        }
        uses
    }

    /// The `n` beginnings that saved most tokens, best first. A beginning ends where what follows it
    /// was found less often.
    pub fn hottest(&self, n: usize, n_tokens_max: usize) -> Vec<Branch> {
        let Some(prefix) = &self.prefix else { return Vec::new() };
        let tree = &prefix.tree;
        let n_hits = |page| tree.node(page).facts.n_hits;
        let mut ends: Vec<_> = tree
            .pages()
            .filter(|&page| {
                let after = tree.node(page).children.iter().map(|&child| n_hits(child)).max();
                n_hits(page) > after.unwrap_or(0)
            })
            .map(|page| (u64::from(n_hits(page)) * u64::from(depth(tree, page)), page))
            .collect();
        ends.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        ends.truncate(n);
        ends.iter().map(|&(_, page)| branch(tree, &self.pages, page, n_tokens_max)).collect()
    }
}

/// Pages from the first one to this.
fn depth(tree: &Tree, page: PageId) -> u32 {
    tree.node(page).facts.depth + 1
}

fn branch(tree: &Tree, pages: &Pages, last: PageId, n_tokens_max: usize) -> Branch {
    let mut path = vec![last];
    let mut at = last;
    let salt = loop {
        match tree.node(at).parent {
            Parent::Root(salt) => break salt,
            Parent::Page(before) => {
                path.push(before);
                at = before;
            }
        }
    };
    let tokens = path.iter().rev().flat_map(|&page| tree.tokens(page).iter().copied());
    let tokens = if salt == Salt::default() { tokens.take(n_tokens_max).collect() } else { vec![] };
    let node = tree.node(last);
    Branch {
        tokens,
        n_tokens: depth(tree, last) * tree.tokens(last).len() as u32,
        n_hits: node.facts.n_hits,
        n_holders: pages.n_refs(last),
        is_on_host: pages.tier(last) == Tier::Host,
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::SeqId;

    use super::*;
    use crate::{Config, Options, Prompt, Retention};

    /// Admits, fills, seals and perhaps releases one sequence.
    fn pass(cache: &mut Cache, seq: u64, tokens: &[TokenId], salt: Salt, is_kept: bool) {
        let seq = SeqId(seq);
        let retention = Retention::default();
        let prompt =
            Prompt { tokens, salt, retention, window: None, may_spill: false, is_fresh: false };
        let admission = cache.plan_admit(seq, prompt);
        let n_found = cache.admit(admission).n_found;
        let extend = cache.plan_extend(seq, tokens.len() as u32 - n_found, 0).unwrap();
        cache.apply(extend);
        cache.seal(seq, tokens);
        if !is_kept {
            cache.release(seq);
        }
    }

    #[test]
    fn slots_and_branches_are_what_was_done() {
        let config = Config { page_len: 4, n_pages: 16, n_host_pages: 2 };
        let mut cache = Cache::with_options(config, Options::default()).unwrap();
        let salt = cache.salt(b"secret", b"");
        let tokens: Vec<TokenId> = (0..10).map(TokenId).collect();
        let other: Vec<TokenId> = (0..4).chain(50..56).map(TokenId).collect();
        pass(&mut cache, 1, &tokens, Salt::default(), false);
        pass(&mut cache, 2, &tokens, Salt::default(), true);
        pass(&mut cache, 3, &other, Salt::default(), true);
        pass(&mut cache, 4, &tokens, salt, false);
        pass(&mut cache, 5, &tokens, salt, false);

        let count = |what| cache.slot_uses().iter().filter(|&&slot| slot == what).count();
        assert_eq!(cache.slot_uses().len(), 18);
        let counts = [SlotUse::Idle, SlotUse::Open, SlotUse::Held, SlotUse::Shared].map(count);
        assert_eq!(counts, [2, 2, 2, 1], "two salted pages idle, one page held by two sequences");

        let hottest = cache.hottest(9, 6);
        let facts: Vec<_> =
            hottest.iter().map(|b| (b.tokens.len(), b.n_tokens, b.n_hits, b.n_holders)).collect();
        assert_eq!(facts, [(4, 4, 2, 2), (6, 8, 1, 1), (0, 8, 1, 0)]);
        assert_eq!(cache.hottest(1, 6).len(), 1);
    }
}
