//! Which page holds what: the bookkeeping of the KV cache.
//!
//! A sequence's KV lies in pages of equal length. This crate decides which page holds which tokens
//! and in which slot of a tier's arena each page lies.
//!
//! ```text
//!          plan_extend, apply          seal               release
//!   free --------------------> open --------> full --------------------> free
//!                                +------------------ release ----------> free
//! ```
//!
//! Code map: [`Cache`] is the facade; `pages` knows every page of the process, `pool` the free slots
//! of one tier, `page` the handles whose type says which state a page is in, `table` a sequence's
//! pages in order, `verify` every invariant.
//!
//! The crate holds no bytes and knows no device, no clock, no thread and no file.
//!
//! ```
//! use nuthatch_cache::{Cache, Config};
//! use nuthatch_types::SeqId;
//!
//! let mut cache = Cache::new(Config { page_len: 16, n_pages: 8 })?;
//! let seq = SeqId(1);
//! cache.admit(seq);
//! let extend = cache.plan_extend(seq, 20).expect("two of eight pages");
//! cache.apply(extend);
//! assert_eq!(cache.slots(seq, 0).count(), 2);
//! cache.seal(seq, 20);
//! cache.release(seq);
//! assert_eq!(cache.stats().pages_free, 8);
//! # Ok::<(), nuthatch_cache::ConfigError>(())
//! ```

mod cache;
mod config;
mod page;
mod pages;
mod pool;
mod stats;
mod table;
mod verify;

pub use cache::{Cache, Extend, Shortfall};
pub use config::{Config, ConfigError};
pub use stats::Stats;
pub use verify::Fault;
