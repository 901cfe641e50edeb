//! The tree of full pages: each node is a page, and its path from the root is the tokens before it.
//!
//! A child is found in constant time by its hash, and its tokens are compared. The children of a
//! node are also sorted by their tokens, so that the one with the longest common beginning is next
//! to where the wanted tokens would stand.

use nuthatch_types::{FastMap, PageId, PageKey, TokenId};

use super::node::{Node, Parent};
use crate::Salt;
use crate::evict::Facts;
use crate::hash::Chain;
use crate::pages::Tier;

/// The tree of full pages.
#[derive(Debug)]
pub(crate) struct Tree {
    chain: Chain,
    page_len: usize,
    /// `[n_pages]` the node of each cached page.
    nodes: Vec<Option<Node>>,
    /// `[n_pages][page_len]` the tokens of each cached page. All in one piece: thousands of pages may
    /// be filled in one step, and memory of its own for each would take most of it.
    tokens: Vec<TokenId>,
    /// The first pages under each salt, sorted by their tokens.
    roots: FastMap<Salt, Vec<PageId>>,
    index: FastMap<PageKey, PageId>,
    /// How many first pages have the same tokens, under any salt; keyed by the hash without salt.
    first_pages: FastMap<PageKey, u32>,
    n_nodes: u32,
}

impl Tree {
    pub(crate) fn new(chain: Chain, n_pages: u32, page_len: u32) -> Self {
        let (n_pages, page_len) = (n_pages as usize, page_len as usize);
        Tree {
            chain,
            page_len,
            nodes: (0..n_pages).map(|_| None).collect(),
            tokens: vec![TokenId::default(); n_pages * page_len],
            roots: FastMap::default(),
            index: FastMap::with_capacity_and_hasher(n_pages, Default::default()),
            first_pages: FastMap::default(),
            n_nodes: 0,
        }
    }

    /// Hashes with another key; the tree is empty.
    pub(crate) fn set_chain(&mut self, chain: Chain) {
        assert_eq!(self.n_nodes, 0, "what is cached is named already");
        self.chain = chain;
    }

    /// Pages of the tree.
    pub(crate) fn len(&self) -> u32 {
        self.n_nodes
    }

    /// The node of a page, if it is cached.
    pub(crate) fn get(&self, page: PageId) -> Option<&Node> {
        self.nodes[page.0 as usize].as_ref()
    }

    /// The node of a cached page.
    pub(crate) fn node(&self, page: PageId) -> &Node {
        self.get(page).expect("the page is cached")
    }

    /// `[page_len]` the tokens of a cached page.
    pub(crate) fn tokens(&self, page: PageId) -> &[TokenId] {
        let start = page.0 as usize * self.page_len;
        &self.tokens[start..start + self.page_len]
    }

    /// What eviction looks at, to change.
    pub(crate) fn facts_mut(&mut self, page: PageId) -> &mut Facts {
        &mut self.node_mut(page).facts
    }

    /// Whether no idle page of a tier follows a cached page right away.
    pub(crate) fn is_last(&self, page: PageId, tier: Tier) -> bool {
        self.node(page).n_idle[tier as usize] == 0
    }

    /// How many of a cached page's children in a tier nobody holds, to change.
    pub(crate) fn n_idle_mut(&mut self, page: PageId, tier: Tier) -> &mut u32 {
        &mut self.node_mut(page).n_idle[tier as usize]
    }

    /// A cached page and all that follow it, each after the one before it.
    pub(crate) fn subtree(&self, page: PageId) -> Vec<PageId> {
        let mut pages = vec![page];
        let mut i = 0;
        while i < pages.len() {
            pages.extend(&self.node(pages[i]).children);
            i += 1;
        }
        pages
    }

    /// The pages that follow, sorted by their tokens.
    pub(crate) fn children(&self, parent: Parent) -> &[PageId] {
        match parent {
            Parent::Root(salt) => self.roots.get(&salt).map_or(&[], Vec::as_slice),
            Parent::Page(page) => &self.node(page).children,
        }
    }

    /// The hash that a page with these tokens has after `parent`.
    pub(crate) fn hash(&self, parent: Parent, tokens: &[TokenId]) -> PageKey {
        let before = match parent {
            Parent::Root(salt) => self.chain.root(salt),
            Parent::Page(page) => self.node(page).hash,
        };
        self.chain.page(before, tokens)
    }

