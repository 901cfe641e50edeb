//! Dropping pages from the middle of a sequence, so that it goes on for ever (StreamingLLM).
//!
//! ```text
//!   before   [ sinks | p | q | r | ... ]      every page full
//!   after    [ sinks'| q | r | ... ]          room for one page
//! ```
//!
//! Keys are stored rotated by their positions, and attention feels differences of positions only. So
//! the last tokens keep their keys, positions grow, and the sinks are what moves: their keys are
//! written anew, turned by as many positions as were dropped, so that they stand right before what
//! is left. They are always turned from the keys as they were first computed, or rounding would add
//! up.

use nuthatch_types::{PageShift, SeqId};

use crate::cache::{Cache, Shortfall};
use crate::page::OpenPage;

impl Cache {
    /// Drops the oldest page after the first `n_sinks` pages of a sequence whose pages are all full,
    /// and says how the sinks are written anew. Afterwards one page can be had. When the pages for
    /// all that are not there, nothing changes.
    ///
    /// From now on the pages that the sequence computes are its own, and it cannot be forked.
    pub fn roll(&mut self, seq: SeqId, n_sinks: u32) -> Result<Vec<PageShift>, Shortfall> {
        let table = self.table(seq);
        assert!(table.may_grow(), "{seq:?} is swapped, or loading");
        assert!(!table.may_spill, "pages of the host are not turned");
        let (is_first, retention) = (table.n_dropped() == 0, table.retention);
        let dropped = table.page(n_sinks as usize).expect("a page follows the sinks");
        let n_fresh = if is_first { n_sinks } else { 0 };
        let needed = n_fresh + 1;
        let available = self.n_available() + u32::from(self.pages.n_refs(dropped) == 1);
        if needed > available {
            return Err(Shortfall { needed, available });
        }
        self.version += 1;
        self.counters.pages_dropped += 1;
        // It goes first, because it may be one of the pages that are needed.
        let page = self.table_mut(seq).drop_after(n_sinks);
        self.leave_page(page, retention);
        let fresh: Vec<OpenPage> = (0..n_fresh).map(|_| self.open_sink()).collect();
        if is_first {
            self.table_mut(seq).put_sinks(fresh);
        }
        let table = self.table(seq);
        let by = i32::try_from(table.n_dropped()).expect("positions fit 31 bits");
        let slot = |page| self.pages.slot(page);
        let shift = |(source, target)| PageShift { source: slot(source), target: slot(target), by };
        Ok(table.sinks().map(shift).collect())
    }

    /// Tokens of an admitted sequence that were dropped. Its places count without them.
    pub fn n_dropped(&self, seq: SeqId) -> u32 {
        self.table(seq).n_dropped()
    }

    fn open_sink(&mut self) -> OpenPage {
        let page_len = self.config.page_len;
        let mut page = self.open_page();
        page.advance(page_len);
        self.open_tokens += page_len;
        page
    }
}
