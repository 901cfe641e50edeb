//! Pages that stand elsewhere than they stood: a conversation whose oldest turns were left out finds the
//! keys and values of the others, which are rotated to their new positions.
//!
//! ```text
//!   stored     s s s s | a a a a | a b b b | b b b b | b c c c | c ...
//!   asked for  s s s s | b b b b | b b b c | c c c ...
//! ```
//!
//! It is an approximation: what was said after something else was said was computed with that in view.
//! So it is done only where somebody asks for it, and such pages have names of their own.
//!
//! The first tokens that differ from what is stored after the same beginning must be those of a stored
//! page, or of the end of one; then it goes on page by page as it was stored. Names of pages lead back to
//! the salt, so nobody finds what others said.

use nuthatch_backend::{RowMove, RowMover};
use nuthatch_store::disk::PageName;
use nuthatch_types::{FastMap, PageKey, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Pages of the same tokens that are looked at.
const N_ALIKE: usize = 8;
/// Pages beyond those that are stored whose texts may be known.
const N_TIDY: usize = 4096;

/// What is stored by what it says, and what makes pages of it.
#[derive(Debug)]
pub(crate) struct Moved {
    page_len: usize,
    /// The fewest tokens in a row that are worth being moved.
    least: usize,
    mover: RowMover,
    seed: u64,
    /// As many texts as are looked through for what is gone.
    n_tidy: usize,
    texts: FastMap<PageKey, Text>,
    /// By the hash of their tokens, and by what they follow.
    alike: FastMap<u64, Vec<PageKey>>,
    after: FastMap<PageKey, Vec<PageKey>>,
}

/// What a page says.
#[derive(Debug)]
struct Text {
    parent: PageKey,
    tokens: Box<[TokenId]>,
}

/// What pages are wanted for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// The name of no page under the salt.
    pub(crate) root: PageKey,
    /// The name of the page before the first one that is wanted.
    pub(crate) parent: PageKey,
    /// All tokens, and where the first page begins.
    pub(crate) tokens: &'a [TokenId],
    pub(crate) start: usize,
}

/// Where a token's row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Source {
    key: PageKey,
    row: usize,
    by: i32,
}

/// Pages that are made of rows of others.
#[derive(Debug, Default)]
pub(crate) struct MovedPages {
    pub(crate) reads: Vec<MovedRead>,
    /// `[n_pages]` what is there of each, and how many rows that are.
    pages: Vec<(Vec<u8>, usize)>,
}

/// A stored page, and where its rows go: to which page, and to which token of it.
#[derive(Debug)]
pub(crate) struct MovedRead {
    key: PageKey,
    parent: PageKey,
    tokens: Box<[TokenId]>,
    rows: Vec<(usize, RowMove)>,
}

impl MovedRead {
    pub(crate) fn name(&self) -> PageName<'_> {
        PageName { key: self.key, parent: self.parent, tokens: &self.tokens }
    }

    /// The pages that need it.
    pub(crate) fn pages(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().map(|(page, _)| *page)
    }
}

impl MovedPages {
    pub(crate) fn n_pages(&self) -> usize {
        self.pages.len()
    }
}

impl Moved {
    pub(crate) fn new(page_len: u32, least: u32, mover: RowMover, seed: u64) -> Self {
        Moved {
            page_len: page_len as usize,
            least: least as usize,
            mover,
            seed,
            n_tidy: N_TIDY,
            texts: FastMap::default(),
            alike: FastMap::default(),
            after: FastMap::default(),
        }
    }

    /// Takes in a page that is stored, or will be.
    pub(crate) fn add(&mut self, name: &PageName<'_>) {
        let text = Text { parent: name.parent, tokens: name.tokens.into() };
        if self.texts.insert(name.key, text).is_none() {
            self.alike.entry(self.hash(name.tokens)).or_default().push(name.key);
            self.after.entry(name.parent).or_default().push(name.key);
        }
    }