    /// The page with exactly these tokens after `parent`, whose hash the caller has made.
    pub(crate) fn find(&self, hash: PageKey, parent: Parent, tokens: &[TokenId]) -> Option<PageId> {
        let page = *self.index.get(&hash)?;
        (self.node(page).parent == parent && self.tokens(page) == tokens).then_some(page)
    }

    /// The child that begins with most of the wanted tokens, and how many.
    pub(crate) fn closest(&self, parent: Parent, wanted: &[TokenId]) -> Option<(PageId, u32)> {
        let children = self.children(parent);
        let place = children.partition_point(|&child| self.tokens(child) < wanted);
        let neighbours = &children[place.saturating_sub(1)..children.len().min(place + 1)];
        let common = |&child: &PageId| {
            let pairs = self.tokens(child).iter().zip(wanted);
            (child, pairs.take_while(|(a, b)| a == b).count() as u32)
        };
        neighbours.iter().map(common).max_by_key(|&(_, n)| n).filter(|&(_, n)| n > 0)
    }

    /// Whether a first page with these tokens is cached under any salt.
    pub(crate) fn has_first_page(&self, tokens: &[TokenId]) -> bool {
        self.first_pages.contains_key(&self.unsalted(tokens))
    }

    /// Adds a page that somebody holds and that [`Tree::find`] does not find. False when another page
    /// has its hash: it then cannot be cached.
    pub(crate) fn insert(
        &mut self,
        hash: PageKey,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
    ) -> bool {
        if self.index.contains_key(&hash) {
            return false;
        }
        let place = self.children(parent).partition_point(|&child| self.tokens(child) < tokens);
        self.add_child(parent, place, page);
        let depth = match parent {
            Parent::Root(_) => {
                *self.first_pages.entry(self.unsalted(tokens)).or_default() += 1;
                0
            }
            Parent::Page(before) => self.node(before).facts.depth + 1,
        };
        let facts = Facts { depth, ..Facts::default() };
        let start = page.0 as usize * self.page_len;
        self.tokens[start..start + self.page_len].copy_from_slice(tokens);
        let node = Node { hash, parent, children: Vec::new(), n_idle: [0; 2], facts };
        let place = &mut self.nodes[page.0 as usize];
        assert!(place.is_none(), "{page:?} is cached once");
        *place = Some(node);
        self.index.insert(hash, page);
        self.n_nodes += 1;
        true
    }

    /// Takes out a leaf. The caller tells the parent if it was idle.
    pub(crate) fn remove(&mut self, page: PageId) -> Node {
        let node = self.nodes[page.0 as usize].take().expect("the page is cached");
        assert!(node.children.is_empty(), "{page:?} goes after the pages that follow it");
        let children = self.children(node.parent);
        let place = children.partition_point(|&child| self.tokens(child) < self.tokens(page));
        assert_eq!(children.get(place), Some(&page), "{page:?} is among its parent's children");
        match node.parent {
            Parent::Root(salt) => {
                self.roots.get_mut(&salt).expect("it has children").remove(place);
                self.forget_first(salt, page);
            }
            Parent::Page(before) => {
                self.node_mut(before).children.remove(place);
            }
        }
        self.index.remove(&node.hash);
        self.n_nodes -= 1;
        node
    }

    /// The cached pages, in order of their ids.
    pub(crate) fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        let cached = |(i, node): (usize, &Option<Node>)| node.as_ref().map(|_| PageId(i as u32));
        self.nodes.iter().enumerate().filter_map(cached)
    }

    /// Salts under which something is cached, for `verify`.
    pub(crate) fn n_roots(&self) -> usize {
        self.roots.len()
    }

    fn forget_first(&mut self, salt: Salt, page: PageId) {
        let unsalted = self.unsalted(self.tokens(page));
        let count = self.first_pages.get_mut(&unsalted).expect("counted when it was added");
        *count -= 1;
        if *count == 0 {
            self.first_pages.remove(&unsalted);
        }
        if self.roots.get(&salt).is_some_and(Vec::is_empty) {
            self.roots.remove(&salt);
        }
    }

    fn unsalted(&self, tokens: &[TokenId]) -> PageKey {
        self.chain.page(self.chain.root(Salt::default()), tokens)
    }

    fn node_mut(&mut self, page: PageId) -> &mut Node {
        self.nodes[page.0 as usize].as_mut().expect("the page is cached")
    }

    fn add_child(&mut self, parent: Parent, place: usize, page: PageId) {
        match parent {
            Parent::Root(salt) => self.roots.entry(salt).or_default().insert(place, page),
            Parent::Page(before) => self.node_mut(before).children.insert(place, page),
        }
    }
}
