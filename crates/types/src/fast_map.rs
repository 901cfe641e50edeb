//! Hash maps with a fixed, fast hash for small integer keys that we made ourselves.
//!
//! Not for keys that a user chooses: an attacker could make them collide. Iteration order is the
//! same in every run, but it is not a meaningful order: sort before it reaches a plan.

#![expect(clippy::disallowed_types, reason = "the fixed hasher is what makes the map allowed")]

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map from small keys that we made ourselves.
pub type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;
/// A set of small keys that we made ourselves.
pub type FastSet<K> = HashSet<K, BuildHasherDefault<IdHasher>>;

/// A multiplicative hash (Fibonacci hashing, folded).
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        let mixed = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