    /// Forgets what is no longer stored, if there is much more than before.
    pub(crate) fn tidy(&mut self, is_stored: impl Fn(PageKey) -> bool) {
        if self.texts.len() < self.n_tidy {
            return;
        }
        self.texts.retain(|&key, _| is_stored(key));
        let texts = &self.texts;
        for keys in self.alike.values_mut().chain(self.after.values_mut()) {
            keys.retain(|key| texts.contains_key(key));
        }
        self.alike.retain(|_, keys| !keys.is_empty());
        self.after.retain(|_, keys| !keys.is_empty());
        self.n_tidy = 2 * self.texts.len() + N_TIDY;
    }

    /// How many pages can be made of what is stored.
    pub(crate) fn n_pages(
        &self,
        wanted: &Wanted<'_>,
        is_stored: impl Fn(PageKey) -> bool,
    ) -> usize {
        self.sources(wanted, &is_stored).len() / self.page_len
    }

    /// As many of so many pages as can be made of what is stored.
    pub(crate) fn pages(
        &self,
        wanted: &Wanted<'_>,
        is_stored: impl Fn(PageKey) -> bool,
    ) -> MovedPages {
        let sources = self.sources(wanted, &is_stored);
        let n_pages = sources.len() / self.page_len;
        let mut moved = MovedPages { reads: Vec::new(), pages: vec![(Vec::new(), 0); n_pages] };
        for (at, source) in sources.iter().take(n_pages * self.page_len).enumerate() {
            let row = RowMove { from: source.row, to: at % self.page_len, by: source.by };
            let row = (at / self.page_len, row);
            match moved.reads.last_mut() {
                Some(read) if read.key == source.key => read.rows.push(row),
                _ => {
                    let Text { parent, tokens } = &self.texts[&source.key];
                    let (key, parent, tokens) = (source.key, *parent, tokens.clone());
                    moved.reads.push(MovedRead { key, parent, tokens, rows: vec![row] });
                }
            }
        }
        moved
    }

    /// Puts the rows of a page that was read where they belong, and gives each page that is whole now.
    pub(crate) fn place<E>(
        &self,
        moved: &mut MovedPages,
        read: usize,
        bytes: &[u8],
        mut give: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let MovedPages { reads, pages } = moved;
        for rows in reads[read].rows.chunk_by(|a, b| a.0 == b.0) {
            let (page, n_rows) = &mut pages[rows[0].0];
            page.resize(self.mover.page_bytes(), 0);
            let moves: Vec<RowMove> = rows.iter().map(|(_, row)| *row).collect();
            self.mover.move_rows(bytes, page, &moves);
            *n_rows += moves.len();
            if *n_rows == self.page_len {
                give(rows[0].0, page)?;
                *page = Vec::new();
            }
        }
        Ok(())
    }

    /// Where the rows of the tokens from the first wanted on are, as many as there are without a gap.
    fn sources(&self, wanted: &Wanted<'_>, is_stored: &impl Fn(PageKey) -> bool) -> Vec<Source> {
        let mut sources = Vec::new();
        // What begins as a stored page does after the same beginning stays where it is.
        let rest = &wanted.tokens[wanted.start..];
        if let Some((key, n)) = self.longest_after(wanted.parent, rest, is_stored) {
            sources.extend((0..n).map(|row| Source { key, row, by: 0 }));
        }
        loop {
            let run = self.run(wanted, wanted.start + sources.len(), is_stored);
            if run.len() < self.least.max(1) {
                return sources;
            }
            sources.extend(run);
        }
    }

    /// The longest run of stored rows that says what comes at a place.
    fn run(
        &self,
        wanted: &Wanted<'_>,
        at: usize,
        is_stored: &impl Fn(PageKey) -> bool,
    ) -> Vec<Source> {
        let mut longest = Vec::new();
        // Of sixteen places in a row one is where a stored page begins.
        for first in at..at + self.page_len {
            let Some(tokens) = wanted.tokens.get(first..first + self.page_len) else { break };
            let alike = self.alike.get(&self.hash(tokens)).map_or(&[][..], |keys| keys);
            let alike = alike.iter().rev().filter(|key| *self.texts[key].tokens == *tokens);
            for &key in alike.filter(|&&key| is_stored(key)).take(N_ALIKE) {
                let run = self.run_with(wanted, at, (key, first), is_stored);
                if run.len() > longest.len() {
                    longest = run;
                }
            }
        }
        longest
    }

