//! The bytes of pages in each tier, and files as memory.
//!
//! [`KvStore`] is the device's arena. [`disk`] keeps pages in files. [`mapped::MappedFile`] is a file that is read as if it were
//! memory. Which page holds what is the cache's affair; this crate knows places only.

pub mod disk;
mod kv;
pub mod mapped;

pub use kv::KvStore;
