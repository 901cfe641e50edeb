//! A guard around libraries that run untrusted files and are known to panic on some of them.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `run`; a panic becomes an error with the panic's words.
///
/// What `run` borrows must be fit for use after a panic: everything it changes is dropped, or is
/// only a cache.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let words = payload.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| payload.downcast_ref::<&str>().copied());
        format!("panic: {}", words.unwrap_or("no message"))
    })
}
