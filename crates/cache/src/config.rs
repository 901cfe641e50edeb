//! The sizes of the cache, fixed for its life.

use std::fmt;

use nuthatch_types::{HostReads, KvSlots};

use crate::Eviction;

/// The sizes of the cache. Every pool is sized when the cache is made and never grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Tokens of one page.
    pub page_len: u32,
    /// Pages of the device tier, which sequences run on.
    pub n_pages: u32,
    /// Pages of the host tier, where pages wait that the device has no room for. 0 is no such tier.
    pub n_host_pages: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config { page_len: 16, n_pages: 1024, n_host_pages: 0 }
    }
}

impl Config {
    /// Checks every number against its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.page_len == 0 {
            return Err(ConfigError::NoPageLen);
        }
        if self.n_pages == 0 {
            return Err(ConfigError::NoPages);
        }
        // Token counts are u32 everywhere, so both tiers together must be countable.
        let Config { page_len, n_pages, n_host_pages } = *self;
        let all = n_pages.checked_add(n_host_pages);
        if all.and_then(|all| all.checked_mul(page_len)).is_none() {
            return Err(ConfigError::TooManyTokens { page_len, n_pages, n_host_pages });
        }
        Ok(())
    }

    /// The slots of both tiers.
    pub fn slots(&self) -> KvSlots {
        KvSlots { device: self.n_pages, host: self.n_host_pages }
    }

    /// Tokens that the device tier holds when every page is full.
    pub fn capacity(&self) -> u32 {
        self.page_len * self.n_pages
    }
}

/// How the cache behaves. The default shares prefixes and evicts the least recently used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether pages can be found by their tokens and stay when nobody uses them.
    pub prefix: bool,
    /// Which cached pages go first when pages are short.
    pub eviction: Eviction,
    /// Key of the hashes that name a page's content. Two caches name the same content alike only
    /// with the same key: make it from a secret and from everything that decides what a page's
    /// bytes are (model, dtype, layout, page length, rope).
    pub hash_key: u128,
    /// Most pages that may be pinned, counted once for each pin. They are taken from what a single
    /// sequence may use, so that every accepted request still fits beside them.
    pub max_pinned: u32,
    /// Whether and how well the device reads pages of the host: unless never, a sequence for which the
    /// device has no room may run on them. Without a host tier it means nothing.
    pub host_reads: HostReads,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            prefix: true,
            eviction: Eviction::Lru,
            hash_key: 0,
            max_pinned: 0,
            host_reads: HostReads::Near,
        }
    }
}

/// Sizes that make no cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// A page must hold at least one token.
    NoPageLen,
    /// There must be at least one page.
    NoPages,
    /// The tiers hold more tokens than can be counted.
    TooManyTokens {
        /// Tokens of one page.
        page_len: u32,
        /// Pages of the device tier.
        n_pages: u32,
        /// Pages of the host tier.
        n_host_pages: u32,
    },
    /// Pins could take every page.
    AllPinned {
        /// Most pages that may be pinned.
        max_pinned: u32,
        /// Pages of the tier.
        n_pages: u32,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ConfigError::NoPageLen => f.write_str("page length is 0, but must be at least 1"),
            ConfigError::NoPages => f.write_str("the cache has 0 pages, but needs at least 1"),
            ConfigError::TooManyTokens { page_len, n_pages, n_host_pages } => write!(
                f,
                "{n_pages} pages on the device and {n_host_pages} on the host, of {page_len} \
                 tokens, are more than 2^32 - 1 tokens"
            ),
            ConfigError::AllPinned { max_pinned, n_pages } => {
                write!(f, "{max_pinned} pages may be pinned, but there are only {n_pages}")
            }
        }
    }
}

impl std::error::Error for ConfigError {}