    /// The run from `at` on in which a page with these tokens begins at `first`.
    fn run_with(
        &self,
        wanted: &Wanted<'_>,
        at: usize,
        (key, first): (PageKey, usize),
        is_stored: &impl Fn(PageKey) -> bool,
    ) -> Vec<Source> {
        let Some(depth) = self.depth(wanted.root, key) else { return Vec::new() };
        let by = first as i32 - (depth * self.page_len) as i32;
        let (parent, n_before) = (self.texts[&key].parent, first - at);
        let mut run = Vec::new();
        if n_before > 0 {
            let end = self.texts.get(&parent).filter(|_| is_stored(parent));
            let is_same =
                |text: &&Text| text.tokens[self.page_len - n_before..] == wanted.tokens[at..first];
            if end.filter(is_same).is_none() {
                return run;
            }
            let rows = self.page_len - n_before..self.page_len;
            run.extend(rows.map(|row| Source { key: parent, row, by }));
        }
        let (mut key, mut n, mut place) = (key, self.page_len, first);
        loop {
            run.extend((0..n).map(|row| Source { key, row, by }));
            place += n;
            if n < self.page_len {
                return run;
            }
            match self.longest_after(key, &wanted.tokens[place..], is_stored) {
                Some((next, len)) => (key, n) = (next, len),
                None => return run,
            }
        }
    }

    /// The stored page after another one that agrees with most of some tokens, and with how many.
    fn longest_after(
        &self,
        parent: PageKey,
        tokens: &[TokenId],
        is_stored: &impl Fn(PageKey) -> bool,
    ) -> Option<(PageKey, usize)> {
        let agreeing = |key: &PageKey| {
            let text = self.texts[key].tokens.iter();
            text.zip(tokens).take_while(|(a, b)| a == b).count()
        };
        let after = self.after.get(&parent)?.iter().filter(|key| is_stored(**key));
        let longest = after.map(|key| (*key, agreeing(key))).max_by_key(|(_, n)| *n);
        longest.filter(|(_, n)| *n > 0)
    }

    /// How many pages come before one, if the first of them comes after no page under this salt.
    fn depth(&self, root: PageKey, key: PageKey) -> Option<usize> {
        let mut key = key;
        for depth in 0..=self.texts.len() {
            key = self.texts.get(&key)?.parent;
            if key == root {
                return Some(depth);
            }
        }
        None
    }

