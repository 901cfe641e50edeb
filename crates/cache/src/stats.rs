//! What the cache holds, as plain numbers.

/// What the cache holds at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens of one page.
    pub page_len: u32,
    /// All pages.
    pub pages_total: u32,
    /// Pages that hold nothing.
    pub pages_free: u32,
    /// Pages that a sequence uses.
    pub pages_used: u32,
    /// Sequences with a table.
    pub seqs: u32,
    /// Tokens that have a place.
    pub tokens_stored: u32,
    /// Places for tokens in used pages that hold none: the room of each sequence's last page.
    pub tokens_wasted: u32,
}

impl Stats {
    /// The share of the used pages' places that hold no token, from 0 to 1.
    pub fn waste_fraction(&self) -> f64 {
        let places = f64::from(self.pages_used) * f64::from(self.page_len);
        if places == 0.0 { 0.0 } else { f64::from(self.tokens_wasted) / places }
    }
}
