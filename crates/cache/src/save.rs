//! What a slower tier has to know: which pages became findable, by which name it keeps a page, and
//! which names a prompt's pages have there.
//!
//! ```text
//!   publish --> take_published --> findable: name and slot --> its bytes are saved
//!   prompt  --> keys           --> as many as are stored   --> prepare_load (see `load`)
//! ```

use nuthatch_types::{PageId, PageKey, Slot, TokenId};

use crate::Salt;
use crate::cache::Cache;
use crate::prefix::{Parent, Prefix};

/// A full page that can be found by its tokens, and where its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Findable<'a> {
    /// Its own name.
    pub key: PageKey,
    /// The name of the page before it, or of no page under its salt.
    pub parent: PageKey,
    /// `[page_len]`
    pub tokens: &'a [TokenId],
    /// Where its bytes are when all copies have been carried out.
    pub slot: Slot,
}

impl Cache {
    /// Remembers which pages become findable from now on: see [`Cache::take_published`].
    pub fn note_published(&mut self) {
        if let Some(prefix) = &mut self.prefix {
            prefix.published.get_or_insert_default();
        }
    }

    /// The pages that became findable since this was called last, each after the one before it. Some
    /// may be gone meanwhile, or be other pages: see [`Cache::findable`].
    pub fn take_published(&mut self) -> Vec<PageId> {
        let published = self.prefix.as_mut().and_then(|prefix| prefix.published.as_mut());
        published.map(std::mem::take).unwrap_or_default()
    }

    /// What a page holds now; `None` if it cannot be found by its tokens.
    pub fn findable(&self, page: PageId) -> Option<Findable<'_>> {
        let Prefix { tree, .. } = self.prefix.as_ref()?;
        let node = tree.get(page)?;
        let parent = match node.parent {
            Parent::Root(salt) => self.chain.root(salt),
            Parent::Page(before) => tree.node(before).hash,
        };
        Some(Findable { key: node.hash, parent, tokens: tree.tokens(page), slot: self.slot(page) })
    }

    /// The name of no page under a salt, and those of the full pages of `tokens` after it.
    pub fn keys(&self, salt: Salt, tokens: &[TokenId]) -> Vec<PageKey> {
        let mut keys = vec![self.chain.root(salt)];
        for tokens in tokens.chunks_exact(self.config.page_len as usize) {
            let parent = keys[keys.len() - 1];
            keys.push(self.chain.page(parent, tokens));
        }
        keys
    }

    /// Full pages that are cached of a prompt's beginning.
    pub fn n_cached(&self, salt: Salt, tokens: &[TokenId]) -> u32 {
        self.prefix.as_ref().map_or(0, |prefix| prefix.walk(salt, tokens).pages.len() as u32)
    }

    /// Mixes a secret into the key of the hashes that name contents. Nothing may be cached yet, and
    /// no salt made.
    pub fn mix_key(&mut self, secret: u128) {
        self.chain = self.chain.mix(secret);
        if let Some(prefix) = &mut self.prefix {
            prefix.tree.set_chain(self.chain);
        }
    }

    /// A name of the key of the hashes. Two caches with the same one name contents alike.
    pub fn key_mark(&self) -> u128 {
        self.chain.key_mark()
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::SeqId;

    use super::*;
    use crate::{Config, Options, Prompt, Retention};

    #[test]
    fn what_is_published_has_the_names_that_a_prompt_asks_for() {
        let config = Config { page_len: 4, n_pages: 8, n_host_pages: 0 };
        let mut cache = Cache::with_options(config, Options::default()).unwrap();
        let mark = cache.key_mark();
        cache.mix_key(7);
        assert_ne!(cache.key_mark(), mark);
        cache.note_published();
        let tokens: Vec<TokenId> = (0..11).map(TokenId).collect();
        for (i, user) in [&b"a"[..], b"b"].into_iter().enumerate() {
            let salt = cache.salt(user, b"");
            let retention = Retention::default();
            let (tokens, seq) = (&tokens[..], SeqId(i as u64));
            let (window, may_spill, is_fresh) = (None, false, false);
            let prompt = Prompt { tokens, salt, retention, window, may_spill, is_fresh };
            let admission = cache.plan_admit(seq, prompt);
            cache.admit(admission);
            cache.extend(seq, 11, 0).unwrap();
            cache.seal(seq, tokens);
            let keys = cache.keys(salt, tokens);
            assert_eq!((keys.len(), cache.n_cached(salt, tokens)), (3, 2));
            let pages = cache.take_published();
            for (i, &page) in pages.iter().enumerate() {
                let found = cache.findable(page).unwrap();
                assert_eq!((found.parent, found.key), (keys[i], keys[i + 1]));
                assert_eq!(found.tokens, &tokens[4 * i..4 * i + 4]);
                assert_eq!(found.slot, cache.slots(seq, i as u32).next().unwrap());
            }
            assert_eq!(pages.len(), 2, "nothing of another salt is shared");
            assert!(cache.take_published().is_empty());
        }
    }
}
