//! The bytes of pages in each tier, and files as memory.
//!
//! [`KvStore`] is the device's arena. [`disk`] keeps pages in files, [`remote`] as objects somewhere
//! else, and [`slow`] is both as one. [`mapped::MappedFile`] is a file that is read as if it were
//! memory. Which page holds what is the cache's affair; this crate knows places only.

mod ahead;
mod cipher;
pub mod disk;
#[cfg(any(test, feature = "testing"))]
pub mod fault;
mod kv;
pub mod mapped;
mod objects;
mod page_buf;
pub mod remote;
pub mod slow;

pub use cipher::{KeyError, RecordForm, StoreKey};
pub use kv::KvStore;
pub use page_buf::{PageBuf, RecordLayout};
