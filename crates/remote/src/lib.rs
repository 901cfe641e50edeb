//! Stores somewhere else as [`Objects`]: S3, GCS, Azure, Redis or Valkey, and directories that
//! machines share.
//!
//! ```text
//!   s3://BUCKET/PREFIX?endpoint=URL&region=NAME
//!   gs://BUCKET/PREFIX?endpoint=URL&credentials=FILE&anonymous=yes
//!   az://CONTAINER/PREFIX?account=NAME&endpoint=URL
//!   redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]?prefix=NAME&ttl=SECONDS
//!   file:///DIRECTORY
//! ```
//!
//! Every request has a deadline and is tried again a few times; how many are under way at once is
//! decided by the threads that ask. This crate knows no page: what an object means is the affair of
//! [`nuthatch_store`]. Without the feature `stores` there are none, and [`open`] says so.

#[cfg(feature = "stores")]
mod address;
#[cfg(feature = "stores")]
mod remote;

use std::sync::Arc;

use nuthatch_store::remote::Objects;

#[cfg(feature = "stores")]
pub use remote::Remote;

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The program was built without stores.
    #[error("this program was built without remote stores: build it with --features remote")]
    NotBuilt,
    /// It is no address.
    #[error("{0:?} is no address such as s3://bucket/prefix, redis://host:6379 or file:///folder")]
    NoAddress(String),
    /// Something is missing in its address.
    #[error("{address:?} does not say {what}")]
    Missing {
        /// The address.
        address: String,
        /// What it should say.
        what: &'static str,
    },
    /// Its address has a setting that is not known, or is not as it should be.
    #[error("{name}={value:?} is not a setting of a {scheme} store")]
    Setting {
        /// Its name.
        name: String,
        /// What it is set to.
        value: String,
        /// What kind of store.
        scheme: &'static str,
    },
    /// The store refuses its settings.
    #[error("{0}")]
    Refused(String),
    /// The system has no threads for it.
    #[error("cannot start its threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// The store at an address. Nothing is asked of it yet.
#[cfg(feature = "stores")]
pub fn open(address: &str) -> Result<Arc<dyn Objects>, OpenError> {
    Ok(Arc::new(Remote::over(address::operator(address)?)?))
}

/// The store at an address. Nothing is asked of it yet.
#[cfg(not(feature = "stores"))]
pub fn open(_address: &str) -> Result<Arc<dyn Objects>, OpenError> {
    Err(OpenError::NotBuilt)
}

#[cfg(all(test, not(feature = "stores")))]
mod tests {
    use super::*;

    #[test]
    fn without_stores_it_is_said() {
        assert!(matches!(open("redis://127.0.0.1"), Err(OpenError::NotBuilt)));
    }
}
