//! The name of a page's content: a keyed 128-bit hash over everything before it and its own tokens.
//!
//! `hash(page) = H(key, hash(parent), tokens)`, and the hash of no page is `H(key, salt)`. The key is
//! not known to users, so nobody can search for two prompts with the same name; and because tokens
//! are compared on each hit, two such prompts would still not be mixed up.

use std::hash::{Hash, Hasher};

use nuthatch_types::{PageKey, TokenId};
use siphasher::sip128::{Hasher128, SipHasher24};

/// What separates requests that must not share pages: another salt, another adapter.
///
/// Made by [`crate::Cache::salt`]; the default is shared by all who give none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Salt(u128);

impl Salt {
    /// Something that is the same for the same salt. The salt itself is a keyed hash already.
    pub(crate) fn mark(self) -> u64 {
        self.0 as u64
    }
}

impl Hash for Salt {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0 as u64);
    }
}

/// Hashes with one key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    key: [u8; 16],
}

/// What is hashed, so that no two kinds of input are the same bytes.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Domain {
    Salt = 1,
    Root = 2,
    Page = 3,
    Key = 4,
}

impl Chain {
    pub(crate) fn new(key: u128) -> Self {
        Chain { key: key.to_le_bytes() }
    }

    /// The salt of a string that the user chose and an adapter.
    pub(crate) fn salt(&self, user: &[u8], adapter: &[u8]) -> Salt {
        let mut hasher = self.hasher(Domain::Salt);
        hasher.write(&(user.len() as u64).to_le_bytes());
        hasher.write(user);
        hasher.write(adapter);
        Salt(hasher.finish128().as_u128())
    }

    /// The same with `secret` mixed into the key.
    pub(crate) fn mix(&self, secret: u128) -> Self {
        Chain::new(u128::from_le_bytes(self.key) ^ secret)
    }

    /// A name of the key that does not give it away.
    pub(crate) fn key_mark(&self) -> u128 {
        self.hasher(Domain::Key).finish128().as_u128()
    }

    /// The hash before the first page.
    pub(crate) fn root(&self, salt: Salt) -> PageKey {
        let mut hasher = self.hasher(Domain::Root);
        hasher.write(&salt.0.to_le_bytes());
        PageKey(hasher.finish128().as_u128())
    }

    /// The hash of a page with these tokens after `parent`.
    pub(crate) fn page(&self, parent: PageKey, tokens: &[TokenId]) -> PageKey {
        let mut hasher = self.hasher(Domain::Page);
        hasher.write(&parent.0.to_le_bytes());
        // Many tokens at once: a call for each would take longer than the hash.
        let mut bytes = [0; 4 * 16];
        for tokens in tokens.chunks(16) {
            for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.0.to_le_bytes());
            }
            hasher.write(&bytes[..4 * tokens.len()]);
        }
        PageKey(hasher.finish128().as_u128())
    }

    fn hasher(&self, domain: Domain) -> SipHasher24 {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(&[domain as u8]);
        hasher
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn everything_that_matters_changes_the_hash() {
        let chain = Chain::new(1);
        let other_key = Chain::new(2);
        let tokens = [1, 2, 3].map(TokenId);
        let salt = chain.salt(b"a", b"");
        let root = chain.root(Salt::default());
        let page = chain.page(root, &tokens);
        let all = [
            root,
            chain.root(salt),
            chain.root(chain.salt(b"", b"a")),
            other_key.root(Salt::default()),
            page,
            chain.page(page, &tokens),
            chain.page(chain.root(salt), &tokens),
            chain.page(root, &[1, 3, 2].map(TokenId)),
            other_key.page(root, &tokens),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert_eq!(page, Chain::new(1).page(root, &tokens));
    }
}
