//! Attention over the cache: write keys and values, pick what to read, attend.
//!
//! [`Dense`] reads everything, and is exact; [`topk`] reads what a query needs. This crate speaks of layers, heads and slots; it has
//! never heard of a request, a queue or a page's identity.

mod dense;
pub mod topk;

pub use dense::{Dense, HeadNorms};