    fn hash(&self, tokens: &[TokenId]) -> u64 {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect();
        xxh3_64_with_seed(&bytes, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::{PageLayout, RopeSpec, RopeStyle};
    use nuthatch_types::KvDtype;

    use super::*;

    const PAGE: usize = 4;

    fn moved(least: u32) -> Moved {
        let places = PageLayout::places(PAGE, 2, |token, is_value, i| {
            (2 * token + usize::from(is_value)) * 2 + i
        });
        let (dtype, head_len) = (KvDtype::F32, 2 * PAGE * 2);
        let layout =
            PageLayout { n_layers: 1, n_kv_heads: 1, d: 2, dtype, places, head_len, tail_bytes: 0 };
        let style = RopeStyle::Halves;
        let rope = RopeSpec { inv_freq: vec![1.0], attention_factor: 1.0, style };
        Moved::new(PAGE as u32, least, RowMover::new(layout, rope).unwrap(), 7)
    }

    fn tokens(text: &str) -> Vec<TokenId> {
        text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
    }

    /// Stores a text page by page; page `i` has the name `first + i + 1`.
    fn store(moved: &mut Moved, first: u128, text: &str) {
        for (i, page) in tokens(text).chunks_exact(PAGE).enumerate() {
            let (parent, key) = (PageKey(first + i as u128), PageKey(first + i as u128 + 1));
            moved.add(&PageName { key, parent, tokens: page });
        }
    }

    /// Where each token comes from: page, row, by how much it moved.
    fn sources(
        moved: &Moved,
        root: u128,
        parent: u128,
        text: &str,
        start: usize,
    ) -> Vec<(u128, usize, i32)> {
        let tokens = tokens(text);
        let (root, parent) = (PageKey(root), PageKey(parent));
        let wanted = Wanted { root, parent, tokens: &tokens, start };
        let sources = moved.sources(&wanted, &|_| true);
        sources.into_iter().map(|source| (source.key.0, source.row, source.by)).collect()
    }

    #[test]
    fn a_text_without_its_middle_is_put_together() {
        let mut moved = moved(2);
        //               page 1   2   3   4   5   6
        store(&mut moved, 0, "SSSSssabcdefghijklmnopqr");
        // Without "abcd": "ss" stays, "ef" is the end of page 3 and so on, "XY" is new.
        let found = sources(&moved, 0, 1, "SSSSssefghijklmnXY", 4);
        let expected: Vec<_> = [(2, 0, 0), (2, 1, 0), (3, 2, -4), (3, 3, -4)]
            .into_iter()
            .chain((0..4).map(|row| (4, row, -4)))
            .chain((0..4).map(|row| (5, row, -4)))
            .collect();
        assert_eq!(found, expected);
        // What differs in between ends it.
        assert_eq!(sources(&moved, 0, 1, "SSSSssXefghijklmn", 4).len(), 2);
        // By another salt nothing is found but what follows its own pages.
        assert_eq!(sources(&moved, 100, 101, "SSSSssefghijklmnXY", 4).len(), 0);
        // A later part first, then an earlier one.
        let found = sources(&moved, 0, 1, "SSSSijklmnopefghijXY", 4);
        assert_eq!(found.len(), 14);
        assert_eq!((found[0], found[8]), ((4, 2, -10), (3, 2, 2)));
        // Too few in a row are not worth it.
        let mut moved = self::moved(20);
        store(&mut moved, 0, "SSSSssabcdefghijklmnopqr");
        assert_eq!(sources(&moved, 0, 1, "SSSSssefghijklmnXY", 4).len(), 2);
    }

    #[test]
    fn pages_are_made_of_rows_and_each_is_read_once() {
        let mut moved = moved(2);
        store(&mut moved, 0, "SSSSssabcdefghijklmnopqr");
        let tokens = tokens("SSSSssefghijklmnXY");
        let wanted = Wanted { root: PageKey(0), parent: PageKey(1), tokens: &tokens, start: 4 };
        let mut pages = moved.pages(&wanted, |_| true);
        assert_eq!(pages.n_pages(), 3);
        assert_eq!(pages.reads.iter().map(|read| read.key.0).collect::<Vec<_>>(), [2, 3, 4, 5]);
        // Rows say which page and which token they are of; values come first here to be looked at.
        let page_of = |key: u128| {
            let numbers = (0..PAGE).flat_map(|row| [0.0, 0.0, key as f32, row as f32]);
            numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()
        };
        let mut made = Vec::new();
        for read in [3, 0, 2, 1] {
            let bytes = page_of(pages.reads[read].key.0);
            let give = |page: usize, bytes: &[u8]| -> Result<(), ()> {
                let (words, _) = bytes.as_chunks();
                let numbers: Vec<f32> =
                    words.iter().map(|word| f32::from_le_bytes(*word)).collect();
                let rows = numbers.chunks_exact(4).map(|row| (row[2], row[3])).collect::<Vec<_>>();
                made.push((page, rows));
                Ok(())
            };
            moved.place(&mut pages, read, &bytes, give).unwrap();
        }
        made.sort_by_key(|(page, _)| *page);
        assert_eq!(made[0].1, [(2.0, 0.0), (2.0, 1.0), (3.0, 2.0), (3.0, 3.0)]);
        assert_eq!(made[1].1, [(4.0, 0.0), (4.0, 1.0), (4.0, 2.0), (4.0, 3.0)]);
        assert_eq!(made.len(), 3);
        // What is gone is forgotten in time.
        moved.n_tidy = 0;
        moved.tidy(|key| key.0 > 3);
        assert_eq!((moved.texts.len(), moved.n_tidy), (3, 6 + N_TIDY));
    }
}
