//! Newtypes for everything that is counted or named, so that the mistake does not compile.

use std::hash::{Hash, Hasher};

/// One token of the vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

/// One request's sequence, unique for the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// One logical page of KV: an identity, not an address. The step clock speaks of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// A place of a page, in one of the tiers: an address, not an identity. The layer clock speaks of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// One layer of the model, counted from the embedding upwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub u32);

/// The name of a full page's content, the same in every tier: a keyed hash over the salt, everything
/// before the page and its own tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageKey(pub u128);

impl PageKey {
    /// Half of it, for those who keep it as one number.
    pub fn low(self) -> u64 {
        self.0 as u64
    }
}

impl Hash for PageKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Its bits are already scattered.
        state.write_u64(self.low());
    }
}
