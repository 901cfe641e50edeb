//! Pins: prefixes that stay whatever else happens, within a fixed number of pages.

use nuthatch_types::TokenId;

use crate::Salt;
use crate::cache::Cache;

/// The name of a pin, given by whoever pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PinId(pub u64);

impl Cache {
    /// Pins what is cached of the beginning of `tokens`, as far as [`crate::Options::max_pinned`]
    /// allows, and returns how many tokens that are. A pin of the same name is replaced.
    pub fn pin(&mut self, pin: PinId, salt: Salt, tokens: &[TokenId]) -> u32 {
        self.unpin(pin);
        self.version += 1;
        let Some(prefix) = &self.prefix else { return 0 };
        // The walk leaves the last token out, because a sequence must compute it. A pin need not.
        let padded: Vec<TokenId> = tokens.iter().copied().chain([TokenId(0)]).collect();
        let mut pages = prefix.walk(salt, &padded).pages;
        pages.truncate((self.options.max_pinned - self.n_pinned) as usize);
        self.n_pinned += pages.len() as u32;
        let handles: Vec<_> = pages.into_iter().map(|page| self.share(page)).collect();
        handles.iter().for_each(|handle| self.pages.pin(handle.id()));
        let n_tokens = handles.len() as u32 * self.config.page_len;
        self.pins.insert(pin, handles);
        n_tokens
    }

    /// Takes a pin away. Its pages stay until their turn comes. False when there is no such pin.
    pub fn unpin(&mut self, pin: PinId) -> bool {
        let Some(handles) = self.pins.remove(&pin) else { return false };
        self.version += 1;
        self.n_pinned -= handles.len() as u32;
        // Last page first, so that it is given up first.
        for handle in handles.into_iter().rev() {
            self.pages.unpin(handle.id());
            self.release_page(handle);
        }
        true
    }
}
