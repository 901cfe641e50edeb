//! One page of the prefix tree.

use nuthatch_types::{PageId, PageKey};

use crate::Salt;
use crate::evict::Facts;

/// What comes before a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    /// Nothing: the page is the first.
    Root(Salt),
    /// Another page.
    Page(PageId),
}

/// One page of the prefix tree. Its id is the page's; its tokens are kept by the tree.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) hash: PageKey,
    pub(crate) parent: Parent,
    /// Pages that follow, sorted by their tokens.
    pub(crate) children: Vec<PageId>,
    /// `[tier]` how many of the children nobody holds.
    pub(crate) n_idle: [u32; 2],
    /// What eviction looks at. Changed only while the page is not offered for eviction.
    pub(crate) facts: Facts,
}
