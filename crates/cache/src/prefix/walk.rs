//! Finding the longest cached beginning of a sequence.
//!
//! ```text
//!   tokens   [0, pages * page_len)    [.., at)              [at, len)
//!            full pages: shared       beginning of another  to be computed; at least one,
//!                                     page: copied          because it gives the logits
//! ```

use nuthatch_types::{PageId, TokenId};

use super::Prefix;
use super::node::Parent;
use crate::Salt;

/// The longest cached beginning of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Full pages to share.
    pub(crate) pages: Vec<PageId>,
    /// A page whose first tokens can be copied, and how many of them.
    pub(crate) copy: Option<(PageId, u32)>,
    pub(crate) miss: Miss,
}

/// Where the cached beginning of a sequence ends, and why it is not longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Tokens that were found.
    pub at: u32,
    /// Why there are no more.
    pub reason: MissReason,
}

/// Why no more tokens of a sequence were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissReason {
    /// All but the last token were found; that one is always computed.
    Complete,
    /// Nothing was ever stored that goes on like this.
    NeverSeen,
    /// The next page was given up for others.
    Evicted,
    /// The tokens are cached for requests with another salt.
    Salt,
    /// What is cached goes on with another token.
    Diverged,
}

impl Prefix {
    /// Finds the longest cached beginning of `tokens`, which ends before the last of them.
    /// Changes nothing.
    pub(crate) fn walk(&self, salt: Salt, tokens: &[TokenId]) -> Found {
        let page_len = self.page_len as usize;
        let limit = tokens.len().saturating_sub(1);
        let mut pages = Vec::new();
        let mut parent = Parent::Root(salt);
        for page_tokens in tokens[..limit].chunks_exact(page_len) {
            let hash = self.tree.hash(parent, page_tokens);
            let Some(page) = self.tree.find(hash, parent, page_tokens) else { break };
            pages.push(page);
            parent = Parent::Page(page);
        }
        let start = pages.len() * page_len;
        let wanted = &tokens[start..limit.min(start + page_len)];
        let copy = self.tree.closest(parent, wanted);
        let at = start as u32 + copy.map_or(0, |(_, n)| n);
        let reason = self.reason(parent, &tokens[start..], at as usize - start);
        Found { pages, copy, miss: Miss { at, reason } }
    }

    /// Why only `n_copied` of the tokens that follow `parent` were found.
    fn reason(&self, parent: Parent, rest: &[TokenId], n_copied: usize) -> MissReason {
        if n_copied + 1 >= rest.len() {
            return MissReason::Complete;
        }
        let next = rest.get(..self.page_len as usize);
        if let Some(next) = next {
            if self.ghosts.contains(self.tree.hash(parent, next)) {
                return MissReason::Evicted;
            }
            if matches!(parent, Parent::Root(_)) && self.tree.has_first_page(next) {
                return MissReason::Salt;
            }
        }
        let found_any = n_copied > 0 || matches!(parent, Parent::Page(_));
        let goes_on = !self.tree.children(parent).is_empty();
        if found_any && goes_on { MissReason::Diverged } else { MissReason::NeverSeen }
    }
}
