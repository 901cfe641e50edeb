//! Which page holds what: the bookkeeping of the KV cache.
//!
//! A sequence's KV lies in pages of equal length. This crate decides which page holds which tokens,
//! in which slot of a tier's arena each page lies, which pages sequences share, and which go when
//! pages are short.
//!
//! ```text
//!          plan_extend, apply         seal               release, slide, roll
//!   free --------------------> open --------> full, cached ---------> idle
//!    ^                           |                 ^                   | |
//!    +--------- release ---------+                 +- plan_admit, admit  |
//!    +------------------------- evict ------------------------------------+
//! ```
//!
//! There are two tiers: the device, on which sequences run, and the host. An idle page that must
//! leave the device may go to the host, and comes back when a sequence is admitted that needs it; a
//! sequence that must give way may take its pages there and come back with them; and one for which
//! the device has no room may run on pages that stay there.
//!
//! Code map: [`Cache`] is the facade; `pages` knows every page of the process, `pool` the free slots
//! of one tier, `page` the handles whose type says which state a page is in, `table` a sequence's
//! pages in order, `admit` how a sequence gets its first pages, `window` and `stream` how it gives
//! some back while it runs, `hash` the names of contents, `prefix` the tree in which pages are found
//! by their tokens, `evict` the orders in which they go, `tier` and `swap` the moves between the
//! tiers, `spill` who runs on the host, `load` what something slower brings, `save` what it is told, `pin` what may not go,
//! `event` who is told of it, `verify` every invariant.
//!
//! The crate holds no bytes and knows no device, no clock, no thread and no file.
//!
//! ```
//! use nuthatch_cache::{Cache, Config, Options, Prompt, Retention, Salt};
//! use nuthatch_types::{SeqId, TokenId};
//!
//! let sizes = Config { page_len: 4, n_pages: 8, n_host_pages: 0 };
//! let mut cache = Cache::with_options(sizes, Options::default())?;
//! let tokens: Vec<TokenId> = (0..10).map(TokenId).collect();
//! let (salt, retention) = (Salt::default(), Retention::default());
//! let prompt = Prompt { tokens: &tokens, salt, retention, window: None, may_spill: true, is_fresh: false };
//!
//! let first = cache.plan_admit(SeqId(1), prompt);
//! assert_eq!(cache.admit(first).n_found, 0);
//! let extend = cache.plan_extend(SeqId(1), 10, 0).expect("three of eight pages");
//! cache.apply(extend);
//! cache.seal(SeqId(1), &tokens);
//!
//! // The two full pages are shared; the third was not full and is computed again.
//! let second = cache.plan_admit(SeqId(2), prompt);
//! assert_eq!(cache.admit(second).n_found, 8);
//! cache.release(SeqId(1));
//! cache.release(SeqId(2));
//! assert_eq!(cache.stats().pages_idle, 2);
//! # Ok::<(), nuthatch_cache::ConfigError>(())
//! ```

mod admit;
mod cache;
mod config;
mod event;
mod evict;
mod hash;
mod load;
mod page;
mod pages;
mod pin;
mod pool;
mod prefix;
mod save;
mod snapshot;
mod spill;
mod stats;
mod stream;
mod swap;
mod table;
mod tier;
mod verify;
mod window;

pub use admit::{Admission, Admitted, Prompt};
pub use cache::{Cache, Extend, Shortfall};
pub use config::{Config, ConfigError, Options};
pub use event::{CachedPage, ContentId, Event};
pub use evict::{Eviction, Retention};
pub use hash::Salt;
pub use load::{Load, LoadId, Outcome};
pub use pages::Tier;
pub use pin::PinId;
pub use prefix::{Miss, MissReason};
pub use save::Findable;
pub use snapshot::{Branch, SlotUse};
pub use stats::{Counters, Stats};
pub use swap::{SwapIn, SwapOut};
pub use verify::Fault;
