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

/// A hash that keeps neighbours together: keys of one block of 4096 numbers, such as ids given one
/// after the other, lie in a row, so that a walk along them is a walk through memory; blocks are
/// scattered.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

/// Numbers of one block.
const BLOCK_BITS: u32 = 12;
/// Bits of a hash that hash tables compare before they look at a key; the others say where it lies.
const TAG_BITS: u32 = 7;

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
        self.0 = scatter(self.0).wrapping_add(n);
    }

    fn write_u128(&mut self, n: u128) {
        self.write_u64(n as u64);
        self.write_u64((n >> 64) as u64);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn finish(&self) -> u64 {
        let place = scatter(self.0 >> BLOCK_BITS).wrapping_add(self.0);
        let tag = scatter(self.0) << (u64::BITS - TAG_BITS);
        tag | (place & (u64::MAX >> TAG_BITS))
    }
}

/// A multiplicative hash (Fibonacci hashing, folded); 0 stays 0.
fn scatter(n: u64) -> u64 {
    let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 40)
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, Hash};

    use super::*;

    fn place(key: impl Hash) -> u64 {
        BuildHasherDefault::<IdHasher>::default().hash_one(key) % 8192
    }

    #[test]
    fn neighbours_lie_in_a_row_and_strides_do_not_collide() {
        for id in (0..4095_u64).chain(1 << 40..(1 << 40) + 4095) {
            assert_eq!((place(id) + 1) % 8192, place(id + 1));
        }
        for shift in 1..50 {
            let mut places: Vec<u64> = (0..4096_u64).map(|i| place(i << shift)).collect();
            places.sort_unstable();
            places.dedup();
            // Random places would be 3223 different ones.
            assert!(places.len() > 2500, "{} places for stride 2^{shift}", places.len());
        }
    }

    #[test]
    fn maps_of_every_key_find_what_was_put_in() {
        let mut map: FastMap<(u64, u32), u64> = FastMap::default();
        let mut wide: FastMap<u128, u64> = FastMap::default();
        for i in 0..2000_u64 {
            map.insert((i * 7 + 1, i as u32 % 3), i);
            wide.insert(u128::from(i) << 61, i);
        }
        for i in 0..2000_u64 {
            assert_eq!(map.get(&(i * 7 + 1, i as u32 % 3)), Some(&i));
            assert_eq!(wide.get(&(u128::from(i) << 61)), Some(&i));
        }
    }
}
