//! How much of a sequence stays in the cache when not all of it does.
//!
//! ```text
//!   Window      [ gone ............ | the window | the step's tokens ]
//!                a model that sees no further back than its window; positions stay
//!
//!   Streaming   [ sinks | dropped | ... the last tokens | the step's tokens ]
//!                any model; the table closes up over what was dropped
//! ```

/// How far back every layer of a model sees, and in which steps its sequences are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens that a token sees, itself included; at least 1.
    pub n_tokens: u32,
    /// Most tokens of a sequence that one step computes; at least 1.
    pub max_chunk: u32,
}

impl Window {
    /// Leading pages that no token after the first `n_computed` sees.
    ///
    /// The last full page always stays, because the next one is found by way of it.
    pub fn pages_out(&self, n_computed: u32, page_len: u32) -> u32 {
        n_computed.saturating_add(1).saturating_sub(self.n_kept(page_len)) / page_len
    }

    /// The most pages that a sequence of `n_tokens` holds at any time.
    pub fn pages_max(&self, n_tokens: u32, page_len: u32) -> u32 {
        // The window ends and the step ends anywhere in a page, and both pages are held whole.
        let ends = 2 * (u64::from(page_len) - 1);
        let span = u64::from(self.n_kept(page_len)) - 1 + u64::from(self.max_chunk) + ends;
        let n_pages = span / u64::from(page_len);
        u32::try_from(n_pages).unwrap_or(u32::MAX).min(n_tokens.div_ceil(page_len))
    }

    fn n_kept(&self, page_len: u32) -> u32 {
        self.n_tokens.max(page_len.saturating_add(1))
    }
}

/// Attention sinks and a window (StreamingLLM): the first tokens and the last ones stay, what lies
/// between is dropped page by page, and positions are counted inside the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    /// First tokens that stay, rounded up to whole pages.
    pub n_sinks: u32,
    /// Last tokens that stay, rounded up to whole pages; at least 1. When sinks and window are full,
    /// the oldest page of the window goes.
    pub window: u32,
}

impl Streaming {
    /// Pages of the sinks.
    pub fn sink_pages(&self, page_len: u32) -> u32 {
        self.n_sinks.div_ceil(page_len)
    }

    /// Pages of sinks and window.
    pub fn table_pages(&self, page_len: u32) -> u32 {
        self.sink_pages(page_len).saturating_add(self.window.div_ceil(page_len))
    }

    /// The most pages that a sequence needs: its table, the sinks as they were computed, from which
    /// those of the table are made again and again, and one more for when a page that it drops is
    /// still held by others.
    pub fn pages_max(&self, page_len: u32) -> u32 {
        self.table_pages(page_len).saturating_add(self.sink_pages(page_len)).saturating_add(1)
    }

    /// The most tokens of the table.
    pub fn max_len(&self, page_len: u32) -> u32 {
        self.table_pages(page_len).saturating_mul(page_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most pages held by any step that a sequence could take.
    fn pages_by_hand(window: Window, page_len: u32) -> u32 {
        let mut most = 0;
        for computed in 0..300 {
            let out = window.pages_out(computed, page_len);
            assert!(out * page_len <= (computed + 1).saturating_sub(window.n_tokens), "still seen");
            assert!(out < (computed / page_len).max(1), "the last full page stays");
            for chunk in 1..=window.max_chunk {
                most = most.max((computed + chunk).div_ceil(page_len) - out);
            }
        }
        most
    }

    #[test]
    fn pages_max_is_the_most_of_all_steps() {
        for page_len in [1, 2, 4, 16] {
            for n_tokens in [1, 2, 3, 15, 16, 17, 40] {
                for max_chunk in [1, 3, 16, 20] {
                    let window = Window { n_tokens, max_chunk };
                    let most = pages_by_hand(window, page_len);
                    assert_eq!(window.pages_max(10_000, page_len), most, "{window:?} {page_len}");
                    assert_eq!(window.pages_max(1, page_len), 1);
                }
            }
        }
    }

    #[test]
    fn streaming_counts_whole_pages() {
        let streaming = Streaming { n_sinks: 4, window: 512 };
        assert_eq!((streaming.sink_pages(16), streaming.table_pages(16)), (1, 33));
        assert_eq!((streaming.pages_max(16), streaming.max_len(16)), (35, 528));
        let none = Streaming { n_sinks: 0, window: 1 };
        assert_eq!((none.pages_max(16), none.max_len(16)), (2, 16));
        let huge = Streaming { n_sinks: u32::MAX, window: u32::MAX };
        assert_eq!(huge.max_len(16), u32::MAX);
    }
}
